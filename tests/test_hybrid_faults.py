"""Windows and states while copies are in flight: failures, aborts, overtaking, and broken books."""

from __future__ import annotations

import pytest
from cache_cases import manual_lanes, settle
from hybrid_cases import (
    admit,
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
from hikv.errors import ArgumentError, CopyFailed

TEN = list(range(10))


def test_a_pin_keeps_window_and_state_for_its_time() -> None:
    now = [0.0]
    cache = hybrid_cache(clock=lambda: now[0])
    serve(cache, TEN)
    settle(cache)
    assert cache.pin(TEN, seconds=5) == 10
    assert (cache.evict(64, "device", "swa"), cache.evict(64, "device", "state")) == (7, 0)
    proved(cache)
    now[0] = 5.0
    cache.poll()
    assert cache.evict(64, "device", "state") == 1
    proved(cache)


def test_a_pin_keeps_what_the_gpu_can_serve_where_the_host_can_serve_more() -> None:
    cache = hybrid_cache()
    serve(cache, TEN[:4])
    on_host(cache, TEN)
    serve(cache, TEN[:4])
    assert cache.match_prefix(TEN) == Lengths(4, 6, 0, None, 6)
    assert cache.pin(TEN, seconds=5) == 10
    lose(cache, "state")
    lose(cache, "swa")
    assert cache.match_prefix(TEN) == Lengths(4, 6, 0, None, 6)
    proved(cache)


def test_misuse_of_states_is_refused_before_anything_changes() -> None:
    cache = hybrid_cache(2)
    request = admit(cache, TEN[:4])
    forward(cache, request, TEN[:4], 0, None)
    slot = request.states["state"]
    for states, why in (
        ({"swa": 0}, "a recurrent component"),
        ({"state": slot + 1}, "own"),
    ):
        with pytest.raises(ArgumentError, match=why):
            cache.insert("serve", states=states)
    with pytest.raises(ArgumentError, match="at least one page"):
        cache.insert("serve", TEN[:1], states={"state": slot})
    assert list(cache.tree.nodes()) == []
    cache.insert("serve", states={"state": slot})
    with pytest.raises(ArgumentError, match="own"):
        cache.insert("serve", states={"state": slot})
    with pytest.raises(ArgumentError, match="a recurrent component"):
        cache.spare_state("serve", "swa")
    cache.release("serve")
    again = cache.acquire("r", TEN[:4])
    cache.allocate("r", 4)
    with pytest.raises(ArgumentError, match="then load_back once"):
        cache.load_back("r")
    again.wait()
    proved(cache)


def test_reset_empties_every_pool() -> None:
    cache = hybrid_cache()
    on_host(cache, TEN)
    cache.acquire("r", TEN)
    cache.load_back("r")
    cache.release("r")
    serve(cache, [7, 8, 9])
    cache.pin([7, 8, 9], 60)
    cache.reset()
    stats = cache.stats()
    for name, device, host in (("", 16, 32), ("swa_", 16, 32), ("state_", 8, 16)):
        assert (stats[f"{name}device_free"], stats[f"{name}host_free"]) == (device, host)
    proved(cache)
    serve(cache, TEN)
    proved(cache)


def loading(lanes, cache=None):
    """A request that loads 10 tokens: the copies of its window, the cached state, its own state and
    the KV, which all are still to run."""
    cache = cache or hybrid_cache(lanes=lanes)
    on_host(cache, TEN)
    before = len(lanes[DEVICE].copies)
    request = cache.acquire("r", [*TEN, 10])
    assert cache.load_back("r") == LoadBack("loading", 10)
    copies = lanes[DEVICE].copies[before:]
    assert [len(copy.request.src_pages) for copy in copies] == [3, 1, 1, 10]
    return cache, request, copies


def all_free(cache) -> bool:
    """Whether every GPU page of every pool is free."""
    pools = [cache.device, *(trail.pools[DEVICE] for trail in cache.hybrid.trails.values())]
    return all(pool.allocator.num_free == pool.num_pages for pool in pools)


@pytest.mark.parametrize("broken", range(4))
def test_a_load_of_which_one_copy_fails_is_a_miss(broken: int) -> None:
    """Whichever it is, nothing but whole KV pages becomes visible, and all pages come back."""
    lanes = manual_lanes()
    cache, request, copies = loading(lanes)
    cache.allocate("r", 11)
    for number, copy in enumerate(copies):
        copy.complete(0 if number == broken else None)
    with pytest.raises(CopyFailed):
        request.wait_layer(0)
    proved(cache)
    assert cache.poll().failed == ["r"]
    proved(cache)
    kv = 0 if broken == 3 else 10
    assert cache.tree.match(ANYONE, TEN).device_len == kv
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    assert entries(cache, "swa", TEN, DEVICE) == entries(cache, "state", TEN, DEVICE) == []
    with pytest.raises(CopyFailed, match="cancel it and acquire again"):
        cache.insert("r", TEN)
    assert cache.explain("r").reasons == ("copy_failed",)
    cache.cancel("r")
    cache.evict(kv)
    assert all_free(cache)
    request = admit(cache, [*TEN, 10])
    assert request.lengths.loaded_len == 10
    proved(cache)


def test_half_of_the_kv_without_its_window_is_no_hit() -> None:
    lanes = manual_lanes()
    cache, _, copies = loading(lanes)
    for copy, pages in zip(copies, (None, None, None, 6), strict=True):
        copy.complete(pages)
    assert cache.poll().failed == ["r"]
    assert cache.tree.match(ANYONE, TEN).device_len == 6
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    cache.cancel("r")
    proved(cache)


@pytest.mark.parametrize("taken", range(4))
def test_a_lane_that_refuses_one_of_the_copies_leaves_nothing_in_flight(taken: int) -> None:
    """What it took before is withdrawn, and ended, before its pages are anyone's again."""
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes)
    on_host(cache, TEN)
    lane, before = lanes[DEVICE], len(lanes[DEVICE].copies)
    submit = lane.submit

    def refuse(request):
        if len(lane.copies) - before == taken:
            raise RuntimeError("no more")
        return submit(request)

    lane.submit = refuse
    request = cache.acquire("r", TEN)
    with pytest.raises(RuntimeError, match="no more"):
        cache.load_back("r")
    assert [copy.pages for copy in lane.copies[before:]] == [0] * taken
    assert (request.pages.size, request.states, request.ticket) == (0, {}, None)
    assert all_free(cache)
    proved(cache)
    lane.submit = submit
    assert cache.load_back("r") == LoadBack("loading", 10)
    cache.release("r")
    settle(cache)
    proved(cache)


