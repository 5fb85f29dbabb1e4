"""The ABI of the driver's copies, against a stand-in compiled from the real cuda.h.

`driver_stub.c` reads its arguments during the call and moves the bytes when told to, so a test sees
what may change in between.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stub_driver import CONTEXT, DEVICE, HEADERS, STREAM, Box, Record, Stub, balanced

from hikv.errors import DriverError
from hikv.kernels.memcpy import (
    BATCH,
    BATCH_3D,
    BOX,
    BOX_ALONE,
    SINGLE,
    SINGLE_3D,
    BoxCopies,
    Descriptors,
    MemcpyAttributes,
    MemcpyDriver,
    MemLocation,
    new_boxes,
)

# Running driver → signature of the batch it is called with; 0 is one call per copy.
GENERATIONS = {12040: 0, 12080: 12080, 12090: 12080, 13000: 13000, 13020: 13000}
POISON = 0xA5


@pytest.fixture
def stub():
    yield from balanced()


class Rows:
    """`count` rows of 16 bytes, to be copied in reverse to every second row of `dst`."""

    def __init__(self, count: int) -> None:
        self.src = np.random.default_rng(count).integers(0, 256, (count, 16), dtype=np.uint8)
        self.want = self.src[::-1].copy()
        self.dst = np.full((2 * count, 16), POISON, np.uint8)
        at = np.arange(count)
        self.work = Descriptors(
            self.src.ctypes.data + 16 * at[::-1],
            self.dst.ctypes.data + 32 * at,
            np.full(count, 16),
        )

    def arrived(self) -> bool:
        return bool((self.dst[::2] == self.want).all() and (self.dst[1::2] == POISON).all())


class Blocks:
    """`count` blocks of 2 layers of 3 rows of 5 bytes, to be copied in reverse, from rows 8 bytes
    and layers 4 rows apart to rows 6 bytes and layers 3 rows apart."""

    def __init__(self, count: int) -> None:
        self.src = np.random.default_rng(count).integers(0, 256, (count, 2, 4, 8), dtype=np.uint8)
        self.want = np.full((count, 2, 3, 6), POISON, np.uint8)
        self.want[..., :5] = self.src[::-1, :, :3, :5]
        self.dst = np.full_like(self.want, POISON)
        boxes = new_boxes((count,))
        places = (("src", self.src[::-1], 8, 4), ("dst", self.dst, 6, 3))
        for side, array, row_length, layer_height in places:
            boxes[side]["address"] = array.ctypes.data + array.strides[0] * np.arange(count)
            boxes[side]["row_length"], boxes[side]["layer_height"] = row_length, layer_height
        boxes["width"], boxes["height"], boxes["depth"] = 5, 3, 2
        self.work = BoxCopies(boxes)

    def arrived(self) -> bool:
        return np.array_equal(self.dst, self.want)


KINDS = {Rows: (BATCH, SINGLE, 1), Blocks: (BATCH_3D, SINGLE_3D, 0)}
"""Kind of work → its calls, and the attributes that a batch of it has."""


def copy(driver: MemcpyDriver, work: Descriptors | BoxCopies, stream: int = STREAM):
    with driver.primary_context(DEVICE.index):
        return driver.copy(work, stream)


@pytest.mark.parametrize(
    "version", HEADERS or [pytest.param(0, marks=pytest.mark.skip("no cuda.h"))]
)
def test_structs_and_constants_equal_the_header(version):
    attributes, location = MemcpyAttributes, MemLocation
    assert Stub(version).sizes("sizes", 13) == [
        ctypes.sizeof(attributes),
        attributes.src_access_order.offset,
        attributes.src_location.offset,
        attributes.dst_location.offset,
        attributes.flags.offset,
        ctypes.sizeof(location),
        location.type.offset,
        location.id.offset,
        ctypes.sizeof(ctypes.c_uint64),
        *(1, 1, 2, 1),  # stream order, legacy stream, per-thread stream, legacy entry points
    ]


@pytest.mark.parametrize(
    "version", HEADERS or [pytest.param(0, marks=pytest.mark.skip("no cuda.h"))]
)
def test_boxes_equal_the_header(version):
    def offset(dtype, name):
        return dtype.fields[name][1]

    operand, side = BOX["src"], BOX_ALONE["src"]
    stub = Stub(version)
    assert stub.sizes("box_sizes", 15) == [
        BOX.itemsize,
        *(offset(BOX, name) for name in BOX.names),
        operand.itemsize,
        *(offset(operand, name) for name in operand.names),
        int(new_boxes((1,))["dst"]["type"][0]),
    ]
    names = ("src", "dst", "width", "height", "depth")
    assert stub.sizes("box_alone_sizes", 12) == [
        BOX_ALONE.itemsize,
        *(offset(BOX_ALONE, name) for name in names),
        *(offset(side, name) for name in ("memory", "address", "pitch", "rows")),
        *(4, 11),  # unified memory, the attribute of the greatest pitch
    ]


@pytest.mark.parametrize("version", [12080, 13000])
def test_every_field_of_a_box_arrives(stub, version):
    driver, blocks = stub.driver(version), Blocks(1)
    boxes = blocks.work.boxes
    boxes["src"]["location"], boxes["dst"]["location"] = (2, 30), (4, 50)
    boxes["src_access_order"], boxes["flags"] = 3, 1
    with driver.primary_context(5):
        driver.copy(blocks.work, STREAM)
    assert stub.records() == [Record(version, 1, 0, 0, 3, 2, 30, 4, 50, 1, STREAM, 0xC005)]
    src, dst = blocks.src.ctypes.data, blocks.dst.ctypes.data
    assert stub.pending() == [Box(src, 8, 32, dst, 6, 18, 5, 3, 2)]


def test_the_greatest_pitch_is_asked_for_and_kept_to(stub):
    driver = stub.driver()
    assert driver.max_pitch(3) == 2**31 - 1
    stub.library.stub_max_pitch(7)
    assert driver.max_pitch(3) == 7
    with pytest.raises(DriverError, match=BATCH_3D):
        copy(driver, Blocks(2).work)


@pytest.mark.parametrize("version", [12080, 13000])
def test_every_argument_arrives(stub, version):
    driver, rows = stub.driver(version), Rows(1)
    attributes = MemcpyAttributes(3, MemLocation(2, 30), MemLocation(4, 50), 1)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(7)
    index = [ctypes.byref(failed)] if version == 12080 else []
    shared = [ctypes.byref(attributes), ctypes.byref(first), 1, *index]
    pointers = [a.ctypes.data for a in (rows.work.dst, rows.work.src, rows.work.nbytes)]
    with driver.primary_context(5):
        driver.call(BATCH, *pointers, 1, *shared, STREAM)
    stub.run()
    assert stub.records() == [Record(version, 1, 1, 0, 3, 2, 30, 4, 50, 1, STREAM, 0xC005)]
    assert failed.value == (2**64 - 1 if version == 12080 else 7)
    assert rows.arrived()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 4096])
@pytest.mark.parametrize("version", GENERATIONS)
def test_the_running_driver_decides_the_call(stub, version, count, kind):
    driver, rows, generation = stub.driver(version), kind(count), GENERATIONS[version]
    batch, single, attributes = KINDS[kind]
    submitted = copy(driver, rows.work)
    calls = stub.records()
    assert (submitted.num_copies, submitted.stream) == (count, STREAM)
    if generation:
        # The same for all: source in stream order, no location, no flag.
        assert submitted.call == batch
        assert calls == [
            Record(generation, count, attributes, 0, 1, 0, 0, 0, 0, 0, STREAM, CONTEXT),
        ]
    else:
        assert submitted.call == single
        assert calls == [Record(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, STREAM, CONTEXT)] * count
    stub.run()
    assert rows.arrived()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [12040, 12080, 13000])
def test_lists_may_be_overwritten_on_return(stub, version, kind):
    rows = kind(64)
    copy(stub.driver(version), rows.work)
    for array in vars(rows.work).values():
        array.view(np.uint8)[:] = 1
    assert (rows.dst == POISON).all()
    stub.run()
    assert rows.arrived()


def test_strided_and_narrow_arrays_are_read_by_value(stub):
    rows = Rows(64)
    wide = np.stack((rows.work.src, rows.work.dst, rows.work.nbytes), axis=1)
    copy(stub.driver(), Descriptors(wide[:, 0], wide[:, 1], wide[:, 2].astype(np.int32)))
    stub.run()
    assert rows.arrived()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_copy_is_no_call(stub, kind):
    for version in (12040, 13000):
        assert copy(stub.driver(version), kind(0).work).num_copies == 0
        assert stub.records() == []


@pytest.mark.parametrize(("kind", "size"), [(Rows, "16 B"), (Blocks, "2 × 3 × 5 B")])
@pytest.mark.parametrize("version", [12040, 12080, 13000])
def test_a_refusal_names_call_code_and_copy(stub, version, kind, size):
    driver = stub.driver(version)
    stub.library.stub_fail_at(ctypes.c_size_t(5))
    with pytest.raises(DriverError) as refusal:
        copy(driver, kind(32).work)
    told = rf"copy 5 of 32 \(0x\w+ → 0x\w+, {size}\)"
    which = told if version < 13000 else "one of 32 copies"
    assert (refusal.value.call, refusal.value.code) == (KINDS[kind][version < 12080], 1)
    assert refusal.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert re.search(which, refusal.value.remedy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream(stub, handle, kind):
    """A batch refuses it and takes the per-thread one (handle 2); a single copy accepts it."""
    for version, used in ((12080, 2), (13000, 2), (12040, handle)):
        submitted = copy(stub.driver(version), kind(1).work, handle)
        assert submitted.stream == used == stub.records()[0].stream


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_context_nothing_is_queued(stub, kind):
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        stub.driver().copy(kind(1).work, STREAM)
    assert stub.records() == []


def test_capture_is_seen(stub):
    driver = stub.driver()
    assert not driver.capturing(STREAM)
    stub.library.stub_capture(1)
    assert driver.capturing(STREAM)


WRONG_SIGNATURE = """
import ctypes, sys
import numpy as np
from hikv.kernels.memcpy import BATCH_3D, BoxCopies, Descriptors, MemcpyDriver, new_boxes

