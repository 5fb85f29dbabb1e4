"""Calls of the CUDA driver, against exports written in Python."""

from __future__ import annotations

import ctypes

import pytest

from hikv.driver import CudaDriver, CudaHostRegistry
from hikv.errors import DriverError

ADDRESS, NBYTES = 0x7F00_0000_0000, 256 << 30


class FakeCuda:
    """libcuda's exports as Python functions; `codes` gives a return code by name."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        def export(*arguments) -> int:
            self.calls.append((name, *[getattr(a, "value", a) for a in arguments]))
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 0xC0DE
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            sizes = {"cuMemHostRegister_v2": (8, 8, 4), "cuMemHostUnregister": (8,)}
            if name in sizes:
                assert tuple(ctypes.sizeof(a) for a in arguments) == sizes[name]
            return self.codes.get(name, 0)

        return export


def test_registration_runs_in_the_primary_context():
    library = FakeCuda()
    registry = CudaHostRegistry(CudaDriver(library), 3)
    registry.register(ADDRESS, NBYTES)
    registry.unregister(ADDRESS)
    first, retained = (library.calls.pop(0) for _ in range(2))
    assert (first[0], first[2], retained[0]) == ("cuDeviceGet", 3, "cuDevicePrimaryCtxRetain")
    pushed = ("cuCtxPushCurrent_v2", 0xC0DE)
    popped = "cuCtxPopCurrent_v2"
    assert [call if call[0] != popped else popped for call in library.calls] == [
        pushed,
        ("cuMemHostRegister_v2", ADDRESS, NBYTES, 3),
        popped,
        pushed,
        ("cuMemHostUnregister", ADDRESS),
        popped,
    ]


def test_refused_registration_pops_the_context_and_names_the_error():
    library = FakeCuda(cuMemHostRegister_v2=2)
    registry = CudaHostRegistry(CudaDriver(library), 0)
    with pytest.raises(DriverError, match=r"cuMemHostRegister_v2.*CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        registry.register(ADDRESS, NBYTES)
    assert library.calls[-1][0] == "cuCtxPopCurrent_v2"
