"""The CUDA driver through ctypes: checked calls, and the registration of host memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hikv.errors import DriverError, Unavailable


class CudaDriver:
    """The CUDA driver API through ctypes; `cuda_driver()` gives the loaded one."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any, remedy: str = "see the CUDA driver API") -> None:
        """Calls the exported function `name`; ctypes lets other threads run meanwhile.

        Pass sizes and addresses as ctypes objects: a bare int is cut to 32 bits.

        Raises:
            DriverError: it returned anything but `CUDA_SUCCESS`.
        """
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown").decode(), remedy=remedy)

    @contextmanager
    def primary_context(self, device: int) -> Iterator[None]:
        """Make the primary context of GPU `device` current; a thread may have another, or none.

        It is kept for the life of the process: registrations may outlive every other user of it.
        """
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def cuda_driver() -> CudaDriver:
    """The initialised driver library of this machine.

    Raises:
        Unavailable: there is no NVIDIA driver.
        DriverError: `cuInit` fails.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable("CUDA", str(error), remedy="install the NVIDIA driver") from error
    driver = CudaDriver(library)
    driver.call("cuInit", ctypes.c_uint(0))
    return driver


class CudaHostRegistry:
    """`cuMemHostRegister` in the primary context of one GPU, portable to every other context.

    The driver takes any address and length and locks whole OS pages. Two registrations may share
    an OS page; `chunk_borders` avoids it where it can.
    """

    _PORTABLE, _DEVICEMAP = 1, 2

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device

    def register(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` of host memory from `address` on; raises `DriverError`."""
        flags = ctypes.c_uint(self._PORTABLE | self._DEVICEMAP)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)

    def unregister(self, address: int) -> None:
        """Undo `register` at the same address; raises `DriverError`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: object) -> None:
        # Memory is freed on whichever thread drops it, and that one may have no context.
        with self._driver.primary_context(self._device):
            self._driver.call(name, *arguments)
