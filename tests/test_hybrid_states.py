"""States of recurrent layers: whose they are, when they are copied, and what holds them."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import settle
from hybrid_cases import (
    admit,
    entries,
    forward,
    hybrid_cache,
    proved,
    publish,
    read_hit,
    serve,
    state_is,
    write_state,
)

from hikv.cache.hiradix import ANYONE
from hikv.cache.holding import ABSENT
from hikv.cache.node import DEVICE, HOST
from hikv.cache.requests import Lengths
from hikv.errors import ArgumentError

TEN = list(range(10))


def test_a_request_never_writes_the_cached_state() -> None:
    """Two go on from one prefix, each in a state of its own; the cached bytes stay."""
    cache = hybrid_cache()
    serve(cache, TEN[:6])
    node = cache.tree.match(ANYONE, TEN[:6]).nodes[-1]
    tier, cached = cache.hybrid.trails["state"].find(node, 5)
    requests = []
    for rid, more in (("a", [60, 61]), ("b", [70])):
        request = admit(cache, [*TEN[:6], *more], rid=rid)
        requests.append(request)
        assert request.states["state"] != cached
    assert requests[0].states != requests[1].states
    for request in requests:
        forward(cache, request, request.tokens, 6, None)
    assert tier == DEVICE
    assert state_is(cache, DEVICE, cached, ANYONE, TEN, 6)
    for request in requests:
        publish(cache, request, request.tokens)
        cache.release(request.rid)
    assert state_is(cache, DEVICE, cached, ANYONE, TEN, 6)
    proved(cache)


def test_a_state_that_was_handed_over_is_written_no_more() -> None:
    """The request goes on in a copy, which `allocate` makes; and only then."""
    cache = hybrid_cache()
    request = admit(cache, TEN[:4])
    forward(cache, request, TEN[:4], 0, None)
    slot = request.states["state"]
    publish(cache, request, TEN[:4])
    assert request.states == {}
    cache.allocate("serve", 6)
    request.wait()
    assert request.states["state"] != slot
    assert state_is(cache, DEVICE, request.states["state"], ANYONE, TEN, 4)
    request.tokens = np.array(TEN[:6], np.int32)
    forward(cache, request, TEN[:6], 4, None)
    assert state_is(cache, DEVICE, slot, ANYONE, TEN, 4)
    assert publish(cache, request, TEN[:6]).inserted_len == 6
    cache.release("serve")
    assert [cache.match_prefix(TEN[:n]).device_len for n in (4, 5, 6)] == [4, 4, 6]
    proved(cache)


def test_without_a_state_of_its_own_a_request_publishes_no_more() -> None:
    """What it has computed since the handover it cannot have computed with a state."""
    cache = hybrid_cache(2)
    request = admit(cache, TEN[:8])
    forward(cache, request, TEN[:4], 0, None)
    cache.insert("serve", TEN[:4], states=request.states)
    cache.insert("serve", TEN[:4])
    with pytest.raises(ArgumentError, match="at most 2 pages of tokens"):
        cache.insert("serve", TEN[:8])
    proved(cache)
    assert cache.match_prefix(TEN) == Lengths(4, 0, 0, None, 6)
    cache.allocate("serve", 8)
    request.wait()
    assert state_is(cache, DEVICE, request.states["state"], ANYONE, TEN, 4)
    forward(cache, request, TEN[:8], 2, None)
    cache.insert("serve", TEN[:8], states=request.states)
    proved(cache)
    assert cache.match_prefix(TEN).device_len == 8


def test_a_state_on_the_way_is_handed_over_while_its_own_goes_on() -> None:
    """Page 4, 10 tokens: the state at 8 enters, that at 10 stays the request's."""
    cache = hybrid_cache(4)
    request = admit(cache, TEN)
    spare = cache.spare_state("serve", "state")
    forward(cache, request, TEN, 0, spare)
    done = cache.insert("serve", TEN, states={"state": spare})
    assert done.inserted_len == 8
    assert state_is(cache, DEVICE, request.states["state"], ANYONE, TEN, 10)
    cache.release("serve")
    assert cache.match_prefix(TEN).device_len == 8
    assert cache.stats()["state_device_free"] == 7
    proved(cache)


def test_without_a_state_a_prefix_cannot_be_resumed() -> None:
    cache = hybrid_cache(kv=(20, 20), swa=(20, 20))
    serve(cache, TEN, state=False)
    assert cache.match_prefix(TEN).device_len == 0
    request = admit(cache, TEN)
    assert request.missing == ("state",)
    forward(cache, request, TEN, 0, None)
    done = publish(cache, request, TEN)
    assert (done.duplicates, done.doubled) == (10, {"swa": 10, "state": 0})
    assert request.windows["swa"].tolist()[:7] == [ABSENT] * 7
    cache.release("serve")
    assert cache.match_prefix(TEN).device_len == 10
    proved(cache)


def test_write_back_saves_a_state_before_it_leaves_the_gpu() -> None:
    cache = hybrid_cache(write_policy="write_back")
    serve(cache, TEN)
    assert cache.stats()["host_free"] == 32
    cache.evict(1, "device", "state")
    assert entries(cache, "state", TEN, HOST) == [9]
    assert cache.tree.match(ANYONE, TEN).pages(HOST).size == 10, "with the KV that it needs there"
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)
    cache.evict(16)
    serve(cache, TEN)
    proved(cache)


def test_a_state_that_leaves_with_its_window_is_saved_though_the_host_has_the_window() -> None:
    cache = hybrid_cache(write_policy="write_back")
    serve(cache, TEN, state=False)
    cache.evict(16)
    assert (entries(cache, "swa", TEN, HOST), entries(cache, "state", TEN, HOST)) == ([7, 8, 9], [])
    serve(cache, TEN)
    assert cache.evict(16, "device", "swa") == 10
    settle(cache)
    proved(cache)
    assert entries(cache, "state", TEN, HOST) == [9]
    assert cache.match_prefix(TEN) == Lengths(0, 10, 0, None, 10)


def test_an_insert_shorter_than_the_cached_prefix_keeps_the_hold_on_that() -> None:
    """A request that found 10 publishes 5 of them, and then 11."""
    cache = hybrid_cache()
    serve(cache, TEN)
    settle(cache)
    request = admit(cache, [*TEN, 10])
    spare = cache.spare_state("serve", "state")
    write_state(cache, spare, ANYONE, TEN, 5)
    assert cache.insert("serve", TEN[:5], states={"state": spare}).inserted_len == 5
    assert cache.match_prefix(TEN[:5]).device_len == 5
    assert (cache.evict(64), cache.evict(64, "device", "swa")) == (0, 4)
    assert entries(cache, "swa", TEN, DEVICE) == [2, 3, 4, 7, 8, 9]
    read_hit(cache, request, 10)
    proved(cache)
    forward(cache, request, request.tokens, 10, None)
    assert publish(cache, request, request.tokens).inserted_len == 11
    cache.release("serve")
    proved(cache)


def test_a_state_stays_with_the_end_of_a_node_that_splits() -> None:
    cache = hybrid_cache(kv=(20, 20), swa=(20, 20))
    serve(cache, TEN)
    serve(cache, [*TEN[:6], 66])
    assert entries(cache, "state", TEN, DEVICE) == [9]
    assert cache.match_prefix(TEN[:7]).device_len == 0
    assert cache.match_prefix(TEN).device_len == 10
    settle(cache)
    proved(cache)
