"""Relayout on the GPU, then whole pages by the copy engine: short SM time, then none.

A conversion that fragments pages is bad for the copy engine over the link, and holds SMs for the
whole trip if a kernel crosses the link. So the kernel converts between the pool and a scratch on
the same GPU in the host's layout, at the GPU's own speed, and the copy engine crosses the link with
whole pages. Two slots alternate: while one is being copied, the other is being converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.kernels.copy_engine import PATH as COPY_ENGINE
from hikv.kernels.relayout import PATH as REGISTERS
from hikv.kernels.submit import Path, check_quota, check_stream, require
from hikv.layout import list_layouts
from hikv.plan import CopyPlan, plan_transfer
from hikv.tuning import DEFAULT_BLOCK_QUOTA

SLOT_BYTES = 32 << 20
"""Scratch per slot, at least one page: long enough copies to hide the launch of the next."""


@dataclass(eq=False)
class Scratch:
    """Two slots of pages in the host's layout on the GPU, reused from call to call.

    Attributes:
        slots: the two buffers.
        lane: the stream of the copy engine's work.
        free: per slot, the event after which it may be overwritten; `None` before first use.
    """

    slots: tuple[KVBuffer, KVBuffer]
    lane: Any
    free: list[Any] = field(default_factory=lambda: [None, None])

    @property
    def pages(self) -> int:
        """Pages a slot holds."""
        return self.slots[0].num_pages


_SCRATCH: dict[tuple[object, ...], Scratch] = {}
_LOCK = Lock()


def staged(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> CopyPlan:
    """Copy pages between a GPU pool and pinned host memory through a scratch on the GPU.

    Args:
        src, dst: one on a GPU, the other in pinned host memory in one of the named layouts.
        src_pages, dst_pages, layers: as for `hikv.plan_transfer`.
        block_quota: most CTAs of the relayout, at least 1; `None` is 2.
        stream: where to queue; `None` is torch's current stream. It waits for the copy engine's
            own stream, so work queued on it afterwards sees the whole copy.

    Asynchronous: both buffers must stay alive and untouched until `stream` has passed the copy.
    The scratch, two slots of `SLOT_BYTES` or a page, stays allocated for the next call;
    `release_scratch()` frees it.

    Raises:
        ArgumentError: as `plan_transfer`, or `block_quota` below 1.
        PathUnavailable: both sides on one side of the link, or a side out of reach.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    quota = DEFAULT_BLOCK_QUOTA if block_quota is None else block_quota
    launch(plan, block_quota=quota, stream=stream)
    return plan


def obstacle(plan: CopyPlan) -> str | None:
    """Why this path cannot serve `plan` on this machine, or `None`."""
    if plan.direction not in ("h2d", "d2h"):
        return f"it crosses between host and GPU, and this copy is {plan.direction}"
    host = plan.src if plan.direction == "h2d" else plan.dst
    if host.layout not in list_layouts(latent=host.spec.latent):
        return "the host side has no layout of its own that a scratch could take"
    return COPY_ENGINE.obstacle(plan)


def launch(plan: CopyPlan, *, block_quota: int, stream: torch.cuda.Stream | None = None) -> None:
    """Queue a plan that was checked already; see `staged`."""
    require("staged", obstacle(plan))
    check_quota("staged", block_quota)
    if not plan.num_pages:
        return
    stream = check_stream("staged", plan, stream)
    with _LOCK:
        scratch = _scratch(plan)
        pipeline(
            plan,
            scratch,
            stream,
            inbound=plan.direction == "h2d",
            convert=lambda part: REGISTERS.launch(part, block_quota=block_quota, stream=stream),
            cross=lambda part: COPY_ENGINE.launch(part, stream=scratch.lane),
        )


def pipeline(
    plan: CopyPlan, scratch: Scratch, stream: Any, *, inbound: bool, convert: Any, cross: Any
) -> None:
    """Queue `convert` on `stream` and `cross` on the scratch's lane, slot by slot.

    Both take a plan; `inbound` is from host to GPU, where pages cross first. Streams need
    `record_event()` and `wait_event(event)` alone.
    """
    first, second = (cross, convert) if inbound else (convert, cross)
    lanes = (scratch.lane, stream) if inbound else (stream, scratch.lane)
    # The lane starts after whatever the caller ordered `stream` after.
    scratch.lane.wait_event(stream.record_event())
    try:
        for turn, (into_slot, out_of_slot) in enumerate(_legs(plan, scratch)):
            slot = turn % 2
            if scratch.free[slot] is not None:
                lanes[0].wait_event(scratch.free[slot])
            first(into_slot)
            lanes[1].wait_event(lanes[0].record_event())
            second(out_of_slot)
            scratch.free[slot] = lanes[1].record_event()
    finally:
        # Also after a failure: what was queued before it still runs.
        stream.wait_event(scratch.lane.record_event())


def _legs(plan: CopyPlan, scratch: Scratch) -> Iterator[tuple[CopyPlan, CopyPlan]]:
    """Per turn, the copy into a slot and the copy out of it."""
    for turn, start in enumerate(range(0, plan.num_pages, scratch.pages)):
        part = slice(start, start + scratch.pages)
        src_pages, dst_pages = plan.src_pages[part], plan.dst_pages[part]
        slot = scratch.slots[turn % 2]
        places = np.arange(len(src_pages))
        yield (
            plan_transfer(plan.src, slot, src_pages, places, layers=plan.layers),
            plan_transfer(slot, plan.dst, places, dst_pages, layers=plan.layers),
        )


def _scratch(plan: CopyPlan) -> Scratch:
    """The scratch for this host layout and direction, allocated at first use."""
    host = plan.src if plan.direction == "h2d" else plan.dst
    key = (plan.gpu, plan.direction, host.layout, host.spec)
    if key not in _SCRATCH:
        pages = max(1, SLOT_BYTES // host.spec.bytes_per_page)
        lane = torch.cuda.Stream(plan.gpu)
        # torch orders memory by the stream that allocates it: on another, a kernel that was queued
        # before could still be writing what a tensor since freed has left.
        with torch.cuda.stream(lane):
            first, second = (
                KVBuffer.empty(host.spec, host.layout, pages, device=plan.gpu or "cpu")
                for _ in range(2)
            )
        _SCRATCH[key] = Scratch((first, second), lane, [lane.record_event()] * 2)
    return _SCRATCH[key]


def release_scratch() -> None:
    """Free every scratch, after the copies that use them."""
    with _LOCK:
        for scratch in _SCRATCH.values():
            for event in scratch.free:
                if event is not None:
                    event.synchronize()
        _SCRATCH.clear()


def stretch_bytes(plan: CopyPlan) -> int:
    """Mean payload of what crosses the link at a time: stretches that the host holds together."""
    hosts = [part.src if plan.direction == "h2d" else part.dst for part in plan.parts]
    pieces = sum(math.prod(host.sizes[:-1]) for host in hosts)
    return sum(part.page_bytes for part in plan.parts) // pieces


PATH = Path(
    "staged", obstacle, launch, block_quota=True, layerwise=False, piece_bytes=stretch_bytes
)
