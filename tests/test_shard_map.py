"""Who owns a logical slot, and where it lies there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.cache.allocator import RotatingAllocator
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError


def test_owners_and_rows_of_two_ranks_with_pages_of_64():
    slots = np.array([0, 63, 64, 127, 128, 191])
    shards = ShardMap(2, 64)
    assert shards.owner(slots).tolist() == [0, 0, 1, 1, 0, 0]
    assert shards.local(slots).tolist() == [0, 63, 0, 63, 64, 127]
    # The same rule stated over wide pages of N · p slots.
    assert np.array_equal(shards.owner(slots), slots % 128 // 64)
    assert np.array_equal(shards.local(slots), slots // 128 * 64 + slots % 64)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_slot_has_one_place_and_comes_back(num_ranks):
    for page_size in range(1, 129):
        shards = ShardMap(num_ranks, page_size)
        rounds = 3 * num_ranks * page_size
        slots = np.arange(rounds)
        owner, local = shards.owner(slots), shards.local(slots)
        # A bijection onto ranks × rows: every place is taken once.
        places = np.zeros((num_ranks, 3 * page_size), int)
        np.add.at(places, (owner, local), 1)
        assert (places == 1).all()
        assert np.array_equal(shards.slot(owner, local), slots)
        pages = slots // page_size
        assert np.array_equal(owner, shards.page_owner(pages))
        assert np.array_equal(local // page_size, shards.local_page(pages))
        assert np.array_equal(shards.page(owner, local // page_size), pages)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ints_arrays_and_tensors_agree(dtype):
    shards = ShardMap(3, 16)
    slots = np.arange(500, dtype=dtype)
    tensor = torch.from_numpy(slots)
    for call in (shards.owner, shards.local, shards.page_owner, shards.local_page):
        expected = [call(int(slot)) for slot in slots]
        assert call(slots).tolist() == expected == call(tensor).tolist()
        assert call(slots).dtype == dtype
        assert call(tensor).dtype == tensor.dtype
    back = shards.slot(shards.owner(tensor), shards.local(tensor))
    assert torch.equal(back, tensor.to(torch.int64))


def test_a_logical_id_may_need_more_bits_than_its_local_one():
    shards = ShardMap(8, 64)
    top = 2**31 - 1
    assert shards.page(np.array([7]), np.array([top], np.int32)).tolist() == [8 * top + 7]
    rows = torch.tensor([top], dtype=torch.int32)
    assert shards.slot(torch.tensor([7]), rows).tolist() == [((top // 64) * 8 + 7) * 64 + top % 64]


def test_an_extension_takes_the_next_owner_and_its_next_local_page():
    """A, B, C on two ranks, then E after A, B and D after A, B, C."""
    shards = ShardMap(2, 64)
    pool = RotatingAllocator(8, shards.num_ranks, first_page=shards.reserved_pages)
    prefix = pool.alloc(3)
    assert shards.page_owner(prefix).tolist() == [0, 1, 0]
    assert shards.local_page(prefix).tolist() == [1, 1, 2]
    (e,) = pool.alloc(1, start_owner=2 % 2)
    (d,) = pool.alloc(1, start_owner=3 % 2)
    assert (int(d), shards.page_owner(int(d)), shards.local_page(int(d))) == (5, 1, 2)
    assert (int(e), shards.page_owner(int(e)), shards.local_page(int(e))) == (6, 0, 3)


def test_pages_of_each_rank_are_counted():
    shards = ShardMap(3, 4)
    for num_pages in range(12):
        owners = shards.page_owner(np.arange(num_pages))
        for rank in range(3):
            assert shards.local_pages(num_pages, rank) == int((owners == rank).sum())


@pytest.mark.parametrize("sizes", [(0, 64), (2, 0), (2.0, 64), (True, 64), (-1, 64)])
def test_a_map_needs_ranks_and_pages(sizes):
    with pytest.raises(ArgumentError, match="a positive int"):
        ShardMap(*sizes)


@pytest.mark.parametrize(
    ("slots", "got"),
    [
        (-1, "-1"),
        (np.array([3, -2]), "-2"),
        (torch.tensor([0, -7]), "-7"),
        (1.0, "float"),
        (True, "bool"),
        (np.array([1.5]), "float64"),
        (np.array([True]), "bool"),
        (torch.tensor([1.0]), "torch.float32"),
        (torch.tensor([True]), "torch.bool"),
    ],
)
def test_what_is_no_slot_is_refused(slots, got):
    for call in (ShardMap(2, 4).owner, ShardMap(2, 4).local):
        with pytest.raises(ArgumentError, match=f"slots: expected whole numbers .*got {got}"):
            call(slots)


@pytest.mark.parametrize("rank", [2, np.array([0, 2]), torch.tensor([2])])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ArgumentError, match=r"ranks in 0\.\.1, got 2"):
        ShardMap(2, 4).page(rank, rank * 0)


def test_ids_on_a_device_are_not_read_back():
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    shards = ShardMap(2, 4)
    assert shards.owner(ids).device.type == shards.slot(ids, ids).device.type == "meta"
