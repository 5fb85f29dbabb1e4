"""Zero-SM copies: a plan as descriptors for the copy engines, joined over consecutive pages.

A copy engine streams what it is handed, so its rate hangs on the size and the number of copies.
Runs of consecutive pages therefore become one copy wherever the bytes are contiguous on both sides,
and component by component the host's addresses ascend as far as the page list does (between two
devices, the destination's): neighbours in the list then share DRAM pages and translations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.errors import DriverError, PathUnavailable
from hikv.kernels.memcpy import Descriptors, MemcpyDriver, Submitted, memcpy_driver
from hikv.kernels.submit import Path, require
from hikv.pinned import registration_borders
from hikv.plan import CopyPlan, PartPlan, Side, page_runs, plan_transfer


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
    if stream is None:
        stream = torch.cuda.current_stream(plan.gpu)
    with driver.primary_context(stream.device.index):
        if driver.capturing(stream.cuda_stream):
            raise PathUnavailable(
                "ce",
                "the stream is being captured into a graph, which takes no batch of copies",
                remedy="copy outside the capture",
            )
        work = split_at_borders(descriptors(plan), _borders(plan))
        return driver.copy(work, stream.cuda_stream)


def unavailable() -> str | None:
    """Why this machine cannot run the copy engines, in one sentence; `None` where it can."""
    if torch.version.hip is not None:
        return "ROCm has no CUDA driver"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        memcpy_driver()
    except (PathUnavailable, DriverError) as error:
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
        starts, lengths = page_runs(src_pages, dst_pages)
        src_pages, dst_pages = src_pages[starts], dst_pages[starts]
        nbytes = lengths * part.run_bytes
    outer = _loops_around_pages(part, src_leads=plan.direction == "h2d")
    src = _addresses(part, part.src, src_pages, outer)
    dst = _addresses(part, part.dst, dst_pages, outer)
    return src.ravel(), dst.ravel(), np.broadcast_to(nbytes[:, None], src.shape).ravel()


def _loops_around_pages(part: PartPlan, src_leads: bool) -> int:
    """Iterations of the loops that step further than a page on the leading side.

    The plan has those loops first, so the pages fit in after them with the addresses ascending.
    """
    page_stride = (part.src if src_leads else part.dst).page_stride
    strides = [(lp.src_stride if src_leads else lp.dst_stride) for lp in part.loops]
    further = [stride is None or stride > page_stride for stride in strides]
    return math.prod(lp.size for lp, far in zip(part.loops, further, strict=True) if far)


def _addresses(part: PartPlan, side: Side, pages: np.ndarray, outer: int) -> np.ndarray:
    """Where the runs of `pages` begin on `side`, int64 `[outer, page, inner]`."""
    # All loops but the last step by their size; the last counts vectors, and steps by whole runs.
    steps = [1] * (len(side.sizes) - 1) + [part.run_bytes // part.vector_bytes]
    offsets = entries = np.zeros(1, np.int64)
    loops = zip(side.sizes, side.strides, side.table_strides, steps, strict=True)
    for size, stride, table_stride, step in loops:
        index = np.arange(0, size, step)
        offsets = np.add.outer(offsets, index * stride).ravel()
        entries = np.add.outer(entries, index * table_stride).ravel()
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
