"""The façade: worked examples, what each verb promises, and faults known from the field."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_cases import (
    compute,
    on_host,
    serve,
    settle,
    small_cache,
    spec,
    wrong_pages,
)

from hikv.cache.config import HiCacheConfig
from hikv.cache.draft import Sidecar
from hikv.cache.explain import TtftSplit
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.node import HOST, Namespace
from hikv.cache.pools import DevicePool, HostPool
from hikv.cache.requests import Lengths, LoadBack
from hikv.errors import ArgumentError, CapacityError
from hikv.spec import KVSpec


def occupied(cache: HiRadixCache, num_pages: int, rid: object = "other") -> None:
    """Let a request hold `num_pages` GPU pages."""
    cache.acquire(rid, [])
    cache.allocate(rid, num_pages * cache.page_size)


def test_a_prompt_of_48_tokens_over_the_tiers() -> None:
    """Page 4: a0…a15 in L1, a16…a31 in L2, b0…b15 nowhere here."""
    cache = small_cache(4, 12, 16)
    a, b = list(range(32)), list(range(100, 116))
    on_host(cache, a)
    serve(cache, a, quota=16)
    cache.evict(4)
    match = cache.tree.match(ANYONE, [*a, *b])
    assert match.device_len, match.host_len == (16, 16)
    last_device_node = [n for n in match.nodes if n.pages[0] is not None][-1]
    assert (last_device_node.end, match.nodes[-1].end) == (16, 32)
    request = cache.acquire("r", [*a, *b])
    assert request.lengths == Lengths(16, 16, 0, None, 32)
    assert request.pages.size == 4, "the GPU cannot read a16…a31 yet"
    assert cache.prefetch("r") == 0
    assert cache.prefetch_ready("r")
    assert cache.load_back("r") == LoadBack("loading", 16)
    assert request.lengths == Lengths(16, 16, 16, 0, 16)
    request.wait()
    assert wrong_pages(cache.device, request.pages, ANYONE, a) == []
    settle(cache)
    assert cache.match_prefix([*a, *b]) == Lengths(32, 0, 0, None, 16)
    cache.check()


def test_a_quota_loads_part_of_what_the_host_holds() -> None:
    """Prompt 4096: 1024 in L1, 2048 in L2, 1024 that a prefetch brought to L2; quota 1536."""
    cache = small_cache(64, 64, 128)
    tokens = list(range(4096))
    on_host(cache, tokens[:3072])
    serve(cache, tokens[:1024])
    pages = cache.host.allocator.alloc(16)
    cache.tree.insert_host(ANYONE, tokens, pages, start=3072)
    request = cache.acquire("r", tokens)
    assert (request.lengths.device_len, request.lengths.host_len) == (1024, 3072)
    assert cache.load_back("r", quota=1536) == LoadBack("loading", 1536, ("gpu_quota",))
    assert request.lengths == Lengths(1024, 3072, 1536, None, 1536)
    assert cache.allocate("r", 4096).size == 1536 // 64
    request.wait()
    assert wrong_pages(cache.device, request.pages[:40], ANYONE, tokens) == []
    explanation = cache.explain("r")
    assert (explanation.left_len, explanation.extend_len) == (1536, 1536)
    assert "quota" in str(explanation)
    cache.check()


@pytest.mark.parametrize(("prompt", "reused"), [(9, 8), (8, 4)])
def test_a_limit_leaves_the_last_token_to_compute(prompt: int, reused: int) -> None:
    cache = small_cache(4)
    serve(cache, list(range(prompt)))
    assert cache.match_prefix(range(prompt), limit=prompt - 1).device_len == reused
    request = cache.acquire("r", range(prompt), limit=prompt - 1)
    assert request.lengths.extend_len == prompt - reused


def test_a_request_that_computed_what_another_published_gets_the_canonical_pages() -> None:
    """Both compute [1…8]; the second goes on with the first one's pages, its own are free again."""
    cache = small_cache(4, 4)
    tokens = list(range(1, 9))
    requests = []
    for rid in "ab":
        request = cache.acquire(rid, tokens)
        cache.allocate(rid, 8)
        compute(cache, request, tokens, 0)
        requests.append(request)
    assert [request.pages.tolist() for request in requests] == [[0, 1], [2, 3]]
    assert cache.insert("a").duplicates == 0
    done = cache.insert("b")
    assert (done.pages.tolist(), done.duplicates) == ([0, 1], 2)
    assert requests[1].pages.tolist() == [0, 1]
    assert cache.stats()["device_free"] == 2
    assert cache.allocate("b", 12).tolist() == [2], "the next token's page follows the prefix"
    cache.check()
    for rid in "ab":
        cache.release(rid)
    cache.check()
    assert cache.stats()["device_free"] == 2


