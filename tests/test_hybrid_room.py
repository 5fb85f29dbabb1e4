"""Who leaves which pool of a hybrid cache, what stays, and what a request is given."""

from __future__ import annotations

import pytest
from cache_cases import settle
from hybrid_cases import (
    entries,
    forward,
    hybrid_cache,
    lose,
    on_host,
    proved,
    publish,
    read_hit,
    serve,
)

from hikv.cache.hiradix import ANYONE
from hikv.cache.node import DEVICE, HOST
from hikv.cache.requests import Lengths, LoadBack
from hikv.errors import CapacityError

TEN = list(range(10))


def test_what_no_boundary_at_the_end_needs_leaves_first() -> None:
    cache = hybrid_cache()
    serve(cache, TEN)
    settle(cache)
    assert cache.evict(2, "device", "swa") == 2
    assert entries(cache, "swa", TEN, DEVICE) == list(range(2, 10))
    assert cache.evict(5, "device", "swa") == 5
    assert cache.match_prefix(TEN).device_len == 10
    assert entries(cache, "state", TEN, DEVICE) == [9]
    assert cache.evict(1, "device", "swa") == 3, "a broken window goes as a whole"
    assert entries(cache, "state", TEN, DEVICE) == []
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    proved(cache)


def test_what_nobody_will_need_leaves_without_a_copy() -> None:
    cache = hybrid_cache(write_policy="write_back")
    serve(cache, TEN)
    assert cache.evict(7, "device", "swa") == 7
    assert cache.stats()["swa_host_free"] == 32
    assert cache.evict(1, "device", "swa") == 3
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    proved(cache)


def test_a_leaf_that_leaves_takes_everything_along() -> None:
    cache = hybrid_cache()
    serve(cache, TEN)
    settle(cache)
    cache.evict(16)
    stats = cache.stats()
    assert (stats["device_free"], stats["swa_device_free"], stats["state_device_free"]) == (
        16,
        16,
        8,
    )
    cache.evict(32, "host")
    stats = cache.stats()
    assert (stats["host_free"], stats["swa_host_free"], stats["state_host_free"]) == (32, 32, 16)
    assert list(cache.tree.nodes()) == []
    proved(cache)


def test_the_least_recently_used_window_leaves_first() -> None:
    cache = hybrid_cache(states=None)
    for start in (0, 100, 200):
        serve(cache, list(range(start, start + 3)))
    settle(cache)
    serve(cache, [0, 1, 2])
    cache.evict(1, "device", "swa")
    assert entries(cache, "swa", [100, 101, 102], DEVICE) == []
    assert entries(cache, "swa", [0, 1, 2], DEVICE) == [0, 1, 2]
    proved(cache)


def test_giving_a_window_back_is_no_use_of_it() -> None:
    cache = hybrid_cache(states=None)
    for start in (0, 100, 200):
        serve(cache, list(range(start, start + 3)))
        if not start:
            cache.acquire("holder", [0, 1, 2])
    cache.release("holder")
    settle(cache)
    cache.evict(1, "device", "swa")
    assert entries(cache, "swa", [0, 1, 2], DEVICE) == []
    proved(cache)


def test_a_split_is_no_use_of_a_window() -> None:
    """With a window of one page the sibling's insert needs nothing of the upper half."""
    cache = hybrid_cache(window=1, states=None, kv=(32, 32), swa=(32, 32))
    serve(cache, TEN[:6])
    serve(cache, [100])
    request = cache.acquire("r", [0, 1, 2, 77], limit=0)
    cache.allocate("r", 4)
    forward(cache, request, request.tokens, 0, None)
    publish(cache, request, request.tokens)
    cache.release("r")
    settle(cache)
    assert len(cache.tree.match(ANYONE, TEN[:6]).nodes) == 2
    assert cache.evict(2, "device", "swa") == 2
    assert cache.evict(4, "device", "swa") == 4
    assert entries(cache, "swa", [100], DEVICE) == [0]
    assert entries(cache, "swa", TEN[:6], DEVICE) == []
    proved(cache)


def test_host_copies_of_what_the_gpu_has_leave_first() -> None:
    """The older of two is on the host alone; the copy of the other costs nothing to lose."""
    cache = hybrid_cache(states=None)
    on_host(cache, [0, 1, 2])
    serve(cache, [100, 101, 102])
    settle(cache)
    assert cache.evict(1, "host", "swa") == 3
    assert entries(cache, "swa", [100, 101, 102], HOST) == []
    assert cache.match_prefix([0, 1, 2]).host_len == 3
    assert cache.match_prefix([100, 101, 102]).device_len == 3
    proved(cache)


