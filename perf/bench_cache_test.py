"""CPU cost of the cache's look-ups and of an eviction: `pytest perf --benchmark-only`.

`dict_ratio` in the extra columns compares with the same prompt looked up in a plain dictionary of
page hashes, hashes computed as an engine would, in the same run: below 1 the tree is quicker.
"""

from __future__ import annotations

import time
from statistics import median, quantiles

import numpy as np
import pytest

from hikv.cache.keys import page_hashes
from hikv.cache.node import DEVICE, Namespace
from hikv.cache.tree import RadixTree

PAGE = 64
SPACE = Namespace()
SIZES = [(1 << 10, 1), (1 << 17, 16), (1 << 20, 100), (1 << 20, 2_000)]

each_prompt = pytest.mark.parametrize(
    ("num_tokens", "num_nodes"), SIZES, ids=["1k", "128k", "1M", "1M-2k-nodes"]
)


def prompt(num_tokens: int) -> np.ndarray:
    """Random tokens, int32."""
    return np.random.default_rng(0).integers(0, 1 << 17, num_tokens, dtype=np.int32)


def resident(tokens: np.ndarray, num_nodes: int) -> RadixTree:
    """A tree that holds `tokens` in a chain of `num_nodes` nodes."""
    tree = RadixTree(PAGE)
    pages = np.arange(tokens.size // PAGE)
    for end in np.linspace(0, pages.size, num_nodes + 1, dtype=int)[1:]:
        tree.insert(SPACE, tokens[: end * PAGE], pages[:end])
    assert len(list(tree.nodes())) == num_nodes
    return tree


@each_prompt
def test_match(benchmark, num_tokens, num_nodes):
    tokens = prompt(num_tokens)
    tree = resident(tokens, num_nodes)
    found = benchmark(tree.match, SPACE, tokens)
    assert found.device_len == num_tokens
    known = {digest: page for page, digest in enumerate(page_hashes(tokens, PAGE, b""))}
    _note_dict(benchmark, lambda: [known[digest] for digest in page_hashes(tokens, PAGE, b"")])


@each_prompt
def test_acquire_and_release(benchmark, num_tokens, num_nodes):
    tokens = prompt(num_tokens)
    tree = resident(tokens, num_nodes)

    def use() -> int:
        acquired = tree.acquire(SPACE, tokens)
        tree.release(acquired.device)
        tree.release(acquired.host)
        return acquired.match.device_len

    assert benchmark(use) == num_tokens


@each_prompt
def test_insert_what_is_there(benchmark, num_tokens, num_nodes):
    tokens = prompt(num_tokens)
    tree = resident(tokens, num_nodes)
    pages = np.arange(num_tokens // PAGE)
    done = benchmark(tree.insert, SPACE, tokens, pages)
    assert (done.created, done.duplicates.size) == (None, 0)


@each_prompt
def test_insert_what_is_new(benchmark, num_tokens, num_nodes):
    tokens, pages = prompt(num_tokens), np.arange(num_tokens // PAGE)

    def fresh() -> tuple[tuple[RadixTree], dict[str, object]]:
        return (RadixTree(PAGE),), {}

    done = benchmark.pedantic(
        lambda tree: tree.insert(SPACE, tokens, pages), setup=fresh, rounds=20
    )
    assert done.created.num_pages == pages.size


@each_prompt
def test_convert_a_list(benchmark, num_tokens, num_nodes):
    """What a caller pays beside the match for passing a Python list."""
    tokens = prompt(num_tokens).tolist()
    array = benchmark(np.asarray, tokens, np.int32)
    assert array.size == num_tokens


@pytest.mark.parametrize("num_leaves", [1_000, 10_000, 100_000])
def test_evict_one_of(benchmark, num_leaves):
    """A leaf goes and another comes; the extra columns are of the eviction alone, in µs."""
    tree = RadixTree(1)
    for leaf in range(num_leaves):
        tree.insert(SPACE, [leaf], [leaf])
    spent: list[float] = []

    def evict() -> int:
        start = time.perf_counter()
        (victim,) = tree.evict(DEVICE, 1)
        spent.append(time.perf_counter() - start)
        tree.insert(SPACE, victim.node.tokens, victim.pages)
        return victim.pages.size

    assert benchmark.pedantic(evict, rounds=5_000, warmup_rounds=200) == 1
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["evict_median_us"] = round(1e6 * median(spent), 2)
        benchmark.extra_info["evict_p99_us"] = round(1e6 * quantiles(spent, n=100)[98], 2)


def _note_dict(benchmark, look_up) -> None:
    """Time the dictionary in the same run; nothing is noted where benchmarks are off."""
    if benchmark.stats is None:
        return
    times = []
    for _ in range(5):
        start = time.perf_counter()
        look_up()
        times.append(time.perf_counter() - start)
    benchmark.extra_info["dict_ratio"] = round(benchmark.stats.stats.median / median(times), 4)
