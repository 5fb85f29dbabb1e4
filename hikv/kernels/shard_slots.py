"""Translate logical slots to a rank's own rows on the GPU, in one launch.

An engine writes the KV of a chunk on every rank that owns some of its pages. Its slot mapping is
logical, its pool is not, and the mapping is on the GPU already.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError

BLOCK = 1024
NOT_HERE = -1


@triton.jit
def owner_and_row(slot, NUM_RANKS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The owner of logical `slot` and its row there; for use inside other kernels.

    `slot` is not negative: division here rounds towards zero.
    """
    page = slot // PAGE_SIZE
    return page % NUM_RANKS, page // NUM_RANKS * PAGE_SIZE + slot % PAGE_SIZE


@triton.jit
def own_rows_kernel(
    slots,
    rows,
    count,
    rank,
    NUM_RANKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NOT_HERE: tl.constexpr,
):
    """`rows[i]`: the row of `slots[i]` on `rank`, or `NOT_HERE`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    owner, row = owner_and_row(slot, NUM_RANKS, PAGE_SIZE)
    own = (slot >= 0) & (owner == rank)
    tl.store(rows + at, tl.where(own, row, NOT_HERE), mask=at < count)


def own_rows(shards: ShardMap, slots: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of `slots` in the pool of `rank`, and −1 for a slot that lies elsewhere.

    Args:
        shards: who owns what.
        slots: logical slots, int32 or int64 `[n]`, contiguous, on a GPU. A negative one is padding
            and gives −1.
        rank: this rank within the shard group.

    Returns:
        A new tensor of the dtype of `slots`, queued on torch's current stream there.

    Raises `ArgumentError` on another dtype, shape or rank.
    """
    shards.check_ranks("rank", rank)
    if slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1 or slots.stride(0) != 1:
        raise ArgumentError(
            "slots",
            expected="one contiguous dimension of int32 or int64 slots",
            got=f"{slots.dtype} of shape {tuple(slots.shape)}, strides {slots.stride()}",
            remedy="pass the flat slot mapping",
        )
    rows = torch.empty_like(slots)
    if slots.numel():
        grid = (triton.cdiv(slots.numel(), BLOCK),)
        # Triton launches on the current device, which need not be the slots' own.
        with torch.cuda.device_of(slots) if slots.is_cuda else nullcontext():
            own_rows_kernel[grid](
                slots,
                rows,
                slots.numel(),
                rank,
                NUM_RANKS=shards.num_ranks,
                PAGE_SIZE=shards.page_size,
                BLOCK=BLOCK,
                NOT_HERE=NOT_HERE,
            )
    return rows
