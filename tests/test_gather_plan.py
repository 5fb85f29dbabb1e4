"""What a batch gathers, against a statement of it that has no arithmetic in common."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.cp.plan import GatherPlan, Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError


def check_plan(plan: GatherPlan, shards: ShardMap, requests: list[Request]) -> None:
    """Fill a scratch of token names by the plan, and read every request through its table."""
    n, p = shards.num_ranks, shards.page_size
    scratch: list[object] = ["poison"] * (plan.num_pages * p)
    for owner in range(n):
        pages = plan.local_pages[owner].tolist()
        assert pages == sorted(set(pages))
        for local, place in zip(pages, plan.block(owner).tolist(), strict=True):
            assert owner * plan.block_pages <= place < (owner + 1) * plan.block_pages
            for row in range(p):
                assert scratch[place * p + row] == "poison", "two pages in one place"
                scratch[place * p + row] = ("cached", local * n + owner, row)
    at = 0
    for i, request in enumerate(requests):
        for token in range(request.chunk_tokens):
            scratch[plan.chunk_slots[at]] = ("chunk", i, token)
            at += 1
    assert at == len(plan.chunk_slots)

    for i, request in enumerate(requests):
        table = plan.table(i).tolist()
        assert len(table) == -(-(request.prefix_tokens + request.chunk_tokens) // p)
        read = [
            scratch[table[t // p] * p + t % p]
            for t in range(request.prefix_tokens + request.chunk_tokens)
        ]
        pages = [int(page) for page in request.pages]
        prefix = [("cached", pages[t // p], t % p) for t in range(request.prefix_tokens)]
        assert read == prefix + [("chunk", i, t) for t in range(request.chunk_tokens)]
    named = {int(page) for request in requests for page in request.pages}
    assert plan.gathered_pages == len(named)
    assert plan.block_pages == max(
        [sum(page % n == owner for page in named) for owner in range(n)], default=0
    )


def random_batch(rng: np.random.Generator, page_size: int) -> list[Request]:
    """Requests over scattered pages; some share whole pages with an earlier request."""
    free = rng.permutation(400)
    requests: list[Request] = []
    for _ in range(rng.integers(0, 5)):
        prefix = int(rng.integers(0, 12 * page_size + 1))
        own = free[: -(-prefix // page_size)]
        if requests and rng.random() < 0.5:
            shared = np.asarray(requests[0].pages)[: requests[0].prefix_tokens // page_size]
            shared = shared[: prefix // page_size]
            own = np.concatenate((shared, own[len(shared) :]))
        free = free[-(-prefix // page_size) :]
        requests.append(Request(own, prefix, int(rng.integers(0, 3 * page_size))))
    return requests


@pytest.mark.parametrize("seed", range(10))
def test_any_batch_reads_back_in_logical_order(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        page_size = int(rng.choice([1, 2, 3, 4]))
        shards = ShardMap(int(rng.integers(1, 9)), page_size)
        requests = random_batch(rng, page_size)
        check_plan(plan_gather(shards, requests), shards, requests)


def test_three_pages_of_two_ranks():
    """A, B, C are pages 2, 3, 4: rank 0 gives A and C, rank 1 gives B and a padding page."""
    plan = plan_gather(ShardMap(2, 64), [Request([2, 3, 4], 192)])
    assert [pages.tolist() for pages in plan.local_pages] == [[1, 2], [1]]
    assert (plan.block_pages, plan.num_pages, plan.gathered_pages) == (2, 4, 3)
    assert plan.table(0).tolist() == [0, 2, 1]
    assert plan.page_table.dtype == np.int32


def test_a_chunk_begins_on_the_partial_page_of_its_prefix():
    plan = plan_gather(ShardMap(2, 4), [Request([2, 3, 4], 10, chunk_tokens=5)])
    assert plan.table(0).tolist() == [0, 2, 1, 4]
    assert plan.chunk_slots.tolist() == [6, 7, 16, 17, 18]
    assert plan.num_pages == 5


@pytest.mark.parametrize("requests", [[], [Request([], 0)], [Request([], 0, 3)]])
def test_a_batch_may_have_nothing_to_gather(requests):
    plan = plan_gather(ShardMap(2, 2), requests)
    assert plan.gathered_pages == plan.block_pages == 0
    check_plan(plan, ShardMap(2, 2), requests)


def test_pages_may_come_as_tensors():
    plan = plan_gather(ShardMap(2, 4), [Request(torch.tensor([2, 3], dtype=torch.int32), 8)])
    assert plan.table(0).tolist() == [0, 1]


def test_equal_batches_have_equal_digests_and_others_do_not():
    shards = ShardMap(2, 4)
    batches = [
        [Request([2, 3, 4], 12)],
        [Request([2, 3, 4], 11)],
        [Request([2, 3, 6], 12)],
        [Request([2, 3, 4], 12, 1)],
        [Request([2, 3], 8), Request([4], 4)],
    ]
    digests = [plan_gather(shards, batch).digest for batch in batches]
    assert len(set(digests)) == len(batches)
    assert digests[0] == plan_gather(shards, [Request(np.array([2, 3, 4]), 12)]).digest
    assert all(0 <= digest < 2**63 for digest in digests)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([Request([2], 4), Request([3], 5)], r"requests\[1\].pages: expected the 2 pages of 5"),
        ([Request([2, 3], 4)], r"requests\[0\].pages: expected the 1 pages of 4 tokens, got 2"),
        ([Request([2], 3, 1), Request([2], 4)], r"requests\[0\].*page 2, which 2 requests name"),
        ([Request([-1], 4)], r"requests\[0\].pages\[0\]: expected a page id"),
        ([Request([2.0], 4)], r"requests\[0\].pages: expected one-dim.*float64"),
        ([Request([2], -4)], r"requests\[0\].prefix_tokens"),
        ([Request([2], 4, 0.5)], r"requests\[0\].chunk_tokens"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(requests, message):
    with pytest.raises(ArgumentError, match=message):
        plan_gather(ShardMap(2, 4), requests)


def test_requests_may_share_a_partial_page_that_nobody_continues():
    requests = [Request([2], 3), Request([2], 3)]
    check_plan(plan_gather(ShardMap(2, 4), requests), ShardMap(2, 4), requests)


def interleaved(tokens: int, num_ranks: int, rank: int) -> np.ndarray:
    return np.arange(rank, tokens, num_ranks)


def zigzag(tokens: int, num_ranks: int, rank: int) -> np.ndarray:
    """Segments r and 2N − 1 − r of 2N, so that causal attention costs every rank the same."""
    segments = np.array_split(np.arange(tokens), 2 * num_ranks)
    return np.concatenate((segments[rank], segments[2 * num_ranks - 1 - rank]))


@pytest.mark.parametrize("assign", [interleaved, zigzag])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_who_computes_a_token_does_not_matter_to_where_it_lies(assign, num_ranks):
    """The chunk arrives in the order of the ranks that computed it, and is staged and stored."""
    shards = ShardMap(num_ranks, 4)
    pages = np.arange(num_ranks, num_ranks + 12)
    request = Request(pages[:6], 22, chunk_tokens=26)
    plan = plan_gather(shards, [request])
    arrived = np.concatenate([assign(26, num_ranks, rank) for rank in range(num_ranks)])
    assert sorted(arrived) == list(range(26))

    scratch = np.full(plan.num_pages * 4, -1)
    scratch[plan.chunk_slots[arrived]] = arrived
    tokens = 22 + np.arange(26)
    assert scratch[plan.table(0)[tokens // 4] * 4 + tokens % 4].tolist() == list(range(26))

    stored = np.full((num_ranks, 4 * 12), -1)
    slots = pages[tokens // 4] * 4 + tokens % 4
    for rank in range(num_ranks):
        own = arrived[shards.owner(slots[arrived]) == rank]
        stored[rank, shards.local(slots[own])] = own
    assert stored[shards.owner(slots), shards.local(slots)].tolist() == list(range(26))
    assert (stored >= 0).sum() == 26, "every token on one rank"
