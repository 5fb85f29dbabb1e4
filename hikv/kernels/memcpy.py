"""Lists of copies through the CUDA driver: one batched call where it has one, else one by one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hikv.driver import CudaDriver, cuda_driver
from hikv.errors import DriverError

BATCH = "cuMemcpyBatchAsync"
SINGLE = "cuMemcpyAsync"

# Constants of cuda.h.
_LEGACY_STREAMS, _PER_THREAD_STREAM = (0, 1), 2
_LEGACY_ENTRY_POINTS = 1
_SOURCE_IN_STREAM_ORDER = 1


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Copies to submit: copy i moves `nbytes[i]` bytes from address `src[i]` to `dst[i]`.

    All three are int64 `[n]`, whose bits are those of the driver's `CUdeviceptr` and `size_t`.
    """

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True)
class Submitted:
    """What was handed to the driver.

    Attributes:
        call: `"cuMemcpyBatchAsync"`, or `"cuMemcpyAsync"` once per copy.
        num_copies: copies in all.
        stream: handle of the stream that holds them.
    """

    call: str
    num_copies: int
    stream: int


class MemLocation(ctypes.Structure):
    """`CUmemLocation` of cuda.h; all zero is no location."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes` of cuda.h. The location hints matter to managed memory alone."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", MemLocation),
        ("dst_location", MemLocation),
        ("flags", ctypes.c_uint),
    )


class MemcpyDriver(CudaDriver):
    """The driver's copies.

    Args:
        library: a `ctypes.CDLL` of the driver, this object's own: functions get prototypes, and
            `cuMemcpyBatchAsync` is replaced by the entry point whose signature is called here.

    Attributes:
        batch_version: CUDA version of that signature; `None` where the driver has no batch.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        library.cuStreamIsCapturing.argtypes = (pointer, pointer)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.batch_version = self._bind_batch()

    def _bind_batch(self) -> int | None:
        """Ask for the batch by the version whose signature the running driver prefers.

        CUDA 12.8 brought it; 13.0 dropped the argument before the stream, the failing copy's index.
        """
        running = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(running))
        version = next((v for v in (13000, 12080) if v <= running.value), None)
        if version is None:
            return None
        entry = ctypes.c_void_p()
        flags, status = ctypes.c_uint64(_LEGACY_ENTRY_POINTS), ctypes.c_void_p()
        symbol, wanted = BATCH.encode(), ctypes.c_int(version)
        self.call("cuGetProcAddress_v2", symbol, ctypes.byref(entry), wanted, flags, status)
        if not entry.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        failed = (pointer,) if version < 13000 else ()
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, *(pointer,) * 3, size, pointer, pointer, size, *failed, pointer
        )
        setattr(self._library, BATCH, prototype(entry.value))
        return version

    def copy(self, work: Descriptors, stream: int) -> Submitted:
        """Queue `work` on the stream with handle `stream`, in the current context.

        The copies of one call run in any order and must not depend on each other. The descriptors
        are arguments, read before the call returns; the bytes that they name are read in stream
        order, so a source must not change until the stream has passed the copy.

        The batch refuses the legacy default stream. There it runs on the per-thread default
        stream, which the legacy one waits for and is waited for by, so the order stays the same.

        Raises:
            DriverError: the driver refused; some copies may be queued all the same.
        """
        if self.batch_version is None:
            self._copy_singly(work, stream)
            return Submitted(SINGLE, len(work), stream)
        if stream in _LEGACY_STREAMS:
            stream = _PER_THREAD_STREAM
        if len(work):
            self._copy_batch(work, stream)
        return Submitted(BATCH, len(work), stream)

    def _copy_batch(self, work: Descriptors, stream: int) -> None:
        # Held here until the call has returned. Attribute 0 holds from copy 0 on, so for all.
        arrays = [np.ascontiguousarray(a, np.int64) for a in (work.dst, work.src, work.nbytes)]
        attributes = MemcpyAttributes(src_access_order=_SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(-1)
        shared = (ctypes.byref(attributes), ctypes.byref(first), 1)
        index = (ctypes.byref(failed),) if self.batch_version == 12080 else ()
        pointers = (array.ctypes.data for array in arrays)
        try:
            self.call(BATCH, *pointers, len(work), *shared, *index, stream)
        except DriverError as error:
            raise _refusal(error, work, failed.value) from error

    def _copy_singly(self, work: Descriptors, stream: int) -> None:
        copies = zip(work.dst.tolist(), work.src.tolist(), work.nbytes.tolist(), strict=True)
        for i, copy in enumerate(copies):
            try:
                self.call(SINGLE, *copy, stream)
            except DriverError as error:
                raise _refusal(error, work, i) from error

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    @contextmanager
    def primary_context(self, device: int) -> Iterator[None]:
        """Make the primary context of GPU `device` current; a thread may have another, or none."""
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
def memcpy_driver() -> MemcpyDriver:
    """The copies of this machine's driver; raises as `cuda_driver` does."""
    cuda_driver()  # loads and initialises it, or tells why not
    return MemcpyDriver(ctypes.CDLL("libcuda.so.1"))


def _refusal(error: DriverError, work: Descriptors, at: int) -> DriverError:
    """`error` with the copy that the driver named, if it named one."""
    which = f"one of {len(work)} copies"
    if at < len(work):
        src, dst, nbytes = (int(array[at]) for array in (work.src, work.dst, work.nbytes))
        which = f"copy {at} of {len(work)} ({src:#x} → {dst:#x}, {nbytes} B)"
    remedy = (
        f"check that {which} stays within device memory or one registration of host memory on "
        "each side; other copies of the call may be queued, so drop the destination pages"
    )
    return DriverError(error.call, error.code, error.name, remedy=remedy)
