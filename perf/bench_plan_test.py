"""CPU cost of planning, validation and choice: `pytest perf --benchmark-only`.

Pages are scattered, so none join. `ns_per_page` in the extra columns of `--benchmark-json` is the
figure to compare: it should not grow from 1k to 100k pages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.pages import check_disjoint, check_pages
from hikv.plan import CopyPlan, page_runs, plan_transfer
from hikv.spec import KVSpec
from hikv.tables import Entry, Table
from hikv.tuning import Tuned, choose, key_of

NUM_PAGES = (1, 1_000, 100_000)
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.bfloat16)

each_size = pytest.mark.parametrize("num_pages", NUM_PAGES)


def pools(num_pages: int) -> tuple[KVBuffer, KVBuffer]:
    """A device pool and a host pool with a page to spare."""
    return (
        KVBuffer.empty(SPEC, "layer_first", num_pages + 1, device="meta"),
        KVBuffer.empty(SPEC, "page_first_direct", num_pages + 1),
    )


def scattered(num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Two lists of `num_pages` ids in random order."""
    rng = np.random.default_rng(0)
    src, dst = (rng.permutation(num_pages + 1)[:num_pages] for _ in range(2))
    return src, dst


def planned(num_pages: int) -> CopyPlan:
    """The copy of those pages."""
    return plan_transfer(*pools(num_pages), *scattered(num_pages))


@each_size
def test_plan(benchmark, num_pages):
    src, dst = pools(num_pages)
    plan = benchmark(plan_transfer, src, dst, *scattered(num_pages))
    assert plan.num_pages == num_pages
    _note_cost(benchmark, num_pages)


@each_size
def test_plan_from_tensors(benchmark, num_pages):
    src, dst = pools(num_pages)
    ids = [torch.from_numpy(pages).to(torch.int32) for pages in scattered(num_pages)]
    plan = benchmark(plan_transfer, src, dst, *ids)
    assert plan.num_pages == num_pages
    _note_cost(benchmark, num_pages)


def test_first_plan_of_two_pools(benchmark):
    def fresh():
        return (*pools(1), [0], [1]), {}

    plan = benchmark.pedantic(plan_transfer, setup=fresh, rounds=50)
    assert len(plan.parts) == 1


@each_size
def test_validate_pages(benchmark, num_pages):
    src, _ = scattered(num_pages)
    checked = benchmark(check_pages, "dst_pages", src, num_pages + 1, unique=True)
    assert len(checked) == num_pages
    _note_cost(benchmark, num_pages)


@each_size
def test_validate_one_pool_against_itself(benchmark, num_pages):
    pool = KVBuffer.empty(SPEC, "layer_first", 2 * num_pages)
    ids = np.random.default_rng(0).permutation(2 * num_pages).reshape(2, num_pages)
    assert benchmark(check_disjoint, pool, pool, *ids) is None
    _note_cost(benchmark, num_pages)


@each_size
def test_join_pages(benchmark, num_pages):
    _, lengths = benchmark(page_runs, *scattered(num_pages))
    assert lengths.sum() == num_pages
    _note_cost(benchmark, num_pages)


def tuned(plan: CopyPlan) -> Tuned:
    """A table with one entry, for `plan`."""
    entry = Entry(key_of(plan), "sm", 4, {})
    return Tuned([(Path("gpu.json"), Table({}, {entry.key: entry}))])


@each_size
def test_choose(benchmark, num_pages):
    plan = planned(num_pages)
    table = tuned(plan)
    choice = benchmark(
        choose, plan, block_quota=None, link_gbps=63.0, serves=lambda path: True, table=table
    )
    assert (choice.path, choice.block_quota, choice.source) == ("sm", 4, "gpu.json")
    _note_cost(benchmark, num_pages)


def _note_cost(benchmark, num_pages: int) -> None:
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["ns_per_page"] = benchmark.stats.stats.median * 1e9 / num_pages
