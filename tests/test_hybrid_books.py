"""Every invariant of the components' books, broken behind the cache's back, is reported by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_cases import manual_lanes, settle
from hybrid_cases import entries, hybrid_cache, serve

from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.holding import ABSENT, Holding
from hikv.cache.node import DEVICE, HOST
from hikv.errors import InvariantError

TEN = list(range(10))


def scene(in_flight: bool) -> tuple[HiRadixCache, Holding]:
    """A request that uses 10 cached tokens, its window on the GPU or on its way there; and what
    their node holds of the window."""
    cache = hybrid_cache(lanes=manual_lanes())
    serve(cache, TEN)
    settle(cache)
    if in_flight:
        cache.evict(64, "device", "swa")
    cache.acquire("r", TEN)
    cache.load_back("r")
    cache.allocate("r", 10)
    if not in_flight:
        settle(cache)
    cache.check()
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    (node,) = cache.tree.match(ANYONE, TEN).nodes
    return cache, cache.hybrid.trails["swa"].of(node)


def swa(cache: HiRadixCache):
    return cache.hybrid.trails["swa"]


def shorten(cache, holding) -> None:
    holding.ids[HOST] = holding.ids[HOST][:-1]


def orphan(cache, holding) -> None:
    cache.release("r")
    cache.host.allocator.free(cache.tree.drop(holding.node, HOST))


def miscount(cache, holding) -> None:
    holding.held[DEVICE] += 1


def misjudge(cache, holding) -> None:
    swa(cache).evictable[DEVICE] += 1


def unqueue(cache, holding) -> None:
    swa(cache).queues[DEVICE].discard(holding)


def overlock(cache, holding) -> None:
    swa(cache).change(holding, DEVICE, slice(0, 1), step=1)


def forget_receipt(cache, holding) -> None:
    cache.ledger["r"].trail_locks.pop(0)


def leak(cache, holding) -> None:
    swa(cache).pools[DEVICE].allocator.alloc(1)


def name_another(cache, holding) -> None:
    cache.ledger["r"].shares["swa"].pages[-1] = 15


def cut_the_table(cache, holding) -> None:
    share = cache.ledger["r"].shares["swa"]
    share.pages = share.pages[:-1]


def write_the_cached(cache, holding) -> None:
    state = cache.hybrid.trails["state"]
    cache.ledger["r"].shares["state"].slot = state.find(holding.node, 9)[1]


def stop_waiting(cache, holding) -> None:
    holding.arriving[DEVICE] = None


def lose_the_cargo(cache, holding) -> None:
    cache.ledger["r"].ticket.cargo = ()


def lose_the_source(cache, holding) -> None:
    holding.ids[HOST][7] = ABSENT


@pytest.mark.parametrize(
    ("breaks", "name", "in_flight"),
    [
        (shorten, "swa: entries", False),
        (orphan, "swa: entry without KV", False),
        (miscount, "swa: counts", False),
        (misjudge, "swa: evictable", False),
        (unqueue, "swa: queue", False),
        (overlock, "swa: receipts", False),
        (forget_receipt, "swa: locks", False),
        (leak, "owned: .*leaked", False),
        (name_another, "swa: table: .*no hold on", False),
        (cut_the_table, "swa: table: .*9 entries for 10 pages", False),
        (write_the_cached, "state: state", False),
        (stop_waiting, "swa: cargo: .*nobody awaits", True),
        (lose_the_cargo, "swa: cargo: .*no copy brings", True),
        (lose_the_source, "swa: cargo: the source", True),
    ],
)
def test_broken_books_are_reported_by_name(
    breaks: Callable[[HiRadixCache, Holding], None], name: str, in_flight: bool
) -> None:
    cache, holding = scene(in_flight)
    breaks(cache, holding)
    with pytest.raises(InvariantError, match=name):
        cache.check()