@pytest.mark.parametrize("state", ["queued", "running", "done"])
@pytest.mark.parametrize("verb", ["cancel", "release"])
def test_leaving_during_a_load_returns_every_page(state: str, verb: str) -> None:
    lanes = manual_lanes()
    cache, _, copies = loading(lanes)
    cache.allocate("r", 11)
    for copy in copies:
        copy.running = state == "running"
        if state == "done":
            copy.complete()
    getattr(cache, verb)("r")
    if (verb, state) == ("cancel", "queued"):
        assert [copy.pages for copy in copies] == [0] * 4, "none of them needs to move any more"
    proved(cache)
    settle(cache)
    proved(cache)
    landed = 0 if verb == "cancel" else 10
    assert cache.match_prefix(TEN).device_len == landed
    assert entries(cache, "state", TEN, DEVICE) == ([9] if landed else [])
    cache.evict(16)
    assert all_free(cache)
    assert cache.tree.locks == set()


def test_nothing_of_a_load_is_visible_before_it_is_acknowledged() -> None:
    lanes = manual_lanes()
    cache, request, copies = loading(lanes)
    second = cache.acquire("second", TEN)
    assert cache.load_back("second") == LoadBack("defer", 0, ("in_flight",))
    for copy in copies[:3]:
        copy.complete()
    assert cache.poll().loaded == 0
    assert entries(cache, "swa", TEN, DEVICE) == []
    assert (cache.evict(64, "host", "swa"), cache.evict(64, "host", "state")) == (0, 0)
    copies[3].complete()
    assert cache.poll().loaded == 10
    assert cache.load_back("second") == LoadBack("nothing")
    assert second.lengths == Lengths(10, 0, 0, None, 0)
    cache.allocate("second", 10)
    second.wait()
    read_hit(cache, second, 10)
    read_hit(cache, request, 10)
    proved(cache)