def test_a_request_keeps_its_window_and_state_and_no_more() -> None:
    cache = hybrid_cache()
    serve(cache, TEN)
    settle(cache)
    request = cache.acquire("r", TEN)
    assert cache.evict(64, "device", "swa") == 7
    assert cache.evict(64, "device", "state") == 0
    assert entries(cache, "swa", TEN, DEVICE) == [7, 8, 9]
    cache.allocate("r", 10)
    request.wait()
    read_hit(cache, request, 10)
    cache.release("r")
    assert cache.evict(64, "device", "state") == 1
    proved(cache)


def test_a_quota_ends_at_a_boundary_that_has_a_state() -> None:
    """States at 4 and 10, all on the host: 6 tokens of quota reach the first."""
    cache = hybrid_cache()
    serve(cache, TEN[:4])
    on_host(cache, TEN)
    request = cache.acquire("r", TEN)
    assert request.lengths.host_len == 10
    assert cache.load_back("r", quota=3) == LoadBack("recompute", 0, ("gpu_quota",))
    assert cache.load_back("r", quota=6) == LoadBack("loading", 4, ("gpu_quota",))
    cache.allocate("r", 10)
    request.wait()
    read_hit(cache, request, 4)
    assert cache.explain("r").left_len == 6
    proved(cache)


def test_room_for_less_ends_at_a_boundary_that_has_a_state_too() -> None:
    """States at 4 and 10, all on the host, and 6 free pages for KV."""
    cache = hybrid_cache(kv=(10, 32))
    serve(cache, TEN[:4])
    on_host(cache, TEN)
    cache.acquire("other", [])
    cache.allocate("other", 4)
    request = cache.acquire("r", TEN)
    assert cache.load_back("r") == LoadBack("loading", 4, ("no_room",))
    request.wait()
    read_hit(cache, request, 4)
    proved(cache)


def test_a_span_too_short_to_load_leaves_what_the_gpu_has() -> None:
    """KV to 4 is on the GPU, its state on the host; 6 more pages of KV are below the threshold."""
    cache = hybrid_cache(load_back_threshold=7)
    serve(cache, TEN[:4])
    serve(cache, TEN)
    settle(cache)
    cache.evict(1)
    lose(cache, "state", "device")
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    request = cache.acquire("r", TEN)
    assert cache.load_back("r") == LoadBack("loading", 4, ("load_back_threshold",))
    cache.allocate("r", 10)
    request.wait()
    read_hit(cache, request, 4)
    proved(cache)


def test_what_a_load_needs_makes_no_room_for_it_on_the_gpu() -> None:
    """A quota to 4, whose window [1, 2, 3] is on the host, and page 1 of it on the GPU."""
    cache = hybrid_cache(swa=(6, 32))
    for end in (2, 4, 6):
        serve(cache, TEN[:end], state=end > 2)
    settle(cache)
    cache.evict(16)
    serve(cache, TEN[:2], state=False)
    serve(cache, [50, 51, 52, 53])
    settle(cache)
    assert entries(cache, "swa", TEN[:6], DEVICE) == [0, 1]
    cache.acquire("other", [50, 51, 52, 53])
    request = cache.acquire("r", TEN[:6])
    assert request.lengths == Lengths(0, 6, 0, None, 6)
    assert cache.load_back("r", quota=2) == LoadBack("loading", 4, ("gpu_quota",))
    assert entries(cache, "swa", TEN[:6], DEVICE) == [1], "0 and 50 made the room for 2 and 3"
    request.wait()
    read_hit(cache, request, 4)
    proved(cache)


def test_what_a_load_needs_makes_no_room_for_it_on_the_host() -> None:
    """The host's 6 window pages are those before 4 and 10; whoever gives way has no copy there."""
    cache = hybrid_cache(swa=(16, 6), kv=(32, 64))
    serve(cache, TEN[:4])
    on_host(cache, TEN)
    for start in range(100, 150, 10):
        serve(cache, [start, start + 1, start + 2])
    serve(cache, [200])
    settle(cache)
    assert entries(cache, "swa", TEN, HOST) == [1, 2, 3, 7, 8, 9]
    request = cache.acquire("r", TEN)
    assert cache.load_back("r", quota=4) == LoadBack("loading", 4, ("gpu_quota",))
    request.wait()
    read_hit(cache, request, 4)
    assert cache.match_prefix([100, 101, 102]) == Lengths(0, 0, 0, None, 3)
    proved(cache)