def test_the_last_sampled_token_has_no_kv() -> None:
    """Prompt 10, six tokens generated: KV for 15, of which 12 fill pages of 4."""
    cache = small_cache(4)
    known = list(range(16))
    cache.acquire("r", known[:10])
    cache.allocate("r", 15)
    assert cache.insert("r", known[:-1]).inserted_len == 12
    assert cache.match_prefix(known).device_len == 12
    cache.check()
    cache.release("r")
    assert cache.stats()["device_free"] == 8 - 3, "the partial page was the request's own"


def test_matching_and_locking_are_one_step() -> None:
    """All 4 GPU pages cached: a match holds them against the allocation that follows."""
    cache = small_cache(4, 4)
    serve(cache, list(range(16)))
    settle(cache)
    request = cache.acquire("r", list(range(16)))
    assert request.lengths.device_len == 16
    cache.acquire("other", [7] * 8)
    with pytest.raises(CapacityError) as error:
        cache.allocate("other", 8)
    assert (error.value.required, error.value.available) == (2, 0)
    assert wrong_pages(cache.device, request.pages, ANYONE, range(16)) == []
    cache.release("r")
    assert cache.allocate("other", 8).size == 2
    cache.check()


def test_a_paused_request_is_acquired_again() -> None:
    cache = small_cache(1)
    serve(cache, [1, 2, 3])
    settle(cache)
    cache.acquire("r", [1, 2, 3, 4])
    cache.release("r")
    cache.evict(8)
    request = cache.acquire("r", [1, 2, 3, 4])
    assert (request.lengths.device_len, request.lengths.host_len) == (0, 3)
    occupied(cache, 8)
    assert cache.load_back("r") == LoadBack("defer", 0, ("locked",))
    cache.cancel("r")
    cache.cancel("other")
    assert cache.tree.locks == set()
    cache.check()


def test_a_host_smaller_than_the_gpu_works() -> None:
    """GPU 8 pages, host 4: copies of what the GPU still has make room, the GPU keeps its pages."""
    cache = small_cache(1, 8, 4)
    serve(cache, list(range(8)))
    settle(cache)
    assert cache.stats()["host_free"] == 0
    assert cache.stats()["unbacked_pages"] == 4
    assert cache.evict(2, "host") == 4, "a segment leaves whole"
    assert cache.match_prefix(range(8)).device_len == 8
    pages = cache.host.allocator.alloc(2)
    assert cache.tree.insert_host(ANYONE, [70, 71], pages, start=0).created is not None
    serve(cache, [5])
    settle(cache)
    cache.check()
    assert cache.match_prefix([70, 71]).host_len == 2
    assert cache.match_prefix([5]).device_len == 1


def test_copies_of_what_the_gpu_holds_give_way_first() -> None:
    """Host 4: [1, 2] is there alone, [3] and [4] are copies; [5] has to leave the GPU."""
    cache = small_cache(1, 3, 4)
    on_host(cache, [1, 2])
    for token in (3, 4, 5):
        serve(cache, [token])
        settle(cache)
    assert [cache.tree.match(ANYONE, [t]).pages(HOST).size for t in (3, 4, 5)] == [1, 1, 0], (
        "a copy made ahead of need takes free pages only"
    )
    serve(cache, [3])
    serve(cache, [4])
    cache.evict(1)
    assert cache.match_prefix([5]).host_len == 1
    assert cache.match_prefix([1, 2]).host_len == 2, "the least recent, but the only one of it"
    assert [cache.tree.match(ANYONE, [t]).pages(HOST).size for t in (3, 4)] == [0, 1]
    cache.check()


@pytest.mark.parametrize(
    ("policy", "uses"), [("write_through", 1), ("write_through_selective", 2), ("write_back", None)]
)
def test_when_a_node_gets_its_copy(policy: str, uses: int | None) -> None:
    cache = small_cache(1, write_policy=policy)
    for use in (1, 2, 3):
        serve(cache, [1, 2])
        settle(cache)
        backed_up = cache.stats()["host_free"] < 16
        assert backed_up == (uses is not None and use >= uses)
    cache.evict(8)
    assert cache.match_prefix([1, 2]) == Lengths(0, 2, 0, None, 2)
    serve(cache, [1, 2])
    cache.check()


