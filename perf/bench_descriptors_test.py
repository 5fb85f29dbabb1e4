"""CPU cost of a copy's descriptors: `pytest perf --benchmark-only`.

The pages are scattered, so none join: every page of the pair below has 4 runs. `ns_per_descriptor`
in the extra columns of `--benchmark-json` is the figure to compare: at most 100 from 1k pages on,
and the same at 100k, if the cost grows linearly.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.kernels.copy_boxes import boxes, split_boxes
from hikv.kernels.copy_engine import descriptors, split_at_borders
from hikv.plan import CopyPlan, plan_transfer
from hikv.spec import KVSpec

NUM_PAGES = (1, 1_000, 100_000)


def scattered(num_pages: int, host: str = "page_first_direct") -> CopyPlan:
    """`num_pages` pages of a device pool to other pages of a host pool."""
    spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.bfloat16)
    src = KVBuffer.empty(spec, "layer_first", num_pages + 1, device="meta")
    dst = KVBuffer.empty(spec, host, num_pages + 1)
    rng = np.random.default_rng(0)
    src_pages, dst_pages = (rng.permutation(num_pages + 1)[:num_pages] for _ in range(2))
    return plan_transfer(src, dst, src_pages, dst_pages)


@pytest.mark.parametrize("num_pages", NUM_PAGES)
def test_build(benchmark, num_pages):
    plan = scattered(num_pages)
    work = benchmark(descriptors, plan)
    assert len(work) == plan.num_descriptors == 4 * num_pages
    _note_cost(benchmark, len(work))


@pytest.mark.parametrize("num_pages", NUM_PAGES)
def test_split_at_borders(benchmark, num_pages):
    work = descriptors(scattered(num_pages))
    middle = int(work.dst[0] + work.nbytes[0] // 2)
    cut = benchmark(split_at_borders, work, np.array([middle]))
    assert len(cut) == len(work) + 1
    _note_cost(benchmark, len(work))


@pytest.mark.parametrize("num_pages", NUM_PAGES)
def test_build_boxes(benchmark, num_pages):
    plan = scattered(num_pages, "page_first")  # 16 runs a page, and a box for each layer
    work = benchmark(boxes, plan)
    assert len(work) == plan.num_descriptors // 8 == 2 * num_pages
    _note_cost(benchmark, len(work))


@pytest.mark.parametrize("num_pages", NUM_PAGES)
def test_split_boxes(benchmark, num_pages):
    work = boxes(scattered(num_pages, "page_first"))
    middle = int(work.boxes["dst"]["address"][0]) + 1
    cut = benchmark(split_boxes, work, np.array([middle]))
    assert len(cut) > len(work)
    _note_cost(benchmark, len(work))


def _note_cost(benchmark, num_descriptors: int) -> None:
    if benchmark.stats is not None:  # None under --benchmark-disable
        nanoseconds = benchmark.stats.stats.median * 1e9
        benchmark.extra_info["ns_per_descriptor"] = nanoseconds / num_descriptors
