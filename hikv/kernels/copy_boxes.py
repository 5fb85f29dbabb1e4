"""Zero-SM relayout: a plan as strided boxes for the copy engines.

A copy engine steps by itself through the rows of a box. So pages whose runs are too short to be
submitted one by one become a few boxes, and no kernel converts them. That the driver carries every
box by a copy engine, however narrow its rows, its documentation does not say; a profile does, and
`tests/test_gpu_copy_engine.py` takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.kernels.copy_engine import obstacle as engine_obstacle
from hikv.kernels.copy_engine import queue, split_at_borders, starts
from hikv.kernels.memcpy import (
    BoxCopies,
    Descriptors,
    MemcpyDriver,
    Submitted,
    memcpy_driver,
    new_boxes,
)
from hikv.kernels.submit import Path, require
from hikv.plan import CopyPlan, Loop, PartPlan, page_runs, plan_transfer
from hikv.shapes import MAX_PITCH, PAGE, Shape, no_rows, num_boxes, part_shape


def copy_boxes(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = 0,
    stream: torch.cuda.Stream | None = None,
) -> CopyPlan:
    """Copy pages as strided boxes with the copy engines on `stream`; returns the plan queued.

    Args:
        src, dst: buffers of equal geometry, one on a GPU, the other in pinned host memory.
        src_pages, dst_pages, layers: as for `hikv.plan_transfer`.
        block_quota: any value is kept, since no CTA is launched.
        stream: where to queue; `None` is torch's current stream. The caller has ordered it after
            the source's producer and the destination's last reader.

    Asynchronous: both buffers must stay alive and untouched until `stream` has passed the copy. The
    lists of page ids may change as soon as this returns.

    Raises:
        ArgumentError: as `plan_transfer`.
        PathUnavailable: layouts of which no box holds two runs, both sides on one GPU, a side out
            of reach, no CUDA driver, or a stream under graph capture.
        DriverError: the driver refused the copies.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    require("ce3d", obstacle(plan))
    launch(plan, stream=stream)
    return plan


def launch(
    plan: CopyPlan,
    *,
    stream: torch.cuda.Stream | None = None,
    driver: MemcpyDriver | None = None,
) -> Submitted:
    """Queue a plan that was checked already; see `copy_boxes`.

    A plan of one layer out of many may have a box for every run. `driver` replaces this machine's;
    one that is given is taken to reach any memory.
    """
    if driver is None:
        require("ce3d", _unreachable(plan))
        driver = memcpy_driver()
    stream = torch.cuda.current_stream(plan.gpu) if stream is None else stream
    max_pitch = driver.max_pitch(stream.device.index)
    return queue("ce3d", plan, lambda p: boxes(p, max_pitch), split_boxes, stream, driver)


def obstacle(plan: CopyPlan) -> str | None:
    """Why strided boxes cannot serve `plan` on this machine, or `None`."""
    return _unreachable(plan) or no_rows(plan)


def _unreachable(plan: CopyPlan) -> str | None:
    if plan.direction == "d2d":
        # What cuda.h says of cuMemcpy2DAsync.
        return "within a GPU the driver may refuse distances between rows that it did not choose"
    return engine_obstacle(plan)


def boxes(plan: CopyPlan, max_pitch: int = MAX_PITCH) -> BoxCopies:
    """The boxes of `plan`, part by part, in the order of the leading side."""
    first, lengths = page_runs(plan.src_pages, plan.dst_pages)
    found = []
    for part in plan.parts:
        shape = part_shape(plan, part, lengths, max_pitch)
        found.append(_part_boxes(plan, part, shape, first, lengths))
    return BoxCopies(found[0] if len(found) == 1 else np.concatenate(found))


def _part_boxes(
    plan: CopyPlan, part: PartPlan, shape: Shape, first: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    src_pages, dst_pages = plan.src_pages, plan.dst_pages
    if shape.joins_pages:
        src_pages, dst_pages = src_pages[first], dst_pages[first]
    src, dst = starts(plan, part, shape.outside, src_pages, dst_pages)
    found = new_boxes(src.shape)
    for name, loop in zip(("width", "height", "depth"), shape.inside, strict=True):
        steps = lengths[:, None] if loop is not None and loop.axis == PAGE else 1
        found[name] = (loop.size if loop is not None else 1) * steps
    sides: tuple[tuple[str, np.ndarray, Callable[[Loop], int | None]], ...] = (
        ("src", src, lambda loop: loop.src_stride),
        ("dst", dst, lambda loop: loop.dst_stride),
    )
    for name, addresses, stride in sides:
        side = found[name]
        side["address"] = addresses
        side["row_length"], side["layer_height"] = found["width"], found["height"]
        if shape.rows is not None:
            side["row_length"] = pitch = stride(shape.rows) or 0
            if shape.layers is not None:
                side["layer_height"] = (stride(shape.layers) or 0) // pitch
    return found.ravel()


def split_boxes(work: BoxCopies, borders: np.ndarray) -> BoxCopies:
    """Take apart what reaches across `borders`: into layers, those into rows, and these by bytes.

    `borders` is as for `split_at_borders`.
    """
    found = work.boxes
    if not len(borders):
        return work
    for extent in ("depth", "height"):
        crossing = _crossing(found, borders)
        found = np.concatenate((found[~crossing], _unstacked(found[crossing], extent)))
    crossing = _crossing(found, borders)
    rows = found[crossing]
    pieces = split_at_borders(
        Descriptors(rows["src"]["address"], rows["dst"]["address"], rows["width"]), borders
    )
    cut = new_boxes((len(pieces),))
    for name, addresses in (("src", pieces.src), ("dst", pieces.dst)):
        cut[name]["address"], cut[name]["row_length"] = addresses, pieces.nbytes
        cut[name]["layer_height"] = 1
    cut["width"], cut["height"], cut["depth"] = pieces.nbytes, 1, 1
    return BoxCopies(np.concatenate((found[~crossing], cut)))


def _crossing(found: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Which boxes have a border between their first byte and their last, on either side."""
    crossing = np.zeros(len(found), bool)
    for side in (found["src"], found["dst"]):
        rows = (found["depth"] - 1) * side["layer_height"] + found["height"] - 1
        end = side["address"] + rows * side["row_length"] + found["width"]
        inside = np.searchsorted(borders, side["address"], side="right")
        crossing |= np.searchsorted(borders, end, side="left") > inside
    return crossing


def _unstacked(found: np.ndarray, extent: str) -> np.ndarray:
    """A box for each layer of these, or for each row of boxes of one layer."""
    counts = found[extent]
    apart = np.repeat(found, counts)
    step = np.arange(len(apart)) - np.repeat(np.cumsum(counts) - counts, counts)
    for side in (apart["src"], apart["dst"]):
        rows = step * side["layer_height"] if extent == "depth" else step
        side["address"] += rows * side["row_length"]
    apart[extent] = 1
    return apart


def box_bytes(plan: CopyPlan) -> int:
    """Mean payload of a box."""
    return plan.nbytes // max(num_boxes(plan), 1)


PATH = Path("ce3d", obstacle, launch, piece_bytes=box_bytes)
