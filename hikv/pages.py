"""Lists of page ids, checked before anything moves.

A page id counts pages, a slot counts tokens; `pages_of_slots` is the one bridge between them.
"""

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
    ids = _as_int64(name, pages, "page ids")
    outside = np.flatnonzero((ids < 0) | (ids >= num_pages))
    if len(outside):
        at = int(outside[0])
        raise ArgumentError(
            f"{name}[{at}]",
            expected=f"a page id in 0..{num_pages - 1}",
            got=int(ids[at]),
            remedy="pass page ids (slot // page_size) of this side's own pool",
        )
    if unique and not _all_differ(ids):
        order = np.argsort(ids, kind="stable")
        at = int(order[np.flatnonzero(np.diff(ids[order]) == 0)[0] + 1])
        raise ArgumentError(
            f"{name}[{at}]",
            expected="every destination page once",
            got=f"page {int(ids[at])} again",
            remedy="drop the duplicate: two writers of one page race",
        )
    return ids


def _all_differ(ids: np.ndarray) -> bool:
    # Sorted by value, which is several times faster than by position.
    ordered = np.sort(ids)
    return not (ordered[1:] == ordered[:-1]).any()


def pages_of_slots(
    slots: Sequence[int] | np.ndarray | torch.Tensor, page_size: int, *, name: str = "slots"
) -> np.ndarray:
    """The page ids, int64 `[len(slots) / page_size]`, of token `slots` given page after page.

    For engines that keep a slot a token. A page moves whole, so its slots must be those of one
    page, in order. Raises `ArgumentError` naming the first slot out of place; `name` is what the
    message calls them. Slots on the GPU are read back, which waits for its current stream.
    """
    flat = _as_int64(name, slots, "slots")
    if page_size < 1:
        raise ArgumentError(
            "page_size", expected="1 or more", got=page_size, remedy="pass the spec's page_size"
        )
    if len(flat) % page_size:
        raise ArgumentError(
            name,
            expected=f"whole pages of {page_size} slots",
            got=f"{len(flat)} slots",
            remedy="leave out the slots of the last, partial page",
        )
    pages = flat[::page_size] // page_size
    in_order = (pages[:, None] * page_size + np.arange(page_size)).ravel()
    misplaced = np.flatnonzero(flat != in_order)
    if len(misplaced):
        at = int(misplaced[0])
        raise ArgumentError(
            f"{name}[{at}]",
            expected=f"slot {int(in_order[at])}, the next of page {int(pages[at // page_size])}",
            got=int(flat[at]),
            remedy="pass the slots of one whole page after another, each in order",
        )
    return pages


def check_disjoint(
    src: KVBuffer, dst: KVBuffer, src_pages: np.ndarray, dst_pages: np.ndarray
) -> None:
    """Refuse a copy whose source and destination bytes may overlap.

    Two views of one pool may exchange pages as long as both see it alike and no page is on both
    lists. Raises `ArgumentError`.
    """
    # Host and devices share one address space, so addresses alone tell, also of mapped memory.
    if not _overlap(src.extents, dst.extents):
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


def _as_int64(
    name: str, values: Sequence[int] | np.ndarray | torch.Tensor, what: str
) -> np.ndarray:
    """A new int64 array of `values`, which must be one-dimensional int32 or int64."""
    try:
        given = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
        array = np.asarray(given)
        got = f"{array.dtype} of shape {array.shape}"
        if isinstance(given, list | tuple) and bool in map(type, given):  # numpy makes it 0 or 1
            array, got = np.empty(()), "bool among them"
    except (TypeError, ValueError, NotImplementedError) as error:
        # A dtype that numpy lacks, a ragged list, or a tensor without memory.
        array, got = np.empty(()), str(error)
    if array.size == 0 and not isinstance(values, np.ndarray | torch.Tensor):
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ArgumentError(
            name,
            expected=f"one-dimensional int32 or int64 {what}",
            got=got,
            remedy=f"pass {what}, not masks or floats",
        )
    return array.astype(np.int64)


def _overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    """Whether two sorted lists of address ranges meet."""
    lows, highs = np.array(a).T
    return any(bool(((lows < high) & (highs > low)).any()) for low, high in b)


def _same_memory(src: KVBuffer, dst: KVBuffer) -> bool:
    return all(
        s.strides == d.strides and np.array_equal(s.addresses, d.addresses)
        for s, d in zip(src.regions, dst.regions, strict=True)
    )
