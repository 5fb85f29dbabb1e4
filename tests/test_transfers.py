"""`hikv.transfer`: the choice of a path, what is refused, and what the handle says."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import DTYPES, PAIRS, check_copy, dense, head_specs, per_layer

import hikv
from hikv import ArgumentError, KVBuffer, KVSpec, PathUnavailable, transfers
from hikv.kernels.submit import check_stream
from hikv.layout import list_layouts
from hikv.tables import Entry, Table
from hikv.transfers import PATHS, obstacle, piece_bytes
from hikv.tuning import DEFAULT_BLOCK_QUOTA, Choice, Tuned, choose, key_of

SPEC = KVSpec(4, 8, 16, 4, torch.bfloat16)
IDS = [0, 2]


def pools(spec: KVSpec = SPEC, *layouts: str) -> tuple[KVBuffer, KVBuffer]:
    src, dst = layouts or ("page_first", "layer_first")
    return KVBuffer.empty(spec, src, 4), KVBuffer.empty(spec, dst, 4)


def run(*arguments, **options):
    """`transfer` as a launcher of the shared matrix."""
    handle = hikv.transfer(*arguments, after=None, **options)
    handle.synchronize()
    return handle


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_host_pools_are_copied_exactly(src, dst):
    for spec in head_specs(DTYPES[0]):
        handle = check_copy(run, spec, dense(src), dense(dst))
        assert (handle.path, handle.block_quota, handle.config_source) == ("cpu", 0, "default")
        assert handle.nbytes == 4 * spec.bytes_per_page
        assert handle.done()


def test_layers_are_copied_alone_also_from_an_engines_pool():
    handle = check_copy(run, SPEC, per_layer, dense("page_head"), layers=(1, 3))
    assert handle.nbytes == 4 * SPEC.bytes_per_page // 2
    handle.wait_layer(2)
    with pytest.raises(ArgumentError, match=r"layer: expected a layer of this transfer, 1\.\.2"):
        handle.wait_layer(3)


def test_no_page_is_no_copy():
    src, dst = pools()
    handle = hikv.transfer(src, dst, [], [], after=None)
    assert handle.nbytes == 0
    assert handle.done()


def test_the_fence_is_never_implied():
    with pytest.raises(TypeError, match="after"):
        hikv.transfer(*pools(), IDS, IDS)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "argument", "remedy"),
    [
        ({"after": 7}, "after", "producer"),
        ({"after": [None]}, "after[0]", "producer"),
        ({"path": "gpu"}, "path", "choose"),
        ({"path": ["cpu"]}, "path", "choose"),
        ({"stream": "main"}, "stream", "None"),
        ({"block_quota": -1}, "block_quota", "whole number"),
        ({"block_quota": True}, "block_quota", "whole number"),
        ({"block_quota": 1.5}, "block_quota", "whole number"),
        ({"block_quota": 0, "path": "sm"}, "block_quota", "path='ce'"),
        ({"block_quota": 0, "path": "staged"}, "block_quota", "path='ce'"),
    ],
)
def test_bad_options_are_refused_before_anything_moves(options, argument, remedy):
    src, dst = pools()
    dst.regions[0].anchors[0, 0].fill_(0xA5)
    with pytest.raises(ArgumentError) as refused:
        hikv.transfer(src, dst, IDS, IDS, **{"after": None, **options})
    assert refused.value.argument == argument
    assert remedy in refused.value.remedy
    assert bool((dst.regions[0].anchors[0, 0] == 0xA5).all())


@pytest.mark.parametrize("path", [path for path in PATHS if path != "cpu"])
def test_a_path_that_cannot_serve_is_an_error_and_nothing_falls_back(path):
    src, dst = pools()
    dst.regions[0].anchors[0, 0].fill_(0xA5)
    reason = obstacle(path, hikv.plan_transfer(src, dst, IDS, IDS))
    assert reason is not None
    with pytest.raises(PathUnavailable) as refused:
        hikv.transfer(src, dst, IDS, IDS, after=None, path=path)
    assert refused.value.path == path
    assert reason in str(refused.value)
    assert bool((dst.regions[0].anchors[0, 0] == 0xA5).all())


def meta_plan(src_layout: str, dst_layout: str, spec: KVSpec, *, d2d: bool = False):
    """A plan from a GPU to pinned memory (or the GPU), without either."""
    src = KVBuffer.empty(spec, src_layout, 64, device="meta")
    memory = torch.empty(
        64 * spec.bytes_per_page, dtype=torch.uint8, device="meta" if d2d else "cpu"
    )
    dst = KVBuffer.from_tensor(memory, spec, dst_layout, pinned=not d2d)
    return hikv.plan_transfer(src, dst, np.arange(0, 64, 2), np.arange(1, 64, 2))


def chosen(plan, block_quota=None, serves=lambda path: True):
    return choose(plan, block_quota=block_quota, link_gbps=63.0, serves=serves)


@pytest.mark.parametrize(
    ("dst_layout", "head_group", "path"),
    [
        # A grid that cuts only layers leaves 128 KiB runs; one that cuts heads leaves 1 KiB.
        ("page_first_direct", None, "ce"),
        ("page_first_direct_group", 4, "sm"),
        ("page_first", None, "sm"),
        ("page_head", None, "sm"),
    ],
)
def test_the_choice_follows_the_size_of_the_copies(dst_layout, head_group, path):
    spec = KVSpec(6, 8, 128, 64, torch.bfloat16, head_group=head_group)
    choice = chosen(meta_plan("layer_first", dst_layout, spec))
    assert (choice.path, choice.source) == (path, "default")
    assert choice.block_quota == (0 if path == "ce" else 2)


def test_pieces_are_what_a_copy_engine_is_handed():
    spec = KVSpec(6, 8, 128, 64, torch.bfloat16)
    plan = meta_plan("layer_first", "page_first", spec)
    page = spec.bytes_per_page
    # Boxes of the rows of a layer, K and V as their two layers; all K or all V from the scratch.
    assert piece_bytes("ce3d", plan) == page // 6
    assert piece_bytes("staged", plan) == page // 2
    assert piece_bytes("ce", plan) is piece_bytes("sm", plan) is None


@pytest.mark.parametrize("num_layers", [6, 2])
def test_the_pieces_of_scratch_are_as_long_as_the_host_holds_bytes_together(num_layers):
    spec = KVSpec(6, 8, 128, 64, torch.bfloat16)
    for layout in list_layouts():
        host = KVBuffer.empty(spec, layout, 4).layer_range(0, num_layers)
        host = replace(host, pinned=True)
        gpu = KVBuffer.empty(host.spec, "page_head", 4, device="meta")
        scratch = KVBuffer.empty(host.spec, layout, 4, device="meta")
        crossing = hikv.plan_transfer(host, scratch, IDS, IDS)
        for src, dst in ((host, gpu), (gpu, host)):
            pieces = piece_bytes("staged", hikv.plan_transfer(src, dst, IDS, IDS))
            assert pieces == crossing.nbytes // crossing.num_descriptors


def test_layer_by_layer_the_copies_of_one_layer_decide(monkeypatch):
    for name, path in PATHS.items():
        monkeypatch.setitem(PATHS, name, replace(path, obstacle=lambda plan: None))
    # A page is one run of 32 KiB, and a layer of it one of 512 B.
    plan = meta_plan("page_unified", "page_unified", KVSpec(64, 2, 16, 4, torch.bfloat16))
    ways = [transfers._choose(plan, None, None, layerwise) for layerwise in (False, True)]
    assert [way.path for way in ways] == ["ce", "sm"]

    monkeypatch.setattr(transfers, "device_info", lambda index: SimpleNamespace(link_gbps=63.0))
    plan = meta_plan("layer_first", "page_first_direct", replace(SPEC, num_layers=8))
    one = plan.for_layers(0, 1)
    for timed_with, path in ((piece_bytes("ce3d", one), "ce3d"), (piece_bytes("ce3d", plan), "sm")):
        entry = Entry(key_of(one), "ce3d", 0, {}, {"piece_bytes": timed_with})
        found = Tuned([(Path("t"), Table({}, {entry.key: entry}))])
        monkeypatch.setattr(transfers, "tuned", lambda info, found=found: found)
        assert transfers._choose(plan, None, None, layerwise=True).path == path


def test_without_a_table_an_sm_path_launches_two_ctas():
    assert DEFAULT_BLOCK_QUOTA == 2
    plan = meta_plan("layer_first", "page_first", SPEC)
    assert chosen(plan).block_quota == 2
    assert chosen(plan, block_quota=7).block_quota == 7


def test_a_quota_of_zero_is_the_copy_engine_alone():
    plan = meta_plan("layer_first", "page_first", SPEC)
    choice = chosen(plan, block_quota=0, serves=lambda path: False)
    assert (choice.path, choice.block_quota) == ("ce", 0)


def test_copies_within_a_gpu_and_without_a_copy_engine_are_kernels():
    spec = KVSpec(6, 8, 128, 64, torch.bfloat16)
    within = meta_plan("layer_first", "layer_first", spec, d2d=True)
    assert chosen(within).path == "sm"
    across = meta_plan("layer_first", "layer_first", spec)
    assert chosen(across).path == "ce"
    assert chosen(across, serves=lambda path: path != "ce").path == "sm"


def on_a_gpu(index: int = 0) -> tuple[KVBuffer, KVBuffer]:
    """Two buffers that say they are on a GPU."""
    src, dst = (replace(pool, device=torch.device("cuda", index)) for pool in pools())
    return src, dst


@dataclass
class Event:
    """A stand-in for what torch records: `passed` says whether the GPU has come to it."""

    passed: bool = False
    cuda_event: int = 1

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_copies_between_host_buffers_wait_for_their_fences(monkeypatch):
    fences = [Event(), Event()]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        transfers, "_launch_on_host", lambda *_: order.append([f.passed for f in fences])
    )
    order: list[list[bool]] = []
    hikv.transfer(*pools(), IDS, IDS, after=fences)
    assert order == [[True, True]]


def test_an_event_that_nobody_recorded_is_no_fence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    src, dst = pools()
    pages = range(dst.num_pages)
    before = dst.logical(pages)
    with pytest.raises(ArgumentError, match=r"after\[1\]: .* an event that was recorded") as seen:
        hikv.transfer(src, dst, IDS, IDS, after=[Event(), Event(cuda_event=0)])
    assert "event.record(stream)" in str(seen.value)
    assert torch.equal(dst.logical(pages).view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("captured", [False, True])
def test_a_stream_of_another_gpu_or_under_capture_is_refused(monkeypatch, captured):
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    plan = hikv.plan_transfer(*on_a_gpu(1), IDS, IDS)
    here, elsewhere = (SimpleNamespace(device=torch.device("cuda", i)) for i in (1, 0))
    with pytest.raises(ArgumentError, match=r"stream: expected a stream of cuda:1.*cuda:0"):
        check_stream("sm", plan, elsewhere)
    if captured:
        with pytest.raises(PathUnavailable, match=r"'tma'.*captured into a graph"):
            check_stream("tma", plan, here)
    else:
        assert check_stream("sm", plan, here) is here


def in_turns(monkeypatch, launch, turns) -> list[transfers.Transfer]:
    """Two copies, of 3 and of 2 layers, queued by `launch` on a stream that is not there."""
    monkeypatch.setitem(PATHS, "sm", replace(PATHS["sm"], launch=launch))
    monkeypatch.setattr(transfers, "on_stream", lambda *_: nullcontext("cuda"))
    uploads = iter(["the page ids"])  # once for both
    monkeypatch.setattr(transfers, "upload_pages", lambda *_: next(uploads))
    monkeypatch.setattr(hikv.handle, "_IN_FLIGHT", deque())
    handles = []
    for num_layers in (3, 2):
        spec = replace(SPEC, num_layers=num_layers)
        src, dst = (
            replace(KVBuffer.empty(spec, name, 8), device=torch.device("cuda", 0))
            for name in ("layer_first", "page_first")
        )
        plan = hikv.plan_transfer(src, dst, IDS, IDS)
        handles.append(transfers.Transfer(plan, "sm", 2, "default"))
    stream = SimpleNamespace(record_event=Event)
    copies = [(handle, Choice("sm", 2, "default")) for handle in handles]
    try:
        transfers._launch_on_gpu(copies, [], stream, turns)
    finally:
        assert list(hikv.handle._IN_FLIGHT) == handles, "both are held until both have passed"
    return handles


@pytest.mark.parametrize(
    ("turns", "order"),
    [
        (None, [(3, 0, 3), (2, 0, 2)]),
        ([], [(3, 0, 1), (3, 1, 2), (3, 2, 3), (2, 0, 1), (2, 1, 2)]),
        (
            [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 9)],
            [(3, 0, 1), (2, 0, 1), (3, 1, 2), (2, 1, 2), (3, 2, 3)],
        ),
        ([(1, 2), (1, 1)], [(2, 0, 1), (2, 1, 2), (3, 0, 1), (3, 1, 2), (3, 2, 3)]),
    ],
    ids=["whole", "layer by layer", "in turns", "the second first"],
)
def test_copies_take_turns_by_layer(monkeypatch, turns, order):
    queued = []

    def launch(plan, **options):
        assert (options["block_quota"], options["pages"]) == (2, "the page ids")
        queued.append((plan.src.spec.num_layers, *plan.layers))

    handles = in_turns(monkeypatch, launch, turns)
    assert queued == order
    for handle in handles:
        layers = [] if turns is None else [*range(handle.plan.src.spec.num_layers)]
        assert [*handle._layer_events] == layers
    assert not any(handle.done() for handle in handles)
    handles[0]._finished.passed = True
    assert all(handle.done() for handle in handles)


def test_a_refusal_in_the_middle_of_turns_holds_what_was_queued(monkeypatch):
    def launch(plan, **_):
        if plan.layers == (1, 2):
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        in_turns(monkeypatch, launch, [(1, 1)])


def test_one_pair_that_cannot_be_served_refuses_all_before_any_moves(monkeypatch):
    good, (src, dst) = pools(), pools()
    good[1].regions[0].anchors[0, 0].fill_(0xA5)
    other = KVBuffer.empty(replace(SPEC, num_kv_heads=4), "page_first", 8)
    with pytest.raises(ArgumentError, match="num_kv_heads"):
        transfers.transfer_in_turns([good, (src, other)], IDS, IDS, after=None)
    assert bool((good[1].regions[0].anchors[0, 0] == 0xA5).all())
    monkeypatch.setitem(PATHS, "ce", replace(PATHS["ce"], obstacle=lambda plan: None))
    with pytest.raises(ArgumentError, match="pairs: expected one GPU"):
        transfers.transfer_in_turns([good, on_a_gpu()], IDS, IDS, after=None, path="ce")
    first, second = transfers.transfer_in_turns([good, (src, dst)], IDS, IDS, after=None)
    for handle, pair in ((first, good), (second, (src, dst))):
        assert handle.path == "cpu"
        moved, source = pair[1].logical(IDS), pair[0].logical(IDS)
        assert torch.equal(moved.view(torch.uint8), source.view(torch.uint8))


def test_a_lost_gpu_reports_what_lost_it(monkeypatch):
    def launch(*_, **__):
        raise RuntimeError("illegal memory access, the first")

    def record_event():
        raise RuntimeError("illegal memory access, once more")

    monkeypatch.setitem(PATHS, "sm", replace(PATHS["sm"], launch=launch, shares_pages=False))
    handle = transfers.Transfer(hikv.plan_transfer(*on_a_gpu(), IDS, IDS), "sm", 2, "default")
    stream = SimpleNamespace(record_event=record_event)
    with pytest.raises(RuntimeError, match="the first"):
        transfers._launch_on_gpu([(handle, Choice("sm", 2, "default"))], [], stream, None)


def test_buffers_are_let_go_once_a_handle_says_that_they_arrived(monkeypatch):
    monkeypatch.setattr(hikv.handle, "_IN_FLIGHT", deque())
    event = Event()
    stream = SimpleNamespace(record_event=lambda: event)
    path = replace(PATHS["sm"], launch=lambda *_, **__: None, shares_pages=False)
    monkeypatch.setitem(PATHS, "sm", path)
    src, dst = on_a_gpu()
    handle = transfers.Transfer(hikv.plan_transfer(src, dst, IDS, IDS), "sm", 2, "default")
    transfers._launch_on_gpu([(handle, Choice("sm", 2, "default"))], [], stream, None)
    held = weakref.ref(src)
    assert not handle.done()
    assert list(hikv.handle._IN_FLIGHT) == [handle]
    event.passed = True
    assert handle.done()
    del handle, src
    gc.collect()
    assert held() is None
