"""Random requests over small pools with real bytes; copies end in any order, fail, or never start.

After every step the books are proved, every page of the tree and of every running request holds the
bytes of its prefix in each tier, and a follower of the events knows exactly what the tree holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from cache_cases import compute, manual_lanes, small_cache, wrong_pages
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hikv.cache.node import TIERS, Namespace
from hikv.cache.requests import Request
from hikv.errors import ArgumentError, CapacityError, CopyFailed

SPACES = [Namespace(), Namespace.of(salt="s")]
PAGE = 2
PROMPTS = st.tuples(st.integers(0, 8), st.integers(0, 6)).map(lambda n: [0] * n[0] + [1] * n[1])
INDEX = st.integers(0, 63)
TIER = st.sampled_from([0, 1])


class Refused(Exception):
    """What a lane raises that takes no copy."""


@dataclass
class Running:
    request: Request
    cached: int
    computed: bool = False


class Machine(RuleBasedStateMachine):
    options: ClassVar[dict] = {}
    owners = 1

    def __init__(self) -> None:
        super().__init__()
        self.lanes = manual_lanes()
        self.seen: dict[str, set[bytes]] = {name: set() for name in TIERS}
        self.sequence = 0
        self.cache = small_cache(
            PAGE,
            12 // self.owners,
            6 // self.owners,
            owners=self.owners,
            lanes=self.lanes,
            on_event=self.follow,
            **self.options,
        )
        self.running: list[Running] = []
        self.next_rid = 0

    def follow(self, event) -> None:
        assert event.sequence == self.sequence
        self.sequence += 1
        if event.kind == "cleared":
            for held in self.seen.values():
                held.clear()
            return
        held, hashes = self.seen[event.tier], set(event.hashes)
        assert event.parent is None or event.parent in held or event.kind == "removed"
        assert hashes.isdisjoint(held) if event.kind == "stored" else hashes <= held
        held.symmetric_difference_update(hashes)

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
        assert wrong_pages(self.cache.device, request.pages, space, tokens) == []
        try:
            if quota != 0:
                result = self.cache.load_back(rid, quota)
                assert result.loaded_len == request.lengths.loaded_len
                assert result.loaded_len <= request.lengths.host_len
                assert quota is None or result.loaded_len <= quota
            cached = request.pages.size
            lengths = request.lengths
            assert cached * PAGE == lengths.device_len + lengths.loaded_len
            assert lengths.extend_len == len(tokens) - cached * PAGE
            cost = self.cache.admission_cost(rid)
            self.cache.allocate(rid, len(tokens))
            assert cost.pages["kv"] == request.pages.size - cached
        except (CapacityError, Refused):
            self.cache.cancel(rid)
        else:
            self.running.append(Running(request, cached))

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS)
    def serve(self, space: Namespace, tokens: list) -> None:
        """A whole request at once, with all copies."""
        before = len(self.running)
        self.admit(space, tokens, 1, None)
        if len(self.running) > before:
            self.forward(-1)
            self.publish(-1)
            self.leave(-1, False)
        self.finish_all()

    @rule(space=st.sampled_from(SPACES), tokens=PROMPTS)
    def reload(self, space: Namespace, tokens: list) -> None:
        """A request whose prompt the host alone holds."""
        self.serve(space, tokens)
        self.evict("device", 12)
        self.admit(space, tokens, 1, None)

    @precondition(lambda self: self.running)
    @rule(at=INDEX, more=st.integers(0, 2))
    def overtake(self, at: int, more: int) -> None:
        """Another request computes the same, and more, while the first still runs or loads."""
        request = self.running[at % len(self.running)].request
        before = len(self.running)
        self.admit(request.namespace, [*request.tokens.tolist(), *[1] * more], 0, 0)
        if len(self.running) > before:
            self.forward(-1)
            self.publish(-1)
            self.leave(-1, False)

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
        assert (
            wrong_pages(
                self.cache.device,
                request.pages[: running.cached],
                request.namespace,
                request.tokens,
            )
            == []
        )
        if not running.computed:
            compute(self.cache, request, request.tokens, running.cached)
            running.computed = True

    @precondition(lambda self: self.running)
    @rule(at=INDEX)
    def publish(self, at: int) -> None:
        running = self.running[at % len(self.running)]
        request = running.request
        if not running.computed:
            return
        before = request.own
        try:
            done = self.cache.insert(request.rid)
        except Refused:
            return
        if done.private is None:
            assert self.cache.match_prefix(request.tokens, request.namespace).device_len == (
                done.inserted_len
            )
            assert set(request.own) <= set(before) - set(request.pages[: done.inserted_len // PAGE])
        else:
            assert self.owners > 1, "only a rotation can be refused"
            assert np.array_equal(before, request.own)

    @precondition(lambda self: self.running)
    @rule(at=INDEX, cancel=st.booleans())
    def leave(self, at: int, cancel: bool) -> None:
        rid = self.running.pop(at % len(self.running)).request.rid
        if cancel:
            self.cache.cancel(rid)
        else:
            self.cache.release(rid)

    @rule(tier=TIER, at=INDEX)
    def run(self, tier: int, at: int) -> None:
        """From here on the copy cannot be withdrawn."""
        if waiting := [copy for copy in self.lanes[tier].copies if not copy.done()]:
            waiting[at % len(waiting)].running = True

    @rule(tier=TIER, at=INDEX, pages=st.none() | st.integers(0, 4))
    def complete(self, tier: int, at: int, pages: int | None) -> None:
        """In any order, wholly or in part."""
        if waiting := [copy for copy in self.lanes[tier].copies if not copy.done()]:
            waiting[at % len(waiting)].complete(pages)

    @rule()
    def poll(self) -> None:
        ready = self.cache.ready()
        failed = self.cache.poll().failed
        for done, queue in zip(ready, self.cache.controller.queues, strict=True):
            assert not queue or not queue[0].copy.done() or done == 0
        for rid in failed:
            running = next(r for r in self.running if r.request.rid == rid)
            assert not running.computed or running.request.failed
            with pytest.raises(CopyFailed):
                self.cache.insert(rid)
            self.running.remove(running)
            self.cache.cancel(rid)

    @rule(tier=TIER, refuse=st.booleans())
    def refuse(self, tier: int, refuse: bool) -> None:
        self.lanes[tier].refuse = Refused("no") if refuse else None

    @rule(tier=st.sampled_from(TIERS), count=st.integers(1, 4))
    def evict(self, tier: str, count: int) -> None:
        before = self.cache.stats()[f"{tier}_free"]
        try:
            freed = self.cache.evict(count, tier)
        except Refused:
            return
        assert self.cache.stats()[f"{tier}_free"] >= before + freed

    @rule()
    def reset(self) -> None:
        if self.running:
            with pytest.raises(ArgumentError, match="open request"):
                self.cache.reset()
            return
        self.cache.reset()
        stats = self.cache.stats()
        assert stats["device_free"] == stats["device_pages"]
        assert stats["host_free"] == stats["host_pages"]

    @invariant()
    def everything_holds(self) -> None:
        self.cache.check()
        self.cache.events.deliver()
        held: dict[str, set[bytes]] = {name: set() for name in TIERS}
        for node in self.cache.tree.nodes():
            tokens = [t for above in node.path() for t in above.tokens.tolist()]
            first = node.start // PAGE
            for tier, pool in enumerate((self.cache.device, self.cache.host)):
                if node.pages[tier] is not None:
                    pages = node.pages[tier]
                    assert wrong_pages(pool, pages, node.namespace, tokens, first) == []
                    held[TIERS[tier]] |= set(node.hashes)
        assert held == self.seen
        for running in self.running:
            request = running.request
            if request.ticket is None and request.failed is None:
                known = len(request.tokens) // PAGE if running.computed else running.cached
                pages = request.pages[:known]
                assert (
                    wrong_pages(self.cache.device, pages, request.namespace, request.tokens) == []
                )

    def finish_all(self) -> None:
        for lane in self.lanes:
            for copy in lane.copies:
                copy.complete()
        self.poll()

    def teardown(self) -> None:
        for lane in self.lanes:
            lane.refuse = None
        while self.running:
            self.leave(0, True)
        self.finish_all()
        self.reset()
        assert self.cache.tree.locks == set()
        assert self.cache.tree.roots == {}


class WriteBack(Machine):
    options: ClassVar[dict] = {"write_policy": "write_back", "granularity": "page"}


class Selective(Machine):
    options: ClassVar[dict] = {"write_policy": "write_through_selective", "eviction": "lfu"}


class Sharded(Machine):
    owners = 2


CASES = (Machine, WriteBack, Selective, Sharded)
for case in CASES:
    case.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMachine, TestWriteBack, TestSelective, TestSharded = (case.TestCase for case in CASES)
