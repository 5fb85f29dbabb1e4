"""The books of one component: which of its pages hold which pages of the tree's nodes, per tier.

A window needs the last few pages before a boundary, a state is one page at its end: both are
entries by page of a node, of which any may be absent. So a node that keeps its full KV may lose its
entries (a tombstone for this component) and get them back. Two rules hold in each tier: an entry
has full KV under it, and what a request or a copy in flight uses is locked, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds
from hikv.cache.components import Component
from hikv.cache.eviction import OrderedQueue
from hikv.cache.holding import ABSENT, ALL, Holding, Positions, Where
from hikv.cache.node import DEVICE, HOST, NO_IDS, Node, join


class Boundary(NamedTuple):
    """Where a prefix of `num_pages` pages ends: `skip` pages before the end of `node`, which may be
    in a node above. A split needs no change to it, as its lower half stays `node`."""

    node: Node
    skip: int
    num_pages: int


@dataclass(frozen=True, eq=False)
class TrailLock:
    """A receipt: it protects, in `tier`, what a component needs at a boundary."""

    trail: Trail
    at: Boundary
    tier: int


class Trail:
    """What one component keeps along the paths of the tree, of which a boundary needs the trailing
    `need` entries.

    `evictable` counts, per tier, the entries that no lock covers; they leave in the order of their
    last use, a host copy of what is still on the GPU first.
    """

    def __init__(self, component: Component, page_size: int) -> None:
        self.component, self.name = component, component.name
        self.rule = component.rule(page_size)
        assert self.rule.trailing is not None
        self.need = self.rule.trailing
        self.pools = (component.device, component.host)
        self.evictable = [0, 0]
        self.locks: set[TrailLock] = set()
        self.queues: list[OrderedQueue[Holding]] = [
            OrderedQueue(lambda holding: holding.last_use),
            OrderedQueue(lambda holding: (not holding.held[DEVICE], holding.last_use)),
        ]
        self._tick = 0

    def of(self, node: Node) -> Holding | None:
        """What is held of `node`, or `None`."""
        return None if node.payload is None else node.payload.get(self.name)

    def held(self, node: Node, *tiers: int) -> npt.NDArray[np.bool_]:
        """Which pages of the prompt that ends with `node` have an entry in some of `tiers`."""
        parts = []
        for above in node.path():
            holding = self.of(above)
            there = np.zeros(above.num_pages, bool) if holding is None else holding.there(*tiers)
            parts.append(there)
        return np.concatenate(parts)

    def needed(self, at: Boundary) -> Iterator[tuple[Node, int, int]]:
        """`(node, first, stop)` of the entries that a boundary needs, bottom up."""
        node, missing, stop = at.node, self.need, at.node.num_pages - at.skip
        while missing > 0 and node.parent is not None:
            if stop > 0:
                first = max(0, stop - missing)
                yield node, first, stop
                missing -= stop - first
            node = node.parent
            stop = node.num_pages + min(stop, 0)

    def serves(self, at: Boundary, *tiers: int) -> bool:
        """Whether `tiers` together have what a boundary needs."""
        for node, first, stop in self.needed(at):
            holding = self.of(node)
            if holding is None or not holding.there(*tiers, where=slice(first, stop)).all():
                return False
        return True

    def read(self, at: Boundary) -> PageIds:
        """The GPU's pages that a boundary needs, held or on their way, in prompt order; `ABSENT`
        where there are none."""
        parts: list[PageIds | None] = []
        for node, first, stop in self.needed(at):
            holding = self.of(node)
            ids = np.full(stop - first, ABSENT)
            if holding is not None:
                ids = holding.ids[DEVICE][first:stop]
                if (awaited := holding.arriving[DEVICE]) is not None:
                    ids = np.where(ids == ABSENT, awaited[1][first:stop], ids)
            parts.append(ids)
        return join(parts[::-1])

    def lacking(self, at: Boundary) -> list[tuple[Node, Positions]]:
        """Entries that a boundary needs and the host has, neither on the GPU nor on their way."""
        found = []
        for node, first, stop in self.needed(at):
            holding = self.of(node)
            if holding is not None:
                where = slice(first, stop)
                waiting = holding.there(HOST, where=where) & ~holding.there(DEVICE, where=where)
                if (awaited := holding.arriving[DEVICE]) is not None:
                    waiting &= awaited[1][where] == ABSENT
                found.append((node, first + np.flatnonzero(waiting)))
        return [(node, where) for node, where in found if where.size]

    def find(self, node: Node, position: int) -> tuple[int, int]:
        """`(tier, page)` of an entry that some tier has, the GPU's first."""
        holding = self.of(node)
        assert holding is not None
        tier = DEVICE if holding.ids[DEVICE][position] != ABSENT else HOST
        return tier, int(holding.ids[tier][position])

    def awaited(self, at: Boundary) -> bool:
        """Whether entries of the nodes with what a boundary needs are on their way to the GPU."""
        near = (self.of(node) for node, _, _ in self.needed(at))
        return any(holding is not None and holding.arriving[DEVICE] for holding in near)

    def lock(self, at: Boundary, tier: int) -> TrailLock:
        """Protect what a boundary needs in `tier`, and count it as used."""
        lock = TrailLock(self, at, tier)
        self.locks.add(lock)
        self._tick += 1
        self._guard(lock, 1)
        return lock

    def release(self, lock: TrailLock) -> None:
        """Give a receipt back, once."""
        self.locks.remove(lock)
        self._guard(lock, -1)

    def put(self, node: Node, tier: int, first: int, ids: PageIds) -> PageIds:
        """Let `ids` hold the entries of `node` from `first` on that are absent; what holds them
        now."""
        holding, where = self._ensure(node), slice(first, first + ids.size)
        now = holding.ids[tier][where]
        now = np.where(now == ABSENT, ids, now)
        self.change(holding, tier, where, now)
        return now

    def take(self, node: Node, tier: int, where: Where = ALL) -> PageIds:
        """Remove entries of `node` from `tier`; their pages are the caller's."""
        holding = self.of(node)
        if holding is None:
            return NO_IDS
        ids = holding.ids[tier][where].copy()
        self.change(holding, tier, where, np.full(ids.size, ABSENT))
        return ids[ids != ABSENT]

    def victim(self, tier: int) -> Node | None:
        """The node whose entries leave `tier` next, or `None` when all are locked."""
        holding = self.queues[tier].first()
        return None if holding is None else holding.node

    def leaving(self, node: Node, tier: int, at_most: int) -> Positions:
        """Which entries of `node` leave: what no boundary at its end needs, and only as much as is
        asked for; else all that no lock covers."""
        holding = self.of(node)
        if holding is None:
            return NO_IDS
        loose = np.flatnonzero((holding.ids[tier] != ABSENT) & (holding.locks[tier] == 0))
        spare = loose[loose < node.num_pages - self.need][:at_most]
        return spare if spare.size else loose

    def unsaved(self, node: Node) -> Positions:
        """Entries on the GPU that a boundary at the end of `node` needs and the host lacks; none
        while others are on their way there."""
        holding = self.of(node)
        if holding is None or holding.arriving[HOST] is not None:
            return NO_IDS
        first = max(0, node.num_pages - self.need)
        where = slice(first, None)
        lacking = holding.there(DEVICE, where=where) & ~holding.there(HOST, where=where)
        return first + np.flatnonzero(lacking)

    def split(self, upper: Node, lower: Node) -> None:
        """Divide what `lower` held before `upper` took its first pages."""
        whole = self.of(lower)
        if whole is None:
            return
        cut, above = upper.num_pages, self._ensure(upper)
        above.last_use = whole.last_use
        for tier in (DEVICE, HOST):
            for mine, theirs in ((above.ids, whole.ids), (above.locks, whole.locks)):
                mine[tier], theirs[tier] = theirs[tier][:cut].copy(), theirs[tier][cut:].copy()
            if (awaited := whole.arriving[tier]) is not None:
                cargo, ids = awaited
                cargo.holdings.remove(whole)
                whole.arriving[tier] = None
                for half, share in ((above, ids[:cut]), (whole, ids[cut:])):
                    if np.any(share != ABSENT):
                        half.arriving[tier] = cargo, share.copy()
                        cargo.holdings.append(half)
        for half in (above, whole):
            for tier in (DEVICE, HOST):
                half.held[tier], half.loose[tier], half.guards[tier] = half.tally(tier, ALL)
            self.settle(half)

    def change(
        self,
        holding: Holding,
        tier: int,
        where: Where,
        ids: PageIds | None = None,
        step: int = 0,
    ) -> None:
        """Make `ids` the entries `where`, or add `step` to their locks: whatever changes an entry
        goes through here, so every count stays right."""
        was = holding.tally(tier, where)
        if ids is not None:
            holding.ids[tier][where] = ids
        holding.locks[tier][where] += step
        now = holding.tally(tier, where)
        holding.held[tier] += now.held - was.held
        holding.loose[tier] += now.loose - was.loose
        holding.guards[tier] += now.guards - was.guards
        self.evictable[tier] += now.loose - was.loose
        self.settle(holding)

    def settle(self, holding: Holding) -> None:
        """Queue `holding` where it may leave, under its present key; forget it when it is empty."""
        for tier in (DEVICE, HOST):
            if holding.loose[tier]:
                self.queues[tier].put(holding)
            else:
                self.queues[tier].discard(holding)
        if not any((*holding.held, *holding.guards, *holding.arriving)):
            holding.node.payload.pop(self.name, None)

    def _ensure(self, node: Node) -> Holding:
        holding = self.of(node)
        if holding is None:
            holding = Holding(node, self._tick)
            node.payload = {**(node.payload or {}), self.name: holding}
        return holding

    def _guard(self, lock: TrailLock, step: int) -> None:
        for node, first, stop in self.needed(lock.at):
            holding = self._ensure(node)
            if step > 0:
                holding.last_use = self._tick
            self.change(holding, lock.tier, slice(first, stop), step=step)
