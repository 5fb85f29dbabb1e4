"""Lists of page ids, checked before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hikv.errors import ArgumentError

if TYPE_CHECKING:
    from hikv.buffer import KVBuffer


def check_pages(
    name: str,
    pages: Sequence[int] | np.ndarray | torch.Tensor,
    num_pages: int,
    *,
    unique: bool = False,
) -> np.ndarray:
    """The ids as a new int64 array `[n]`.

    Args:
        name: the argument's name, for messages.
        pages: int32 or int64 ids, each in `0..num_pages`. A GPU tensor is read back, which waits
            for the work queued on its device's current stream.
        unique: refuse an id that stands twice.

    Raises `ArgumentError` naming the first offending position.
    """
    ids = pages.detach().cpu().numpy() if isinstance(pages, torch.Tensor) else np.asarray(pages)
    if ids.size == 0 and not isinstance(pages, np.ndarray | torch.Tensor):
        ids = ids.astype(np.int64)  # an empty list has no dtype of its own
    if ids.ndim != 1 or ids.dtype not in (np.int32, np.int64):
        raise ArgumentError(
            name,
            expected="one-dimensional int32 or int64 page ids",
            got=f"{ids.dtype} of shape {ids.shape}",
            remedy="pass page ids, not slots, masks or floats",
        )
    ids = ids.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= num_pages))
    if len(outside):
        at = int(outside[0])
        raise ArgumentError(
            f"{name}[{at}]",
            expected=f"a page id in 0..{num_pages - 1}",
            got=int(ids[at]),
            remedy="pass page ids (slot // page_size) of this side's own pool",
        )
    if unique and len(ids) > 1:
        order = np.argsort(ids, kind="stable")
        twice = np.flatnonzero(np.diff(ids[order]) == 0)
        if len(twice):
            at = int(order[twice[0] + 1])
            raise ArgumentError(
                f"{name}[{at}]",
                expected="every destination page once",
                got=f"page {int(ids[at])} again",
                remedy="drop the duplicate: two writers of one page race",
            )
    return ids


def check_disjoint(
    src: KVBuffer, dst: KVBuffer, src_pages: np.ndarray, dst_pages: np.ndarray
) -> None:
    """Refuse a copy whose source and destination bytes may overlap.

    Two views of one pool may exchange pages as long as both see it alike and no page is on both
    lists. Raises `ArgumentError`.
    """
    if src.device != dst.device or not _overlap(src.extents, dst.extents):
        return
    if not _same_memory(src, dst):
        raise ArgumentError(
            "dst",
            expected="memory apart from src, or the same pool seen alike",
            got="overlapping memory with other strides",
            remedy="copy through a buffer of its own",
        )
    both = np.intersect1d(src_pages, dst_pages)
    if len(both):
        raise ArgumentError(
            "dst_pages",
            expected="no page that src_pages reads from the same pool",
            got=f"page {int(both[0])} on both sides",
            remedy="move it in two calls, or through another page",
        )


def _overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    """Whether two sorted lists of address ranges meet."""
    lows, highs = np.array(a).T
    return any(bool(((lows < high) & (highs > low)).any()) for low, high in b)


def _same_memory(src: KVBuffer, dst: KVBuffer) -> bool:
    return all(
        s.strides == d.strides and np.array_equal(s.addresses, d.addresses)
        for s, d in zip(src.regions, dst.regions, strict=True)
    )
