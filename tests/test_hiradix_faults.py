"""The façade while copies are in flight: failures, aborts, splits, and who overtakes whom."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import compute, manual_lanes, on_host, serve, settle, small_cache, wrong_pages

from hikv.cache.hiradix import ANYONE
from hikv.cache.node import HOST
from hikv.cache.requests import Lengths, LoadBack
from hikv.errors import ArgumentError, CopyFailed, InvariantError


def test_an_eviction_waits_for_backups_that_hold_all_there_is() -> None:
    cache = small_cache(1, 2, lanes=manual_lanes())
    serve(cache, [1, 2])
    assert cache.stats()["device_evictable"] == 0
    cache.acquire("r", [3])
    assert cache.allocate("r", 1).size == 1
    assert cache.match_prefix([1, 2]).host_len == 2
    cache.check()


def test_an_eviction_waits_for_nobody_when_others_can_leave() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, 4, lanes=lanes)
    serve(cache, [1, 2])
    settle(cache)
    serve(cache, [3, 4])
    pending = lanes[HOST].copies[-1]
    assert cache.evict(2) == 2
    assert not pending.done()
    assert cache.match_prefix([3, 4]).device_len == 2
    cache.check()


def test_an_insert_that_splits_a_pending_backup_leaves_both_halves_restorable() -> None:
    """Page 1, 375 tokens pending; splits at 374 and 100; then the acknowledgement."""
    lanes = manual_lanes()
    cache = small_cache(1, 400, 400, lanes=lanes)
    tokens = list(range(375))
    serve(cache, tokens)
    for cut in (374, 100):
        serve(cache, [*tokens[:cut], 1000 + cut])
        cache.check()
    assert cache.evict(1, "host") == 0, "nothing on the host may go before the acknowledgement"
    settle(cache)
    cache.check()
    assert cache.tree.locks == set()
    cache.evict(400)
    assert cache.match_prefix(tokens).host_len == 375
    assert cache.match_prefix([*tokens[:374], 1374]).host_len == 375
    serve(cache, tokens)


def test_a_failed_parent_takes_its_child_along_and_both_are_retried() -> None:
    """Host room comes and goes: no hole ever opens above a node that the host alone holds."""
    lanes = manual_lanes()
    cache = small_cache(1, 8, 8, lanes=lanes)
    serve(cache, [1])
    serve(cache, [1, 2])
    parent, child = lanes[HOST].copies
    parent.complete(0)
    child.complete()
    cache.poll()
    cache.check()
    assert cache.stats()["host_free"] == 8
    serve(cache, [1, 2, 3])
    settle(cache)
    cache.evict(8)
    assert cache.match_prefix([1, 2, 3]).host_len == 3
    cache.check()


def test_a_load_of_160_pages_fails_at_page_87() -> None:
    """Another request with the same prefix waits; afterwards the GPU has exactly 87 pages of it."""
    lanes = manual_lanes()
    cache = small_cache(1, 200, 200, lanes=lanes)
    tokens = list(range(160))
    on_host(cache, tokens)
    first = cache.acquire("first", tokens)
    assert cache.load_back("first").loaded_len == 160
    second = cache.acquire("second", tokens)
    assert second.lengths.device_len == 0
    assert cache.load_back("second") == LoadBack("defer", 0, ("in_flight",))
    lanes[0].copies[-1].complete(87)
    assert cache.poll().failed == ["first"]
    assert cache.match_prefix(tokens) == Lengths(87, 73, 0, None, 73)
    cache.check()
    with pytest.raises(CopyFailed, match="87 of 160 pages"):
        first.wait()
    with pytest.raises(CopyFailed, match="cancel it and acquire again"):
        cache.insert("first")
    cache.cancel("first")
    assert cache.stats()["device_free"] == 200 - 87
    assert cache.load_back("second") == LoadBack("loading", 73)
    assert second.lengths == Lengths(87, 73, 73, None, 0)
    settle(cache)
    assert wrong_pages(cache.device, second.pages, ANYONE, tokens) == []
    cache.check()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_load_that_another_insert_saw_fail_is_reported_by_the_next_poll(leaves: bool) -> None:
    lanes = manual_lanes()
    cache = small_cache(lanes=lanes)
    for tokens in ([1, 2], [3, 4]):
        on_host(cache, tokens)
    for rid, tokens in (("first", [1, 2]), ("second", [3, 4])):
        cache.acquire(rid, tokens)
        assert cache.load_back(rid) == LoadBack("loading", 2)
    lanes[0].copies[-2].complete(0)
    cache.insert("second")  # waits for its own load, and so for the one before it
    if leaves:
        cache.cancel("first")
        cache.acquire("first", [5])
    assert cache.poll().failed == ([] if leaves else ["first"])
    assert cache.poll().failed == []
    cache.check()


@pytest.mark.parametrize("tier", [0, HOST])
def test_a_failure_in_page_3_of_8_leaves_2(tier: int) -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    tokens = list(range(8))
    if tier == HOST:
        serve(cache, tokens)
    else:
        on_host(cache, tokens)
        cache.acquire("r", tokens)
        cache.load_back("r")
    lanes[tier].copies[-1].complete(2)
    settle(cache)
    cache.check()
    match = cache.tree.match(ANYONE, tokens)
    assert match.pages(tier).size == 2
    assert wrong_pages((cache.device, cache.host)[tier], match.pages(tier), ANYONE, tokens) == []


@pytest.mark.parametrize("state", ["queued", "running", "done"])
@pytest.mark.parametrize("verb", ["cancel", "release"])
def test_leaving_during_a_load_returns_everything(state: str, verb: str) -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    on_host(cache, [1, 2, 3])
    cache.acquire("r", [1, 2, 3, 4])
    cache.load_back("r")
    cache.allocate("r", 4)
    copy = lanes[0].copies[-1]
    copy.running = state == "running"
    if state == "done":
        copy.complete()
    getattr(cache, verb)("r")
    cache.check()
    copy.complete()
    cache.poll()
    cache.check()
    landed = 0 if verb == "cancel" else 3
    assert cache.match_prefix([1, 2, 3]).device_len == landed
    stats = cache.stats()
    assert stats["device_free"] == 8 - landed
    assert (stats["device_protected"], stats["host_protected"]) == (0, 0)
    assert cache.tree.locks == set()


def test_a_request_overtaken_while_it_loads_keeps_what_its_table_names() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, 8, lanes=lanes)
    on_host(cache, [1, 2])
    slow = cache.acquire("slow", [1, 2, 3])
    cache.load_back("slow")
    cache.allocate("slow", 3)
    serve(cache, [1, 2, 9], rid="quick")
    slow.wait()
    cache.poll()
    cache.check()
    assert wrong_pages(cache.device, slow.pages[:2], ANYONE, [1, 2]) == []
    compute(cache, slow, [1, 2, 3], 2)
    assert cache.insert("slow").duplicates == 2
    cache.release("slow")
    settle(cache)
    cache.check()
    assert cache.stats()["device_free"] == 8 - 4


def test_the_host_keeps_what_is_being_loaded() -> None:
    cache = small_cache(1, lanes=manual_lanes())
    on_host(cache, [1, 2])
    cache.acquire("r", [1, 2])
    cache.load_back("r")
    cache.release("r")
    assert cache.evict(2, "host") == 0
    settle(cache)
    assert cache.evict(2, "host") == 2
    assert cache.match_prefix([1, 2]).device_len == 2


def test_reset_empties_both_tiers_whatever_is_in_flight() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    on_host(cache, [1, 2])
    cache.acquire("r", [1, 2])
    cache.load_back("r")
    with pytest.raises(ArgumentError, match="no open request"):
        cache.reset()
    cache.release("r")
    serve(cache, [7], rid="backup pending")
    cache.reset()
    cache.check()
    assert (cache.stats()["device_free"], cache.stats()["host_free"]) == (8, 16)
    assert list(cache.tree.nodes()) == []
    serve(cache, [1, 2])
    cache.check()


def test_a_leak_is_reported_by_name() -> None:
    cache = small_cache(1)
    serve(cache, [1, 2])
    settle(cache)
    cache.acquire("r", [1, 2])
    lost = cache.device.allocator.alloc(1)
    with pytest.raises(InvariantError, match=r"owned: .*leaked"):
        cache.check()
    cache.device.allocator.free(lost)
    request = cache.ledger["r"]
    request.pages = np.append(request.pages, lost)
    with pytest.raises(InvariantError, match=r"table: .*no hold on"):
        cache.check()
    request.pages = request.pages[:-1]
    del cache.ledger.requests["r"]
    with pytest.raises(InvariantError, match=r"locks: .*held by nobody"):
        cache.check()


def test_a_copy_without_its_books_is_reported_by_name() -> None:
    cache = small_cache(1, lanes=manual_lanes())
    serve(cache, [1])
    serve(cache, [2])
    queue = cache.controller.queues[HOST]
    queue.rotate()
    with pytest.raises(InvariantError, match="tickets: the host queue is out of order"):
        cache.check()
    queue.pop()
    with pytest.raises(InvariantError, match=r"tickets: .*disagree"):
        cache.check()
