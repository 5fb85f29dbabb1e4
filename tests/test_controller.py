"""Lanes and acknowledgements: fences, layers as they arrive, order, withdrawal, failure."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_cases import (
    compute,
    fill,
    holds,
    manual_lanes,
    on_host,
    serve,
    settle,
    small_cache,
    spec,
    wrong_pages,
)

from hikv.cache import lanes
from hikv.cache.hiradix import ANYONE
from hikv.cache.lanes import CopyRequest, StreamLane, ThreadLane
from hikv.cache.node import DEVICE, HOST
from hikv.cache.pools import DevicePool, HostPool
from hikv.errors import ArgumentError, CopyFailed, DriverError

PATIENCE = 30  # seconds, only ever spent by a test that fails


@pytest.fixture
def lane():
    lane = ThreadLane("test")
    yield lane
    lane.close()


@pytest.fixture
def pools():
    device = DevicePool.empty(spec(2, num_layers=3), "layer_first", 4)
    host = HostPool.beside(device, num_pages=4)
    for page in range(4):
        fill(device.buffers["kv"], page, b"old")
        fill(host.buffers["kv"], page, b"%d" % page)
    return device, host


def load(pools, fences=(), layerwise=True, pages=(0, 1, 2)) -> CopyRequest:
    device, host = pools
    ids = np.array(pages)
    return CopyRequest(
        [(host.buffers["kv"], device.buffers["kv"])], ids, ids, fences, layerwise=layerwise
    )


def test_a_layer_is_computed_while_the_next_one_moves(lane, pools, monkeypatch) -> None:
    """Each layer's copy begins only when the layer before it is being computed: were a forward made
    to wait for more than its layer, neither would ever go on."""
    log: list[tuple[str, int]] = []
    computing = [threading.Event() for _ in range(3)]
    real = lanes.transfer

    def transfer(*arguments, layers, **options):
        assert layers[0] == 0 or computing[layers[0] - 1].wait(PATIENCE)
        real(*arguments, layers=layers, **options)
        log.append(("moved", layers[0]))

    monkeypatch.setattr(lanes, "transfer", transfer)
    copy = lane.submit(load(pools))
    for layer in range(3):
        copy.wait_layer(layer)
        log.append(("computes", layer))
        computing[layer].set()
    copy.wait()
    steps = [("moved", 0), ("computes", 0), ("moved", 1), ("computes", 1), ("moved", 2)]
    assert log == [*steps, ("computes", 2)]
    assert all(holds(pools[0].buffers["kv"], page, b"%d" % page) for page in range(3))


def test_a_forward_pass_waits_for_its_layers_through_its_request(monkeypatch) -> None:
    first_is_computed = threading.Event()
    cache = small_cache(1)
    on_host(cache, [1, 2])
    real = lanes.transfer

    def transfer(*arguments, layers, **options):
        assert layers[0] == 0 or first_is_computed.wait(PATIENCE)
        real(*arguments, layers=layers, **options)

    monkeypatch.setattr(lanes, "transfer", transfer)
    request = cache.acquire("r", [1, 2, 3])
    cache.load_back("r")
    cache.allocate("r", 3)
    with pytest.raises(ArgumentError, match="layer: expected 0 … 1, "):
        request.wait_layer(-1)
    request.wait_layer(0)
    assert cache.ready()[DEVICE] == 0
    assert cache.match_prefix([1, 2]).device_len == 0, "not there for others before it is whole"
    first_is_computed.set()
    request.wait_layer(1)
    assert wrong_pages(cache.device, request.pages[:2], ANYONE, [1, 2]) == []
    compute(cache, request, [1, 2, 3], 2)
    cache.insert("r")
    assert cache.match_prefix([1, 2, 3]).device_len == 3
    cache.check()
    cache.close()


@pytest.mark.parametrize(("layerwise", "calls"), [(True, 2), (False, 1)])
def test_the_step_level_mode_moves_all_layers_at_once(layerwise, calls, monkeypatch) -> None:
    cache = small_cache(1, layerwise=layerwise)
    on_host(cache, [1, 2])
    seen = []
    real = lanes.transfer
    monkeypatch.setattr(
        lanes, "transfer", lambda *a, **k: (seen.append(k["layers"]), real(*a, **k))
    )
    serve(cache, [1, 2])
    assert len(seen) == calls
    cache.close()


def test_a_copy_waits_for_the_producer_of_its_source(lane, pools) -> None:
    produced = threading.Event()
    copy = lane.submit(load(pools, [produced]))
    assert not copy.done()
    fill(pools[1].buffers["kv"], 0, b"new")
    produced.set()
    copy.wait()
    assert holds(pools[0].buffers["kv"], 0, b"new")


def test_every_copy_asks_for_its_fences() -> None:
    fences = [threading.Event(), threading.Event()]
    cache = small_cache(1, after=lambda: fences)
    serve(cache, [1, 2])
    assert not cache.controller.queues[HOST][0].copy.done()
    for fence in fences:
        fence.set()
    settle(cache)
    assert cache.stats()["host_free"] == 14
    cache.close()


def test_copies_of_a_lane_run_in_order(lane, pools) -> None:
    gate = threading.Event()
    copies = [lane.submit(load(pools, [gate])), lane.submit(load(pools, pages=(3,)))]
    assert not copies[1].done()
    gate.set()
    copies[1].wait()
    assert copies[0].done()


def test_a_copy_is_withdrawn_from_the_queue_and_from_its_fence(lane, pools) -> None:
    never = threading.Event()
    running, queued = lane.submit(load(pools, [never])), lane.submit(load(pools, pages=(3,)))
    queued.withdraw()
    assert queued.done()
    running.withdraw()
    running.synchronize()
    for copy in (running, queued):
        assert copy.arrived() == 0
        assert copy.failure() is not None
        with pytest.raises(CopyFailed):
            copy.wait()
        with pytest.raises(CopyFailed):
            copy.wait_layer(0)
    assert all(holds(pools[0].buffers["kv"], page, b"old") for page in range(4))


def test_a_failure_reaches_those_who_wait_and_nobody_else(lane, pools, monkeypatch) -> None:
    real = lanes.transfer

    def transfer(*arguments, layers, **options):
        if layers[0] == 1:
            raise DriverError("memcpy", 700, "CUDA_ERROR", remedy="none")
        real(*arguments, layers=layers, **options)

    monkeypatch.setattr(lanes, "transfer", transfer)
    copy = lane.submit(load(pools))
    copy.wait_layer(0)
    with pytest.raises(CopyFailed) as error:
        copy.wait_layer(1)
    assert isinstance(error.value.__cause__, DriverError)
    assert (copy.arrived(), copy.done()) == (0, True)
    monkeypatch.undo()
    lane.submit(load(pools)).wait()


class FakeEvent:
    """What stands for an event of a stream; `passed` tells whether the stream got there."""

    passed = False
    stream, cuda_event = None, 0

    def __init__(self, **options) -> None:
        self.options = options

    def record(self, stream) -> None:
        self.stream, self.cuda_event = stream, 1

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert (self.passed, end.passed) == (True, True)
        return 250.0


class FakeStream:
    def __init__(self, device) -> None:
        self.device = device


def test_a_copy_says_how_long_it_ran(pools, monkeypatch) -> None:
    monkeypatch.setattr(lanes, "transfer_in_turns", lambda *_, **__: [])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    copy = StreamLane(torch.device("cuda")).submit(load(pools))
    copy._start.passed = copy._end.passed = True
    assert copy.seconds() == 0.25
    ticks = iter([10.0, 12.5])
    monkeypatch.setattr(lanes.time, "perf_counter", lambda: next(ticks))
    lane = ThreadLane("test")
    copy = lane.submit(load(pools))
    copy.synchronize()
    assert copy.seconds() == 2.5
    lane.close()


def test_a_stream_that_refuses_in_the_middle_is_done_when_what_it_took_has_passed(
    pools, monkeypatch
) -> None:
    """The pages are not free before: copies that were queued still write them."""
    calls = []

    def transfer_in_turns(pairs, src, dst, **options):
        calls.append((pairs, [*options.pop("turns")], options))
        raise DriverError("memcpy", 700, "CUDA_ERROR", remedy="none")

    monkeypatch.setattr(lanes, "transfer_in_turns", transfer_in_turns)
    monkeypatch.setattr(lanes, "queue_behind", lambda *fences: waited.append(fences))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    lane = StreamLane(torch.device("cuda"), path="ce", block_quota=0)
    fence, waited = object(), []
    request = load(pools, [fence])
    request = replace(request, buffers=[*request.buffers] * 3)
    copy = lane.submit(request)
    ((pairs, turns, options),) = calls
    assert pairs == request.buffers
    # Layer by layer, and every buffer before the next layer of any.
    assert turns == [(i, layer + 1) for layer in range(request.num_layers) for i in range(3)]
    start = options.pop("after")
    assert options == {"path": "ce", "block_quota": 0, "stream": lane._stream}
    # Time counts from the last fence on; and what it counts from is behind them all.
    assert waited == [([fence], lane._stream)]
    assert (start.stream, start.options) == (lane._stream, {"enable_timing": True})
    assert not copy.done()
    copy.withdraw()
    assert not copy.done(), "a stream does not give back what is queued"
    copy.synchronize()
    assert (copy.done(), copy.arrived(), copy.seconds()) == (True, 0, None)
    for wait in (copy.wait, lambda: copy.wait_layer(0)):
        with pytest.raises(CopyFailed):
            wait()


def test_an_interrupt_leaves_once_the_stream_has_passed_what_it_took(pools, monkeypatch) -> None:
    """Nobody has a handle to wait for, and the pages go back to their pool."""
    waited = []

    def transfer_in_turns(*_, **__):
        assert not waited
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes, "transfer_in_turns", transfer_in_turns)
    monkeypatch.setattr(FakeStream, "synchronize", lambda own: waited.append(own), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    lane = StreamLane(torch.device("cuda"))
    with pytest.raises(KeyboardInterrupt):
        lane.submit(load(pools))
    assert waited == [lane._stream]


def test_a_fence_that_a_thread_cannot_wait_for_fails_the_copy(lane, pools) -> None:
    copy = lane.submit(load(pools, ["a GPU's event"]))
    copy.synchronize()
    assert (copy.done(), copy.arrived()) == (True, 0)
    assert isinstance(copy.failure(), ArgumentError)
    assert "threading.Event" in str(copy.failure())


def test_copies_are_acknowledged_in_the_order_they_began() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    for token in (1, 2, 3):
        serve(cache, [token])
    first, second, third = lanes[HOST].copies
    third.complete()
    second.complete()
    assert cache.ready() == (0, 0)
    assert cache.poll().backed_up == 0
    first.complete()
    assert cache.ready() == (0, 3)
    assert cache.poll((0, 1)).backed_up == 1, "ranks agreed on one"
    assert cache.ready() == (0, 2)
    assert cache.poll().backed_up == 2
    cache.check()


def test_an_agreed_acknowledgement_waits_where_the_copy_is_late() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    serve(cache, [1])
    assert cache.ready() == (0, 0)
    assert cache.poll((0, 1)).backed_up == 1
    assert lanes[HOST].copies[0].done()


def test_an_aborted_copy_keeps_its_turn() -> None:
    """Ranks that withdrew it early or late acknowledge the same copies in the same order."""
    lanes = manual_lanes()
    cache = small_cache(1, 8, lanes=lanes)
    for tokens in ([1, 2], [3, 4]):
        on_host(cache, tokens)
    for rid, tokens in (("a", [1, 2]), ("b", [3, 4])):
        cache.acquire(rid, tokens)
        cache.load_back(rid)
    cache.cancel("b")
    assert cache.ready() == (0, 0)
    cache.check()
    lanes[DEVICE].copies[0].complete()
    assert cache.poll().loaded == 2
    assert cache.match_prefix([3, 4]).device_len == 0
    assert cache.stats()["device_free"] == 6
    cache.check()


def test_each_owner_copies_its_own_pages_and_all_keep_the_same_books() -> None:
    """Three pages on owners 0, 1, 0: both ranks know all of them, each moves its own."""
    caches = []
    for owner in range(2):
        cache = small_cache(1, 4, 4)
        device = DevicePool(cache.device.buffers, num_owners=2, owner=owner)
        host = HostPool(cache.host.buffers, num_owners=2, owner=owner)
        caches.append(type(cache)(device, host, cache.config, after=None))
    for cache in caches:
        on_host(cache, [1, 2, 3])
        request = serve(cache, [1, 2, 3, 4])
        assert (request.pages % 2).tolist() == [0, 1, 0, 1]
        cache.check()
    moved = [cache.metrics.copied_bytes["load_back"].value for cache in caches]
    assert moved == [2 * 16, 16]
    assert wrong_pages(caches[1].device, request.pages, ANYONE, [1, 2, 3, 4]) == []
    for cache in caches:
        cache.close()
