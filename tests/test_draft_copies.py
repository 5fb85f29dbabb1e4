"""Draft state on its way: saved, restored, waited for and failed with the target's pages."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cache_cases import fill, holds, on_host, serve, settle, small_cache, wrong_pages
from cases import (
    assert_bytes,
    logical_bytes,
    per_layer,
    random_rows,
    stay,
)
from draft_cases import MODES, PACKED, PROMPT, SPECS, U8, gpu_pool
from oracle import LATENT_ORDERS

from hikv.buffer import KVBuffer
from hikv.cache import lanes
from hikv.cache.config import HiCacheConfig
from hikv.cache.draft import Packed
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.lanes import CopyRequest, StreamLane, ThreadLane
from hikv.cache.pools import DevicePool, HostPool
from hikv.errors import CopyFailed, DriverError
from hikv.spec import KVSpec

PATIENCE = 30  # seconds, only ever spent by a test that fails


@MODES
@pytest.mark.parametrize("layout", LATENT_ORDERS)
def test_three_cached_pages_come_back_to_both_models_in_other_slots(drafts, layout):
    """The worked example: backed up, evicted, and restored where the GPU has room now."""
    cache = small_cache(2, 8, 8, specs=SPECS, drafts=drafts, mem_layout=layout)
    first = serve(cache, PROMPT)
    settle(cache)
    cache.evict(3)
    assert cache.match_prefix(PROMPT).host_len == 6
    cache.acquire("elsewhere", [9])
    taken = cache.allocate("elsewhere", 8)
    for page in range(8):
        for buffer in cache.device.buffers.values():
            fill(buffer, page, b"poison")
    request = cache.acquire("again", PROMPT)
    assert cache.load_back("again").loaded_len == 6
    assert set(first.pages) <= set(taken)
    assert not set(request.pages) & set(taken)
    request.wait()
    for name, buffer in cache.device.buffers.items():
        assert buffer.spec == SPECS[name]
    assert wrong_pages(cache.device, request.pages, ANYONE, PROMPT) == []
    for page in set(range(8)) - set(request.pages):
        assert all(holds(buffer, page, b"poison") for buffer in cache.device.buffers.values())
    cache.cancel("again")
    cache.release("elsewhere")
    settle(cache)
    cache.check()
    cache.close()


@pytest.fixture
def lane():
    lane = ThreadLane("test")
    yield lane
    lane.close()


@MODES
@pytest.mark.parametrize("layerwise", [True, False])
def test_unsorted_pages_are_the_same_for_every_buffer_in_any_order_of_pairs(
    drafts, layerwise, lane
):
    device, rng = gpu_pool(), np.random.default_rng(0)
    rows = {name: random_rows(spec, 12, rng) for name, spec in SPECS.items()}
    pairs = np.array([[9, 3], [2, 11], [7, 0]])
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
        host = HostPool.beside(device, num_pages=12, drafts=drafts)
        for buffer in (*device.buffers.values(), *host.buffers.values()):
            for page in range(12):
                fill(buffer, page, b"poison")
        sources = {name: per_layer(SPECS[name], rows[name], stay).buffer for name in SPECS}
        there, back = pairs[order], pairs[order][:, ::-1] + [0, 1]
        for src, dst, pages in (
            (sources, host.buffers, there),
            (host.buffers, device.buffers, back),
        ):
            both = [(src[name], dst[name]) for name in SPECS]
            lane.submit(CopyRequest(both, *pages.T, (), layerwise=layerwise)).wait()
        for name, buffer in device.buffers.items():
            got = buffer.logical(torch.tensor([10, 3, 8])).view(U8).numpy()
            want = logical_bytes(rows[name], np.array([9, 2, 7]))
            assert_bytes(got.ravel(), want.ravel(), name)
            untouched = set(range(12)) - {10, 3, 8}
            assert all(holds(buffer, page, b"poison") for page in untouched)


def layer_log(monkeypatch, buffers, hook=lambda name, layers: None) -> list:
    """What moves into `buffers` from here on, as `(name, first layer, last + 1)`."""
    log: list = []
    names = {buffer: name for name, buffer in buffers.items()}
    real = lanes.transfer

    def transfer(source, target, *pages, layers, **options):
        hook(names[target], layers)
        real(source, target, *pages, layers=layers, **options)
        log.append((names[target], *layers))

    monkeypatch.setattr(lanes, "transfer", transfer)
    return log


@MODES
def test_the_drafts_layers_are_in_before_the_last_layer_is_computed(drafts, lane, monkeypatch):
    """They are numbered behind the target's, so they hold up none of its layers but the last."""
    device = gpu_pool()
    host = HostPool.beside(device, num_pages=12, drafts=drafts)
    computing = [threading.Event() for _ in range(4)]

    def hook(name, layers):
        # A layer moves only once the one before it is being computed.
        if name == "kv" and layers[0]:
            assert computing[layers[0] - 1].wait(PATIENCE)

    log = layer_log(monkeypatch, device.buffers, hook)
    both = [(host.buffers[name], device.buffers[name]) for name in SPECS]
    copy = lane.submit(CopyRequest(both, np.arange(3), np.arange(3), (), layerwise=True))
    for layer in range(4):
        copy.wait_layer(layer)
        log.append(f"target computes {layer}")
        computing[layer].set()
    log.append("draft computes")
    moved = [[("kv", n, n + 1), ("indexer", n, n + 1)] for n in range(4)]
    assert log == [
        *moved[0],
        "target computes 0",
        *moved[1],
        "target computes 1",
        *moved[2],
        "target computes 2",
        *moved[3],
        ("draft", 0, 1),
        ("draft_indexer", 0, 1),
        "target computes 3",
        "draft computes",
    ]