def test_selective_drops_what_was_used_once() -> None:
    cache = small_cache(1, write_policy="write_through_selective")
    serve(cache, [1, 2])
    assert cache.evict(2) == 2
    assert cache.match_prefix([1, 2]).host_len == 0
    assert cache.stats()["dropped_pages"] == 2


def test_write_back_brings_the_whole_chain_to_the_host() -> None:
    """The root stays hot, its leaf leaves: the root's copy is made with it, parents first."""
    cache = small_cache(1, write_policy="write_back")
    serve(cache, [1, 2])
    serve(cache, [1, 2, 3, 4])
    cache.acquire("hot", [1, 2])
    assert cache.evict(2) == 2
    assert cache.match_prefix([1, 2, 3, 4]) == Lengths(2, 2, 0, None, 2)
    assert cache.tree.match(ANYONE, [1, 2, 3, 4]).pages(HOST).size == 4
    cache.check()


def test_write_back_without_room_on_the_host_drops_and_says_so() -> None:
    """A host full of locked pages: the victim leaves, and is nowhere called backed up."""
    cache = small_cache(1, 8, 2, write_policy="write_back")
    on_host(cache, [1, 2])
    cache.acquire("holds", [1, 2])
    serve(cache, [5])
    assert cache.evict(1) == 1
    assert cache.match_prefix([5]) == Lengths(0, 0, 0, None, 1)
    assert (cache.stats()["dropped_pages"], cache.stats()["unbacked_pages"]) == (1, 1)
    cache.check()


def test_short_spans_are_computed_rather_than_loaded() -> None:
    cache = small_cache(1, 16, load_back_threshold=10)
    on_host(cache, list(range(9)))
    request = cache.acquire("r", list(range(9)))
    assert cache.load_back("r") == LoadBack("recompute", 0, ("load_back_threshold",))
    assert request.lengths.extend_len == 9
    cache.release("r")
    on_host(cache, list(range(12)))
    cache.acquire("r", list(range(12)))
    assert cache.load_back("r", quota=9) == LoadBack("recompute", 0, ("gpu_quota",))


def test_a_load_back_evicts_others_then_loads_what_fits() -> None:
    cache = small_cache(1, 4, 16)
    on_host(cache, [1, 2, 3, 4])
    serve(cache, [9, 8])
    settle(cache)
    cache.acquire("r", [1, 2, 3, 4])
    assert cache.load_back("r") == LoadBack("loading", 4)
    assert cache.match_prefix([9, 8]).host_len == 2
    cache.release("r")
    settle(cache)
    cache.evict(4)
    occupied(cache, 3)
    cache.acquire("r", [1, 2, 3, 4])
    assert cache.load_back("r") == LoadBack("loading", 1, ("no_room",))
    cache.release("r")
    cache.cancel("other")
    settle(cache)
    cache.check()


def test_a_prefix_that_can_never_fit_is_computed() -> None:
    cache = small_cache(1, 4, 16, load_back_threshold=6)
    on_host(cache, [1, 2, 3, 4])
    pages = cache.host.allocator.alloc(4)
    cache.tree.insert_host(ANYONE, range(1, 9), pages, start=4)
    cache.acquire("r", range(1, 9))
    assert cache.load_back("r") == LoadBack("recompute", 0, ("no_room",))


def test_host_hits_cost_gpu_pages() -> None:
    cache = small_cache(1, 8, 16)
    on_host(cache, [1, 2, 3])
    occupied(cache, 4)
    cache.acquire("r", [1, 2, 3, 4, 5])
    cost = cache.admission_cost("r")
    assert (cost.load_len, cost.extend_len) == (3, 2)
    assert (cost.pages, cost.available, cost.fits) == ({"kv": 5}, {"kv": 4}, False)
    cache.load_back("r", quota=2)
    cost = cache.admission_cost("r")
    assert (cost.load_len, cost.extend_len, cost.pages["kv"]) == (2, 3, 3)


