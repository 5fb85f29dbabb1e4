"""`ShardMap`: which rank owns a logical page, and where it lies there. Arithmetic, no table.

Trees, queues and request tables hold logical ids; ranks translate where bytes move, and nowhere
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from hikv.errors import ArgumentError

Ids = TypeVar("Ids", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class ShardMap:
    """Pages dealt out to ranks in turn.

    With N ranks and p tokens a page, logical slot x lies in page q = ⌊x / p⌋. Its owner is q mod N,
    and there it is row ⌊q / N⌋ · p + x mod p. Owner and local id together are a bijection.

    The ranks are those of the context-parallel group, or of the attention-tensor group for latent
    rows that it would otherwise replicate. Which rank computes which token (interleaved or zigzag)
    is no business of this map.

    Every method takes an int, a numpy array or a torch tensor of whole numbers and returns the
    same kind; tensors stay on their device, and nothing waits for a GPU. It raises `ArgumentError`
    for ids that are not whole numbers, and for negative ones wherever it can see them without such
    a wait, so everywhere but on a GPU.

    Local page 0 of every rank is logical pages 0 … N − 1; `reserved_pages` of them are left to
    padding. With N = 2 a fresh allocator then gives a prefix A, B, C the pages 2, 3, 4 (owners
    0, 1, 0). An extension D continues on owner 1: page 5, local page 2.
    """

    num_ranks: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("num_ranks", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(
                    name, expected="a positive int", got=repr(value), remedy=f"pass {name} >= 1"
                )

    @property
    def reserved_pages(self) -> int:
        """Logical pages, counted from 0, that make up the one reserved local page of each rank."""
        return self.num_ranks

    def owner(self, slots: Ids) -> Ids:
        """The rank that owns each logical slot."""
        return self.page_owner(_whole("slots", slots) // self.page_size)

    def local(self, slots: Ids) -> Ids:
        """Each logical slot's row in its owner's pool."""
        wide, within = self.num_ranks * self.page_size, _whole("slots", slots) % self.page_size
        return slots // wide * self.page_size + within

    def slot(self, owner: Ids, local: Ids) -> Ids:
        """The logical slot of row `local` on rank `owner`: the inverse of the two above."""
        page, within = _whole("local", local) // self.page_size, local % self.page_size
        return self.page(owner, page) * self.page_size + within

    def page_owner(self, pages: Ids) -> Ids:
        """The rank that owns each logical page."""
        return _whole("pages", pages) % self.num_ranks

    def local_page(self, pages: Ids) -> Ids:
        """Each logical page's id in its owner's pool."""
        return _whole("pages", pages) // self.num_ranks

    def page(self, owner: Ids, local_page: Ids) -> Ids:
        """The logical page that is `local_page` on rank `owner`; 64-bit, whatever came in."""
        self.check_ranks("owner", owner)
        return _wide(_whole("local_page", local_page)) * self.num_ranks + owner

    def local_pages(self, num_pages: int, rank: int) -> int:
        """How many of the logical pages 0 … `num_pages` − 1 rank `rank` owns."""
        self.check_ranks("rank", rank)
        return len(range(rank, num_pages, self.num_ranks))

    def check_ranks(self, name: str, ranks: Ids) -> None:
        """Refuse a rank outside the group; one on a GPU cannot be seen without a wait."""
        if isinstance(ranks, torch.Tensor) and ranks.device.type != "cpu":
            return
        outside = np.asarray(_whole(name, ranks) >= self.num_ranks)
        if outside.any():
            raise ArgumentError(
                name,
                expected=f"ranks in 0..{self.num_ranks - 1}",
                got=int(np.asarray(ranks).ravel()[outside.argmax()]),
                remedy="pass the rank within the shard group, not the global one",
            )


def _whole(name: str, ids: Ids) -> Ids:
    """`ids`, refused unless they are whole numbers and, where that can be seen, not negative."""
    if isinstance(ids, torch.Tensor):
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        lowest = int(ids.min()) if whole and ids.device.type == "cpu" and ids.numel() else 0
    elif isinstance(ids, np.ndarray):
        whole = ids.dtype.kind in "iu"
        lowest = int(ids.min()) if whole and ids.size else 0
    else:
        whole = isinstance(ids, int | np.integer) and not isinstance(ids, bool)
        lowest = int(ids) if whole else 0
    if not whole or lowest < 0:
        kind = getattr(ids, "dtype", type(ids).__name__)
        raise ArgumentError(
            name,
            expected="whole numbers from 0 on",
            got=lowest if whole else kind,
            remedy="drop the padding entries, and pass ids, not masks or floats",
        )
    return ids


def _wide(ids: Ids) -> Ids:
    """`ids` in 64 bits: a logical id may not fit the type that its local id fits."""
    if isinstance(ids, torch.Tensor):
        return ids.to(torch.int64)
    return ids.astype(np.int64) if isinstance(ids, np.ndarray) else ids
