"""What the façade answers where it cannot serve: arguments that are none, prompts that can never
fit, copies that failed."""

from __future__ import annotations

import pytest
from cache_cases import small_cache

from hikv.errors import ArgumentError


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
