"""The TMA kernel: the copies of the register kernel through tensor descriptors.

Each side of a part is one tensor descriptor, and equal boxes travel between the two (`hikv.boxes`
finds them). A persistent loop keeps a ring of loads in shared memory, written by the copy hardware
with no register in between: ring times box are the bytes in flight. Each box then passes through
registers into a staging buffer from which the hardware stores it.

Needs a GPU of compute capability 9.0, multiples of 16 bytes and strides for every loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import hikv.boxes
from hikv.boxes import STAGE_BYTES, WORD_BYTES, Boxes, BoxSide, plan_boxes
from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo, device_info
from hikv.kernels.submit import Path, check_quota, kernel_obstacle, on_stream, require, upload_pages
from hikv.plan import CopyPlan, PartPlan, plan_transfer
from hikv.tuning import DEFAULT_BLOCK_QUOTA

MIN_CAPABILITY = 90
_BLACKWELL = 100
_LAST_MISTAKEN_DRIVER = 13010


@triton.jit
def _page_id(pages, tile, num_tiles, PER_PAGE: tl.constexpr):
    return tl.load(pages + tl.minimum(tile, num_tiles - 1) // PER_PAGE)


@triton.jit
def _coordinates(
    tile, page, steps, DIMS: tl.constexpr, COUNTS: tl.constexpr, PERIODS: tl.constexpr
):
    """Where box `tile` of page `page` begins, one coordinate per dimension of the descriptor."""
    AXES: tl.constexpr = len(DIMS)
    coordinates = (page,)
    for dim in tl.static_range(1, DIMS[AXES - 1] + 1):
        at = page * 0
        for i in tl.static_range(AXES):
            if DIMS[i] == dim:
                at += tile // PERIODS[i] % COUNTS[i] * steps[i]
        coordinates = coordinates + (at,)
    return coordinates


# Neither the number of pages nor where a list of ids begins makes another compilation.
@triton.jit(do_not_specialize=["src_pages", "dst_pages", "num_tiles"])
def relayout_tma_kernel(
    src,
    dst,
    src_pages,
    dst_pages,
    num_tiles,
    src_steps,
    dst_steps,
    DIMS: tl.constexpr,
    COUNTS: tl.constexpr,
    PERIODS: tl.constexpr,
    BUFFERS: tl.constexpr,
):
    """Copy `num_tiles` boxes, in the order of `hikv.boxes.Boxes`, page after page.

    Axis i is `COUNTS[i]` boxes long along dimension `DIMS[i]` of a descriptor, and the next of them
    comes after `PERIODS[i]` tiles; `src_steps` and `dst_steps` say how far on.
    """
    PER_PAGE: tl.constexpr = COUNTS[0] * PERIODS[0]
    # Zero, but no compiler can know: the destination decodes its tile anew, or the digits of every
    # load in flight would be carried in registers up to its store.
    opaque = num_tiles >> 31

    step = tl.num_programs(0)
    first = tl.program_id(0)
    # Ids come from the iteration before. Loaded where they are used, they would be one more stage
    # of the pipeline, and the ring would lose buffers to it.
    src_page = _page_id(src_pages, first, num_tiles, PER_PAGE)
    dst_page = _page_id(dst_pages, first, num_tiles, PER_PAGE)
    for tile in tl.range(first, num_tiles, step, num_stages=BUFFERS + 1):
        data = src.load(_coordinates(tile, src_page, src_steps, DIMS, COUNTS, PERIODS))
        again = tile + opaque
        dst.store(_coordinates(again, dst_page, dst_steps, DIMS, COUNTS, PERIODS), data)
        src_page = _page_id(src_pages, tile + step, num_tiles, PER_PAGE)
        dst_page = _page_id(dst_pages, again + step, num_tiles, PER_PAGE)


@dataclass(frozen=True)
class Config:
    """A CTA's ring: `buffers` loads in flight of at most `stage_bytes` each, beside one store."""

    buffers: int
    stage_bytes: int = STAGE_BYTES
    num_warps: int = 4


_IN_FLIGHT_BYTES = 128 << 10
_MAX_BUFFERS = 32
_BARRIER_BYTES = 1 << 10


