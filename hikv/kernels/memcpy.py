"""Lists of copies through the CUDA driver: one batched call where it has one, else one by one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hikv.driver import CudaDriver, cuda_driver
from hikv.errors import DriverError

BATCH, BATCH_3D = "cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"
SINGLE, SINGLE_3D = "cuMemcpyAsync", "cuMemcpy3DAsync_v2"

# Constants of cuda.h.
_LEGACY_STREAMS, _PER_THREAD_STREAM = (0, 1), 2
_LEGACY_ENTRY_POINTS = 1
_SOURCE_IN_STREAM_ORDER = 1
_POINTER_OPERAND = 1
_UNIFIED_MEMORY = 4
_MAX_PITCH_ATTRIBUTE = 11

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCHES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    BATCH: ((*(_POINTER,) * 3, _SIZE, _POINTER, _POINTER, _SIZE), ()),
    BATCH_3D: ((_SIZE, _POINTER), (ctypes.c_ulonglong,)),
}
"""Parameters of the calls that take a list: before the index of the failing copy, which CUDA 13
dropped, and between it and the stream, which comes last."""


@dataclass(frozen=True)
class Submitted:
    """What was handed to the driver.

    Attributes:
        call: name of the batched call, or of the one that was made for every copy.
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


_OPERAND = np.dtype(
    [
        ("type", "i4"),
        ("address", "i8"),
        ("row_length", "i8"),
        ("layer_height", "i8"),
        ("location", "i4", 2),
    ],
    align=True,
)
BOX = np.dtype(
    [
        ("src", _OPERAND),
        ("dst", _OPERAND),
        ("width", "i8"),
        ("height", "i8"),
        ("depth", "i8"),
        ("src_access_order", "i4"),
        ("flags", "u4"),
    ],
    align=True,
)
"""`CUDA_MEMCPY3D_BATCH_OP` of cuda.h between two addresses, where an element is a byte: `depth`
layers of `height` rows of `width` bytes. Rows follow each other `row_length` bytes apart, layers
`row_length × layer_height` bytes; a length is at least the width, a height at least the rows."""


def new_boxes(shape: tuple[int, ...]) -> np.ndarray:
    """An array of `BOX` between addresses, to be read in stream order; places and extents are 0."""
    boxes = np.zeros(shape, BOX)
    boxes["src"]["type"] = boxes["dst"]["type"] = _POINTER_OPERAND
    boxes["src_access_order"] = _SOURCE_IN_STREAM_ORDER
    return boxes


