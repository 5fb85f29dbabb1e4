"""CPU cost of planning a gather: `pytest perf --benchmark-only`.

200 thousand tokens on scattered pages. At most 0.5 ms at 64 tokens a page and 1 ms at 16 are the
figures to keep; `ns_per_page` in the extra columns of `--benchmark-json` should not grow with the
tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from hikv.cp.plan import Request, plan_gather
from hikv.cp.shard_map import ShardMap

TOKENS = 200_000


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("page_size", [64, 16, 1])
def test_plan(benchmark, page_size, num_ranks):
    _measure(benchmark, page_size, num_ranks, TOKENS)


@pytest.mark.parametrize("tokens", [TOKENS // 4, TOKENS // 2, TOKENS, 4 * TOKENS])
def test_growth(benchmark, tokens):
    _measure(benchmark, 16, 8, tokens)


def _measure(benchmark, page_size: int, num_ranks: int, tokens: int) -> None:
    num_pages = tokens // page_size
    pages = np.random.default_rng(0).permutation(3 * num_pages)[:num_pages]
    shards, requests = ShardMap(num_ranks, page_size), [Request(pages, tokens, 8192)]
    plan = benchmark(plan_gather, shards, requests)
    assert plan.gathered_pages == num_pages
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["ns_per_page"] = benchmark.stats.stats.median * 1e9 / num_pages
