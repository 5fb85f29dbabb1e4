"""Zero-SM copies: a plan as descriptors for the copy engines, joined over consecutive pages.

A copy engine streams what it is handed, so its rate hangs on the size and the number of copies.
Runs of consecutive pages therefore become one copy wherever the bytes are contiguous on both sides,
and component by component the host's addresses ascend as far as the page list does (between two
devices, the destination's): neighbours in the list then share DRAM pages and translations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.errors import DriverError, PathUnavailable, Unavailable
from hikv.kernels.memcpy import (
    BoxCopies,
    Descriptors,
    MemcpyDriver,
    Submitted,
    memcpy_driver,
)
from hikv.kernels.submit import Path, require
from hikv.pinned import registration_borders
from hikv.plan import CopyPlan, Loop, PartPlan, Side, page_runs, plan_transfer


def copy_engine(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = 0,
    stream: torch.cuda.Stream | None = None,
) -> CopyPlan:
    """Copy pages with the copy engines on `stream`; returns the plan that was queued.

    Args:
        src, dst: buffers of equal geometry, on a GPU or in pinned host memory.
        src_pages, dst_pages, layers: as for `hikv.plan_transfer`.
        block_quota: any value is kept, since no CTA is launched.
        stream: where to queue; `None` is torch's current stream. The caller has ordered it after
            the source's producer and the destination's last reader.

    Asynchronous: both buffers must stay alive and untouched until `stream` has passed the copy. The
    lists of page ids may change as soon as this returns.

    Raises:
        ArgumentError: as `plan_transfer`.
        PathUnavailable: a side out of reach, no CUDA driver, or a stream under graph capture.
        DriverError: the driver refused the copies.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    launch(plan, stream=stream)
    return plan


def launch(
    plan: CopyPlan,
    *,
    stream: torch.cuda.Stream | None = None,
    driver: MemcpyDriver | None = None,
) -> Submitted:
    """Queue a plan that was checked already; see `copy_engine`.

    `driver` replaces this machine's; one that is given is taken to reach any memory.
    """
    if driver is None:
        require("ce", obstacle(plan))
        driver = memcpy_driver()
    return queue("ce", plan, descriptors, split_at_borders, stream, driver)


Work = TypeVar("Work", Descriptors, BoxCopies)


def queue(
    path: str,
    plan: CopyPlan,
    make: Callable[[CopyPlan], Work],
    split: Callable[[Work, np.ndarray], Work],
    stream: torch.cuda.Stream | None,
    driver: MemcpyDriver,
) -> Submitted:
    """Queue what `make` makes of `plan`, cut by `split` at the borders of registrations.

    Raises as `copy_engine` does.
    """
    if stream is None:
        stream = torch.cuda.current_stream(plan.gpu)
    with driver.primary_context(stream.device.index):
        if driver.capturing(stream.cuda_stream):
            raise PathUnavailable(
                path,
                "the stream is being captured into a graph, which takes no batch of copies",
                remedy="copy outside the capture",
            )
        return driver.copy(split(make(plan), _borders(plan)), stream.cuda_stream)


def unavailable() -> str | None:
    """Why this machine cannot run the copy engines, in one sentence; `None` where it can."""
    if torch.version.hip is not None:
        return "ROCm has no CUDA driver"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        memcpy_driver()
    except (Unavailable, DriverError) as error:
        return str(error)
    return None


def obstacle(plan: CopyPlan) -> str | None:
    """Why the copy engines cannot serve `plan` on this machine, or `None`."""
    return plan.unreachable() or unavailable()