def default_config(part: PartPlan, capability: int = MIN_CAPABILITY) -> Config:
    """128 KiB of payload in flight a CTA, as far as shared memory and a ring of 32 loads allow.

    `capability` is ten times the compute capability. That much is two CTAs' share of a PCIe 5 link
    at a round trip of 2.4 µs twice over.
    """
    boxes = plan_boxes(part)
    wanted = -(-_IN_FLIGHT_BYTES // int(boxes.stage_bytes * boxes.payload_share))
    room = (_shared_bytes(capability) - _BARRIER_BYTES) // boxes.stage_bytes - 1
    return Config(buffers=min(wanted, room, _MAX_BUFFERS))


def _shared_bytes(capability: int) -> int:
    """Shared memory that one CTA may use (CUDA programming guide, technical specifications)."""
    return 227 << 10 if capability < 120 else 99 << 10


def variant(boxes: Boxes, config: Config) -> dict[str, Any]:
    """The compile-time arguments of `relayout_tma_kernel`; the box is part of its descriptors."""
    return {
        "DIMS": boxes.dims,
        "COUNTS": boxes.counts,
        "PERIODS": tuple(math.prod(boxes.counts[i + 1 :]) for i in range(len(boxes.counts))),
        "BUFFERS": config.buffers,
    }


def arguments(
    boxes: Boxes,
    anchors: tuple[torch.Tensor, torch.Tensor],
    pool_pages: tuple[int, int],
    pages: torch.Tensor,
) -> dict[str, Any]:
    """The run-time arguments of `relayout_tma_kernel`, by name.

    `anchors` are one-element int32 tensors at both base addresses, `pool_pages` the pages of each
    pool, `pages` int32 ids `[2, n]`, source first, on the device that launches.
    """
    return {
        "src": _descriptor(anchors[0], pool_pages[0], boxes.src, boxes.box),
        "dst": _descriptor(anchors[1], pool_pages[1], boxes.dst, boxes.box),
        "src_pages": pages[0],
        "dst_pages": pages[1],
        "num_tiles": pages.shape[1] * boxes.per_page,
        "src_steps": boxes.src.steps,
        "dst_steps": boxes.dst.steps,
    }


def _descriptor(
    anchor: torch.Tensor, num_pages: int, side: BoxSide, box: Sequence[int]
) -> TensorDescriptor:
    strides = [*(stride // WORD_BYTES for stride in side.strides), 1]
    return TensorDescriptor(anchor, [num_pages, *side.sizes], strides, list(box))


def relayout_tma(
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
    """Copy pages with the TMA kernel on `stream`; returns the plan that was queued.

    Args:
        src, dst: buffers of equal geometry, on a GPU or in pinned host memory.
        src_pages, dst_pages, layers: as for `hikv.plan_transfer`.
        block_quota: most CTAs to launch, at least 1; `None` is 2.
        stream: where to queue; `None` is torch's current stream. The caller has ordered it after
            the source's producer and the destination's last reader.
        config: the ring of a CTA; `None` is `default_config`.

    Asynchronous: both buffers must stay alive and untouched until `stream` has passed the copy.

    Raises:
        ArgumentError: as `plan_transfer`, or `block_quota` below 1.
        PathUnavailable: a side that no kernel can reach, a GPU below compute capability 9.0, rows
            or strides that are not multiples of 16 bytes, or a pool behind a table of addresses.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    quota = DEFAULT_BLOCK_QUOTA if block_quota is None else block_quota
    launch(plan, block_quota=quota, stream=stream, config=config)
    return plan


def obstacle(plan: CopyPlan) -> str | None:
    """Why this kernel cannot serve `plan`, or `None`."""
    reasons = [kernel_obstacle(plan, relayout_tma_kernel), *map(hikv.boxes.obstacle, plan.parts)]
    if plan.gpu is not None:
        reasons.append(_device_obstacle(plan.gpu))
    reason = next(filter(None, reasons), None)
    if reason is None and plan.gpu is not None and plan.gpu.type == "cuda":
        reason = _clipping_obstacle(plan, _capability(plan.gpu), device_info(plan.gpu.index))
    return reason


def _clipping_obstacle(plan: CopyPlan, capability: int, info: DeviceInfo | None) -> str | None:
    """Boxes that overhang need their stores clipped.

    On Blackwell, drivers up to CUDA 13.1 encode that wrongly for small pools, and Triton's remedy
    takes some large pools for small ones (triton-lang/triton#9235, #10442).
    """
    driver = info.cuda_driver_version if info is not None else None
    if capability < _BLACKWELL or (driver is not None and driver > _LAST_MISTAKEN_DRIVER):
        return None
    if all(plan_boxes(part).payload_share == 1 for part in plan.parts):
        return None
    return "boxes would overhang, which this GPU's driver may not clip; CUDA 13.2's does"


def _device_obstacle(device: torch.device) -> str | None:
    if torch.version.hip:
        return "tensor descriptors need an NVIDIA GPU"
    capability = _capability(device)
    if capability < MIN_CAPABILITY:
        major, minor = divmod(capability, 10)
        return f"tensor descriptors need compute capability 9.0, {device} has {major}.{minor}"
    return None


def _capability(device: torch.device) -> int:
    """Ten times the compute capability; the interpreter passes for the least that serves."""
    if device.type != "cuda":
        return MIN_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(
    plan: CopyPlan,
    *,
    block_quota: int,
    stream: torch.cuda.Stream | None = None,
    config: Config | None = None,
    pages: torch.Tensor | None = None,
) -> None:
    """Queue a plan that was checked already; see `relayout_tma`.

    `pages` are the plan's ids where `upload_pages` brought them to the GPU before.
    """
    require("tma", obstacle(plan))
    check_quota("tma", block_quota)
    if not plan.num_pages:
        return
    with on_stream("tma", plan, stream) as device:
        pages = upload_pages(plan, device) if pages is None else pages
        for part, src, dst in zip(plan.parts, plan.src.regions, plan.dst.regions, strict=True):
            chosen = config or default_config(part, _capability(device))
            boxes = plan_boxes(part, chosen.stage_bytes)
            anchors = [r.for_layers(*plan.layers).anchor(torch.int32) for r in (src, dst)]
            pool_pages = (plan.src.num_pages, plan.dst.num_pages)
            run_time = arguments(boxes, (anchors[0], anchors[1]), pool_pages, pages)
            relayout_tma_kernel[(min(block_quota, run_time["num_tiles"]),)](
                **run_time,
                **variant(boxes, chosen),
                num_warps=chosen.num_warps,
                enable_fp_fusion=False,
            )


PATH = Path("tma", obstacle, launch, block_quota=True, config=Config, shares_pages=True)
