"""The hit rules as pure functions, and which components a cache refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_cases import spec
from hybrid_cases import hybrid_cache, pools, rows
from hypothesis import given
from hypothesis import strategies as st

from hikv.cache.components import (
    ALL_PAGES,
    Recurrent,
    SlidingWindow,
    Usable,
    trailing_pages,
    usable_pages,
)
from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import HiRadixCache
from hikv.cache.pools import DevicePool, HostPool
from hikv.errors import ArgumentError

CONFIG = HiCacheConfig(mem_layout="page_first")


@pytest.mark.parametrize(
    ("rule", "held", "boundaries"),
    [
        (ALL_PAGES, "111", "1111"),
        (ALL_PAGES, "110111", "1110000"),
        (ALL_PAGES, "011", "1000"),
        (ALL_PAGES, "", "1"),
        (trailing_pages(2), "0011", "10001"),
        (trailing_pages(2), "1", "11"),  # a prompt shorter than the window needs what there is
        (trailing_pages(2), "110110", "1110010"),
        (trailing_pages(3), "110111", "1110001"),
        (trailing_pages(9), "1111", "11111"),
        (trailing_pages(1), "000100", "1000100"),  # a state: exactly where it was taken
    ],
)
def test_which_boundaries_a_rule_allows(rule, held, boundaries) -> None:
    got = rule.boundaries([flag == "1" for flag in held])
    assert "".join(str(int(flag)) for flag in got) == boundaries


@pytest.mark.parametrize(
    ("hits", "usable"),
    [
        # KV of 6 pages, a sidecar with a hole: the leading run counts, not the number.
        ({"kv": (ALL_PAGES, [1] * 6), "indexer": (ALL_PAGES, [1, 1, 0, 1, 1, 1])}, 2),
        # KV hits fully, and the sidecar nothing.
        ({"kv": (ALL_PAGES, [1] * 6), "scales": (ALL_PAGES, [0] * 6)}, 0),
        # A window and a state cover the tail alone, and that suffices.
        (
            {
                "kv": (ALL_PAGES, [1] * 6),
                "swa": (trailing_pages(2), [0, 0, 0, 0, 1, 1]),
                "state": (trailing_pages(1), [0, 0, 0, 0, 0, 1]),
            },
            6,
        ),
        # The state is where the window is not: what both allow is shorter than either.
        (
            {
                "swa": (trailing_pages(2), [1, 1, 0, 1, 1, 0]),
                "state": (trailing_pages(1), [0, 1, 0, 0, 0, 1]),
            },
            2,
        ),
        # A longer window of the KV's own is not hurt by what KV lacks beyond.
        ({"kv": (ALL_PAGES, [1, 1, 1, 0]), "swa": (trailing_pages(2), [0, 1, 1, 1])}, 3),
    ],
)
def test_what_all_components_can_serve(hits, usable) -> None:
    found = usable_pages(hits)
    assert found.pages == usable
    assert set(found.missing) == {
        name for name, (rule, held) in hits.items() if not rule.boundaries(held)[-1]
    }


def test_the_missing_components_are_those_that_the_longest_prefix_lacks() -> None:
    hits = {
        "kv": (ALL_PAGES, [1, 1, 1]),
        "swa": (trailing_pages(2), [1, 1, 0]),
        "state": (trailing_pages(1), [0, 1, 1]),
    }
    assert usable_pages(hits) == Usable(2, ("swa",))


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"kv: 3, swa: 2"):
        usable_pages({"kv": (ALL_PAGES, [1, 1, 1]), "swa": (trailing_pages(1), [1, 1])})
    with pytest.raises(ArgumentError, match="hits"):
        usable_pages({})


VECTOR = st.lists(st.booleans(), min_size=7, max_size=7)


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.tuples(st.none() | st.integers(1, 9), VECTOR), min_size=1
    )
)
def test_the_rules_say_what_a_plain_search_finds(given_hits) -> None:
    hits = {
        name: (ALL_PAGES if need is None else trailing_pages(need), held)
        for name, (need, held) in given_hits.items()
    }
    fits = [
        end
        for end in range(8)
        if all(all(held[max(0, end - (need or end)) : end]) for need, held in given_hits.values())
    ]
    assert usable_pages(hits).pages == fits[-1]


@pytest.mark.parametrize(("window", "pages"), [(1, 1), (64, 1), (65, 2), (128, 2), (1024, 16)])
def test_a_window_needs_the_pages_that_it_touches(window, pages) -> None:
    pool = pools({"swa": rows(64, 4)}, 2, 2, CONFIG)
    assert SlidingWindow("swa", window, *pool).rule(64).trailing == pages
    assert Recurrent("state", *pool).rule(64).trailing == 1


def build(page_size: int, *components, owners: int = 1) -> HiRadixCache:
    device = DevicePool.empty(spec(page_size), "layer_first", 4)
    device = DevicePool(device.buffers, num_owners=owners)
    host = HostPool.beside(device, CONFIG, num_pages=4)
    return HiRadixCache(device, host, CONFIG, after=None, components=components)


def test_components_that_cannot_be_kept_are_refused_by_name() -> None:
    window, state = (pools({"x": rows(size, 4)}, 2, 2, CONFIG) for size in (2, 1))
    for components, owners, why in (
        ([SlidingWindow("kv", 4, *window)], 1, "name that no other"),
        ([Recurrent("a", *state), SlidingWindow("a", 4, *window)], 1, "name that no other"),
        ([SlidingWindow("a", 4, *window), SlidingWindow("b", 4, *window)], 1, "pools of its own"),
        ([SlidingWindow("a", 0, *window)], 1, "at least 1 token"),
        ([SlidingWindow("a", 4, *state)], 1, "pages of size 2"),
        ([Recurrent("a", *window)], 1, "pages of size 1"),
        ([Recurrent("a", *state)], 2, "no context parallelism"),
        ([Recurrent("a", state[0], window[1])], 1, "geometry"),
        ([state[0]], 1, "components"),
    ):
        with pytest.raises(ArgumentError, match=why) as error:
            build(2, *components, owners=owners)
        assert (
            why in ("geometry", "components")
            or "component 'a'" in str(error.value)
            or (f"component {components[-1].name!r}" in str(error.value))
        )
    assert build(2, SlidingWindow("a", 4, *window), Recurrent("b", *state)).stats()["a_device_free"]


def test_a_component_that_nobody_declared_is_no_component() -> None:
    cache = hybrid_cache(states=None)
    with pytest.raises(ArgumentError, match="one of swa"):
        cache.evict(1, "device", "state")
    cache.acquire("r", [1])
    with pytest.raises(ArgumentError, match="it has none"):
        cache.spare_state("r", "swa")
    assert np.all(cache.device.buffers["kv"].device == torch.device("cpu"))