path, version, function, stream = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
stub, library = ctypes.CDLL(path), ctypes.CDLL(path)
stub.stub_reset(version)
driver = MemcpyDriver(library)
src, dst = np.arange(8), np.zeros(8, np.int64)
work = Descriptors(*(np.array([n]) for n in (src.ctypes.data, dst.ctypes.data, 64)))
if function.startswith(BATCH_3D):
    work = BoxCopies(new_boxes((1,)))
    work.boxes["src"]["address"], work.boxes["dst"]["address"] = src.ctypes.data, dst.ctypes.data
    work.boxes["width"], work.boxes["height"], work.boxes["depth"] = 64, 1, 1
prototype = type(getattr(library, work.batch))
entry = ctypes.cast(getattr(stub, function), ctypes.c_void_p).value
setattr(library, work.batch, prototype(entry))
with driver.primary_context(0):
    driver.copy(work, stream)
record = (ctypes.c_longlong * 12)()
stub.stub_record(ctypes.c_size_t(0), record)
sys.exit(0 if record[10] == stream else 3)
"""


@pytest.mark.parametrize(
    ("version", "function", "returncode"),
    [
        (12080, "cuMemcpyBatchAsync", 0),
        (13000, "cuMemcpyBatchAsync_v2", 0),
        # The index of the failing copy lands where the stream is expected.
        (12080, "cuMemcpyBatchAsync_v2", 3),
        # The stream is written to as if it were that index.
        (13000, "cuMemcpyBatchAsync", -signal.SIGSEGV),
        (12080, "cuMemcpy3DBatchAsync", 0),
        (13000, "cuMemcpy3DBatchAsync_v2", 0),
        # The index lands where flags are expected, and those must be 0: the driver refuses.
        (12080, "cuMemcpy3DBatchAsync_v2", 1),
        # The flags, 0, are written to as if they were that index.
        (13000, "cuMemcpy3DBatchAsync", -signal.SIGSEGV),
    ],
)
def test_a_wrong_signature_is_seen(stub, version, function, returncode):
    """The stub tells the two signatures apart; in a process of its own, since it may die."""
    arguments = [stub.path, str(version), function, str(STREAM)]
    command = [sys.executable, "-c", WRONG_SIGNATURE, *arguments]
    root = Path(__file__).parents[1]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert finished.returncode == returncode, finished.stderr
