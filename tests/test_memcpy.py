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
from stub_driver import CONTEXT, DEVICE, HEADERS, STREAM, Record, Stub, balanced

from hikv.errors import DriverError
from hikv.kernels.memcpy import (
    BATCH,
    SINGLE,
    Descriptors,
    MemcpyAttributes,
    MemcpyDriver,
    MemLocation,
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


def copy(driver: MemcpyDriver, work: Descriptors, stream: int = STREAM):
    with driver.primary_context(DEVICE.index):
        return driver.copy(work, stream)


@pytest.mark.parametrize(
    "version", HEADERS or [pytest.param(0, marks=pytest.mark.skip("no cuda.h"))]
)
def test_structs_and_constants_equal_the_header(version):
    attributes, location = MemcpyAttributes, MemLocation
    assert Stub(version).sizes() == [
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


@pytest.mark.parametrize("count", [1, 4096])
@pytest.mark.parametrize("version", GENERATIONS)
def test_the_running_driver_decides_the_call(stub, version, count):
    driver, rows, generation = stub.driver(version), Rows(count), GENERATIONS[version]
    submitted = copy(driver, rows.work)
    calls = stub.records()
    assert (submitted.num_copies, submitted.stream) == (count, STREAM)
    if generation:
        # One attribute for all: source in stream order, no location, no flag.
        assert submitted.call == BATCH
        assert calls == [
            Record(generation, count, 1, 0, 1, 0, 0, 0, 0, 0, STREAM, CONTEXT),
        ]
    else:
        assert submitted.call == SINGLE
        assert calls == [Record(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, STREAM, CONTEXT)] * count
    stub.run()
    assert rows.arrived()


@pytest.mark.parametrize("version", [12040, 12080, 13000])
def test_descriptors_may_be_overwritten_on_return(stub, version):
    rows = Rows(64)
    copy(stub.driver(version), rows.work)
    for array in (rows.work.src, rows.work.dst, rows.work.nbytes):
        array[:] = 1
    assert (rows.dst == POISON).all()
    stub.run()
    assert rows.arrived()


def test_strided_and_narrow_arrays_are_read_by_value(stub):
    rows = Rows(64)
    wide = np.stack((rows.work.src, rows.work.dst, rows.work.nbytes), axis=1)
    copy(stub.driver(), Descriptors(wide[:, 0], wide[:, 1], wide[:, 2].astype(np.int32)))
    stub.run()
    assert rows.arrived()


def test_nothing_to_copy_is_no_call(stub):
    for version in (12040, 13000):
        assert copy(stub.driver(version), Rows(0).work).num_copies == 0
        assert stub.records() == []


@pytest.mark.parametrize(
    ("version", "call", "which"),
    [
        (12040, SINGLE, r"copy 5 of 32 \(0x\w+ → 0x\w+, 16 B\)"),
        (12080, BATCH, r"copy 5 of 32 \(0x\w+ → 0x\w+, 16 B\)"),
        (13000, BATCH, "one of 32 copies"),
    ],
)
def test_a_refusal_names_call_code_and_copy(stub, version, call, which):
    driver = stub.driver(version)
    stub.library.stub_fail_at(ctypes.c_size_t(5))
    with pytest.raises(DriverError) as refusal:
        copy(driver, Rows(32).work)
    assert (refusal.value.call, refusal.value.code) == (call, 1)
    assert refusal.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert re.search(which, refusal.value.remedy)


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_stream(stub, handle):
    """The batch refuses it and takes the per-thread one (handle 2); a single copy accepts it."""
    for version, used in ((12080, 2), (13000, 2), (12040, handle)):
        submitted = copy(stub.driver(version), Rows(1).work, handle)
        assert submitted.stream == used == stub.records()[0].stream


def test_without_a_context_nothing_is_queued(stub):
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        stub.driver().copy(Rows(1).work, STREAM)
    assert stub.records() == []


def test_capture_is_seen(stub):
    driver = stub.driver()
    assert not driver.capturing(STREAM)
    stub.library.stub_capture(1)
    assert driver.capturing(STREAM)


WRONG_SIGNATURE = """
import ctypes, sys
import numpy as np
from hikv.kernels.memcpy import BATCH, Descriptors, MemcpyDriver

path, version, function, stream = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
stub, library = ctypes.CDLL(path), ctypes.CDLL(path)
stub.stub_reset(version)
driver = MemcpyDriver(library)
prototype = type(getattr(library, BATCH))
setattr(library, BATCH, prototype(ctypes.cast(getattr(stub, function), ctypes.c_void_p).value))
src, dst = np.arange(8), np.zeros(8, np.int64)
work = Descriptors(*(np.array([n]) for n in (src.ctypes.data, dst.ctypes.data, 64)))
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
    ],
)
def test_a_wrong_signature_is_seen(stub, version, function, returncode):
    """The stub tells the two signatures apart; in a process of its own, since it may die."""
    arguments = [stub.path, str(version), function, str(STREAM)]
    command = [sys.executable, "-c", WRONG_SIGNATURE, *arguments]
    root = Path(__file__).parents[1]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert finished.returncode == returncode, finished.stderr