def test_namespaces_never_meet() -> None:
    cache = small_cache(1, 16)
    spaces = [
        ANYONE,
        Namespace.of(lora="X", id=1),
        Namespace.of(lora="X", id=2),
        Namespace.of(salt="X", id=1),
    ]
    for space in spaces:
        assert cache.match_prefix([1, 2], space).device_len == 0
        serve(cache, [1, 2], space)
    settle(cache)
    cache.evict(16)
    for space in spaces:
        serve(cache, [1, 2], space)
    assert cache.stats()["host_free"] == 16 - 8


def test_pools_that_ride_along_move_together() -> None:
    """KV of two layers and an indexer's rows of one: one page list, every byte of both."""
    specs = {"kv": spec(4), "indexer": KVSpec(1, 1, 12, 4, torch.uint8, latent=True)}
    cache = small_cache(4, 8, 8, specs=specs, mem_layout="page_first")
    assert cache.device.bytes_per_page == 64 + 48
    on_host(cache, list(range(20)))
    serve(cache, list(range(20)))
    assert cache.metrics.copied_bytes["backup"].value == 5 * (64 + 48)
    assert cache.metrics.copy_seconds["backup"].count == 1
    assert cache.metrics.copy_seconds["backup"].sum > 0
    cache.check()


def test_what_rides_along_may_lie_otherwise() -> None:
    """Rows without heads beside a host pool in head groups, which they cannot be in."""
    specs = {"kv": spec(4), "indexer": KVSpec(1, 1, 12, 4, torch.uint8, latent=True)}
    device = DevicePool.empty(specs, "layer_first", 8)
    config = HiCacheConfig(mem_layout="page_first_direct_group", load_back_threshold=0)
    drafts = {"indexer": Sidecar("kv", layout="page_first")}
    host = HostPool.beside(device, config, num_pages=8, drafts=drafts)
    cache = HiRadixCache(device, host, config, after=None)
    on_host(cache, list(range(20)))
    serve(cache, list(range(20)))
    assert cache.metrics.copied_bytes["load_back"].value == 5 * device.bytes_per_page
    cache.close()


def test_what_the_engine_measured_of_the_first_token_is_counted_at_release() -> None:
    cache = small_cache(4, 8, 8)
    for rid, ttft in (("a", TtftSplit(prefill=0.5)), ("b", None), ("c", TtftSplit(*[0.25] * 6))):
        cache.acquire(rid, [1, 2, 3])
        cache.release(rid, ttft=ttft)
    assert cache.metrics.requests.value == 3
    assert cache.metrics.ttft_terms["prefill"].sum == 0.75
    assert cache.metrics.ttft_terms["sampling"].count == 1
    assert (cache.metrics.ttft.count, cache.metrics.ttft.sum) == (1, 1.5)


def test_pages_in_another_rotation_stay_private() -> None:
    """Owners 0, 1, 0 are cached; a request that began on owner 1 may not join them."""
    cache = small_cache(1, 8, 8, owners=2)
    early = cache.acquire("early", [1, 2, 3, 4])
    cache.allocate("early", 4)
    first = early.pages[0] % 2
    serve(cache, [1, 2, 3])
    assert cache.tree.match(ANYONE, [1, 2, 3]).nodes[0].rotation == first
    late = cache.acquire("late", [1, 2, 3, 4])
    cache.allocate("late", 4)
    assert (late.pages % 2).tolist() == [(first + n) % 2 for n in range(4)]
    late.pages[3] ^= 1  # what an engine with an allocator of its own might have done
    late.own = late.pages[3:]
    done = cache.insert("late")
    assert "belongs on owner" in done.private
    assert done.inserted_len == 0
    assert cache.match_prefix([1, 2, 3, 4]).device_len == 3


def test_misuse_is_refused_before_anything_changes() -> None:
    cache = small_cache(2)
    on_host(cache, [1, 2, 3, 4])
    cache.acquire("r", [1, 2, 3, 4])
    with pytest.raises(ArgumentError, match="one not in use"):
        cache.acquire("r", [1])
    with pytest.raises(ArgumentError, match="an open request"):
        cache.release("s")
    with pytest.raises(ArgumentError, match="allocate"):
        cache.insert("r")
    cache.allocate("r", 4)
    with pytest.raises(ArgumentError, match="then load_back once"):
        cache.load_back("r")
    with pytest.raises(ArgumentError, match="device, host"):
        cache.evict(1, "disk")
    with pytest.raises(ArgumentError, match="integer ids"):
        cache.acquire("t", [0.5])
    cache.check()
    assert not cache.prefetch_ready("s")