def test_a_request_keeps_what_it_may_load_in_both_tiers() -> None:
    """Its window is on the GPU alone, its state on the host alone."""
    cache = hybrid_cache(swa=(16, 2))
    serve(cache, TEN)
    settle(cache)
    cache.evict(1, "device", "state")
    request = cache.acquire("r", TEN)
    assert request.lengths == Lengths(0, 10, 0, None, 10)
    assert cache.evict(64, "device", "swa") == 7
    assert cache.evict(64, "host", "state") == 0
    assert cache.load_back("r") == LoadBack("loading", 10)
    cache.release("r")
    settle(cache)
    assert cache.evict(64, "host", "state") == 1
    proved(cache)


def test_a_copy_made_ahead_of_need_takes_free_pages_only() -> None:
    cache = hybrid_cache(swa=(16, 3), states=None)
    for prompt in ([0, 1, 2], [100, 101, 102]):
        serve(cache, prompt)
        settle(cache)
    assert entries(cache, "swa", [0, 1, 2], HOST) == [0, 1, 2]
    assert entries(cache, "swa", [100, 101, 102], HOST) == []
    assert cache.evict(3, "device", "swa") == 3, "[0, 1, 2], which is there already"
    assert cache.evict(3, "device", "swa") == 3
    assert entries(cache, "swa", [100, 101, 102], HOST) == [0, 1, 2], "needed now: it takes room"
    proved(cache)


def test_a_backup_carries_what_its_own_end_needs() -> None:
    """The host has lost the window before 5, which the next 5 pages do not need."""
    cache = hybrid_cache(states=None)
    serve(cache, TEN[:5])
    settle(cache)
    cache.evict(64, "host", "swa")
    serve(cache, TEN)
    settle(cache)
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    proved(cache)


def test_without_room_for_a_window_nothing_is_loaded() -> None:
    cache = hybrid_cache(swa=(4, 16))
    on_host(cache, TEN[:4])
    cache.acquire("other", [50, 51])
    cache.allocate("other", 2)
    request = cache.acquire("r", TEN[:4])
    assert cache.load_back("r") == LoadBack("defer", 0, ("locked",))
    assert (request.lengths.loaded_len, request.states) == (0, {})
    cache.cancel("other")
    assert cache.load_back("r").loaded_len == 4
    cache.release("r")
    settle(cache)
    proved(cache)


def test_admission_counts_every_pool() -> None:
    """12 tokens, 10 of them on the host with 3 window pages and a state; then less and less."""
    cache = hybrid_cache()
    on_host(cache, TEN)
    cache.acquire("r", [*TEN, 10, 11])
    cost = cache.admission_cost("r")
    assert (cost.load_len, cost.extend_len) == (10, 2)
    assert cost.pages == {"kv": 12, "indexer": 12, "swa": 3 + 2, "state": 2}
    assert cost.available == {"kv": 16, "indexer": 16, "swa": 16, "state": 8}
    assert cost.fits
    cache.load_back("r")
    assert cache.admission_cost("r").pages == {"kv": 2, "indexer": 2, "swa": 2, "state": 0}
    cache.allocate("r", 12)
    assert set(cache.admission_cost("r").pages.values()) == {0}
    cache.release("r")
    settle(cache)
    lose(cache, "state", "device")
    cache.acquire("again", [*TEN, 10, 11])
    cost = cache.admission_cost("again")
    assert cost.pages == {"kv": 2, "indexer": 2, "swa": 2, "state": 2}, "the KV is there already"
    proved(cache)


def test_room_for_computing_that_is_not_there_changes_nothing() -> None:
    cache = hybrid_cache(swa=(4, 8))
    request = cache.acquire("r", TEN)
    with pytest.raises(CapacityError, match="'swa'") as error:
        cache.allocate("r", 10)
    assert (error.value.required, error.value.available) == (10, 4)
    assert (request.pages.size, request.states) == (0, {})
    assert cache.stats()["device_free"] == 16
    proved(cache)


def test_a_prompt_enters_chunk_by_chunk_in_a_window_pool_smaller_than_it() -> None:
    """The window's passed pages are the tree's after each insert, and make the room."""
    cache = hybrid_cache(swa=(6, 6))
    request = cache.acquire("r", TEN)
    for start, end in ((0, 3), (3, 6), (6, 9), (9, 10)):
        cache.allocate("r", end)
        request.wait()
        forward(cache, request, TEN[:end], start, None)
        assert publish(cache, request, TEN[:end]).inserted_len == end
        assert cache.match_prefix(TEN[:end]).device_len == end
        settle(cache)
        proved(cache)
    cache.release("r")
    proved(cache)
