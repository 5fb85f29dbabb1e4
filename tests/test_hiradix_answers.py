"""What the façade answers where it cannot serve: arguments that are none, prompts that can never
fit, copies that failed."""

from __future__ import annotations

import pytest
from cache_cases import manual_lanes, on_host, serve, settle, small_cache, spec
from hybrid_cases import hybrid_cache
from hybrid_cases import serve as serve_hybrid

from hikv.cache.components import Recurrent, SlidingWindow
from hikv.cache.hiradix import HiRadixCache
from hikv.cache.node import DEVICE, HOST, Namespace
from hikv.cache.pools import DevicePool, HostPool
from hikv.errors import ArgumentError, CapacityError, CopyFailed


def test_a_namespace_that_is_none_is_refused_by_every_verb_that_takes_one() -> None:
    cache = small_cache()
    for call in (
        lambda: cache.acquire("r", [1], "tenantA"),
        lambda: cache.match_prefix([1], "tenantA"),
        lambda: cache.pin([1], 1.0, "tenantA"),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert str(error.value) == (
            "namespace: expected a Namespace, got str; pass Namespace.of(tenant=…)"
        )
    assert cache.stats()["open_requests"] == 0
    cache.check()


@pytest.mark.parametrize("limit", [-1, 1.5, "2"])
def test_a_limit_is_a_count(limit) -> None:
    cache = small_cache()
    for call in (
        cache.match_prefix,
        lambda *prompt, **limits: cache.acquire("r", *prompt, **limits),
    ):
        with pytest.raises(ArgumentError, match=f"limit: expected a whole number, .*{limit!r}"):
            call([1, 2, 3], limit=limit)
    assert cache.stats()["open_requests"] == 0


@pytest.mark.parametrize("quota", [-1, 0.5])
def test_a_quota_is_a_count(quota) -> None:
    cache = small_cache()
    cache.acquire("r", [1, 2, 3])
    with pytest.raises(ArgumentError, match=f"quota: expected a whole number, .*{quota!r}"):
        cache.load_back("r", quota)
    assert cache.load_back("r", 0).outcome == "nothing"


@pytest.mark.parametrize(
    ("owner", "make"),
    [
        ("", lambda *pools: HiRadixCache(*pools, after=None)),
        ("component 'swa', ", lambda *pools: SlidingWindow("swa", 4, *pools)),
        ("component 'ssm', ", lambda *pools: Recurrent("ssm", *pools)),
    ],
)
def test_what_is_no_pool_or_that_of_the_other_tier_is_refused(owner: str, make) -> None:
    device = DevicePool.empty(spec(1), "layer_first", 4)
    host, buffer = HostPool.beside(device, num_pages=4), device.buffers["kv"]
    for pools, name, expected, got in (
        ((buffer, host), "device", "DevicePool", "KVBuffer"),
        ((device, buffer), "host", "HostPool", "KVBuffer"),
        ((host, device), "device", "DevicePool", "HostPool"),
        ((device, None), "host", "HostPool", "NoneType"),
    ):
        with pytest.raises(ArgumentError) as error:
            make(*pools)
        assert str(error.value).startswith(f"{owner}{name}: expected a {expected}, got {got}; ")


def test_a_cache_that_is_closed_takes_no_request_and_lets_the_open_ones_go() -> None:
    cache = small_cache()
    cache.acquire("r", [1])
    cache.close()
    with pytest.raises(ArgumentError, match=r"cache: expected an open one, got one after close"):
        cache.acquire("s", [1])
    cache.release("r")
    cache.close()
    cache.check()


def test_a_layer_that_the_model_has_not_is_refused_with_nothing_to_wait_for() -> None:
    request = small_cache().acquire("r", [1])
    request.wait_layer(1)
    for layer in (-1, 2):
        with pytest.raises(ArgumentError, match=f"layer: expected 0 … 1, .* got {layer};"):
            request.wait_layer(layer)


def test_no_message_tells_what_the_prompt_was() -> None:
    cache = small_cache(1)
    request = cache.acquire("r", [987654, 876543], Namespace.of(tenant="somebody"))
    cache.allocate("r", 2)
    with pytest.raises(ArgumentError) as error:
        cache.load_back("r")
    assert "got 'r', which has allocated;" in str(error.value)
    cache.insert("r")
    with pytest.raises(ArgumentError, match="got 'r', which has inserted;"):
        cache.load_back("r")
    assert "rid='r'" in repr(request)
    for text in (str(error.value), repr(request)):
        assert not [word for word in ("987654", "876543", "somebody", "array") if word in text]


def test_a_failure_tells_as_much_before_a_poll_as_after_it() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    on_host(cache, [1, 2, 3])
    request = cache.acquire("r", [1, 2, 3, 4])
    cache.load_back("r")
    copy = lanes[DEVICE].copies[-1]
    assert cache.explain("r").loaded_len == 3
    assert not copy.done(), "an explanation waits for nothing"
    copy.complete(2)
    with pytest.raises(CopyFailed) as before:
        request.wait_layer(0)
    assert str(before.value) == (
        "request 'r': 2 of 3 pages arrived: the link broke; cancel it and acquire again"
    )
    assert before.value.__cause__ is copy.error
    for polled in (False, True):
        assert not polled or cache.poll().failed == ["r"]
        found = cache.explain("r")
        assert (found.loaded_len, found.extend_len, found.reasons) == (2, 2, ("copy_failed",))
    with pytest.raises(CopyFailed) as after:
        request.wait()
    assert str(after.value) == str(before.value)
    cache.cancel("r")
    cache.check()


def test_a_failure_names_the_components_that_did_not_come() -> None:
    lanes = manual_lanes()
    cache = hybrid_cache(lanes=lanes)
    serve_hybrid(cache, list(range(10)))
    settle(cache)
    cache.evict(16)
    request = cache.acquire("r", list(range(10)))
    assert cache.load_back("r").loaded_len == 10
    lanes[DEVICE].copies[-2].complete(0)
    with pytest.raises(CopyFailed, match="10 of 10 pages and no swa and no state arrived: the"):
        request.wait()
    assert cache.explain("r").loaded_len == 0
    cache.cancel("r")
    settle(cache)
    cache.check()


def test_a_backup_that_fails_is_told_once_with_its_pages_and_its_reason() -> None:
    lanes = manual_lanes()
    cache = small_cache(1, lanes=lanes)
    serve(cache, [1, 2, 3])
    lanes[HOST].copies[-1].complete(2)
    told = ["2 of 3 pages arrived: the link broke"]
    done = cache.poll()
    assert (done.backed_up, done.failed, done.failed_backups) == (2, [], told)
    assert cache.poll().failed_backups == []
    assert cache.stats()["failed_backups"] == 1
    serve(cache, [7, 8])
    lanes[HOST].copies[-1].complete(0)
    cache.evict(8)
    told = ["0 of 2 pages arrived: the link broke"]
    assert cache.poll().failed_backups == told, "an eviction saw it fail"
    serve(cache, [9])
    cache.reset()
    assert cache.poll().failed_backups == [], "what a reset gives up has not failed"
    assert cache.stats()["failed_backups"] == 2
    cache.check()


def test_a_prompt_that_is_larger_than_the_pool_never_fits() -> None:
    """Pool of 8, prompts of 8 and 9; others have 3 pages, then 5 of the prompt are cached."""
    cache = small_cache(1)
    cache.acquire("other", [])
    cache.allocate("other", 3)
    for size, ever in ((8, True), (9, False)):
        cache.acquire(size, range(size))
        cost = cache.admission_cost(size)
        assert (cost.pages, cost.attainable) == ({"kv": size}, {"kv": 8})
        assert (cost.fits, cost.ever_fits) == (False, ever)
    with pytest.raises(CapacityError, match="needs 8 pages, 5 available; poll, or release"):
        cache.allocate(8, 8)
    told = "needs 9 pages, 5 available; the pool has 8 pages in all: refuse the prompt"
    with pytest.raises(CapacityError, match=told):
        cache.allocate(9, 9)
    for rid in ("other", 8, 9):
        cache.release(rid)
    serve(cache, range(5))
    cache.acquire(9, range(9))
    cost = cache.admission_cost(9)
    assert (cost.pages, cost.attainable, cost.ever_fits) == ({"kv": 4}, {"kv": 3}, False)
    with pytest.raises(CapacityError, match="needs 4 pages, 3 available; the pool has 8 pages"):
        cache.allocate(9, 9)
    cache.allocate(9, 8)
    cache.check()


def test_a_prompt_that_is_longer_than_the_window_s_pool_is_admitted_chunk_by_chunk() -> None:
    """A window of 3 in a pool of 6: 12 pages as 4, 4 and 4."""
    cache = hybrid_cache(states=None, swa=(6, 32))
    tokens = list(range(12))
    request = cache.acquire("r", tokens)
    cost = cache.admission_cost("r")
    assert (cost.pages["swa"], cost.attainable["swa"], cost.ever_fits) == (12, 6, False)
    told = r"'swa'.* the pool has 6 pages in all: allocate a chunk at a time, with an insert after"
    with pytest.raises(CapacityError, match=told):
        cache.allocate("r", 12)
    for end, held, rest in ((4, 0, False), (7, 3, False), (10, 3, False), (12, 3, True)):
        assert cache.admission_cost("r").ever_fits is rest
        cost = cache.admission_cost("r", end)
        assert (cost.extend_len, cost.pages["swa"]) == (end, end - request.pages.size)
        assert (cost.attainable["swa"], cost.fits, cost.ever_fits) == (6 - held, True, True)
        cache.allocate("r", end)
        cache.insert("r", tokens[:end])
        settle(cache)
        cache.check()
    cache.release("r")
    cache.check()


def test_a_state_s_pool_that_is_too_small_says_so() -> None:
    cache = hybrid_cache(window=0, states=(1, 4))
    serve_hybrid(cache, [1, 2])
    settle(cache)
    cache.acquire("r", [1, 2, 3])
    cost = cache.admission_cost("r")
    assert (cost.pages["state"], cost.attainable["state"], cost.ever_fits) == (1, 0, False)
    with pytest.raises(CapacityError, match=r"'state'.* the pool has 1 pages in all: make it larg"):
        cache.allocate("r", 3)
    cache.check()


def test_room_for_the_output_is_asked_for_with_the_prompt() -> None:
    cache = small_cache(2)
    cache.acquire("r", [1, 2, 3])
    assert cache.admission_cost("r").pages == {"kv": 2}
    assert cache.admission_cost("r", 16)[:3] == (0, 16, {"kv": 8})
    assert not cache.admission_cost("r", 17).ever_fits
    for call in (cache.admission_cost, cache.allocate):
        with pytest.raises(ArgumentError, match=r"num_tokens: expected a whole number, .* got -1"):
            call("r", -1)
    cache.allocate("r", 16)
    assert cache.admission_cost("r").pages == {"kv": 0}


@pytest.mark.parametrize("limits", [(-1, 0), (0, 1.5)])
def test_a_poll_takes_counts(limits) -> None:
    cache = small_cache(1, 8, 8)
    serve(cache, [1, 2, 3])
    with pytest.raises(ArgumentError, match=r"limits\[\d\]: expected a whole number, 0 or more"):
        cache.poll(limits)
    assert cache.stats()["host_copies_in_flight"] == 1, "nothing was acknowledged"