def descriptors(plan: CopyPlan) -> Descriptors:
    """The copies of `plan`, `plan.num_descriptors` of them."""
    columns = [_part_columns(plan, part) for part in plan.parts]
    return Descriptors(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _part_columns(plan: CopyPlan, part: PartPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, destinations and sizes of one part, in the order of the leading side."""
    src_pages, dst_pages = plan.src_pages, plan.dst_pages
    nbytes = np.full(len(src_pages), part.run_bytes)
    if part.pages_join:
        first, lengths = page_runs(src_pages, dst_pages)
        src_pages, dst_pages = src_pages[first], dst_pages[first]
        nbytes = lengths * part.run_bytes
    src, dst = starts(plan, part, part.loops, src_pages, dst_pages)
    return src.ravel(), dst.ravel(), np.broadcast_to(nbytes[:, None], src.shape).ravel()


def starts(
    plan: CopyPlan,
    part: PartPlan,
    loops: Sequence[Loop],
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Where every step of `loops`, in the plan's order, begins in these pages on either side.

    Both arrays are int64 `[outer, page, inner]`: the loops that step further than a page on the
    leading side come before the pages, so that the addresses there ascend.
    """
    src_strides = [loop.src_stride for loop in loops]
    dst_strides = [loop.dst_stride for loop in loops]
    src_leads = plan.direction == "h2d"
    page_stride = (part.src if src_leads else part.dst).page_stride
    leading = zip(loops, src_strides if src_leads else dst_strides, strict=True)
    outer = math.prod(lp.size for lp, stride in leading if stride is None or stride > page_stride)
    return (
        _addresses(part.src, src_pages, loops, src_strides, outer),
        _addresses(part.dst, dst_pages, loops, dst_strides, outer),
    )


def _addresses(
    side: Side,
    pages: np.ndarray,
    loops: Sequence[Loop],
    strides: Sequence[int | None],
    outer: int,
) -> np.ndarray:
    offsets = entries = np.zeros(1, np.int64)
    for loop, stride in zip(loops, strides, strict=True):
        index = np.arange(loop.size)
        offsets = np.add.outer(offsets, index * (stride or 0)).ravel()
        if side.table is not None:  # `[kv, layer]`, flat; both are then without a stride
            entry = {"kv": side.table.size // loop.size, "layer": 1}.get(loop.axis, 0)
            entries = np.add.outer(entries, index * entry).ravel()
    if side.table is not None:
        offsets = offsets + side.table[entries]
    bases = side.address + pages * side.page_stride
    return offsets.reshape(outer, 1, -1) + bases[:, None]


def split_at_borders(work: Descriptors, borders: np.ndarray) -> Descriptors:
    """Cut copies so that none reaches across an address of `borders` on either side.

    `borders` is int64, ascending: where one registration of host memory ends and the next begins.
    The driver refuses a copy over two of them.
    """
    for side in ("src", "dst"):
        work = _cut(work, getattr(work, side), borders)
    return work


def _cut(work: Descriptors, starts: np.ndarray, borders: np.ndarray) -> Descriptors:
    """`work` with every copy cut at the borders strictly inside `[start, start + nbytes)`."""
    if not len(borders):
        return work
    first = np.searchsorted(borders, starts, side="right")
    cuts = np.searchsorted(borders, starts + work.nbytes, side="left") - first
    if not cuts.any():
        return work
    copy = np.repeat(np.arange(len(work)), cuts + 1)
    piece = np.arange(len(copy)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)
    begin = np.where(piece == 0, 0, borders[first[copy] + piece - 1] - starts[copy])
    end = np.where(piece == cuts[copy], work.nbytes[copy], np.roll(begin, -1))
    return Descriptors(work.src[copy] + begin, work.dst[copy] + begin, end - begin)


def _borders(plan: CopyPlan) -> np.ndarray:
    """Where one registration ends and the next begins within the plan's host buffers, ascending."""
    hosts = [buffer for buffer in (plan.src, plan.dst) if buffer.device.type == "cpu"]
    anchors = [tensor for b in hosts for region in b.regions for tensor in region.anchors.flat]
    ranges = [
        borders for tensor in anchors if (borders := registration_borders(tensor)) is not None
    ]
    return np.unique(np.concatenate([np.empty(0, np.int64), *(r[1:-1] for r in ranges)]))


PATH = Path("ce", obstacle, launch)
