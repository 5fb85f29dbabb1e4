"""Sharded caches under pressure: splits, evictions to the host and reloads to other addresses.

Every rank has a cache of its own over pools of its own; all are told the same and exchange nothing.
After every round the books are proven on each rank, compared between them, and every page that a
request reuses is read on its owner.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from cache_cases import compute, fill, settle, spec, wrong_pages

from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.node import DEVICE, HOST
from hikv.cache.pools import DevicePool, HostPool
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError

PAGE = 2
RANKS = (2, 3)


def rank_cache(num_ranks, rank, device_pages, host_pages, settings):
    """The cache of one rank; its pools hold so many local pages, page 0 of the GPU reserved."""
    config = HiCacheConfig(load_back_threshold=0, **settings)
    buffers = DevicePool.empty(spec(PAGE), "layer_first", device_pages).buffers
    device = DevicePool(buffers, num_owners=num_ranks, owner=rank, reserved=1)
    host = HostPool.beside(device, config, num_pages=host_pages)
    for pool in (device, host):
        for page in range(pool.buffers["kv"].num_pages):
            fill(pool.buffers["kv"], page, b"poison")
    return HiRadixCache(device, host, config, after=None, clock=lambda: 0.0)


class Ranks:
    """All ranks of a group in one process."""

    def __init__(self, num_ranks, device_pages, host_pages, **settings):
        self.size = num_ranks
        self.caches = [
            rank_cache(num_ranks, rank, device_pages, host_pages, settings)
            for rank in range(num_ranks)
        ]

    def agreed(self, tell):
        """What every rank says, which must be one thing."""
        told = [tell(cache) for cache in self.caches]
        assert all(other == told[0] for other in told)
        return told[0]

    def owners(self, pages):
        return [page % self.size for page in pages]

    def begin(self, rid, tokens, quota=None):
        """Match, load back and allocate; returns the page table and how much of it was there."""
        for cache in self.caches:
            cache.acquire(rid, tokens)
            cache.load_back(rid, quota)
            cached = cache.ledger[rid].pages.size
            cache.allocate(rid, len(tokens))
            cache.ledger[rid].wait()
        return self.agreed(lambda cache: cache.ledger[rid].pages.tolist()), cached

    def finish(self, rid, tokens, cached):
        """Read what is reused, compute the rest, insert and release; why it stayed private."""
        private = []
        for cache in self.caches:
            request = cache.ledger[rid]
            reused = request.pages[:cached]
            assert wrong_pages(cache.device, reused, ANYONE, tokens) == []
            compute(cache, request, tokens, cached)
            private.append(cache.insert(rid).private)
            cache.release(rid)
        assert len(set(private)) == 1
        return private[0]

    def serve(self, tokens, quota=None):
        """A whole request; its pages and how many of them were cached."""
        for cache in self.caches:
            settle(cache)
        pages, cached = self.begin("serve", tokens, quota)
        start = pages[0] if pages else 0
        assert self.owners(pages) == self.owners(range(start, start + len(pages)))
        assert self.finish("serve", tokens, cached) is None
        self.prove()
        return pages, cached

    def evict(self, num_pages):
        """Let pages leave the GPU, backed up first where that is still to come."""
        for cache in self.caches:
            settle(cache)
        freed = self.agreed(lambda cache: cache.evict(num_pages))
        self.prove()
        return freed

    def prove(self):
        """The books of every rank, that they are the same, and that no page is astray."""
        for cache in self.caches:
            cache.check()
        for start, rotation, *tiers in self.agreed(books):
            for pages in tiers:
                if pages is not None:
                    first = rotation + start // PAGE
                    assert self.owners(pages) == self.owners(range(first, first + len(pages)))

    def rotations(self):
        """Of every cached beginning of prompts, by its serial, the owner of its first page."""
        nodes = self.caches[0].tree.nodes()
        return {node.created: node.rotation for node in nodes if node.start == 0}

    def read_all(self):
        """Every page in either tier, on every rank, against the prefix that it stands for."""
        for cache in self.caches:
            settle(cache)
            for node in cache.tree.nodes():
                tokens = [int(t) for above in node.path() for t in above.tokens]
                for tier, pool in ((DEVICE, cache.device), (HOST, cache.host)):
                    if node.pages[tier] is not None:
                        where = (node.pages[tier], ANYONE, tokens, node.start // PAGE)
                        assert wrong_pages(pool, *where) == []

    def close(self):
        for cache in self.caches:
            cache.close()


def books(cache):
    """Every node: where it starts, its rotation, and its pages in both tiers."""
    return [
        (node.start, node.rotation, *(None if p is None else p.tolist() for p in node.pages))
        for node in cache.tree.nodes()
    ]


def prompt(*pages):
    """Tokens of whole pages: page number n is the tokens 10 n and 10 n + 1."""
    return [10 * page + i for page in pages for i in range(PAGE)]


POLICIES = [
    ("write_through", "segment"),
    ("write_through_selective", "page"),
    ("write_back", "segment"),
    ("write_back", "page"),
]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("policy", "granularity"), POLICIES)
def test_rounds_of_split_evict_and_reload(num_ranks, policy, granularity):
    """Prompts that branch off and extend each other, over pools that hold a part of them."""
    settings = {"write_policy": policy, "granularity": granularity}
    ranks = Ranks(num_ranks, 1 + 12 // num_ranks, 30 // num_ranks, **settings)
    chance = random.Random(f"{num_ranks} {policy} {granularity}")
    known, seen, last = [], Counter(), {}
    rotations = {}
    for turn in range(120):
        if chance.random() < 0.25:
            seen["evicted"] += ranks.evict(chance.randrange(1, 8))
        if known and chance.random() < 0.8:
            base = chance.choice(known)
            base = base[: chance.randrange(1, len(base) + 1)]
        else:
            base = ()
        pages = (*base, *range(100 * turn + 1, 100 * turn + 1 + chance.randrange(0, 4)))[:9]
        tokens = prompt(*pages or (100 * turn + 1,))
        before = len(books(ranks.caches[0]))
        quota = chance.choice([None, None, PAGE, 3 * PAGE])
        table, cached = ranks.serve(tokens, quota)
        lengths = Counter(cached=cached, computed=len(table) - cached)
        seen.update(lengths)
        # A node more than the new tail: one was cut in two.
        seen["splits"] += len(books(ranks.caches[0])) > before + 1
        moved = [
            (old, new)
            for old, new in zip(last.get(tokens[0], []), table[:cached], strict=False)
            if old != new
        ]
        seen["moved"] += len(moved)
        now = ranks.rotations()
        kept = rotations.keys() & now.keys()
        assert {first: now[first] for first in kept} == {first: rotations[first] for first in kept}
        rotations, last[tokens[0]] = now, table
        known = [*known, pages or (100 * turn + 1,)][-12:]
    ranks.read_all()
    loaded = ranks.agreed(lambda cache: cache.metrics.copied_bytes["load_back"].value > 0)
    assert loaded, "the host gave pages back"
    short = {
        name for name in ("evicted", "cached", "computed", "splits", "moved") if not seen[name]
    }
    assert not short, f"{short} never came about in {seen}"
    ranks.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_reload_to_other_pages_keeps_every_owner(num_ranks):
    ranks = Ranks(num_ranks, 9, 24)
    first, cached = ranks.serve(prompt(1, 2, 3, 4, 5))
    assert cached == 0
    ranks.evict(ranks.caches[0].device.num_pages)
    # Takes the pages that are free first, so the reload lands elsewhere.
    ranks.serve(prompt(6))
    again, cached = ranks.serve(prompt(1, 2, 3, 4, 5))
    assert cached == 5
    assert ranks.owners(again) == ranks.owners(first)
    assert again != first
    ranks.read_all()
    ranks.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_an_extension_behind_a_split_continues_the_rotation(num_ranks):
    ranks = Ranks(num_ranks, 9, 24)
    whole, _ = ranks.serve(prompt(1, 2, 3, 4))
    assert whole[0] == num_ranks, "behind the reserved page of every rank"
    for turn, cut in enumerate((3, 2, 1)):
        branch, cached = ranks.serve(prompt(*range(1, cut + 1), 50 + turn, 60 + turn))
        assert cached == cut
        assert branch[:cut] == whole[:cut]
        assert ranks.owners(branch[cut:]) == [(whole[0] + cut + i) % num_ranks for i in range(2)]
    ranks.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_part_that_was_loaded_is_extended_in_its_rotation(num_ranks):
    """A quota cuts the node on the host in two; what is computed behind it takes its owners."""
    ranks = Ranks(num_ranks, 9, 24)
    first, _ = ranks.serve(prompt(1, 2, 3, 4, 5))
    ranks.evict(ranks.caches[0].device.num_pages)
    again, cached = ranks.serve(prompt(1, 2, 3, 4, 5), quota=2 * PAGE)
    assert cached == 2
    assert ranks.owners(again) == ranks.owners(first)
    longer, cached = ranks.serve(prompt(1, 2, 3, 4, 5, 6))
    assert cached == 5
    assert longer[5] % num_ranks == (first[0] + 5) % num_ranks
    ranks.read_all()
    ranks.close()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("demoted", [False, True])
def test_two_rotations_never_join(num_ranks, demoted):
    """Two requests compute one prefix at once and begin on different owners. The second keeps its
    pages to itself, on every rank for the same reason, and leaks none; also when only the host
    still holds what the first one cached."""
    ranks = Ranks(num_ranks, 9, 24)
    one, other = prompt(1, 2, 3, 4, 5), prompt(1, 2, 3, 4, 5, 6)
    pages, _ = ranks.begin("one", one)
    mine, _ = ranks.begin("other", other)
    assert mine[0] % num_ranks != pages[0] % num_ranks
    assert ranks.finish("one", one, 0) is None
    if demoted:
        assert ranks.evict(5) == 5
    private = ranks.finish("other", other, 0)
    astray = 0 if demoted else 5  # the first page that would have entered
    assert private == (
        f"page {astray} of the prompt is on owner {mine[astray] % num_ranks}, "
        f"in the cached prefix's rotation it belongs on owner {(pages[0] + astray) % num_ranks}"
    )
    ranks.prove()
    held = 0 if demoted else 5
    assert ranks.agreed(lambda cache: cache.match_prefix(other).device_len) == held * PAGE
    free = ranks.agreed(lambda cache: cache.device.allocator.num_free)
    assert free == ranks.caches[0].device.num_pages - held
    table, cached = ranks.serve(other)
    assert cached == 5
    assert ranks.owners(table) == [(pages[0] + i) % num_ranks for i in range(6)]
    ranks.read_all()
    ranks.close()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_copy_to_another_owner_is_refused_in_both_directions(num_ranks):
    tree = RadixTree(PAGE, num_owners=num_ranks)
    pages = np.arange(1, 4)
    tree.insert(ANYONE, prompt(1, 2, 3), pages)
    (node,) = tree.nodes()
    assert node.rotation == 1
    with pytest.raises(ArgumentError, match="host_pages: expected page 0 of the prompt on owner 1"):
        tree.begin_backup([node], pages + 1)
    tree.finish(tree.begin_backup([node], pages + num_ranks))
    tree.evict(DEVICE, 3)
    with pytest.raises(ArgumentError, match="device_pages: expected page 0 of the prompt on own"):
        tree.begin_load_back([node], pages - 1)
    tree.finish(tree.begin_load_back([node], pages + 2 * num_ranks))
    assert node.pages[DEVICE].tolist() == (pages + 2 * num_ranks).tolist()
    tree.check()
