"""The register kernel: one Triton kernel for every pair of layouts.

A page is a flat range of vectors in the order of the sequential side. Each side turns a flat index
into an address by mixed radix over its own merged loops: sizes are compile-time constants, strides
run-time numbers, offsets 64-bit. A CTA keeps a whole tile in registers, every load ahead of the
first store, because at a small `block_quota` the bytes in flight decide the rate (Little's law).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.kernels.submit import (
    Path,
    check_quota,
    kernel_obstacle,
    on_stream,
    require,
    upload_pages,
    upload_table,
    warp_size,
    word_dtype,
)
from hikv.plan import CopyPlan, PartPlan, plan_transfer
from hikv.tuning import DEFAULT_BLOCK_QUOTA


@triton.jit
def _offset(vector, strides, table, SIZES: tl.constexpr, ENTRIES: tl.constexpr):
    """Vectors from the side's base to flat index `vector` of a page.

    `strides` and `ENTRIES` belong to all loops but the last, which is the contiguous one. A loop
    with `ENTRIES` steps through the table of offsets; without, it steps by its stride.
    """
    LOOPS: tl.constexpr = len(SIZES)
    rest = vector
    if LOOPS == 1:
        offset = rest.to(tl.int64)
    else:
        offset = (rest % SIZES[LOOPS - 1]).to(tl.int64)
        rest = rest // SIZES[LOOPS - 1]
        entry = rest * 0
        for i in tl.static_range(LOOPS - 1):
            if i < LOOPS - 2:
                digit = rest % SIZES[LOOPS - 2 - i]
                rest = rest // SIZES[LOOPS - 2 - i]
            else:
                digit = rest
            if ENTRIES[LOOPS - 2 - i] > 0:
                entry += digit * ENTRIES[LOOPS - 2 - i]
            else:
                offset += digit.to(tl.int64) * strides[LOOPS - 2 - i]
        if table is not None:
            offset += tl.load(table + entry)
    return offset


@triton.jit
def _place(tile, i, PER_PAGE: tl.constexpr, SHAPE: tl.constexpr):
    """Pair of pages, and first vector in the page, of every thread in slice `i` of `tile`."""
    SLICES: tl.constexpr = SHAPE[0]
    DEPTH: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[2]
    LANES: tl.constexpr = SHAPE[3]
    thread = tl.arange(0, ROWS * LANES)
    chunk = (tile.to(tl.int64) * SLICES + i) * ROWS + thread // LANES
    vector = (chunk % PER_PAGE).to(tl.int32) * (DEPTH * LANES) + thread % LANES
    return (chunk // PER_PAGE).to(tl.int32), vector


@triton.jit
def _page_ids(pages, tile, i, num_pages, PER_PAGE: tl.constexpr, SHAPE: tl.constexpr):
    pair, _ = _place(tile, i, PER_PAGE, SHAPE)
    return tl.load(pages + pair, mask=pair < num_pages, other=0)


@triton.jit
def _pointers(
    base,
    vector,
    page_ids,
    page_stride,
    strides,
    table,
    SIZES: tl.constexpr,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where the words of every thread's `vector` lie on one side: `[threads, WORDS]`."""
    offset = _offset(vector, strides, table, SIZES, ENTRIES)
    offset += page_ids.to(tl.int64) * page_stride
    words = base + (offset * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    # The plan saw to the alignment, but no pointer tells the compiler.
    return tl.multiple_of(words, [1, 16]) if WORDS == 2 else words


# One compilation serves every call: no value, alignment or size of an argument makes a new one.
@triton.jit(do_not_specialize=list(range(12)))
def relayout_kernel(
    src,
    dst,
    src_pages,
    dst_pages,
    src_table,
    dst_table,
    num_pages,
    num_tiles,
    src_page_stride: tl.int64,
    dst_page_stride: tl.int64,
    src_strides,
    dst_strides,
    SRC_SIZES: tl.constexpr,
    DST_SIZES: tl.constexpr,
    SRC_ENTRIES: tl.constexpr,
    DST_ENTRIES: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    SHAPE: tl.constexpr,
    HINTS: tl.constexpr,
):
    """Copy pages; strides and tables count vectors of `WORDS` words of the pointers' type.

    `SHAPE` is `(SLICES, DEPTH, ROWS, LANES)`. A page is cut into chunks of `DEPTH · LANES` vectors,
    a tile is `SLICES` slices, a slice `ROWS` chunks. Lanes and rows are the threads, `DEPTH`
    vectors of a slice stay with each, so a thread needs one page id per slice, not one per vector.
    Threads form a single axis: of two, Triton would choose which one makes neighbours, and
    neighbours must hold neighbouring vectors. `HINTS` are the cache modifiers of loads and stores.
    """
    SLICES: tl.constexpr = SHAPE[0]
    DEPTH: tl.constexpr = SHAPE[1]
    LANES: tl.constexpr = SHAPE[3]
    PER_PAGE: tl.constexpr = (PAGE + DEPTH * LANES - 1) // (DEPTH * LANES)

    step = tl.num_programs(0)
    tile = tl.program_id(0)
    src_ids = ()
    for i in tl.static_range(SLICES):
        src_ids = src_ids + (_page_ids(src_pages, tile, i, num_pages, PER_PAGE, SHAPE),)
    while tile < num_tiles:
        data = ()
        for i in tl.static_range(SLICES):
            pair, first = _place(tile, i, PER_PAGE, SHAPE)
            for j in tl.static_range(DEPTH):
                vector = first + j * LANES
                words = _pointers(
                    src, vector, src_ids[i], src_page_stride, src_strides, src_table,
                    SRC_SIZES, SRC_ENTRIES, WORDS,
                )  # fmt: skip
                valid = (vector < PAGE) & (pair < num_pages)
                data = data + (tl.load(words, mask=valid[:, None], cache_modifier=HINTS[0]),)

        # These ids travel while the data does: this tile's destinations, the next one's sources.
        dst_ids = ()
        src_ids = ()
        for i in tl.static_range(SLICES):
            dst_ids = dst_ids + (_page_ids(dst_pages, tile, i, num_pages, PER_PAGE, SHAPE),)
            src_ids = src_ids + (_page_ids(src_pages, tile + step, i, num_pages, PER_PAGE, SHAPE),)

        for i in tl.static_range(SLICES):
            pair, first = _place(tile, i, PER_PAGE, SHAPE)
            # Zero, but no compiler can know, so it decodes the destination anew and not before the
            # id is there: whatever it kept in registers meanwhile would lie beside the data, and
            # the data needs those.
            first += dst_ids[i] >> 31
            for j in tl.static_range(DEPTH):
                vector = first + j * LANES
                words = _pointers(
                    dst, vector, dst_ids[i], dst_page_stride, dst_strides, dst_table,
                    DST_SIZES, DST_ENTRIES, WORDS,
                )  # fmt: skip
                valid = (vector < PAGE) & (pair < num_pages)
                tl.store(words, data[i * DEPTH + j], mask=valid[:, None], cache_modifier=HINTS[1])
        tile += step


_CORRECT = "correct the config, or the tuned table that it comes from"


@dataclass(frozen=True)
class Config:
    """How a CTA holds its tile: `num_warps` warps of `warp_size` threads, `loads` vectors each.

    `streaming`, 1 or 0, is a hint to the caches that no byte is needed twice: loads pass the L1 by
    (`.cg`), stores leave the L2 first (`.cs`).

    Raises `ArgumentError` for another hint, and unless all sizes are powers of two.
    """

    num_warps: int
    loads: int
    warp_size: int = 32
    streaming: int = 0

    def __post_init__(self) -> None:
        sizes = {"num_warps": self.num_warps, "loads": self.loads, "warp_size": self.warp_size}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ArgumentError(
                    name,
                    expected="a power of two, as the sizes of Triton's tiles are",
                    got=repr(value),
                    remedy=_CORRECT,
                )
        if self.streaming not in (0, 1):
            raise ArgumentError(
                "streaming", expected="0 or 1", got=repr(self.streaming), remedy=_CORRECT
            )

    @property
    def tile(self) -> int:
        """Vectors a CTA keeps in flight."""
        return self.num_warps * self.warp_size * self.loads


def default_config(vector_bytes: int, *, warp_size: int = 32) -> Config:
    """128 KiB in flight a CTA for vectors of 16 bytes, which is two CTAs' share of a PCIe 5 link at
    a round trip of 2.4 µs twice over. A narrower vector costs a register or two all the same, so
    rows that only allow those have less in flight.
    """
    loads = 16 if vector_bytes >= 8 else 32
    return Config(num_warps=16, loads=loads * 32 // warp_size, warp_size=warp_size)


_MAX_DEPTH = 4


def variant(part: PartPlan, config: Config) -> dict[str, Any]:
    """The compile-time arguments of `relayout_kernel` for `part`: what decides the machine code.

    The chunk is the largest power of two, up to a few vectors per thread of a warp, that pads a
    page by at most a sixteenth.
    """
    chunk = min(config.loads, _MAX_DEPTH) * config.warp_size
    while chunk > 1 and -part.page_vectors % chunk * 16 > part.page_vectors:
        chunk //= 2
    lanes = min(chunk, config.warp_size)
    depth, threads = chunk // lanes, config.num_warps * config.warp_size
    return {
        "SRC_SIZES": part.src.sizes,
        "DST_SIZES": part.dst.sizes,
        "SRC_ENTRIES": part.src.table_strides[:-1],
        "DST_ENTRIES": part.dst.table_strides[:-1],
        "PAGE": part.page_vectors,
        "WORDS": 2 if part.vector_bytes == 16 else 1,
        "SHAPE": (config.loads // depth, depth, threads // lanes, lanes),
        "HINTS": (".cg", ".cs") if config.streaming else ("", ""),
    }


def arguments(
    part: PartPlan,
    anchors: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    constants: dict[str, Any],
) -> dict[str, Any]:
    """The run-time arguments of `relayout_kernel` beside `constants`, its `variant`, by name.

    `anchors` are one-element tensors of the word type at both base addresses, `pages` int32 ids
    `[2, n]`, source first, on the device that launches; tables go to the same device.
    """
    width, num_pages = part.vector_bytes, pages.shape[1]
    slices, depth, rows, lanes = constants["SHAPE"]
    chunks = num_pages * -(-part.page_vectors // (depth * lanes))
    return {
        "src": anchors[0],
        "dst": anchors[1],
        "src_pages": pages[0],
        "dst_pages": pages[1],
        "src_table": upload_table(part.src.table, width, pages.device),
        "dst_table": upload_table(part.dst.table, width, pages.device),
        "num_pages": num_pages,
        "num_tiles": -(-chunks // (slices * rows)),
        "src_page_stride": part.src.page_stride // width,
        "dst_page_stride": part.dst.page_stride // width,
        "src_strides": tuple(stride // width for stride in part.src.strides[:-1]),
        "dst_strides": tuple(stride // width for stride in part.dst.strides[:-1]),
    }


def relayout(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = None,
    stream: torch.cuda.Stream | None = None,
    config: Config | None = None,
) -> CopyPlan:
    """Copy pages with the register kernel on `stream`; returns the plan that was queued.

    Args:
        src, dst: buffers of equal geometry, on a GPU or in pinned host memory.
        src_pages, dst_pages, layers: as for `hikv.plan_transfer`.
        block_quota: most CTAs to launch, at least 1; `None` is 2.
        stream: where to queue; `None` is torch's current stream. The caller has ordered it after
            the source's producer and the destination's last reader.
        config: warps and loads per thread; `None` is `default_config`.

    Asynchronous: both buffers must stay alive and untouched until `stream` has passed the copy.

    Raises:
        ArgumentError: as `plan_transfer`, or `block_quota` below 1.
        PathUnavailable: a side that no kernel can reach.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    quota = DEFAULT_BLOCK_QUOTA if block_quota is None else block_quota
    launch(plan, block_quota=quota, stream=stream, config=config)
    return plan


def obstacle(plan: CopyPlan) -> str | None:
    """Why this kernel cannot serve `plan`, or `None`."""
    return kernel_obstacle(plan, relayout_kernel)


def launch(
    plan: CopyPlan,
    *,
    block_quota: int,
    stream: torch.cuda.Stream | None = None,
    config: Config | None = None,
    pages: torch.Tensor | None = None,
) -> None:
    """Queue a plan that was checked already; see `relayout`.

    `pages` are the plan's ids where `upload_pages` brought them to the GPU before.
    """
    require("sm", obstacle(plan))
    check_quota("sm", block_quota)
    if not plan.num_pages:
        return
    with on_stream("sm", plan, stream) as device:
        pages = upload_pages(plan, device) if pages is None else pages
        for part, src, dst in zip(plan.parts, plan.src.regions, plan.dst.regions, strict=True):
            chosen = config or default_config(part.vector_bytes, warp_size=warp_size())
            word = word_dtype(part.vector_bytes)
            anchors = [region.for_layers(*plan.layers).anchor(word) for region in (src, dst)]
            constants = variant(part, chosen)
            run_time = arguments(part, (anchors[0], anchors[1]), pages, constants)
            relayout_kernel[(min(block_quota, run_time["num_tiles"]),)](
                **run_time, **constants, num_warps=chosen.num_warps, enable_fp_fusion=False
            )


PATH = Path(
    "sm",
    obstacle,
    launch,
    block_quota=True,
    config=partial(Config, warp_size=warp_size()),
    shares_pages=True,
)