@pytest.mark.parametrize(
    ("first", "count", "steps"),
    [
        (14, 2, [0, 0, 0, 2]),  # behind the target's
        (0, 2, [2, 2, 2, 2]),  # numbered by itself, on a stage that is not the first
        (10, 2, [1, 2, 2, 2]),  # beside its first layers
        (12, 9, [0, 0, 1, 9]),  # deeper than the target's stage
        (10, 9, [1, 2, 3, 9]),
    ],
)
def test_what_is_due_at_each_layer_follows_the_models_numbering(
    first, count, steps, lane, monkeypatch
):
    specs = {
        "kv": KVSpec(4, 1, 4, 2, U8, first_layer=10),
        "draft": KVSpec(count, 1, 4, 2, U8, first_layer=first),
    }
    device = DevicePool.empty(specs, "layer_first", 4)
    host = HostPool.beside(device, num_pages=4, drafts={"draft": Packed()})
    for buffer in host.buffers.values():
        fill(buffer, 1, b"there")
    log = layer_log(monkeypatch, device.buffers)
    both = [(host.buffers[name], device.buffers[name]) for name in specs]
    request = CopyRequest(both, np.array([1]), np.array([3]), (), layerwise=True)
    assert [request.due(layer, specs["draft"]) for layer in range(4)] == steps
    assert [request.due(layer, specs["kv"]) for layer in range(4)] == [1, 2, 3, 4]
    lane.submit(request).wait_layer(3)
    moved = [entry for entry in log if entry[0] == "draft"]
    ends = [0, *dict.fromkeys(step for step in steps if step)]
    assert moved == [("draft", start, stop) for start, stop in pairwise(ends)]
    assert log[-1][2] == specs[log[-1][0]].num_layers
    whole = torch.cat([device.buffers[name].logical([3]).flatten() for name in specs])
    assert torch.equal(whole, torch.cat([host.buffers[n].logical([1]).flatten() for n in specs]))


