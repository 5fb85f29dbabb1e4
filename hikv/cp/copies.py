"""Backup and load-back of sharded pages: every page stays on its owner, at any address there.

The cache tree and its queues name logical pages on both tiers. Every rank is handed the same pairs,
picks those that it owns, and translates them here, at the copy boundary; so the ranks move disjoint
shards at the same time, each over its own link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError
from hikv.pages import check_pages
from hikv.transfers import Transfer, transfer


def own_pairs(
    shards: ShardMap,
    rank: int,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of logical pages that `rank` owns, as local pages of its own two pools, int64.

    Raises `ArgumentError` for lists of unequal length, and on every rank for a pair whose pages
    have two owners: the copy would end where no rank looks for it.
    """
    shards.check_ranks("rank", rank)
    limit = np.iinfo(np.int64).max
    src = check_pages("src_pages", src_pages, limit)
    dst = check_pages("dst_pages", dst_pages, limit)
    if len(src) != len(dst):
        raise ArgumentError(
            "dst_pages",
            expected=f"as many ids as src_pages, {len(src)}",
            got=len(dst),
            remedy="pair every source page with one destination page",
        )
    owner, dst_owner = shards.page_owner(src), shards.page_owner(dst)
    astray = np.flatnonzero(owner != dst_owner)
    if len(astray):
        at = int(astray[0])
        raise ArgumentError(
            f"dst_pages[{at}]",
            expected=f"a page of owner {owner[at]}, as src_pages[{at}] = {src[at]}",
            got=f"page {dst[at]} of owner {dst_owner[at]}",
            remedy="allocate with the rotation of the prefix (start_owner)",
        )
    own = owner == rank
    return shards.local_page(src[own]), shards.local_page(dst[own])


def transfer_own(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    shards: ShardMap,
    rank: int,
    after: Any,
    **options: Any,
) -> Transfer:
    """`hikv.transfer` of the pairs that `rank` owns, from its own pool to its own pool.

    `src_pages` and `dst_pages` are logical and the same on every rank; `after` and `options` are
    those of `hikv.transfer`, and so are the result and the errors, beside those of `own_pairs`.
    """
    own_src, own_dst = own_pairs(shards, rank, src_pages, dst_pages)
    return transfer(src, dst, own_src, own_dst, after=after, **options)
