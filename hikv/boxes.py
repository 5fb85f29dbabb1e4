"""Which boxes of a tensor descriptor carry a page. Pure arithmetic: no GPU, nothing moves.

A tensor descriptor is a base address, up to five sizes and strides, and a box. The copy hardware
moves a box at a time: what lies beyond a size is zero when it loads and left out when it stores.
Both sides of a copy get the same box over the same dimensions, outer → inner:

    page    one page
    rest    the axes that no box spans, folded into one dimension: its stride is the greatest
            common divisor of theirs, so each of them steps by a multiple of it
    axes    at most two that a box spans, each of its exact size, so boxes may overhang
    words   a stretch of the run

Folding is what makes five dimensions enough, whatever the layouts: strides need no order and no
nesting. The limits below are those of `cuTensorMapEncodeTiled` in CUDA's `cuda.h`: the innermost
dimension contiguous, other strides multiples of 16 bytes and below 2⁴⁰, a box of at most 256
elements a dimension. Coordinates are int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

from hikv.errors import PathUnavailable
from hikv.plan import PartPlan

WORD_BYTES = 4
STAGE_BYTES = 16 << 10
_ALIGNMENT = 16
_MAX_BOX = 256
_SEGMENT_BYTES = 128  # the longest row of a box that shared memory swizzles
_STRIDE_LIMIT = 1 << 40
_COORDINATE_LIMIT = 1 << 31

Axes: TypeAlias = "tuple[tuple[int, int, int], ...]"
"""Size, source stride and destination stride of each, strides in bytes, outer → inner."""


@dataclass(frozen=True)
class BoxSide:
    """One side's descriptor beside its base, and how boxes find their place in it.

    Attributes:
        sizes: words per dimension, outer → inner; `page` is left out, since the pool knows it.
        strides: bytes per dimension, the innermost left out, since it is contiguous.
        steps: per axis, what one box further along it adds to the coordinate of its dimension.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Boxes:
    """How equal boxes carry a page between the descriptors of two sides.

    Attributes:
        box: words per dimension, outer → inner.
        counts: boxes of a page along each axis, outer → inner; the last axis cuts the run.
        dims: the dimension along which each axis moves.
        page_bytes: payload of a page.
        src, dst: the two sides.
    """

    box: tuple[int, ...]
    counts: tuple[int, ...]
    dims: tuple[int, ...]
    page_bytes: int
    src: BoxSide
    dst: BoxSide

    @property
    def stage_bytes(self) -> int:
        """Shared memory that one box fills."""
        return math.prod(self.box) * WORD_BYTES

    @property
    def per_page(self) -> int:
        """Boxes of one page."""
        return math.prod(self.counts)

    @property
    def payload_share(self) -> float:
        """Payload over what the boxes span; the rest overhangs and never crosses a link."""
        return self.page_bytes / (self.per_page * self.stage_bytes)


def obstacle(part: PartPlan, stage_bytes: int = STAGE_BYTES) -> str | None:
    """Why no tensor descriptor with boxes of `stage_bytes` can serve `part`, or `None`."""
    for name, side in (("src", part.src), ("dst", part.dst)):
        if side.table is not None:
            return f"{name} has no uniform layer stride, but a table of addresses"
    if part.vector_bytes < _ALIGNMENT:
        return (
            f"tensor descriptors need rows, strides and addresses in multiples of {_ALIGNMENT} "
            f"bytes, and these share {part.vector_bytes}"
        )
    if _find(part, stage_bytes) is None:
        return "a pool is too large for strides below 2⁴⁰ bytes and coordinates below 2³¹"
    return None


def plan_boxes(part: PartPlan, stage_bytes: int = STAGE_BYTES) -> Boxes:
    """The fewest boxes of at most `stage_bytes`, at least 1 KiB, that carry a page of `part`.

    Raises `PathUnavailable` where `obstacle` has a reason.
    """
    reason = obstacle(part, stage_bytes)
    boxes = None if reason else _find(part, stage_bytes)
    if boxes is None:
        raise PathUnavailable("tma", str(reason), remedy="choose path='sm'")
    return boxes


def _find(part: PartPlan, stage_bytes: int) -> Boxes | None:
    # Only a side with a table has loops without strides.
    axes = tuple((loop.size, loop.src_stride or 0, loop.dst_stride or 0) for loop in part.loops)
    return _search(axes, part.run_bytes, part.src.page_stride, part.dst.page_stride, stage_bytes)