def test_two_boundaries_of_one_node_do_not_load_at_once() -> None:
    """The window alone is missing, at 10 for one and at 9 for the other."""
    lanes = manual_lanes()
    cache = hybrid_cache(states=None, lanes=lanes)
    serve(cache, TEN[:9])
    serve(cache, TEN)
    settle(cache)
    cache.evict(64, "device", "swa")
    cache.acquire("a", TEN)
    cache.acquire("b", TEN[:9])
    assert cache.load_back("a").loaded_len == 10
    assert cache.load_back("b") == LoadBack("defer", 0, ("in_flight",))
    settle(cache)
    assert cache.load_back("b") == LoadBack("loading", 9), "page 6 alone is missing now"
    assert len(lanes[DEVICE].copies[-1].request.src_pages) == 1
    proved(cache)


def test_windows_and_states_go_ahead_of_the_first_layer() -> None:
    """The last copy is still to run when the others have: no layer may be computed before them."""
    lanes = manual_lanes()
    _, request, copies = loading(lanes)
    assert copies[3].request.layerwise
    assert not any(copy.request.layerwise for copy in copies[:3])
    request.wait_layer(0)
    assert all(copy.done() for copy in copies)


def test_a_request_overtaken_while_it_loads_keeps_what_its_table_names() -> None:
    lanes = manual_lanes()
    cache, slow, _ = loading(lanes)
    cache.allocate("r", 11)
    quick = cache.acquire("quick", TEN[:5])
    cache.allocate("quick", 5)
    forward(cache, quick, TEN[:5], 0, None)
    publish(cache, quick, TEN[:5])
    cache.release("quick")
    proved(cache)
    slow.wait()
    cache.poll()
    proved(cache)
    read_hit(cache, slow, 10)
    forward(cache, slow, slow.tokens, 10, None)
    publish(cache, slow, slow.tokens)
    proved(cache)
    cache.release("r")
    settle(cache)
    assert cache.match_prefix(slow.tokens).device_len == 11
    proved(cache)


def test_a_path_that_splits_while_room_is_made_for_it_loads_whole() -> None:
    """A backup of [3…6] arrives by half, and splits it, while a request waits for window pages."""
    lanes = manual_lanes()
    cache = hybrid_cache(states=None, window=6, swa=(10, 32), lanes=lanes)
    serve(cache, TEN[:3])
    settle(cache)
    holder = cache.acquire("holder", TEN[:7])
    cache.allocate("holder", 7)
    forward(cache, holder, TEN[:7], 3, None)
    publish(cache, holder, TEN[:7])
    cache.release("holder")
    cache.evict(3, "device", "swa")
    assert entries(cache, "swa", TEN[:7], DEVICE) == [3, 4, 5, 6]
    lanes[HOST].copies[-1].complete(2)
    serve(cache, [80])
    cache.acquire("other", [50])
    cache.allocate("other", 4)
    request = cache.acquire("r", TEN[:7])
    assert request.lengths == Lengths(0, 7, 0, None, 7)
    assert len(cache.tree.match(ANYONE, TEN[:7]).nodes) == 2
    assert cache.load_back("r") == LoadBack("loading", 7)
    assert len(cache.tree.match(ANYONE, TEN[:7]).nodes) == 3
    assert cache.match_prefix([80]).device_len == 0, "its window has made the room"
    cache.allocate("r", 7)
    request.wait()
    read_hit(cache, request, 7)
    proved(cache)


@pytest.mark.parametrize("refused", [True, False])
def test_a_state_that_cannot_be_copied_leaves_nothing_behind(refused: bool) -> None:
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes)
    serve(cache, TEN)
    settle(cache)
    request = cache.acquire("r", [*TEN, 10])
    if refused:
        lanes[DEVICE].refuse = RuntimeError("no")
        with pytest.raises(RuntimeError, match="no"):
            cache.allocate("r", 11)
        assert (request.pages.size, request.states) == (10, {})
        proved(cache)
        lanes[DEVICE].refuse = None
        cache.allocate("r", 11)
        request.wait()
        read_hit(cache, request, 10)
        cache.poll()
        assert cache.metrics.copied_bytes["load_back"].value == 0, "it never left the GPU"
    else:
        cache.allocate("r", 11)
        lanes[DEVICE].copies[-1].complete(0)
        with pytest.raises(CopyFailed):
            request.wait()
        assert cache.poll().failed == ["r"]
        with pytest.raises(CopyFailed, match="no state arrived"):
            request.wait()
    cache.cancel("r")
    settle(cache)
    proved(cache)
    assert cache.stats()["state_device_free"] == 7
    assert cache.match_prefix(TEN).device_len == 10


