"""Page allocators: free lists of page ids, one list or one per owner.

Ids are numpy int64 arrays that own their storage, never views of a free list, so a node that keeps
its pages for hours keeps nothing else alive. Both calls cost O(pages asked for), whatever the
pool's size. Not thread-safe: one thread owns an allocator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hikv.errors import ArgumentError, CapacityError, InvariantError

PageIds = npt.NDArray[np.int64]


def as_ids(
    name: str,
    values: npt.ArrayLike,
    dtype: npt.DTypeLike = np.int64,
    *,
    wider: str = "use 64-bit ids on this side",
) -> npt.NDArray[Any]:
    """Page or token ids as a contiguous `dtype` array `[n]`: no copy where `values` is one already.

    Raises `ArgumentError` for anything but one dimension of whole numbers that fit `dtype`; `wider`
    is the remedy where they do not.
    """
    ids = np.asarray(values)
    if ids.size == 0 and not isinstance(values, np.ndarray):
        ids = ids.astype(dtype)  # an empty list has no dtype of its own
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            name,
            expected="one dimension of integer ids",
            got=f"{ids.dtype} of shape {ids.shape}",
            remedy="pass an int32 or int64 array, or a list of int",
        )
    if not np.can_cast(ids.dtype, dtype) and ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise ArgumentError(
                name,
                expected=f"ids that fit {np.dtype(dtype)}",
                got=f"values in {low} … {high}",
                remedy=wider,
            )
    return np.ascontiguousarray(ids, dtype=dtype)


class _FreeStack:
    """Free ids of one owner, last in, first out; a run given back together keeps its order."""

    def __init__(self, ids: PageIds) -> None:
        self._ids, self.size = ids[::-1].copy(), ids.size

    def take(self, count: int) -> PageIds:
        """A view, good until the next `give`."""
        self.size -= count
        return self._ids[self.size : self.size + count][::-1]

    def give(self, ids: PageIds) -> None:
        self._ids[self.size : self.size + ids.size] = ids[::-1]
        self.size += ids.size

    def ids(self) -> PageIds:
        return self._ids[: self.size].copy()


class PageAllocator:
    """Hands out the page ids `first_page … first_page + num_pages − 1`.

    Ids below `first_page` are reserved, for a padding row for example. A fresh allocator gives the
    lowest ids first; afterwards the pages freed last go out first, in the order they were freed in,
    so pages that lay side by side do so again and copies of them merge.
    """

    num_owners = 1

    def __init__(self, num_pages: int, first_page: int = 0) -> None:
        if num_pages < 1 or first_page < 0:
            raise ArgumentError(
                "num_pages, first_page",
                expected="at least 1 page and no negative id",
                got=f"{num_pages}, {first_page}",
                remedy="give the pool room for one page",
            )
        self.num_pages, self.first_page = num_pages, first_page
        ids = np.arange(first_page, first_page + num_pages, dtype=np.int64)
        self._free = [_FreeStack(ids[ids % self.num_owners == r]) for r in range(self.num_owners)]
        self._owned = np.zeros(num_pages, dtype=bool)
        self._order = np.empty(num_pages, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Free pages over all owners."""
        return sum(stack.size for stack in self._free)

    @property
    def available(self) -> int:
        """The pages that the next `alloc` can surely get, whichever owner it starts on."""
        return self.num_owners * min(stack.size for stack in self._free)

    def alloc(self, count: int) -> PageIds:
        """Take `count` pages, all or nothing; raises `CapacityError` when fewer are free."""
        return self._take(count, 0)

    def free(self, pages: npt.ArrayLike) -> None:
        """Give pages back, in any order and from any number of `alloc` calls.

        Raises `ArgumentError`, and frees none of them, when one is foreign, already free, or named
        twice.
        """
        ids = as_ids("pages", pages)
        if not ids.size:
            return
        rows = ids - self.first_page
        foreign = (rows < 0) | (rows >= self.num_pages)
        self._refuse(ids, foreign, "which this pool does not have")
        self._refuse(ids, ~self._owned[rows], "which is already free")
        order = np.arange(ids.size)
        self._order[rows] = order
        self._refuse(ids, self._order[rows] != order, "named twice")
        self._owned[rows] = False
        for owner, stack in enumerate(self._free):
            stack.give(ids[ids % self.num_owners == owner])

    def check(self, owned: npt.ArrayLike | None = None) -> None:
        """Prove that free and owned pages are disjoint and together are all pages.

        `owned`: what the pages' holders claim, each page once; compared with what was handed out.
        Raises `InvariantError` naming the broken rule.
        """
        free = np.concatenate([stack.ids() for stack in self._free])
        for owner, stack in enumerate(self._free):
            if np.any(stack.ids() % self.num_owners != owner):
                raise InvariantError(f"owner: a page of another is on the free list of {owner}")
        held = np.flatnonzero(self._owned) + self.first_page
        every = np.arange(self.first_page, self.first_page + self.num_pages)
        if not np.array_equal(np.sort(np.concatenate([free, held])), every):
            raise InvariantError("partition: free and owned pages overlap or are not all pages")
        claimed = held if owned is None else as_ids("owned", owned)
        if not np.array_equal(np.sort(claimed), held):
            leaked, stolen = np.setdiff1d(held, claimed), np.setdiff1d(claimed, held)
            raise InvariantError(
                f"owned: {claimed.size} pages claimed, {held.size} handed out; leaked "
                f"{leaked[:8].tolist()}, claimed but free {stolen[:8].tolist()}"
            )

    def _take(self, count: int, start_owner: int) -> PageIds:
        """`count` pages whose owners are `start_owner`, `start_owner + 1`, … modulo the owners."""
        if count < 0:
            raise ArgumentError("count", expected="0 or more", got=count, remedy="correct it")
        shares = [self._share(count, start_owner, owner) for owner in range(self.num_owners)]
        short = [
            f"owner {owner} needs {share}, has {stack.size}"
            for owner, (share, stack) in enumerate(zip(shares, self._free, strict=True))
            if share > stack.size
        ]
        if short:
            raise CapacityError(
                "pages" if self.num_owners == 1 else f"pages ({'; '.join(short)})",
                required=count,
                available=self._longest(start_owner),
                unit="pages",
                remedy="evict or release pages first",
            )
        pages = np.empty(count, dtype=np.int64)
        for owner, (share, stack) in enumerate(zip(shares, self._free, strict=True)):
            pages[(owner - start_owner) % self.num_owners :: self.num_owners] = stack.take(share)
        self._owned[pages - self.first_page] = True
        return pages

    def _share(self, count: int, start_owner: int, owner: int) -> int:
        """How many of `count` pages, dealt out in turn from `start_owner`, fall to `owner`."""
        return len(range((owner - start_owner) % self.num_owners, count, self.num_owners))

    def _longest(self, start_owner: int) -> int:
        """The longest chain from `start_owner`: it ends at the first owner that runs out."""
        return min(
            (owner - start_owner) % self.num_owners + self.num_owners * stack.size
            for owner, stack in enumerate(self._free)
        )

    @staticmethod
    def _refuse(ids: PageIds, bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            raise ArgumentError(
                "pages",
                expected="pages handed out and not yet freed, each once",
                got=f"page {ids[bad.argmax()]}, {why}",
                remedy="free every page exactly once, by its holder",
            )


class RotatingAllocator(PageAllocator):
    """Pages sharded over owners: page id `q` lives on owner `q mod num_owners`.

    A chain of pages visits the owners in turn, so every owner holds an equal share of every prefix.
    """

    def __init__(self, num_pages: int, num_owners: int, first_page: int = 0) -> None:
        """`first_page = num_owners` reserves one local page on each owner."""
        if num_owners < 1:
            raise ArgumentError("num_owners", expected="1 or more", got=num_owners, remedy="fix it")
        self.num_owners = num_owners
        super().__init__(num_pages, first_page)

    def alloc(self, count: int, start_owner: int | None = None) -> PageIds:
        """Take a chain of `count` pages, all or nothing.

        `start_owner`: owner of the first page. An extension of a prefix of n pages that began on
        owner b continues its rotation with `(b + n) mod num_owners` (owners 0, 1, 0 → 1). `None`
        begins a new chain on the owner with the most free pages, ties to the lowest. Raises
        `CapacityError` that names the shortage of each owner.
        """
        return self._take(count, self._start(start_owner))

    def longest_chain(self, start_owner: int | None = None) -> int:
        """The most pages that `alloc` with this `start_owner` can give now."""
        return self._longest(self._start(start_owner))

    def _start(self, start_owner: int | None) -> int:
        if start_owner is None:
            return max(range(self.num_owners), key=lambda owner: self._free[owner].size)
        if not 0 <= start_owner < self.num_owners:
            raise ArgumentError(
                "start_owner",
                expected=f"an owner in 0 … {self.num_owners - 1}",
                got=start_owner,
                remedy="continue with (first owner + pages of the prefix) mod num_owners",
            )
        return start_owner
