"""Random requests, copies and evictions over small pools; everything is proved after every step.

The model writes into each page the prefix that it holds, so a page that is freed too early, read
too early or named twice shows up as a wrong prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile, takewhile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hikv.cache.allocator import RotatingAllocator
from hikv.cache.node import DEVICE, HOST, Acquired, Namespace, Operation
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError

SPACES = [Namespace(), Namespace.of(salt="s")]
PAGE = 2
PROMPTS = st.tuples(st.integers(0, 8), st.integers(0, 6)).map(lambda n: (0,) * n[0] + (1,) * n[1])
INDEX = st.integers(0, 63)

Prefix = tuple[Namespace, tuple[int, ...]]


@dataclass
class Request:
    space: Namespace
    tokens: tuple[int, ...]
    acquired: Acquired
    table: np.ndarray
    own: np.ndarray


class Machine(RuleBasedStateMachine):
    owners, granularity, policy = 1, "segment", "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tree = RadixTree(
            PAGE,
            policy=self.policy,
            granularity=self.granularity,
            num_owners=self.owners,
            clock=lambda: self.now,
        )
        self.pools = [RotatingAllocator(16, self.owners), RotatingAllocator(8, self.owners)]
        self.bytes: list[dict[int, Prefix]] = [{}, {}]
        self.requests: list[Request] = []
        self.operations: list[Operation] = []

    def alloc(self, tier: int, count: int, owner: int | None) -> np.ndarray | None:
        """Pages with unknown bytes, making room if need be."""
        pool = self.pools[tier]
        while pool.longest_chain(owner) < count:
            victims = self.tree.evict(tier, 1)
            if not victims:
                return None
            for victim in victims:
                pool.free(victim.pages)
        pages = pool.alloc(count, owner)
        for page in pages.tolist():
            self.bytes[tier].pop(page, None)
        return pages

    def write(self, tier: int, pages: np.ndarray, space: Namespace, tokens: tuple, at: int) -> None:
        for number, page in enumerate(pages.tolist(), at):
            self.bytes[tier][page] = (space, tokens[: (number + 1) * PAGE])

    def read(self, tier: int, pages: np.ndarray, space: Namespace, tokens: tuple) -> None:
        for number, page in enumerate(pages.tolist(), 1):
            assert self.bytes[tier].get(page) == (space, tokens[: number * PAGE])

    def longest_prefix(self, space: Namespace, tokens: tuple) -> int:
        known = set()
        for node in self.tree.nodes():
            if node.namespace == space:
                prefix = tuple(t for above in node.path() for t in above.tokens.tolist())
                known |= {prefix[:end] for end in range(PAGE, len(prefix) + 1, PAGE)}
        return max((len(p) for p in known if p == tokens[: len(p)]), default=0)

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS, spare=st.integers(0, 1))
    def admit(self, space: Namespace, tokens: tuple, spare: int) -> None:
        longest = self.longest_prefix(space, tokens)
        assert self.tree.match(space, tokens).matched_len == longest
        acquired = self.tree.acquire(space, tokens, limit=max(0, len(tokens) - spare))
        match = acquired.match
        assert match.matched_len == min(longest, max(0, len(tokens) - spare) // PAGE * PAGE)
        cached = match.pages(DEVICE)
        self.read(DEVICE, cached, space, tokens)
        self.read(HOST, match.pages(HOST), space, tokens)
        assert cached.size == match.device_len // PAGE
        owner = self.tree.owner_at(match, cached.size)
        fresh = self.alloc(DEVICE, len(tokens) // PAGE - cached.size, owner)
        if fresh is None:
            self.release(acquired)
        else:
            self.write(DEVICE, fresh, space, tokens, cached.size)
            table = np.concatenate([cached, fresh])
            self.requests.append(Request(space, tokens, acquired, table, fresh))

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS)
    def serve(self, space: Namespace, tokens: tuple) -> None:
        """A whole request at once."""
        before = len(self.requests)
        self.admit(space, tokens, 1)
        if len(self.requests) > before:
            self.publish(-1, True, 0)
            self.leave(-1)

    def release(self, acquired: Acquired) -> None:
        self.tree.release(acquired.device)
        self.tree.release(acquired.host)

    @precondition(lambda self: self.requests)
    @rule(at=INDEX, stays=st.booleans(), priority=st.integers(0, 2))
    def publish(self, at: int, stays: bool, priority: int) -> None:
        request = self.requests[at % len(self.requests)]
        try:
            done = self.tree.insert(request.space, request.tokens, request.table, priority=priority)
        except ArgumentError:
            assert self.owners > 1, "only a rotation can be refused"
            return
        self.read(DEVICE, done.pages, request.space, request.tokens)
        assert set(done.duplicates) <= set(request.own)
        device = self.tree.lock(done.node, DEVICE)
        self.tree.release(request.acquired.device)
        request.acquired = request.acquired._replace(device=device)
        request.table, request.own = done.pages, request.own[:0]
        self.pools[DEVICE].free(done.duplicates)
        if not stays:
            self.leave(at)

    @precondition(lambda self: self.requests)
    @rule(at=INDEX)
    def leave(self, at: int) -> None:
        request = self.requests.pop(at % len(self.requests))
        self.release(request.acquired)
        self.pools[DEVICE].free(request.own)

    @rule(tier=st.sampled_from([DEVICE, HOST]), at=INDEX, count=st.integers(1, 6))
    def begin(self, tier: int, at: int, count: int) -> None:
        """Back up or load back the part of some path that is missing in `tier`."""
        nodes = sorted(self.tree.nodes(), key=lambda node: node.serial)
        nodes = [n for n in nodes if not n.occupies(tier) and n.pages[1 - tier] is not None]
        if not nodes:
            return
        path = list(dropwhile(lambda node: node not in nodes, nodes[at % len(nodes)].path()))
        path = list(takewhile(lambda node: node in nodes, path))
        lock = self.tree.lock(path[-1], 1 - tier)
        count = min(count, sum(node.num_pages for node in path))
        owner = (path[0].rotation + path[0].start // PAGE) % self.owners
        pages = self.alloc(tier, count, owner)
        if pages is not None:
            try:
                verb = self.tree.begin_backup if tier == HOST else self.tree.begin_load_back
                self.operations.append(verb(path, pages))
            except ArgumentError:
                assert not path[0].parent.occupies(tier), "only a lost parent may refuse it"
                self.pools[tier].free(pages)
        self.tree.release(lock)

    @precondition(lambda self: self.operations)
    @rule(at=INDEX, arrived=st.none() | st.integers(0, 6))
    def acknowledge(self, at: int, arrived: int | None) -> None:
        """In order; an abort may come at any time."""
        operation = self.operations.pop(at % len(self.operations) if arrived == 0 else 0)
        source, target = (pages.tolist() for pages in operation.pairs)
        arrived = None if arrived is None else min(arrived, len(source))
        for read, written in list(zip(source, target, strict=True))[:arrived]:
            self.bytes[operation.tier][written] = self.bytes[1 - operation.tier][read]
        landed = self.tree.finish(operation, arrived)
        self.pools[operation.tier].free(landed.surplus)

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS, early=st.integers(-1, 2))
    def prefetch(self, space: Namespace, tokens: tuple, early: int) -> None:
        match = self.tree.match(space, tokens)
        start = max(0, match.matched_len // PAGE - early)
        count = len(tokens) // PAGE - start
        owner = self.tree.owner_at(match, start)
        pages = self.alloc(HOST, count, owner) if count > 0 else None
        if pages is None:
            return
        self.write(HOST, pages, space, tokens, start)
        try:
            self.pools[HOST].free(
                self.tree.insert_host(space, tokens, pages, start * PAGE).duplicates
            )
        except ArgumentError:
            assert self.owners > 1, "only a rotation can be refused"
            self.pools[HOST].free(pages)

    @rule(tier=st.sampled_from([DEVICE, HOST]), count=st.integers(1, 4))
    def evict(self, tier: int, count: int) -> None:
        before = self.tree.evictable[tier]
        freed = sum(victim.pages.size for victim in self.drain(tier, count))
        assert self.tree.evictable[tier] == before - freed

    def drain(self, tier: int, count: int) -> list:
        victims = self.tree.evict(tier, count)
        for victim in victims:
            self.pools[tier].free(victim.pages)
        return victims

    @rule(tier=st.sampled_from([DEVICE, HOST]), at=INDEX, seconds=st.integers(1, 5))
    def pin(self, tier: int, at: int, seconds: int) -> None:
        nodes = [node for node in self.tree.nodes() if node.pages[tier] is not None]
        if nodes:
            self.tree.pin(min(nodes, key=lambda n: (n.serial - at) % 64), tier, seconds)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.tree.expire_pins()
        assert all(lock.deadline > self.now for lock in self.tree.locks)

    @invariant()
    def everything_holds(self) -> None:
        self.tree.check()
        own = [request.own for request in self.requests]
        self.pools[DEVICE].check(np.concatenate([self.tree.owned(DEVICE), *own]))
        self.pools[HOST].check(self.tree.owned(HOST))
        for request in self.requests:
            self.read(DEVICE, request.table, request.space, request.tokens)

    def teardown(self) -> None:
        while self.operations:
            self.acknowledge(0, 0)
        while self.requests:
            self.leave(0)
        self.wait(99)
        assert self.tree.locks == set()
        for tier in (DEVICE, HOST):
            self.drain(tier, 99)
            assert self.pools[tier].num_free == self.pools[tier].num_pages
        assert self.tree.roots == {}


class Sharded(Machine):
    owners, granularity, policy = 2, "page", "length_aware"


class Paged(Machine):
    granularity, policy = "page", "slru"


class Frequent(Machine):
    policy = "lfu"


CASES = (Machine, Sharded, Paged, Frequent)
for case in CASES:
    case.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine, TestSharded, TestPaged, TestFrequent = (case.TestCase for case in CASES)