@pytest.mark.parametrize("verb", ["cancel", "release"])
def test_a_state_that_is_copied_stays_while_somebody_waits_for_the_copy(verb: str) -> None:
    """Both pages do; once the request has left, only the one that the copy still writes."""
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes, states=(2, 2))
    serve(cache, TEN)
    settle(cache)
    cache.acquire("r", TEN)
    cache.allocate("r", 10)
    copy = lanes[DEVICE].copies[-1]
    copy.running = True
    assert cache.evict(64) == cache.evict(64, "device", "state") == 0
    getattr(cache, verb)("r")
    proved(cache)
    assert cache.evict(64, "device", "state") == 1
    assert cache.evict(64) == 10
    assert cache.stats()["state_device_free"] == 1, "the other is being written"
    copy.complete()
    cache.poll()
    proved(cache)
    assert cache.stats()["state_device_free"] == 2


def test_a_backup_of_which_a_part_fails_is_made_again_when_the_leaf_leaves() -> None:
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes)
    serve(cache, TEN)
    window, state, kv = lanes[HOST].copies
    state.complete(0)
    window.complete()
    kv.complete()
    assert cache.poll().backed_up == 10
    proved(cache)
    assert cache.tree.match(ANYONE, TEN).pages(HOST).size == 10
    assert entries(cache, "swa", TEN, HOST) == entries(cache, "state", TEN, HOST) == []
    assert cache.evict(10) == 10
    assert len(lanes[HOST].copies) == 5, "the window and the state alone"
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    proved(cache)


def test_a_window_does_not_arrive_where_its_kv_did_not() -> None:
    """The parent's copy fails, and so takes the child's KV along; the child's window came whole."""
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes, states=None)
    serve(cache, [1])
    serve(cache, [1, 2])
    copies = lanes[HOST].copies
    assert [len(copy.request.src_pages) for copy in copies] == [1, 1, 1, 1]
    copies[1].complete(0)
    for copy in copies:
        copy.complete()
    cache.poll()
    proved(cache)
    assert (cache.stats()["host_free"], cache.stats()["swa_host_free"]) == (32, 32)


def test_a_backup_cut_short_for_want_of_room_carries_no_window() -> None:
    """4 free pages on the host for 10 of KV: the window of page 10 has nothing to hang on there."""
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes, kv=(16, 4))
    serve(cache, TEN)
    assert [len(copy.request.src_pages) for copy in lanes[HOST].copies] == [4]
    settle(cache)
    proved(cache)


def test_kv_that_arrives_without_its_state_is_kept_for_who_waits_for_it() -> None:
    """The first load brings the KV alone; the second request then needs the rest of it only."""
    lanes = manual_lanes()
    cache, _, copies = loading(lanes)
    second = cache.acquire("second", TEN)
    for number, copy in enumerate(copies):
        copy.complete(0 if number == 1 else None)
    cache.poll()
    cache.cancel("r")
    assert cache.load_back("second") == LoadBack("loading", 10)
    assert cache.evict(16) == 0
    second.wait()
    read_hit(cache, second, 10)
    proved(cache)


def test_a_split_reaches_entries_on_their_way_in_both_directions() -> None:
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes, kv=(32, 32), swa=(32, 32))
    serve(cache, TEN)
    for cut in (8, 5):
        serve(cache, [*TEN[:cut], 80 + cut])
        proved(cache)
    settle(cache)
    proved(cache)
    assert entries(cache, "swa", TEN, HOST) == [2, 3, 4, 7, 8, 9]
    cache.evict(32)
    cache.acquire("r", TEN)
    cache.load_back("r")
    serve(cache, [*TEN[:9], 99])
    proved(cache)
    settle(cache)
    proved(cache)
    assert cache.match_prefix(TEN).device_len == 10


def test_a_host_without_room_for_windows_keeps_the_kv() -> None:
    cache = hybrid_cache(swa=(16, 2))
    serve(cache, TEN)
    settle(cache)
    assert cache.stats()["swa_unbacked_pages"] == 3
    cache.evict(16)
    assert cache.tree.match(ANYONE, TEN).host_len == 10
    request = cache.acquire("r", TEN)
    assert (request.lengths.host_len, request.missing) == (0, ("swa",))
    proved(cache)
