"""Pinned memory: chunk borders, roll-back, lifetime and budget, with fake registries."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hikv import device, pinned
from hikv.errors import ArgumentError, CapacityError, DriverError, Unavailable
from hikv.host_memory import OS_PAGE, Budget, map_touched

MIB = 1 << 20
GIB = 1 << 30
PLENTY = Budget(1 << 40, 1 << 40, "test")


class FakeRegistry:
    """Records its calls; from registration number `fail_from` on, refuses with `code`."""

    def __init__(self, fail_from: int | None = None, code: int = 2) -> None:
        self.calls: list[tuple] = []
        self.fail_from, self.code = fail_from, code

    def register(self, address: int, nbytes: int) -> None:
        if self.fail_from is not None and len(self.calls) >= self.fail_from:
            raise DriverError("cuMemHostRegister_v2", self.code, "CUDA_ERROR_X", remedy="none")
        self.calls.append(("register", address, nbytes))

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))

    def unregistered(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "unregister"]


def allocate(nbytes: int, page_bytes: int, **options) -> pinned.PinnedMemory:
    options = {"register": FakeRegistry(), "budget": PLENTY, "prefault_threads": 2} | options
    return pinned.allocate_pinned(nbytes, page_bytes=page_bytes, **options)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_failed_pin", None)
    monkeypatch.setattr(pinned, "_live", {})


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Every mapping that the allocator makes."""
    made: list[weakref.ref] = []

    def spy(*arguments, **options):
        mapping, refusals = map_touched(*arguments, **options)
        made.append(weakref.ref(mapping))
        return mapping, refusals

    monkeypatch.setattr(pinned, "map_touched", spy)
    return made