@pytest.mark.parametrize(("name", "value"), [("storage", "file"), ("enabled", False)])
def test_settings_that_this_cache_cannot_serve_are_refused_by_name(name: str, value) -> None:
    with pytest.raises(ArgumentError, match=f"config.{name}"):
        small_cache(**{name: value})


def test_an_engines_own_tensors_are_the_pool() -> None:
    from hikv.buffer import KVBuffer

    layers = [torch.zeros(8, 2, 1, 4, dtype=torch.uint8) for _ in range(4)]
    device = DevicePool(KVBuffer.from_layers(layers[:2], layers[2:], spec(2)))
    cache = HiRadixCache(device, HostPool.beside(device, num_pages=8), after=None)
    request = cache.acquire("r", np.arange(20))
    cache.allocate("r", 16)
    layers[0][request.pages[0]] = 7
    cache.insert("r", range(16))
    cache.release("r")
    settle(cache)
    cache.evict(8)
    for layer in layers:
        layer.fill_(9)
    request = cache.acquire("r", range(16))
    assert cache.load_back("r").loaded_len == 16
    request.wait_layer(0)
    assert layers[0][request.pages[0]].eq(7).all()
    cache.release("r")
    cache.close()


def test_the_metrics_count_what_happened() -> None:
    cache = small_cache(1, 8, 16)
    on_host(cache, [1, 2, 3])
    serve(cache, [1, 2, 3, 4])
    settle(cache)
    metrics = cache.metrics
    assert (metrics.requests.value, metrics.prompt_tokens.value) == (2, 7)
    assert (metrics.matched_tokens["device"].value, metrics.matched_tokens["host"].value) == (0, 3)
    assert (metrics.loaded_tokens.value, metrics.extend_tokens.value) == (3, 4)
    assert metrics.copied_bytes["load_back"].value == 3 * cache.device.bytes_per_page
    assert metrics.evicted_pages["device"].value == 3
    assert 'hikv_used_pages{tier="device"} 4' in metrics.render()
    assert 'hikv_total_pages{tier="host"} 16' in metrics.render()
    assert 'hikv_copies_in_flight{hop="backup"} 0' in metrics.render()


def test_a_prompt_enters_chunk_by_chunk() -> None:
    cache = small_cache(2, 8)
    tokens = list(range(11))
    request = cache.acquire("r", tokens)
    for start, end in ((0, 4), (4, 9), (9, 11)):
        cache.allocate("r", end)
        compute(cache, request, tokens[:end], start // 2)
        assert cache.insert("r", tokens[:end]).inserted_len == end // 2 * 2
        assert cache.match_prefix(tokens).device_len == end // 2 * 2
        cache.check()
    assert wrong_pages(cache.device, request.pages[:5], ANYONE, tokens) == []
    cache.release("r")
    settle(cache)
    cache.check()
    assert cache.stats()["device_free"] == 3


def test_other_tokens_than_those_acquired_do_not_enter() -> None:
    cache = small_cache(1)
    serve(cache, [1, 2])
    cache.acquire("r", [1, 2, 3])
    cache.allocate("r", 3)
    with pytest.raises(ArgumentError, match="the prompt that was acquired"):
        cache.insert("r", [1, 9, 3])
    cache.check()


def test_a_pin_ends_by_itself() -> None:
    now = [0.0]
    cache = small_cache(1, clock=lambda: now[0])
    serve(cache, [1, 2])
    settle(cache)
    assert cache.pin([1, 2, 3], seconds=5) == 2
    cache.check()
    assert (cache.evict(8), cache.evict(8, "host")) == (0, 0)
    now[0] = 5.0
    cache.poll()
    assert (cache.evict(8), cache.evict(8, "host")) == (2, 2)
    assert cache.pin([1, 2], seconds=5) == 0
    cache.check()


def test_the_engine_loop_in_the_docs_runs_as_it_stands(capsys) -> None:
    import hikv.cache

    (example,) = hikv.cache.__doc__.split("```python\n")[1:]
    code = example.split("```")[0]
    assert 25 <= len(code.splitlines()) <= 35
    exec(compile(code, "the docstring of hikv.cache", "exec"), {})
    # 712 tokens: all; all but the shared 512; all but the whole pages before the last token.
    assert capsys.readouterr().out == "[712, 200, 8]\n"
