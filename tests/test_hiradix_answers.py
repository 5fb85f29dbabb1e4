"""What the façade answers where it cannot serve: arguments that are none, prompts that can never
fit, copies that failed."""

from __future__ import annotations

import pytest
from cache_cases import manual_lanes, on_host, serve, settle, small_cache
from hybrid_cases import hybrid_cache
from hybrid_cases import serve as serve_hybrid

from hikv.cache.node import DEVICE, HOST, Namespace
from hikv.errors import ArgumentError, CopyFailed


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
