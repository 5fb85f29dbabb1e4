"""The random requests of test_hiradix_machine.py over a window, a state and sidecars as well.

Copies of KV, windows and states end in any order, fail one by one, or never start. After every step
the books of all pools are proved, and every entry of the tree and of every request, in each tier,
holds the bytes of its prefix; so no cached state was ever written by a request that went on from
it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from cache_cases import manual_lanes
from hybrid_cases import (
    check_bytes,
    forward,
    hybrid_cache,
    publish,
    read_hit,
    state_is,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_hiradix_machine import INDEX, PAGE, PROMPTS, SPACES, Machine, Refused, Running

from hikv.cache.node import DEVICE, TIERS, Namespace
from hikv.errors import CapacityError, CopyFailed


class HybridMachine(Machine):
    shape: ClassVar[dict] = {"window": 3, "kv": (12, 8), "swa": (8, 5), "states": (4, 3)}

    def __init__(self) -> None:
        super().__init__()
        self.lanes = manual_lanes()
        self.seen = {name: set() for name in TIERS}
        self.sequence = 0
        self.now = 0
        self.cache = hybrid_cache(
            PAGE,
            lanes=self.lanes,
            on_event=self.follow,
            clock=lambda: self.now,
            **{**self.shape, **self.options},
        )

    @rule(
        space=st.sampled_from(SPACES),
        tokens=PROMPTS,
        spare=st.integers(0, 1),
        quota=st.none() | st.integers(0, 9),
    )
    def admit(self, space: Namespace, tokens: list, spare: int, quota: int | None) -> None:
        found = self.cache.match_prefix(tokens, space, max(0, len(tokens) - spare))
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        request = self.cache.acquire(rid, tokens, space, max(0, len(tokens) - spare))
        assert request.lengths == found
        try:
            if quota != 0:
                before = request.lengths.device_len
                result = self.cache.load_back(rid, quota)
                assert result.loaded_len == request.lengths.loaded_len
                assert request.lengths.device_len >= before
            cached, lengths = request.pages.size, request.lengths
            assert cached * PAGE == lengths.device_len + lengths.loaded_len
            assert lengths.extend_len == len(tokens) - cached * PAGE
            self.cache.explain(rid)
            cost, size = self.cache.admission_cost(rid), cached
            lacked = {n: s.lacking(-(-len(tokens) // PAGE)) for n, s in request.shares.items()}
            self.cache.allocate(rid, len(tokens))
            if request.loads or lengths.host_len == 0:
                assert cost.pages["kv"] == request.pages.size - size
                assert {name: cost.pages[name] for name in lacked} == lacked
        except (CapacityError, Refused):
            self.cache.cancel(rid)
        else:
            self.running.append(Running(request, cached))

    @precondition(lambda self: self.running)
    @rule(at=INDEX)
    def forward(self, at: int) -> None:
        """Wait for the load-back, read what it brought, compute the rest."""
        running = self.running[at % len(self.running)]
        request = running.request
        try:
            request.wait()
        except CopyFailed:
            return
        if not running.computed:
            read_hit(self.cache, request, running.cached)
            forward(self.cache, request, request.tokens, running.cached, None)
            running.computed = True

    @precondition(lambda self: self.running)
    @rule(at=INDEX, state=st.booleans())
    def publish(self, at: int, state: bool = True) -> None:
        running = self.running[at % len(self.running)]
        request = running.request
        if not running.computed:
            return
        tables = {name: table.copy() for name, table in request.windows.items()}
        try:
            done = publish(self.cache, request, request.tokens, state)
        except (Refused, CapacityError):
            return
        assert done.private is None
        usable = self.cache.match_prefix(request.tokens, request.namespace).device_len
        assert usable <= done.inserted_len
        if state:
            assert usable == done.inserted_len
        for name, table in request.windows.items():
            assert table.size == tables[name].size

    @precondition(lambda self: self.running)
    @rule(at=INDEX, more=st.integers(1, 3))
    def go_on(self, at: int, more: int) -> None:
        """Decode: where the state was handed over, the request gets a copy to write."""
        running = self.running[at % len(self.running)]
        request = running.request
        if not running.computed or request.failed is not None:
            return
        before = len(request.tokens)
        tokens = np.append(request.tokens, [1] * more).astype(np.int32)
        handed = self.cache.hybrid.trails.keys() & {"state"} - request.states.keys()
        try:
            self.cache.allocate(request.rid, tokens.size)
            request.wait()
        except (CapacityError, Refused, CopyFailed):
            return
        if handed and before >= PAGE:
            slot = request.states["state"]
            assert state_is(
                self.cache, DEVICE, slot, request.namespace, tokens, before // PAGE * PAGE
            )
        request.tokens = tokens
        forward(self.cache, request, tokens, before // PAGE, None)

    @rule(which=INDEX, tier=st.sampled_from(TIERS), count=st.integers(1, 4))
    def evict_component(self, which: int, tier: str, count: int) -> None:
        name = self.component(which)
        before = self.cache.stats()[f"{name}_{tier}_free"]
        try:
            freed = self.cache.evict(count, tier, name)
        except Refused:
            return
        assert self.cache.stats()[f"{name}_{tier}_free"] >= before + freed

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS, which=INDEX)
    def reload_component(self, space: Namespace, tokens: list, which: int) -> None:
        """A request whose full KV is on the GPU, and a component on the host alone."""
        self.serve(space, tokens)
        try:
            self.cache.evict(12, "device", self.component(which))
        except Refused:
            return
        self.admit(space, tokens, 0, None)

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS)
    def pin(self, space: Namespace, tokens: list) -> None:
        """For two steps of the clock."""
        self.cache.pin(tokens, 2, space)

    @rule()
    def tick(self) -> None:
        self.now += 1

    def component(self, which: int) -> str:
        names = list(self.cache.hybrid.trails)
        return names[which % len(names)]

    @invariant()
    def everything_holds(self) -> None:
        self.cache.check()
        self.cache.events.deliver()
        held: dict[str, set[bytes]] = {name: set() for name in TIERS}
        for node in self.cache.tree.nodes():
            for tier, name in enumerate(TIERS):
                if node.pages[tier] is not None:
                    held[name] |= set(node.hashes)
        assert held == self.seen
        check_bytes(self.cache)
        for running in self.running:
            request = running.request
            if request.ticket is None and request.failed is None and not running.computed:
                read_hit(self.cache, request, running.cached)

    def teardown(self) -> None:
        super().teardown()
        for trail in self.cache.hybrid.trails.values():
            assert trail.locks == set()
            for pool in trail.pools:
                assert pool.allocator.num_free == pool.num_pages


class WriteBack(HybridMachine):
    options: ClassVar[dict] = {"write_policy": "write_back", "granularity": "page"}


class Selective(HybridMachine):
    options: ClassVar[dict] = {"write_policy": "write_through_selective", "eviction": "lfu"}


class Windows(HybridMachine):
    shape: ClassVar[dict] = {**HybridMachine.shape, "states": None, "window": 5}


class States(HybridMachine):
    shape: ClassVar[dict] = {**HybridMachine.shape, "window": 0}
    options: ClassVar[dict] = {"load_back_threshold": 4}


CASES = (HybridMachine, WriteBack, Selective, Windows, States)
for case in CASES:
    case.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestHybrid, TestWriteBack, TestSelective, TestWindows, TestStates = (
    case.TestCase for case in CASES
)