_SIDE = [
    *((name, "i8") for name in ("x", "y", "z", "level")),
    ("memory", "i4"),
    *((name, "i8") for name in ("host", "address", "array", "reserved", "pitch", "rows")),
]
BOX_ALONE = np.dtype(
    [
        ("src", np.dtype(_SIDE, align=True)),
        ("dst", np.dtype(_SIDE, align=True)),
        ("width", "i8"),
        ("height", "i8"),
        ("depth", "i8"),
    ],
    align=True,
)
"""`CUDA_MEMCPY3D` of cuda.h, the same box for a call of its own."""


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Copies to submit: copy i moves `nbytes[i]` bytes from address `src[i]` to `dst[i]`.

    All three are int64 `[n]`, whose bits are those of the driver's `CUdeviceptr` and `size_t`.
    """

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray

    batch, single = BATCH, SINGLE

    def __len__(self) -> int:
        return len(self.nbytes)

    def batch_arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of the batch, as `_BATCHES` has them; they keep alive what they point to."""
        arrays = [np.ascontiguousarray(a, np.int64) for a in (self.dst, self.src, self.nbytes)]
        pointers = [array.ctypes.data_as(_POINTER) for array in arrays]
        # Attribute 0 holds from copy 0 on, so for all.
        attributes = MemcpyAttributes(src_access_order=_SOURCE_IN_STREAM_ORDER)
        first = ctypes.byref(_SIZE(0))
        return (*pointers, len(self), ctypes.byref(attributes), first, 1), ()

    def single_arguments(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of each copy alone."""
        return zip(self.dst.tolist(), self.src.tolist(), self.nbytes.tolist(), strict=True)

    def describe(self, at: int) -> str:
        """Copy `at` for people."""
        src, dst, nbytes = (int(array[at]) for array in (self.src, self.dst, self.nbytes))
        return f"{src:#x} → {dst:#x}, {nbytes} B"


@dataclass(frozen=True, eq=False)
class BoxCopies:
    """Strided boxes to submit: `boxes`, `[n]`, contiguous, made by `new_boxes` and filled in."""

    boxes: np.ndarray

    batch, single = BATCH_3D, SINGLE_3D

    def __len__(self) -> int:
        return len(self.boxes)

    def batch_arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of the batch, as `_BATCHES` has them; they keep alive what they point to."""
        return (len(self), self.boxes.ctypes.data_as(_POINTER)), (0,)

    def single_arguments(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of each box alone."""
        alone = np.zeros(len(self), BOX_ALONE)
        for side in ("src", "dst"):
            alone[side]["memory"] = _UNIFIED_MEMORY
            for name, given in (
                ("address", "address"),
                ("pitch", "row_length"),
                ("rows", "layer_height"),
            ):
                alone[side][name] = self.boxes[side][given]
        for extent in ("width", "height", "depth"):
            alone[extent] = self.boxes[extent]
        for i in range(len(alone)):
            yield (alone[i:].ctypes.data_as(_POINTER),)

    def describe(self, at: int) -> str:
        """Box `at` for people."""
        box = self.boxes[at]
        extents = " × ".join(str(box[name]) for name in ("depth", "height", "width"))
        return f"{box['src']['address']:#x} → {box['dst']['address']:#x}, {extents} B"


class MemcpyDriver(CudaDriver):
    """The driver's copies.

    Args:
        library: a `ctypes.CDLL` of the driver, this object's own: functions get prototypes, and
            batches are replaced by the entry points whose signatures are called here.

    Attributes:
        batches: the batched calls that the driver has, and the CUDA version of the signature.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER)
        library.cuMemcpy3DAsync_v2.argtypes = (_POINTER, _POINTER)
        library.cuStreamIsCapturing.argtypes = (_POINTER, _POINTER)
        self.batches = self._bind_batches()

    def _bind_batches(self) -> dict[str, int]:
        """Ask for the batches by the version whose signature the running driver prefers.

        CUDA 12.8 brought them; 13.0 dropped the argument that told the failing copy's index.
        """
        running = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(running))
        if running.value < 12080:
            return {}
        version = 13000 if running.value >= 13000 else 12080
        found = {}
        for name, (before, after) in _BATCHES.items():
            entry = ctypes.c_void_p()
            flags, status = ctypes.c_uint64(_LEGACY_ENTRY_POINTS), ctypes.c_void_p()
            symbol, wanted = name.encode(), ctypes.c_int(version)
            self.call("cuGetProcAddress_v2", symbol, ctypes.byref(entry), wanted, flags, status)
            if entry.value:
                failed = (_POINTER,) if version < 13000 else ()
                prototype = ctypes.CFUNCTYPE(ctypes.c_int, *before, *failed, *after, _POINTER)
                setattr(self._library, name, prototype(entry.value))
                found[name] = version
        return found

    def copy(self, work: Descriptors | BoxCopies, stream: int) -> Submitted:
        """Queue `work` on the stream with handle `stream`, in the current context.

        The copies of one call run in any order and must not depend on each other. The lists are
        arguments, read before the call returns; the bytes that they name are read in stream order,
        so a source must not change until the stream has passed the copy.

        A batch refuses the legacy default stream. There it runs on the per-thread default stream,
        which the legacy one waits for and is waited for by, so the order stays the same.

        Raises:
            DriverError: the driver refused; some copies may be queued all the same.
        """
        if work.batch not in self.batches:
            self._copy_singly(work, stream)
            return Submitted(work.single, len(work), stream)
        if stream in _LEGACY_STREAMS:
            stream = _PER_THREAD_STREAM
        if len(work):
            self._copy_batch(work, stream)
        return Submitted(work.batch, len(work), stream)

    def _copy_batch(self, work: Descriptors | BoxCopies, stream: int) -> None:
        before, after = work.batch_arguments()
        failed = ctypes.c_size_t(-1)
        index = (ctypes.byref(failed),) if self.batches[work.batch] == 12080 else ()
        try:
            self.call(work.batch, *before, *index, *after, stream)
        except DriverError as error:
            raise _refusal(error, work, failed.value) from error

    def _copy_singly(self, work: Descriptors | BoxCopies, stream: int) -> None:
        for i, arguments in enumerate(work.single_arguments()):
            try:
                self.call(work.single, *arguments, stream)
            except DriverError as error:
                raise _refusal(error, work, i) from error

    def max_pitch(self, device: int) -> int:
        """Most bytes from row to row of a box that the driver takes on GPU `device`."""
        pitch, handle = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        attribute = ctypes.c_int(_MAX_PITCH_ATTRIBUTE)
        self.call("cuDeviceGetAttribute", ctypes.byref(pitch), attribute, handle)
        return pitch.value

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0


@functools.cache
def memcpy_driver() -> MemcpyDriver:
    """The copies of this machine's driver; raises as `cuda_driver` does."""
    cuda_driver()  # loads and initialises it, or tells why not
    return MemcpyDriver(ctypes.CDLL("libcuda.so.1"))


def _refusal(error: DriverError, work: Descriptors | BoxCopies, at: int) -> DriverError:
    """`error` with the copy that the driver named, if it named one."""
    which = f"one of {len(work)} copies"
    if at < len(work):
        which = f"copy {at} of {len(work)} ({work.describe(at)})"
    remedy = (
        f"check that {which} stays within device memory or one registration of host memory on "
        "each side; other copies of the call may be queued, so drop the destination pages"
    )
    return DriverError(error.call, error.code, error.name, remedy=remedy)
