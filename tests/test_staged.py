"""The staged path's schedule, on streams that only write down what was queued."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from cases import assert_bytes, logical_bytes, random_rows
from oracle import pack

from hikv import KVBuffer, KVSpec, plan_transfer
from hikv.errors import DriverError
from hikv.kernels.reference import launch as copy
from hikv.kernels.staged import Scratch, obstacle, pipeline

staged = sys.modules["hikv.kernels.staged"]  # the package gives the name to the launcher
SPEC = KVSpec(3, 8, 16, 4, torch.bfloat16, head_group=2)


@dataclass
class Lane:
    """A stream that runs at once, and refuses work whose events have not been recorded."""

    name: str
    log: list[str]
    ids: itertools.count = field(default_factory=itertools.count)

    def record_event(self) -> str:
        event = f"{self.name}{next(self.ids)}"
        self.log.append(f"record {event}")
        return event

    def wait_event(self, event: str) -> None:
        assert f"record {event}" in self.log
        self.log.append(f"{self.name} waits {event}")


def pool(rows: list[np.ndarray], layout: str) -> KVBuffer:
    memory = torch.from_numpy(pack(layout, rows, SPEC.heads_per_group))
    return KVBuffer.from_tensor(memory, SPEC, layout)


def staged_copy(inbound: bool, num_pages: int, slot_pages: int, calls: int = 1) -> list[str]:
    """Copy through a poisoned scratch, check the bytes, and return what was queued in order."""
    rng = np.random.default_rng(0)
    source, before = random_rows(SPEC, 9, rng), random_rows(SPEC, 8, rng)
    layouts = ("page_first_direct_group", "layer_first")
    src_layout, dst_layout = layouts if inbound else layouts[::-1]
    src, dst = pool(source, src_layout), pool(before, dst_layout)
    slots = [KVBuffer.empty(SPEC, layouts[0], slot_pages) for _ in range(2)]
    for slot in slots:
        slot.regions[0].anchors[0, 0].fill_(0xA5)
    log: list[str] = []
    stream, lane = Lane("stream", log), Lane("lane", log)
    scratch = Scratch((slots[0], slots[1]), lane)

    def leg(name: str):
        def run(part) -> None:
            log.append(f"{name} {part.num_pages}")
            copy(part)

        return run

    for _ in range(calls):
        src_pages, dst_pages = rng.permutation(9)[:num_pages], rng.permutation(8)[:num_pages]
        plan = plan_transfer(src, dst, src_pages, dst_pages)
        legs = {"convert": leg("convert"), "cross": leg("cross")}
        pipeline(plan, scratch, stream, inbound=inbound, **legs)
        for rows, moved in zip(before, source, strict=True):
            rows[dst_pages] = moved[src_pages]
    got = dst.logical(range(8)).view(torch.uint8).numpy()
    assert_bytes(got.ravel(), logical_bytes(before, np.arange(8)).ravel(), "destination")
    return log


@pytest.mark.parametrize("inbound", [True, False])
@pytest.mark.parametrize(("num_pages", "slot_pages"), [(1, 4), (7, 2), (8, 8), (5, 1)])
def test_pages_arrive_whatever_the_slots_hold(inbound, num_pages, slot_pages):
    log = staged_copy(inbound, num_pages, slot_pages)
    turns = -(-num_pages // slot_pages)
    for leg in ("convert", "cross"):
        moved = [int(line.split()[1]) for line in log if line.startswith(leg)]
        assert len(moved) == turns
        assert sum(moved) == num_pages


def test_a_slot_is_filled_again_only_after_it_was_emptied():
    log = staged_copy(inbound=False, num_pages=3, slot_pages=1)
    assert log == [
        "record stream0",  # the lane starts after what the caller fenced
        "lane waits stream0",
        "convert 1",
        "record stream1",
        "lane waits stream1",
        "cross 1",
        "record lane0",
        "convert 1",  # into the other slot, while the first one crosses
        "record stream2",
        "lane waits stream2",
        "cross 1",
        "record lane1",
        "stream waits lane0",
        "convert 1",
        "record stream3",
        "lane waits stream3",
        "cross 1",
        "record lane2",
        "record lane3",
        "stream waits lane3",  # so work after the copy sees all of it
    ]


def test_the_next_call_waits_for_the_slots_of_the_last():
    log = staged_copy(inbound=True, num_pages=2, slot_pages=2, calls=2)
    second = log[log.index("stream waits lane1") + 1 :]
    assert "lane waits stream1" in second  # the event after which the last call's slot was free


@pytest.mark.parametrize("inbound", [True, False])
def test_after_a_failure_the_stream_still_waits_for_the_lane(inbound):
    log: list[str] = []
    stream, lane = Lane("stream", log), Lane("lane", log)
    layouts = ("page_first", "layer_first") if inbound else ("layer_first", "page_first")
    src, dst = (KVBuffer.empty(SPEC, layout, 4) for layout in layouts)
    slots = [KVBuffer.empty(SPEC, "page_first", 1) for _ in range(2)]

    def cross(part) -> None:
        if log.count("cross"):
            raise DriverError("cuMemcpyBatchAsync", 700, "LOST", remedy="")
        log.append("cross")

    plan = plan_transfer(src, dst, [0, 1, 2], [0, 1, 2])
    with pytest.raises(DriverError):
        pipeline(
            plan,
            Scratch((slots[0], slots[1]), lane),
            stream,
            inbound=inbound,
            convert=lambda part: None,
            cross=cross,
        )
    lane_event = log[-2].removeprefix("record ")
    assert lane_event.startswith("lane")
    assert log[-1] == f"stream waits {lane_event}"


def test_the_scratch_is_the_lanes_own_memory(monkeypatch):
    log: list[str] = []
    current: list[str] = []

    @contextmanager
    def on(lane):
        current.append(lane.name)
        yield
        current.pop()

    def empty(*arguments, make=KVBuffer.empty, **options):
        log.append(f"allocate on {current}")
        return make(*arguments, **options)

    src = KVBuffer.empty(SPEC, "layer_first", 2, device="meta")
    dst = KVBuffer.empty(SPEC, "page_first", 2)
    monkeypatch.setattr(staged, "_SCRATCH", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Lane("lane", log))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(KVBuffer, "empty", empty)
    scratch = staged._scratch(plan_transfer(src, dst, [0], [1]))
    assert log == ["allocate on ['lane']"] * 2 + ["record lane0"]
    assert scratch.free == ["lane0", "lane0"], "the stream waits for it before it writes a slot"


def test_it_serves_only_copies_over_the_link():
    src, dst = (KVBuffer.empty(SPEC, "layer_first", 2) for _ in range(2))
    assert "h2h" in str(obstacle(plan_transfer(src, dst, [0], [1])))
    assert "pageable" in str(
        obstacle(
            plan_transfer(KVBuffer.empty(SPEC, "layer_first", 2, device="meta"), dst, [0], [1])
        )
    )
