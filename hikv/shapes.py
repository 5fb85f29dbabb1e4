"""Which strided boxes carry a plan, for the copy engines. Pure arithmetic: nothing moves.

A box is rows of contiguous bytes at one distance from each other, and layers of such rows at
another, each side of the copy with distances of its own. It has its width from the run, its rows
from one loop of the plan, and its layers from another whose stride is a multiple of the rows' on
both sides, since the driver takes it as a number of rows. What is left of the loops becomes more
boxes. A run, rows or layers may go on through consecutive pages where the memory does on both
sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hikv.plan import CopyPlan, Loop, PartPlan, outerness, page_runs

MAX_PITCH = (1 << 31) - 1
"""Bytes from row to row that every driver takes so far; a launch asks the one that runs."""

PAGE = "page"
"""The axis of a loop that goes on through consecutive pages."""


@dataclass(frozen=True)
class Shape:
    """How boxes carry a part. A loop over `PAGE` goes on through consecutive pages.

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
        return any(loop is not None and loop.axis == PAGE for loop in self.inside)

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
    page = Loop(PAGE, 1, part.src.page_stride, part.dst.page_stride)
    dst_leads = plan.direction != "h2d"
    loops = sorted([*part.loops, page], key=lambda loop: outerness(loop, dst_leads))
    return *loops, Loop("run", part.run_bytes, 1, 1)


@lru_cache(maxsize=1024)
def _best(loops: tuple[Loop, ...], max_pitch: int, longest: int) -> list[Shape]:
    """The shapes with the fewest boxes of a page, and of a stretch of up to `longest` pages."""
    found: dict[bool, Shape] = {}
    for joined in _joined(loops):
        for shape in _shapes(joined, max_pitch, longest):
            best = found.setdefault(shape.joins_pages, shape)
            if shape.each < best.each:
                found[shape.joins_pages] = shape
    return [found[joins] for joins in sorted(found)]


def _joined(loops: Sequence[Loop]) -> Iterator[list[Loop]]:
    """Every way to join neighbours where the outer one continues the inner on both sides.

    What is joined is longer; what is not may be rows and layers.
    """
    if len(loops) == 1:
        yield [*loops]
        return
    *rest, outer, inner = loops
    strides = ((outer.src_stride, inner.src_stride), (outer.dst_stride, inner.dst_stride))
    if inner.axis != PAGE and all(o and i and o == inner.size * i for o, i in strides):
        both = Loop(outer.axis, inner.size * outer.size, inner.src_stride, inner.dst_stride)
        yield from _joined([*rest, both])
    yield from ([*others, inner] for others in _joined([*rest, outer]))


def _shapes(loops: Sequence[Loop], max_pitch: int, longest: int) -> Iterator[Shape]:
    """Every legal shape over `loops`, the run last, for stretches of at most `longest` pages."""
    *rest, width = loops

    def reach(loop: Loop) -> int:
        return loop.size * (longest if loop.axis == PAGE else 1)

    def without(*taken: Loop) -> tuple[Loop, ...]:
        return tuple(loop for loop in rest if loop not in taken)

    if width.axis == PAGE and reach(width) > max_pitch:
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


def no_rows(plan: CopyPlan) -> str | None:
    """Why no box of `plan` would hold two runs of a page, or `None`: a matter of layouts alone."""
    for part in plan.parts:
        loops = tuple(loop for loop in _loops(plan, part) if loop.axis != PAGE)
        if _best(loops, MAX_PITCH, 1)[0].rows is not None:
            return None
    if any(side.table is not None for part in plan.parts for side in (part.src, part.dst)):
        return "a table of addresses leads to every run, and no box can step through a table"
    return "no box would hold two runs of a page: path 'ce' makes the same copies"
