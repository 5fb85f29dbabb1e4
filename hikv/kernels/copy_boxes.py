"""Zero-SM relayout: a plan as strided boxes for the copy engines.

A copy engine steps by itself through a box: rows of contiguous bytes at one distance from each
other, and layers of such rows at another, each side with distances of its own. So a page whose runs
are too short to be submitted one by one becomes a few boxes, and no kernel converts it.

A box has its width from the run, its rows from one loop of the plan, and its layers from another
whose stride is a multiple of the rows' on both sides (the driver takes it as a number of rows).
What is left of the loops becomes more boxes. A run, rows or layers may go on through consecutive
pages where the memory does on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
from hikv.plan import CopyPlan, Loop, PartPlan, outerness, page_runs, plan_transfer

MAX_PITCH = (1 << 31) - 1
"""Bytes from row to row that every driver takes so far; a launch asks the one that runs."""

_PAGE = "page"


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


def no_rows(plan: CopyPlan) -> str | None:
    """Why no box of `plan` would hold two runs of a page, or `None`: a matter of layouts alone."""
    for part in plan.parts:
        loops = tuple(loop for loop in _loops(plan, part) if loop.axis != _PAGE)
        if _best(loops, MAX_PITCH, 1)[0].rows is not None:
            return None
    if any(side.table is not None for part in plan.parts for side in (part.src, part.dst)):
        return "a table of addresses leads to every run, and no box can step through a table"
    return "no box would hold two runs of a page: path 'ce' makes the same copies"


@dataclass(frozen=True)
class Shape:
    """How boxes carry a part. A loop named `"page"` goes on through consecutive pages.

    Attributes:
        width: the run; its size is in bytes.
        rows, layers: the loops that a box steps through, if any.
        outside: the others, one box for each of their steps.
    """

    width: Loop
    rows: Loop | None
    layers: Loop | None
    outside: tuple[Loop, ...]

    @property
    def joins_pages(self) -> bool:
        """Whether a box holds a stretch of consecutive pages."""
        return any(loop is not None and loop.axis == _PAGE for loop in self.inside)

    @property
    def inside(self) -> tuple[Loop, Loop | None, Loop | None]:
        """What a box holds: width, rows and layers."""
        return self.width, self.rows, self.layers

    @property
    def each(self) -> int:
        """Boxes of a page, or of a stretch of pages that it joins."""
        return math.prod(loop.size for loop in self.outside)

    def count(self, num_pages: int, num_runs: int) -> int:
        """Boxes of `num_pages` pages in `num_runs` stretches of consecutive ones."""
        return self.each * (num_runs if self.joins_pages else num_pages)


def part_shape(plan: CopyPlan, part: PartPlan, lengths: np.ndarray, max_pitch: int) -> Shape:
    """The shape with the fewest boxes of those that the driver takes; of equals the simplest.

    `lengths` are those of the stretches of consecutive pages.
    """
    candidates = _best(_loops(plan, part), max_pitch, int(lengths.max(initial=1)))
    return min(candidates, key=lambda shape: shape.count(plan.num_pages, len(lengths)))


def _loops(plan: CopyPlan, part: PartPlan) -> tuple[Loop, ...]:
    """The loops of `part` and that over pages in the plan's order, and the run as the last."""
    page = Loop(_PAGE, 1, part.src.page_stride, part.dst.page_stride)
    dst_leads = plan.direction != "h2d"
    loops = sorted([*part.loops, page], key=lambda loop: outerness(loop, dst_leads))
    return *loops, Loop("run", part.run_bytes, 1, 1)


@lru_cache(maxsize=1024)
def _best(loops: tuple[Loop, ...], max_pitch: int, longest: int) -> list[Shape]:
    """The shapes with the fewest boxes of a page, and of a stretch of up to `longest` pages."""
    found: dict[bool, Shape] = {}
    for joined in (_merged(loops), loops):
        for shape in _shapes(joined, max_pitch, longest):
            best = found.setdefault(shape.joins_pages, shape)
            if shape.each < best.each:
                found[shape.joins_pages] = shape
    return [found[joins] for joins in sorted(found)]


def _merged(loops: Sequence[Loop]) -> list[Loop]:
    """`loops` with neighbours joined where the outer one continues the inner on both sides."""
    merged = [loops[-1]]
    for outer in reversed(loops[:-1]):
        inner = merged[-1]
        strides = ((outer.src_stride, inner.src_stride), (outer.dst_stride, inner.dst_stride))
        if inner.axis != _PAGE and all(o and i and o == inner.size * i for o, i in strides):
            merged[-1] = Loop(
                outer.axis, inner.size * outer.size, inner.src_stride, inner.dst_stride
            )
        else:
            merged.append(outer)
    return merged[::-1]


def _shapes(loops: Sequence[Loop], max_pitch: int, longest: int) -> Iterator[Shape]:
    """Every legal shape over `loops`, the run last, for stretches of at most `longest` pages."""
    *rest, width = loops

    def reach(loop: Loop) -> int:
        return loop.size * (longest if loop.axis == _PAGE else 1)

    def without(*taken: Loop) -> tuple[Loop, ...]:
        return tuple(loop for loop in rest if loop not in taken)

    if width.axis == _PAGE and reach(width) > max_pitch:
        return
    yield Shape(width, None, None, without())
    for rows in reversed(rest):
        pitches = rows.src_stride, rows.dst_stride
        if not all(pitch and reach(width) <= pitch <= max_pitch for pitch in pitches):
            continue
        yield Shape(width, rows, None, without(rows))
        for layers in reversed(rest):
            steps = zip((layers.src_stride, layers.dst_stride), pitches, strict=True)
            if layers != rows and all(
                step and pitch and step % pitch == 0 and step // pitch >= reach(rows)
                for step, pitch in steps
            ):
                yield Shape(width, rows, layers, without(rows, layers))


def num_boxes(plan: CopyPlan) -> int:
    """Boxes that the copy engines would be handed, before any is split."""
    _, lengths = page_runs(plan.src_pages, plan.dst_pages)
    shapes = [part_shape(plan, part, lengths, MAX_PITCH) for part in plan.parts]
    return sum(shape.count(plan.num_pages, len(lengths)) for shape in shapes)


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
        steps = lengths[:, None] if loop is not None and loop.axis == _PAGE else 1
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


PATH = Path("ce3d", obstacle, launch)