@pytest.mark.parametrize(("nbytes", "page_bytes"), [(5 << 24, 5 * MIB), (7000, 1000)])
def test_maps_the_exact_size(mappings, nbytes, page_bytes):
    memory = allocate(nbytes, page_bytes)
    assert memory.nbytes == memory.tensor.numel() == nbytes
    assert len(mappings[0]()) == -(-nbytes // OS_PAGE) * OS_PAGE


def test_borders_are_whole_pages():
    """10 pages of 3 MiB in chunks of 8 MiB: a chunk holds two pages, never two and a part."""
    registry = FakeRegistry()
    memory = allocate(30 * MIB, 3 * MIB, chunk_bytes=8 * MIB, register=registry)
    assert (memory.borders - memory.address).tolist() == [i * 6 * MIB for i in range(6)]
    assert registry.calls == [("register", memory.address + i * 6 * MIB, 6 * MIB) for i in range(5)]
    assert memory.borders.dtype == np.int64
    assert not memory.borders.flags.writeable


@given(
    pages=st.integers(1, 300),
    page_bytes=st.one_of(st.integers(1, 20_000), st.integers(1, 8).map(lambda n: n * OS_PAGE)),
    slack=st.integers(0, 200_000),
)
def test_no_page_straddles_two_chunks(pages, page_bytes, slack):
    chunk_bytes = page_bytes + slack
    borders = pinned.chunk_borders(pages * page_bytes, page_bytes, chunk_bytes)
    sizes = np.diff(borders)
    assert (borders[0], borders[-1]) == (0, pages * page_bytes)
    assert sizes.min() > 0
    assert sizes.max() <= chunk_bytes
    assert not (borders % page_bytes).any()
    if np.lcm(page_bytes, OS_PAGE) <= chunk_bytes:
        assert not (borders[:-1] % OS_PAGE).any()


def test_one_chunk_below_the_default_limit():
    assert pinned.chunk_borders(250 * GIB, 5 * MIB, pinned.CHUNK_BYTES).tolist() == [0, 250 * GIB]
    assert len(pinned.chunk_borders(1000 * GIB, 5 * MIB, pinned.CHUNK_BYTES)) == 5


@pytest.mark.parametrize(
    ("code", "kind"), [(1, CapacityError), (2, CapacityError), (3, DriverError)]
)
def test_refused_chunk_rolls_back_and_names_the_numbers(mappings, code, kind):
    registry = FakeRegistry(fail_from=3, code=code)
    free = Budget(2 * GIB, GIB, "test")
    with pytest.raises(kind) as caught:
        allocate(30 * MIB, 3 * MIB, chunk_bytes=8 * MIB, register=registry, budget=free)
    done = [call[1] for call in registry.calls if call[0] == "register"]
    assert len(done) == 3
    assert registry.unregistered() == done[::-1], "newest chunk first, each at its own address"
    assert mappings[0]() is None or mappings[0]().closed
    assert pinned.pinned_bytes() == 0
    message = str(caught.value)
    for part in (str(30 * MIB), str(GIB), "num_pages", "HIKV_PINNED_BUDGET", "chunk 4 of 5"):
        assert part in message


def test_failed_pin_is_final_and_tries_no_smaller_size():
    refusing, willing = FakeRegistry(fail_from=0), FakeRegistry()
    asked = []
    refusing.register = lambda address, nbytes: (
        asked.append(nbytes),
        FakeRegistry.register(refusing, address, nbytes),
    )
    with pytest.raises(CapacityError):
        allocate(8 * MIB, MIB, register=refusing)
    assert asked == [8 * MIB]
    with pytest.raises(
        CapacityError, match=r"earlier refusal.*8388608 bytes.*final for the process"
    ):
        allocate(MIB, MIB, register=willing)
    assert willing.calls == []


def test_other_exceptions_roll_back_too():
    registry = FakeRegistry()

    def interrupted(address: int, nbytes: int) -> None:
        if registry.calls:
            raise KeyboardInterrupt
        registry.calls.append(("register", address, nbytes))

    registry.register = interrupted
    with pytest.raises(KeyboardInterrupt):
        allocate(4 * MIB, MIB, chunk_bytes=2 * MIB, register=registry)
    assert registry.unregistered() == [registry.calls[0][1]]
    assert allocate(MIB, MIB).nbytes == MIB, "an interrupt is not a refusal"


@pytest.mark.parametrize("nbytes", [0, -MIB, MIB + 1, MIB // 2])
def test_size_must_be_whole_pages(nbytes):
    registry = FakeRegistry()
    with pytest.raises(ArgumentError, match=f"nbytes: expected a positive multiple.*got {nbytes}"):
        allocate(nbytes, MIB, register=registry)
    assert registry.calls == []


@pytest.mark.parametrize(
    ("argument", "options", "remedy"),
    [
        ("page_bytes", {"page_bytes": 0}, "pass the bytes of a KV page"),
        ("chunk_bytes", {"chunk_bytes": MIB - 1}, "raise it to a page, or leave it out"),
        ("numa_node", {"numa_node": -1}, "pass None for the GPU's own node"),
        ("prefault_threads", {"prefault_threads": 0}, "leave it out for the default"),
    ],
)
def test_bad_arguments_are_named(argument, options, remedy):
    with pytest.raises(ArgumentError) as caught:
        allocate(MIB, **{"page_bytes": MIB} | options)
    assert (caught.value.argument, caught.value.remedy) == (argument, remedy)


def test_beyond_the_budget_is_refused_before_mapping(monkeypatch):
    monkeypatch.setattr(pinned, "map_touched", lambda *a, **k: pytest.fail("mapped"))
    with pytest.raises(CapacityError) as caught:
        allocate(3 * MIB, MIB, budget=Budget(5 * MIB, 2 * MIB, "HIKV_PINNED_BUDGET"))
    assert (caught.value.required, caught.value.available) == (3 * MIB, 2 * MIB)
    assert "num_pages" in str(caught.value)
    assert "HIKV_PINNED_BUDGET" in str(caught.value)


def test_os_refusal_names_both_numbers(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned, "map_touched", refuse)
    with pytest.raises(CapacityError, match=f"needs {MIB} bytes, {1 << 40} available"):
        allocate(MIB, MIB)
    assert pinned._failed_pin is None, "only the driver's refusal is final"


def test_tensor_is_zeroed_writable_and_shared():
    memory = allocate(3 * MIB, MIB)
    assert (memory.tensor.dtype, memory.tensor.shape) == (torch.uint8, (3 * MIB,))
    assert memory.tensor.data_ptr() == memory.address
    assert int(torch.count_nonzero(memory.tensor)) == 0
    memory.tensor[-1] = 7
    assert ctypes.c_ubyte.from_address(memory.address + 3 * MIB - 1).value == 7


def test_close_unregisters_every_chunk_and_is_idempotent():
    registry = FakeRegistry()
    memory = allocate(30 * MIB, 3 * MIB, chunk_bytes=8 * MIB, register=registry)
    starts = memory.borders[:-1].tolist()
    memory.close()
    memory.close()
    assert registry.unregistered() == starts[::-1]
    assert not pinned.is_registered(memory.address)
    with pytest.raises(ArgumentError, match="closed"):
        _ = memory.tensor


def test_memory_outlives_close_while_a_view_is_alive():
    registry = FakeRegistry()
    memory = allocate(2 * MIB, MIB, register=registry)
    view = memory.tensor.view(torch.int16)[5:]
    address = memory.address
    memory.close()
    del memory
    gc.collect()
    view.fill_(0x1234)
    assert registry.unregistered() == []
    assert pinned.is_registered(address)
    del view
    assert registry.unregistered() == [address]
    assert not pinned.is_registered(address)


def test_dropped_memory_is_freed(mappings):
    registry = FakeRegistry()
    memory = allocate(16 * MIB, MIB, register=registry)
    address = memory.address
    assert pinned.pinned_bytes() == 16 * MIB
    del memory
    assert registry.unregistered() == [address]
    assert pinned.pinned_bytes() == 0
    assert mappings[0]() is None, "unmapped"


def test_unregistration_continues_after_an_error_and_reports_it(monkeypatch):
    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda event: reported.append(event.exc_value))
    registry = FakeRegistry()
    memory = allocate(4 * MIB, MIB, chunk_bytes=2 * MIB, register=registry)

    def stubborn(address: int) -> None:
        FakeRegistry.unregister(registry, address)
        raise DriverError("cuMemHostUnregister", 713, "NOT_REGISTERED", remedy="none")

    registry.unregister = stubborn
    starts = memory.borders[:-1].tolist()
    memory.close()
    assert registry.unregistered() == starts[::-1]
    assert [error.code for error in reported] == [713]


def test_forked_child_leaves_the_registrations_alone(monkeypatch):
    registry = FakeRegistry()
    memory = allocate(MIB, MIB, register=registry)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    memory.close()
    assert registry.unregistered() == []


def test_borders_are_found_from_any_view():
    first, second = allocate(4 * MIB, MIB, chunk_bytes=2 * MIB), allocate(MIB, MIB)
    assert pinned.registration_borders(first.tensor[3 * MIB :]) is first.borders
    assert pinned.registration_borders(second.tensor.view(torch.int32)[1:]) is second.borders
    assert pinned.registration_borders(torch.zeros(8)) is None
    assert pinned.is_registered(first.address)
    assert pinned.is_registered(first.address + first.nbytes - 1)
    second.close()
    assert pinned.registration_borders(torch.zeros(0)) is None
    assert not pinned.is_registered(second.address)


def test_parallel_allocations_share_one_budget(monkeypatch):
    """Two threads must not both pass the check on the same free bytes."""
    kept: list[pinned.PinnedMemory] = []
    refused: list[CapacityError] = []
    monkeypatch.setenv("HIKV_PINNED_BUDGET", str(5 * MIB))

    def take() -> None:
        try:
            kept.append(allocate(2 * MIB, MIB, budget=None))
        except CapacityError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(kept), len(refused)) == (2, 4)
    assert {error.available for error in refused} == {MIB}


def test_memory_on_the_wrong_node_is_flagged(monkeypatch):
    monkeypatch.setattr(pinned, "numa_nodes", lambda address, nbytes: (1,))
    memory = allocate(MIB, MIB, numa_node=0)
    assert any(text.startswith("pinned memory on NUMA node 1") for text in memory.refusals)


def test_default_node_is_the_gpus(monkeypatch):
    info = device.DeviceInfo(0, "x", "u", "nvidia", (9, 0), 132, GIB, numa_node=1023)
    monkeypatch.setattr(pinned, "device_info", lambda: info)
    assert any("node 1023" in text for text in allocate(MIB, MIB).refusals)


def test_variable_counts_what_is_pinned_already():
    environ = {"HIKV_PINNED_BUDGET": str(10 * MIB)}
    memory = allocate(3 * MIB, MIB)
    bound = pinned.pinned_budget(environ=environ)
    assert bound == Budget(10 * MIB, 7 * MIB, "HIKV_PINNED_BUDGET")
    memory.close()
    assert pinned.pinned_budget(environ=environ).available_bytes == 10 * MIB


def test_tightest_bound_wins(monkeypatch):
    host, group = Budget(9 * MIB, 4 * MIB, "host"), Budget(7 * MIB, 5 * MIB, "cgroup")
    monkeypatch.setattr(pinned, "memory_bounds", lambda **roots: [group, host])
    assert pinned.pinned_budget(environ={}) == host
    assert pinned.pinned_budget(environ={"HIKV_PINNED_BUDGET": "3"}).available_bytes == 3
    assert pinned.pinned_budget(environ={"HIKV_PINNED_BUDGET": str(GIB)}) == host


def test_without_a_gpu_the_default_registry_says_why(monkeypatch):
    monkeypatch.setattr(pinned, "probe_failure", lambda: "torch 9 is a CPU build")
    pinned._default_registry.cache_clear()
    with pytest.raises(Unavailable, match="pinned memory is unavailable: torch 9 is a CPU build"):
        allocate(MIB, MIB, register=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("nbytes", "page_bytes", "chunk_bytes"),
    [(30 * MIB, 3 * MIB, 8 * MIB), (20_000, 1000, 5000)],
    ids=["own_os_pages", "shared_os_pages"],
)
def test_gpu_copies_every_chunk(nbytes, page_bytes, chunk_bytes):
    memory = pinned.allocate_pinned(nbytes, page_bytes=page_bytes, chunk_bytes=chunk_bytes)
    expected = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    memory.tensor.copy_(expected)
    assert memory.tensor.is_pinned()
    assert len(memory.borders) > 2
    arrived = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cuda")
    for start, end in itertools.pairwise((memory.borders - memory.address).tolist()):
        arrived[start:end].copy_(memory.tensor[start:end], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(arrived.cpu(), expected)
