"""Full KV, a window, a state and sidecars in one tree: worked examples, every reused byte compared.

Pages are one token and the window is 3 of them where nothing else is said. `entries` are the pages
of a prompt of which a component has something in a tier.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cache_cases import serve as serve_plain
from cache_cases import settle, small_cache, spec, wrong_pages
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
from hikv.cache.holding import ABSENT
from hikv.cache.node import DEVICE, HOST, Namespace
from hikv.cache.requests import Lengths, LoadBack

TEN = list(range(10))


def test_three_cached_pages_come_back_in_new_slots_for_target_and_draft() -> None:
    """The draft's KV rides on the target's page ids: one list of slots moves both."""
    cache = small_cache(4, 8, 8, specs={"kv": spec(4), "draft": spec(4, 1)})
    tokens = list(range(12))
    serve_plain(cache, tokens)
    before = cache.tree.match(ANYONE, tokens).pages(DEVICE).tolist()
    settle(cache)
    cache.evict(3)
    cache.acquire("other", [7])
    cache.allocate("other", 12)
    request = cache.acquire("again", tokens)
    assert cache.load_back("again") == LoadBack("loading", 12)
    request.wait()
    assert not set(before) & set(request.pages.tolist())
    assert wrong_pages(cache.device, request.pages, ANYONE, tokens) == []
    assert set(cache.device.buffers) == {"kv", "draft"}
    cache.check()


def test_a_hit_survives_the_host_with_its_window_and_state_alone() -> None:
    """10 pages of KV and indexer, 3 of the window, 1 state: what covers the tail suffices."""
    cache = hybrid_cache()
    on_host(cache, TEN)
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    assert entries(cache, "state", TEN, HOST) == [9]
    assert cache.metrics.copied_bytes["backup"].value == (
        10 * cache.device.bytes_per_page
        + sum(
            count * trail.pools[DEVICE].bytes_per_page
            for trail, count in zip(cache.hybrid.trails.values(), (3, 1), strict=True)
        )
    )
    request = admit(cache, [*TEN, 10, 11])
    assert request.lengths == Lengths(0, 10, 10, None, 2)
    assert request.windows["swa"].tolist()[:7] == [ABSENT] * 7
    forward(cache, request, request.tokens, 10, None)
    publish(cache, request, request.tokens)
    cache.release("serve")
    assert cache.match_prefix([*TEN, 10, 11]).device_len == 12
    proved(cache)


@pytest.mark.parametrize("tiers", [None, "device"])
@pytest.mark.parametrize(
    ("name", "usable"),
    [("swa", (0, 10, 0)), ("state", (0, 10, 0))],
)
def test_full_kv_without_the_rest_is_no_hit(name, usable, tiers) -> None:
    """KV is on the GPU wholly. In both tiers gone: nothing is usable. On the host: it loads."""
    cache = hybrid_cache(load_back_threshold=100)
    serve(cache, TEN)
    settle(cache)
    lose(cache, name, tiers)
    assert cache.tree.match(ANYONE, TEN).device_len == 10
    request = cache.acquire("r", TEN)
    explanation = cache.explain("r")
    if tiers is None:
        assert request.lengths == Lengths(0, 0, 0, None, 10)
        assert (explanation.unusable_len, explanation.reasons) == (10, ("component_missing",))
        assert name in explanation.missing
        assert f"is missing ({', '.join(explanation.missing)})" in str(explanation)
    else:
        assert request.lengths == Lengths(0, 10, 0, None, 10)
        assert explanation.missing == ()
        assert cache.load_back("r") == LoadBack("loading", 10), "whatever the threshold"
        pages = cache.tree.match(ANYONE, TEN).pages(DEVICE)
        assert np.array_equal(request.pages, pages), "the KV stays where it is"
        cache.allocate("r", 10)
        request.wait()
        read_hit(cache, request, 10)
        settle(cache)
        assert cache.match_prefix(TEN).device_len == 10
    cache.release("r")
    proved(cache)


def test_the_usable_prefix_is_where_all_components_agree() -> None:
    """States at 4 and 10; a window at 10 with a hole: 4 is the longest that all serve."""
    cache = hybrid_cache()
    serve(cache, TEN[:4])
    serve(cache, TEN)
    settle(cache)
    assert cache.match_prefix(TEN[:9]).device_len == 4, "no state between 4 and 10"
    assert cache.match_prefix(TEN).device_len == 10
    assert cache.match_prefix(TEN, limit=9).device_len == 4
    holder = cache.acquire("holder", TEN[:4])
    lose(cache, "swa")
    assert entries(cache, "swa", TEN, DEVICE) == [1, 2, 3], "in use: the window before 4"
    assert cache.match_prefix(TEN).device_len == 4
    request = cache.acquire("r", TEN)
    assert (request.lengths.device_len, request.unusable_len) == (4, 6)
    assert set(request.missing) == {"swa", "state"}
    assert holder.lengths.device_len == 4
    assert cache.pin(TEN, seconds=60) == 4
    assert cache.evict(16) == 6, "what nobody can use is not protected"
    proved(cache)


def test_a_window_alone_is_usable_inside_a_node() -> None:
    cache = hybrid_cache(states=None)
    serve(cache, TEN)
    assert [cache.match_prefix(TEN[:n]).device_len for n in (1, 5, 9)] == [1, 5, 9]
    settle(cache)
    cache.evict(16)
    assert cache.match_prefix(TEN[:9]).host_len == 0, "the host keeps what the end needs"
    assert cache.match_prefix(TEN).host_len == 10
    request = admit(cache, [*TEN, 77])
    assert request.lengths.loaded_len == 10
    proved(cache)


def test_a_tombstone_revives_from_the_request_that_computes_it_again() -> None:
    cache = hybrid_cache(kv=(20, 20))
    serve(cache, TEN)
    settle(cache)
    lose(cache, "swa")
    assert entries(cache, "state", TEN, DEVICE) == [], "a state without its window is of no use"
    assert cache.match_prefix(TEN) == Lengths(0, 0, 0, None, 10)
    request = admit(cache, TEN)
    forward(cache, request, TEN, 0, None)
    done = publish(cache, request, TEN)
    assert (done.duplicates, done.doubled) == (10, {"swa": 0, "state": 0})
    cache.release("serve")
    assert cache.match_prefix(TEN).device_len == 10
    settle(cache)
    assert entries(cache, "swa", TEN, HOST) == [7, 8, 9]
    proved(cache)


def test_an_internal_node_loses_its_window_and_state_and_keeps_its_kv() -> None:
    cache = hybrid_cache()
    serve(cache, TEN[:5])
    serve(cache, TEN)
    settle(cache)
    cache.acquire("holder", TEN)
    lose(cache, "swa", "device")
    assert entries(cache, "swa", TEN, DEVICE) == [7, 8, 9]
    assert entries(cache, "state", TEN, DEVICE) == [9]
    assert cache.tree.match(ANYONE, TEN).device_len == 10
    cache.release("holder")
    request = cache.acquire("r", TEN[:5])
    assert request.lengths == Lengths(0, 5, 0, None, 5), "demoted, as it was backed up"
    assert cache.load_back("r").loaded_len == 5
    cache.allocate("r", 5)
    request.wait()
    read_hit(cache, request, 5)
    proved(cache)


def test_duplicates_come_back_pool_by_pool() -> None:
    """Both compute the same; the second goes on with the first one's window."""
    cache = hybrid_cache(kv=(8, 8))
    requests = [admit(cache, TEN[:4], rid=rid) for rid in "ab"]
    for request in requests:
        forward(cache, request, TEN[:4], 0, None)
    assert publish(cache, requests[0], TEN[:4]).doubled == {"swa": 0, "state": 0}
    done = publish(cache, requests[1], TEN[:4])
    assert (done.duplicates, done.doubled) == (4, {"swa": 4, "state": 1})
    tables = [request.windows["swa"].tolist() for request in requests]
    assert tables[0] == tables[1]
    assert tables[0][0] == ABSENT
    proved(cache)
    for rid in "ab":
        cache.release(rid)
    stats = cache.stats()
    assert (stats["device_free"], stats["swa_device_free"], stats["state_device_free"]) == (
        4,
        12,
        7,
    )
    proved(cache)


def test_namespaces_have_states_of_their_own() -> None:
    cache = hybrid_cache()
    for space in (ANYONE, Namespace.of(lora="X")):
        assert cache.match_prefix(TEN[:3], space).device_len == 0
        serve(cache, TEN[:3], space)
    serve(cache, TEN[:3], ANYONE)
    proved(cache)


def test_the_example_in_the_docs_runs_as_it_stands(capsys) -> None:
    text = (Path(__file__).parent.parent / "docs" / "hybrid.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/hybrid.md", "exec"), {})
    # 16 pages from the host, with the window's last 8 and one state; the rest is computed.
    assert capsys.readouterr().out == "0 0 256\n0 256 2\n0 256 1\n"
