"""Eviction order: the queue against a sorted list, each policy, and two real traces."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hikv.cache.allocator import PageAllocator
from hikv.cache.eviction import BLOCK, POLICIES, OrderedQueue, find_policy, length_aware
from hikv.cache.node import DEVICE, HOST, Namespace
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError

NONE = Namespace()
DATA = Path(__file__).parents[2] / "shared" / "data"
CONVERSATION, CODING = "conversation_trace.jsonl", "agentic_coding_trace.jsonl"


@dataclass(eq=False)
class Item:
    serial: int
    key: int


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["put", "discard", "pop"]))))
def test_the_queue_is_a_sorted_list(steps: list[tuple[int, str]]) -> None:
    queue: OrderedQueue[Item] = OrderedQueue(lambda item: item.key)
    items = [Item(serial, 0) for serial in range(4)]
    held: set[Item] = set()
    for at, (number, verb) in enumerate(steps):
        item = items[number % 4]
        if verb == "put":
            item.key = number * at % 5
            queue.put(item)
            held.add(item)
        elif verb == "discard":
            queue.discard(item)
            held.discard(item)
        elif held:
            first = queue.first()
            assert first is min(held, key=lambda item: (item.key, item.serial))
            queue.discard(first)
            held.discard(first)
        assert list(queue.problems(held)) == []
        assert len(queue) == len(held)
        assert (item in queue) == (item in held)


def test_the_queue_stays_ordered_over_many_blocks() -> None:
    chance = random.Random(5)
    queue: OrderedQueue[Item] = OrderedQueue(lambda item: item.key)
    items = [Item(serial, chance.randrange(1000)) for serial in range(6 * BLOCK)]
    for item in items:
        queue.put(item)
    for item in items[::3]:
        queue.discard(item)
    for item in items[1::3]:
        item.key = chance.randrange(1000)
        queue.put(item)
    left = [item for at, item in enumerate(items) if at % 3]
    assert list(queue.problems(set(left))) == []
    order = []
    while (item := queue.first()) is not None:
        order.append(item)
        queue.discard(item)
    assert order == sorted(left, key=lambda item: (item.key, item.serial))


def test_the_queue_says_what_is_wrong_with_it() -> None:
    queue: OrderedQueue[Item] = OrderedQueue(lambda item: item.key)
    one, two = Item(1, 5), Item(2, 6)
    queue.put(one)
    assert list(queue.problems({one, two})) == ["has 1 nodes, not the 2 unlocked leaves"]
    one.key = 9
    assert list(queue.problems({one})) == ["keeps a node under a key it no longer has"]
    queue.put(one)
    queue.put(two)
    queue._blocks[0].reverse()
    assert "is out of order" in list(queue.problems({one, two}))


def order(policy: str) -> str:
    """Five leaves: a used once long ago, b used often, c urgent, d long, e the newest."""
    tree = RadixTree(1, policy=find_policy(policy))
    leaves = {
        "a": ([1, 2], 0),
        "b": ([11, 12], 0),
        "c": ([21, 22], 1),
        "d": (list(range(100, 800)), 0),
        "e": ([31, 32], 0),
    }
    page = 0
    for tokens, priority in leaves.values():
        tree.insert(NONE, tokens, range(page, page + len(tokens)), priority=priority)
        page += len(tokens)
    for name in "bba":  # leave one token to compute, as a request does
        acquired = tree.acquire(NONE, [*leaves[name][0], 5])
        tree.release(acquired.device)
        tree.release(acquired.host)
    first = {tokens[0]: name for name, (tokens, _) in leaves.items()}
    return "".join(first[int(victim.node.tokens[0])] for victim in tree.evict(DEVICE, page))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "cdeba"),
        ("lfu", "cdeab"),  # used 1, 1, 1, 2, 3 times
        ("slru", "cdeba"),  # c, d, e on probation; b, a protected
        ("fifo", "abcde"),
        ("priority", "debac"),
        ("length_aware", "cebad"),  # losing d would cost 700 tokens
    ],
)
def test_each_policy_orders_its_victims(policy: str, expected: str) -> None:
    assert order(policy) == expected


def test_every_policy_is_tested_and_an_unknown_one_refused() -> None:
    assert set(POLICIES) == {"lru", "lfu", "slru", "fifo", "priority", "length_aware"}
    with pytest.raises(ArgumentError, match="one of lru, lfu"):
        RadixTree(1, policy="mru")
    with pytest.raises(ArgumentError, match="granularity"):
        RadixTree(1, granularity="block")


def test_length_aware_takes_only_tails_that_a_conversation_can_spare() -> None:
    tree = RadixTree(1, policy=length_aware(free_tail=2))
    tree.insert(NONE, range(50, 53), range(6, 9))  # the oldest, but three tokens are too many
    for length in (2, 4, 6):
        tree.insert(NONE, range(length), range(length))
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 2)] == [[4, 5]]
    # without 2 and 3 as well, the conversation of six would lack four: by recency now
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 1)] == [[6, 7, 8]]
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 1)] == [[2, 3]]


def test_a_split_moves_a_leaf_whose_key_depends_on_its_start() -> None:
    tree = RadixTree(1, policy=length_aware(free_tail=2))
    tree.insert(NONE, [8], [9])
    tree.insert(NONE, [1, 2, 3, 4], range(4))
    tree.insert(NONE, [1, 2, 9, 9, 9], [0, 1, 4, 5, 6])
    tree.check()
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 2)] == [[9], [2, 3]]


def test_a_parent_becomes_a_leaf_in_its_own_place() -> None:
    """Older than another leaf, it must not queue behind it for having become a leaf later."""
    tree = RadixTree(1)
    tree.insert(NONE, [1], [0])
    tree.insert(NONE, [1, 2], [0, 1])
    tree.insert(NONE, [9], [2])
    assert [v.pages.tolist() for v in tree.evict(DEVICE, 3)] == [[1], [0], [2]]


def test_a_released_leaf_keeps_the_recency_of_its_use() -> None:
    tree = RadixTree(1)
    for at in range(3):
        tree.insert(NONE, [at], [at])
    acquired = tree.acquire(NONE, [0])
    lock = tree.lock(tree.match(NONE, [1]).nodes[0], DEVICE)
    tree.release(acquired.device)
    tree.release(lock)  # a lock alone is no use
    assert [v.pages.tolist() for v in tree.evict(DEVICE, 3)] == [[1], [2], [0]]


@pytest.mark.parametrize(
    ("granularity", "freed"),
    [("segment", [[3, 4, 5]]), ("page", [[5]])],
)
def test_one_page_is_asked_for(granularity: str, freed: list[list[int]]) -> None:
    """A stem of three pages and a leaf of three: the whole leaf goes, or its last page alone."""
    tree = RadixTree(1, granularity=granularity)
    tree.insert(NONE, [1, 2, 3], [0, 1, 2])
    tree.insert(NONE, [1, 2, 3, 4, 5, 6], range(6))
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 1)] == freed
    assert tree.evict(HOST, 1) == []
    tree.check()


def replay(trace: str, capacity: int | None, granularity: str) -> tuple[int, int]:
    """`(block touches, hits)`: one hash id is one page; nothing stays locked after its insert."""
    requests = [
        np.array(json.loads(line)["hash_ids"], np.int32)
        for line in (DATA / trace).read_text().splitlines()
    ]
    touches = sum(ids.size for ids in requests)
    pool = PageAllocator(touches if capacity is None else capacity)
    tree = RadixTree(1, granularity=granularity)
    hits = 0
    for ids in requests:
        acquired = tree.acquire(NONE, ids)
        cached = acquired.match.pages(DEVICE)
        hits += cached.size
        for victim in tree.evict(DEVICE, ids.size - cached.size - pool.num_free):
            pool.free(victim.pages)
        fresh = pool.alloc(ids.size - cached.size)
        tree.insert(NONE, ids, np.concatenate([cached, fresh]))
        tree.release(acquired.device)
        tree.release(acquired.host)
    tree.check()
    pool.check(tree.owned(DEVICE))
    return touches, hits


@pytest.mark.parametrize(
    ("trace", "capacity", "granularity", "touches", "hits"),
    [
        (CONVERSATION, None, "segment", 288_500, 105_710),
        (CONVERSATION, 1_000, "segment", 288_500, 12_831),
        (CONVERSATION, 10_000, "segment", 288_500, 60_921),
        (CONVERSATION, 1_000, "page", 288_500, 12_847),
        (CONVERSATION, 10_000, "page", 288_500, 61_046),
        (CODING, None, "segment", 522_502, 460_358),
        (CODING, 10_000, "page", 522_502, 427_431),
        (CODING, 30_000, "page", 522_502, 455_718),
    ],
)
def test_real_traces_give_the_published_integers(
    trace: str, capacity: int | None, granularity: str, touches: int, hits: int
) -> None:
    if not (DATA / trace).exists():
        pytest.skip(f"the trace {trace} is not beside this checkout")
    assert replay(trace, capacity, granularity) == (touches, hits)
