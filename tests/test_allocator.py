"""Page allocators: whose page is whose, and nothing else kept alive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hikv.cache.allocator import PageAllocator, RotatingAllocator, as_ids
from hikv.errors import ArgumentError, CapacityError, InvariantError


def test_a_fresh_pool_gives_the_lowest_ids_and_a_freed_run_comes_back_in_order() -> None:
    pool = PageAllocator(8, first_page=10)
    assert pool.alloc(5).tolist() == [10, 11, 12, 13, 14]
    pool.free([12, 13, 14])
    assert pool.alloc(4).tolist() == [12, 13, 14, 15]
    assert (pool.num_free, pool.available) == (2, 2)


def test_ids_own_their_storage() -> None:
    """A view of the free list would keep the whole list of a large pool alive with every page."""
    pool = PageAllocator(1_000_000)
    kept = []
    for _ in range(1000):
        page, other = pool.alloc(1), pool.alloc(1)
        kept.append(page)
        pool.free(other)
    assert all(page.base is None and page.nbytes == 8 for page in kept)
    assert pool.num_free == 1_000_000 - 1000
    pool.check(np.concatenate(kept))


def test_the_tail_of_a_stopped_prefetch_is_freed_once() -> None:
    """Eight pages, five arrive; the transfer and its caller both release the other three."""
    pool = PageAllocator(8)
    pages = pool.alloc(8)
    pool.free(pages[5:])
    with pytest.raises(ArgumentError, match="page 5, which is already free"):
        pool.free(pages[5:])
    assert pool.num_free == 3
    pool.check(pages[:5])


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ([2, 3, 2], "page 2, named twice"),
        ([1, 7], "page 7, which is already free"),
        ([0, 8], "page 8, which this pool does not have"),
        ([-1], "page -1, which this pool does not have"),
        ([1.0], "one dimension of integer ids"),
        ([[1]], "one dimension of integer ids"),
        ([True], "one dimension of integer ids"),
    ],
)
def test_a_wrong_free_frees_nothing(pages: list, why: str) -> None:
    pool = PageAllocator(8)
    held = pool.alloc(4)
    with pytest.raises(ArgumentError, match=why):
        pool.free(pages)
    pool.check(held)
    assert pool.num_free == 4


def test_allocation_is_all_or_nothing() -> None:
    pool = PageAllocator(4)
    pool.alloc(3)
    with pytest.raises(CapacityError) as caught:
        pool.alloc(2)
    assert (caught.value.required, caught.value.available, caught.value.unit) == (2, 1, "pages")
    assert pool.alloc(1).tolist() == [3]
    assert pool.alloc(0).size == 0


@pytest.mark.parametrize("make", [lambda: PageAllocator(0), lambda: PageAllocator(4, -1)])
def test_a_pool_needs_pages(make) -> None:
    with pytest.raises(ArgumentError, match="at least 1 page"):
        make()


def test_negative_counts_and_owners_are_refused() -> None:
    with pytest.raises(ArgumentError, match="count"):
        PageAllocator(4).alloc(-1)
    with pytest.raises(ArgumentError, match="num_owners"):
        RotatingAllocator(4, 0)
    with pytest.raises(ArgumentError, match="start_owner"):
        RotatingAllocator(4, 2).alloc(1, start_owner=2)


def test_an_extension_continues_the_rotation_of_its_prefix() -> None:
    """Two ranks, a local page of each reserved: A, B, C; E after A, B; D after A, B, C."""
    pool = RotatingAllocator(8, 2, first_page=2)
    a, b, c = pool.alloc(3)
    assert (a, b, c) == (2, 3, 4)
    (e,) = pool.alloc(1, start_owner=0)  # after owners 0, 1
    (d,) = pool.alloc(1, start_owner=1)  # after owners 0, 1, 0
    assert (e, d) == (6, 5)
    owner, local = np.divmod([a, b, c, d, e], 2)[::-1]
    assert owner.tolist() == [0, 1, 0, 1, 0]
    assert local.tolist() == [1, 1, 2, 2, 3]


def test_a_new_chain_starts_where_most_is_free_and_ties_go_to_the_lowest() -> None:
    pool = RotatingAllocator(9, 3)
    assert (pool.alloc(1) % 3).tolist() == [0]
    assert (pool.alloc(2) % 3).tolist() == [1, 2]
    pool.alloc(1, start_owner=1)
    pool.alloc(1, start_owner=0)
    assert (pool.alloc(2) % 3).tolist() == [2, 0]


def test_a_shortage_is_named_for_each_owner() -> None:
    pool = RotatingAllocator(6, 3)
    pool.alloc(1, start_owner=1)
    with pytest.raises(CapacityError, match="owner 1 needs 2, has 1") as caught:
        pool.alloc(6, start_owner=0)
    assert "owner 0" not in str(caught.value)
    assert (caught.value.required, caught.value.available) == (6, 4)
    assert pool.num_free == 5, "nothing was taken"
    pool.check([1])


def test_a_shared_wide_page_is_freed_in_two_cuts() -> None:
    """16 pages over 8 owners, given back as 9 and 7: the cut falls inside a row of owners."""
    pool = RotatingAllocator(16, 8)
    chain = pool.alloc(16)
    pool.free(chain[:9])
    pool.check(chain[9:])
    assert (pool.available, pool.longest_chain(0)) == (8, 9)
    pool.free(chain[9:])
    pool.check([])


@given(
    owners=st.integers(1, 5),
    taken=st.lists(st.integers(0, 4), max_size=12),
    start=st.integers(0, 4),
)
def test_capacity_figures_are_exact(owners: int, taken: list[int], start: int) -> None:
    pool = RotatingAllocator(4 * owners, owners)
    for owner in taken:
        if pool.longest_chain(owner % owners):
            pool.alloc(1, owner % owners)
    start %= owners
    longest = pool.longest_chain(start)
    assert pool.available == min(pool.longest_chain(owner) for owner in range(owners))
    with pytest.raises(CapacityError):
        pool.alloc(longest + 1, start)
    chain = pool.alloc(longest, start)
    assert (chain % owners).tolist() == [(start + at) % owners for at in range(longest)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30), st.integers(1, 3))
def test_free_and_owned_are_all_pages_after_every_step(steps: list, owners: int) -> None:
    pool = RotatingAllocator(12, owners, first_page=3)
    held: list[int] = []
    for take, count in steps:
        if take and count <= pool.longest_chain():
            held += pool.alloc(count).tolist()
        elif not take:
            pool.free(held[:count])
            del held[:count]
        pool.check(held)
        assert pool.num_free + len(held) == 12


def test_check_names_what_is_broken() -> None:
    pool = PageAllocator(4)
    pool.alloc(2)
    with pytest.raises(InvariantError, match=r"^owned: .*leaked \[1\]"):
        pool.check([0])
    with pytest.raises(InvariantError, match=r"^owned: .*claimed but free \[2\]"):
        pool.check([0, 1, 2])
    with pytest.raises(InvariantError, match=r"^owned: 3 pages claimed, 2 handed out"):
        pool.check([0, 1, 1])
    pool._owned[3] = True
    with pytest.raises(InvariantError, match=r"^partition:"):
        pool.check()
    rotating = RotatingAllocator(4, 2)
    swapped = [stack.take(1).copy() for stack in rotating._free]
    for stack, pages in zip(rotating._free, reversed(swapped), strict=True):
        stack.give(pages)
    with pytest.raises(InvariantError, match=r"^owner: .* list of 0"):
        rotating.check()


def test_ids_are_converted_without_loss() -> None:
    ids = np.arange(4, dtype=np.int32)
    assert as_ids("tokens", ids, np.int32) is ids, "the warm path copies nothing"
    assert as_ids("tokens", [], np.int32).dtype == np.int32
    assert as_ids("tokens", np.array([1, 2], np.uint64), np.int32).tolist() == [1, 2]
    with pytest.raises(ArgumentError, match="ids that fit int32, got values in 0 … 2147483648"):
        as_ids("tokens", [0, 2**31], np.int32)
    with pytest.raises(ArgumentError, match="tokens"):
        as_ids("tokens", np.zeros(2), np.int32)