class FakeTransfer:
    """A queued transfer that writes down what is waited for."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_layer(self, layer: int, stream: object) -> None:
        self.log.append((self.name, layer, stream))


def queued(monkeypatch, log: list, layerwise: bool) -> lanes.Copy:
    """A copy of the target and its draft on a stream that moves nothing."""
    device = gpu_pool()
    host = HostPool.beside(device, num_pages=12, drafts=PACKED)
    fakes = [FakeTransfer(name, log) for name in SPECS]
    monkeypatch.setattr(lanes, "transfer_in_turns", lambda *_, **__: fakes)
    monkeypatch.setattr(lanes, "queue_behind", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda stream: None)
    )
    both = [(host.buffers[name], device.buffers[name]) for name in SPECS]
    request = CopyRequest(both, np.arange(3), np.arange(3), (), layerwise=layerwise)
    return StreamLane(torch.device("cuda")).submit(request)


def test_a_copy_that_is_not_layerwise_is_waited_for_whole_at_any_layer(monkeypatch):
    """Its buffers' layers may be numbered by another model than the one that is computed, as are
    those of a state."""
    log: list = []
    queued(monkeypatch, log, layerwise=False).wait_layer(0, "compute")
    assert log == [(name, spec.num_layers - 1, "compute") for name, spec in SPECS.items()]


def test_a_stream_waits_for_the_draft_with_the_targets_last_layer(monkeypatch):
    log: list = []
    copy = queued(monkeypatch, log, layerwise=True)
    for layer in range(4):
        copy.wait_layer(layer, "compute")
        log.append("computes")
    target = [[(name, layer, "compute") for name in ("kv", "indexer")] for layer in range(4)]
    draft = [(name, 0, "compute") for name in ("draft", "draft_indexer")]
    ends = [[], [], [], draft]
    assert log == [
        entry for own, rest in zip(target, ends, strict=True) for entry in [*own, *rest, "computes"]
    ]


def fail_into(monkeypatch, buffer: KVBuffer) -> None:
    real = lanes.transfer

    def transfer(source, target, *arguments, **options):
        if target is buffer:
            raise DriverError("memcpy", 700, "CUDA_ERROR", remedy="none")
        return real(source, target, *arguments, **options)

    monkeypatch.setattr(lanes, "transfer", transfer)


@MODES
@pytest.mark.parametrize("name", ["draft", "draft_indexer"])
def test_a_prefix_whose_draft_was_not_saved_is_not_on_the_host(drafts, name, monkeypatch):
    cache = small_cache(2, 8, 8, specs=SPECS, drafts=drafts)
    with monkeypatch.context() as patch:
        fail_into(patch, cache.host.buffers[name])
        serve(cache, PROMPT)
        settle(cache)
    assert (cache.stats()["host_free"], cache.match_prefix(PROMPT).device_len) == (8, 6)
    cache.check()
    cache.evict(8)
    settle(cache)
    on_host(cache, PROMPT)
    assert cache.match_prefix(PROMPT).host_len == 6
    serve(cache, PROMPT)
    cache.close()


@MODES
@pytest.mark.parametrize("name", ["draft", "draft_indexer"])
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_draft_that_does_not_come_back_is_a_miss_for_the_target_too(
    drafts, name, layerwise, monkeypatch
):
    cache = small_cache(2, 8, 8, specs=SPECS, drafts=drafts, layerwise=layerwise)
    on_host(cache, PROMPT)
    with monkeypatch.context() as patch:
        fail_into(patch, cache.device.buffers[name])
        request = cache.acquire("r", PROMPT)
        assert cache.load_back("r").outcome == "loading"
        with pytest.raises(CopyFailed):
            request.wait_layer(3)
        settle(cache)
    assert cache.match_prefix(PROMPT).device_len == 0
    assert request.failed is not None
    cache.cancel("r")
    assert cache.stats()["device_free"] == 8
    cache.check()
    serve(cache, PROMPT)  # checks the bytes of all four buffers
    cache.close()


def test_each_owner_keeps_the_draft_of_its_own_pages():
    for owner, count in ((0, 2), (1, 1)):
        device = DevicePool(gpu_pool(6).buffers, num_owners=2, owner=owner)
        host = HostPool.beside(device, num_pages=6, drafts=PACKED)
        config = HiCacheConfig(load_back_threshold=0)
        cache = HiRadixCache(device, host, config, after=None)
        on_host(cache, PROMPT)
        assert (serve(cache, PROMPT).pages % 2).tolist() == [0, 1, 0]
        settle(cache)
        moved = cache.metrics.copied_bytes["load_back"].value
        assert moved == count * device.bytes_per_page
        cache.close()