@lru_cache(maxsize=256)
def _search(axes: Axes, run: int, src_page: int, dst_page: int, stage_bytes: int) -> Boxes | None:
    """The best candidate whose numbers a descriptor can hold."""
    for _, width, spans in sorted(_candidates([size for size, _, _ in axes], run, stage_bytes)):
        boxes = _build(axes, run, src_page, dst_page, width, spans)
        sides = (boxes.src, boxes.dst)
        if all(
            max(side.sizes) < _COORDINATE_LIMIT and max(side.strides) < _STRIDE_LIMIT
            for side in sides
        ):
            return boxes
    return None


def _candidates(
    sizes: Sequence[int], run: int, stage_bytes: int
) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Rank; bytes of the run in a row of the box; what the box spans of each axis and, last, of the
    run in such rows.

    Fewest boxes first, since overhang costs no transfer; among equals the smallest, then those with
    the longest contiguous stretch, then those of the fewest instructions.
    """
    longest = min(_ceil_power(run), _MAX_BOX * WORD_BYTES)
    width = min(longest, _SEGMENT_BYTES)
    while width <= longest:
        rows, pieces = (1, -(-run // width)) if run % width else (run // width, 1)
        for spans in _spans([*sizes, rows], stage_bytes // width):
            count = pieces * math.prod(map(_count, [*sizes, rows], spans))
            yield (count, width * math.prod(spans), -width * spans[-1], width), width, spans
        width *= 2


def _spans(sizes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Boxes that span one or two axes of `sizes` and as much of `room` as those can fill."""
    tops = [min(_ceil_power(size), _MAX_BOX) for size in sizes]
    for outer, inner in combinations(range(-1, len(sizes)), 2):
        most = 1 if outer < 0 else min(tops[outer], room)
        for first in (1 << i for i in range(most.bit_length())):
            spans = [1] * len(sizes)
            spans[inner] = min(tops[inner], 1 << (room // first).bit_length() - 1)
            if outer >= 0:
                spans[outer] = first
            yield tuple(spans)


def _build(
    axes: Axes, run: int, src_page: int, dst_page: int, width: int, spans: tuple[int, ...]
) -> Boxes:
    """The descriptors of one candidate."""
    page_bytes = run * math.prod(size for size, _, _ in axes)
    if spans[-1] > 1:
        axes, run = (*axes, (run // width, width, width)), width
    else:
        spans = spans[:-1]
    spanned = [span for span in spans if span > 1]
    first = 1 + (len(spanned) < len(spans))  # the dimension of the first axis that is spanned
    dims = iter(range(first, first + len(spanned)))
    return Boxes(
        box=(*[1] * first, *spanned, width // WORD_BYTES),
        counts=(
            *(_count(size, span) for (size, _, _), span in zip(axes, spans, strict=True)),
            -(-run // width),
        ),
        dims=(*(next(dims) if span > 1 else 1 for span in spans), first + len(spanned)),
        page_bytes=page_bytes,
        src=_side(src_page, [(size, stride) for size, stride, _ in axes], spans, run, width),
        dst=_side(dst_page, [(size, stride) for size, _, stride in axes], spans, run, width),
    )


def _side(
    page_stride: int, axes: Sequence[tuple[int, int]], spans: Sequence[int], run: int, width: int
) -> BoxSide:
    folded = [axis for axis, span in zip(axes, spans, strict=True) if span == 1]
    spanned = [axis for axis, span in zip(axes, spans, strict=True) if span > 1]
    pitch = math.gcd(*(stride for _, stride in folded))
    rest = [(1 + sum((size - 1) * stride // pitch for size, stride in folded), pitch)]
    dims = [*(rest if folded else []), *spanned]
    steps = [
        span if span > 1 else stride // pitch for (_, stride), span in zip(axes, spans, strict=True)
    ]
    return BoxSide(
        sizes=(*(size for size, _ in dims), run // WORD_BYTES),
        strides=(page_stride, *(stride for _, stride in dims)),
        steps=(*steps, width // WORD_BYTES),
    )


def _count(size: int, span: int) -> int:
    return -(-size // span)


def _ceil_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
