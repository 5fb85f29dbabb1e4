"""Backup and load-back of sharded pages: owners kept, content exact, whatever the addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cache.allocator import RotatingAllocator
from hikv.cp.copies import own_pairs, transfer_own
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError
from hikv.spec import KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


def pools(num_ranks, layout, num_pages):
    return [KVBuffer.empty(SPEC, layout, num_pages) for _ in range(num_ranks)]


def write(shards, ranks, pages, rng):
    """Random rows into logical `pages`; returns them."""
    rows = []
    for page in pages.tolist():
        pool = ranks[shards.page_owner(page)]
        row = torch.from_numpy(rng.integers(0, 255, SPEC.bytes_per_page, np.uint8))
        source = KVBuffer.from_tensor(row, SPEC, "page_first_direct")
        for _, _, view in pool.regions[0].tensors(torch.int16):
            for _, _, given in source.regions[0].tensors(torch.int16):
                view[shards.local_page(page)] = given[0]
        rows.append(source.logical([0]))
    return torch.cat(rows)


def read(shards, ranks, pages):
    owners, local = shards.page_owner(pages), shards.local_page(pages)
    return torch.cat([ranks[o].logical([l]) for o, l in zip(owners, local, strict=True)])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_prefixes_survive_many_evictions_and_reloads(num_ranks):
    """Device and host pages differ every round; every rank moves its own pages alone."""
    rng = np.random.default_rng(num_ranks)
    shards = ShardMap(num_ranks, SPEC.page_size)
    device = RotatingAllocator(8 * num_ranks, num_ranks, first_page=shards.reserved_pages)
    host = RotatingAllocator(16 * num_ranks, num_ranks)
    on_device, on_host = pools(num_ranks, "layer_first", 9), pools(num_ranks, "page_head", 16)

    def move(src, dst, src_pages, dst_pages):
        moved = [
            transfer_own(s, d, src_pages, dst_pages, shards=shards, rank=rank, after=None)
            for rank, (s, d) in enumerate(zip(src, dst, strict=True))
        ]
        assert sum(handle.plan.num_pages for handle in moved) == len(src_pages)

    backups: list[tuple[np.ndarray, torch.Tensor]] = []
    addresses = set()
    for _ in range(40):
        count = int(rng.integers(1, 2 * num_ranks + 2))
        chain = device.alloc(count)
        content = write(shards, on_device, chain, rng)
        copy = host.alloc(count, start_owner=int(shards.page_owner(chain[0])))
        assert np.array_equal(shards.page_owner(copy), shards.page_owner(chain))
        move(on_device, on_host, chain, copy)
        device.free(chain)
        for buffer in on_device:  # evicted: whoever reads it now gets poison
            for _, _, view in buffer.regions[0].tensors(torch.int16):
                view.fill_(-1)
        backups.append((copy, content))
        # Reload one of the backups beside pages that others hold meanwhile.
        held = device.alloc(int(rng.integers(0, 2 * num_ranks)))
        copy, content = backups[int(rng.integers(len(backups)))]
        reloaded = device.alloc(len(copy), start_owner=int(shards.page_owner(copy[0])))
        addresses.add(tuple(reloaded.tolist()))
        assert np.array_equal(shards.page_owner(reloaded), shards.page_owner(copy))
        move(on_host, on_device, copy, reloaded)
        assert torch.equal(
            read(shards, on_device, reloaded).view(torch.int16), content.view(torch.int16)
        )
        device.free(np.concatenate((held, reloaded)))
        device.check([])
        while host.available < 3 * num_ranks:
            copy, _ = backups.pop(int(rng.integers(len(backups))))
            host.free(copy)
        host.check(np.concatenate([copy for copy, _ in backups]))
    assert len(addresses) > 10, "reloads went to many places"


def test_every_rank_takes_its_own_pairs():
    shards = ShardMap(2, 64)
    src, dst = [2, 3, 4], [6, 1, 0]
    pairs = [own_pairs(shards, rank, src, dst) for rank in range(2)]
    assert [[ids.tolist() for ids in pair] for pair in pairs] == [[[1, 2], [3, 0]], [[1], [0]]]


def test_a_pair_of_two_owners_is_refused_on_every_rank():
    for rank in range(2):
        with pytest.raises(
            ArgumentError, match=r"dst_pages\[1\]: expected a page of owner 1.*of o"
        ):
            own_pairs(ShardMap(2, 64), rank, [2, 3], [4, 6])
    with pytest.raises(ArgumentError, match="as many ids as src_pages, 2"):
        own_pairs(ShardMap(2, 64), 0, [2, 3], [4])
    with pytest.raises(ArgumentError, match="rank"):
        own_pairs(ShardMap(2, 64), 2, [2], [4])
