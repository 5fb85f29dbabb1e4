"""The books of one component: which of its pages hold which pages of the tree's nodes, per tier.

A window needs the last few pages before a boundary, a state is one page at its end: both are
entries by page of a node, of which any may be absent. So a node that keeps its full KV may lose its
entries (a tombstone for this component) and get them back. Two rules hold in each tier: an entry
has full KV under it, and what a request or a copy in flight uses is locked, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds
from hikv.cache.components import Component
from hikv.cache.eviction import OrderedQueue
from hikv.cache.node import DEVICE, HOST, NO_IDS, TIERS, Lock, Node, join

ABSENT = -1

Positions = npt.NDArray[np.int64]


class Holding:
    """The entries of one node: per tier `ids`, `locks` and, on their way, `arriving` `[num_pages]`.

    `held` and `loose` count the entries that are there, and those of them that no lock covers.
    """

    __slots__ = ("arriving", "held", "ids", "last_use", "locks", "loose", "node")

    def __init__(self, node: Node, last_use: int) -> None:
        self.node, self.last_use = node, last_use
        self.ids = [np.full(node.num_pages, ABSENT) for _ in TIERS]
        self.locks = [np.zeros(node.num_pages, np.int32) for _ in TIERS]
        self.arriving: list[tuple[Cargo, PageIds] | None] = [None, None]
        self.held, self.loose = [0, 0], [0, 0]

    @property
    def serial(self) -> int:
        """Its node's."""
        return self.node.serial

    def there(self, *tiers: int) -> npt.NDArray[np.bool_]:
        """Which entries some of `tiers` has, bool `[num_pages]`."""
        return np.logical_or.reduce([self.ids[tier] != ABSENT for tier in tiers])


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


@dataclass(eq=False)
class Cargo:
    """Entries of one component on their way into `tier`, on board of a copy.

    Attributes:
        holdings: whose entries arrive; a split adds the upper half.
        sources, pages: page ids to copy from the other tier, pair by pair.
        private: `(source tier, source page, page)`: a page of `tier` that comes to belong to a
            request instead of a node.
        guard: keeps the source of a private copy within one tier.
        surplus: once finished, the pages that found no place.
    """

    trail: Trail
    tier: int
    holdings: list[Holding] = field(default_factory=list)
    sources: list[PageIds | None] = field(default_factory=list)
    pages: list[PageIds | None] = field(default_factory=list)
    private: tuple[int, int, int] | None = None
    guard: Lock | None = None
    surplus: PageIds = field(default_factory=lambda: NO_IDS)

    def add(self, node: Node, at: Positions, pages: PageIds) -> None:
        """Let `pages` be on their way to the entries `at` of `node`; the other tier holds them, and
        keeps them until `finish`."""
        holding = self.trail.of(node)
        assert holding is not None
        ids, source = np.full(node.num_pages, ABSENT), 1 - self.tier
        ids[at] = pages
        holding.arriving[self.tier] = (self, ids)
        holding.locks[source][at] += 1
        self.holdings.append(holding)
        self.sources.append(holding.ids[source][at])
        self.pages.append(pages)
        self.trail.settle(holding)

    def moves(self) -> Iterator[tuple[int, PageIds, PageIds]]:
        """`(source tier, source pages, pages)` of each copy that it takes."""
        if self.pages:
            yield 1 - self.tier, join(self.sources), join(self.pages)
        if self.private is not None:
            tier, source, page = self.private
            yield tier, np.array([source]), np.array([page])

    @property
    def nbytes(self) -> int:
        """Payload between the tiers."""
        moved = sum(pages.size for tier, _, pages in self.moves() if tier != self.tier)
        return moved * self.trail.pools[self.tier].bytes_per_page

    def finish(self, whole: bool) -> None:
        """Make the entries visible if the copy was `whole`, where their nodes have full KV and
        nobody else has filled them; the rest is `surplus`."""
        surplus: list[PageIds | None] = []
        for holding in self.holdings:
            awaited, node = holding.arriving[self.tier], holding.node
            assert awaited is not None
            _, ids = awaited
            at = np.flatnonzero(ids != ABSENT)
            holding.locks[1 - self.tier][at] -= 1
            free = whole and node.pages[self.tier] is not None
            lands = at[(holding.ids[self.tier][at] == ABSENT) & free]
            holding.ids[self.tier][lands] = ids[lands]
            surplus.append(ids[np.setdiff1d(at, lands)])
            holding.arriving[self.tier] = None
            self.trail.settle(holding)
        self.surplus = join(surplus)


class Trail:
    """One component beside the tree.

    `need` entries before a boundary make it usable. `evictable` counts, per tier, the entries that
    no lock covers; they leave in the order of their last use, a host copy of what is still on the
    GPU first.
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
            if holding is None or not holding.there(*tiers)[first:stop].all():
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
                waiting = holding.there(HOST) & ~holding.there(DEVICE)
                if (awaited := holding.arriving[DEVICE]) is not None:
                    waiting &= awaited[1] == ABSENT
                found.append((node, first + np.flatnonzero(waiting[first:stop])))
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
        if np.all(ids == ABSENT):
            return ids
        holding = self._ensure(node)
        now = holding.ids[tier][first : first + ids.size]
        np.copyto(now, ids, where=now == ABSENT)
        result = now.copy()
        self.settle(holding)
        return result

    def take(self, node: Node, tier: int, at: Positions | None = None) -> PageIds:
        """Remove entries of `node` from `tier`, `None` is all; their pages are the caller's."""
        holding = self.of(node)
        if holding is None:
            return NO_IDS
        at = np.arange(node.num_pages) if at is None else at
        ids = holding.ids[tier][at]
        holding.ids[tier][at] = ABSENT
        self.settle(holding)
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
        lacking = holding.there(DEVICE) & ~holding.there(HOST)
        lacking[: max(0, node.num_pages - self.need)] = False
        return np.flatnonzero(lacking)

    def copies(self, node: Node) -> bool:
        """Whether entries of `node` are on their way to the host."""
        holding = self.of(node)
        return holding is not None and holding.arriving[HOST] is not None

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
                above.arriving[tier] = cargo, ids[:cut].copy()
                whole.arriving[tier] = cargo, ids[cut:].copy()
                cargo.holdings.append(above)
        self.settle(above)
        self.settle(whole)

    def settle(self, holding: Holding) -> None:
        """Bring counts and queues up to what `holding` is now; forget it when it is empty."""
        for tier in (DEVICE, HOST):
            there = holding.ids[tier] != ABSENT
            loose = int(np.count_nonzero(there & (holding.locks[tier] == 0)))
            self.evictable[tier] += loose - holding.loose[tier]
            holding.held[tier], holding.loose[tier] = int(np.count_nonzero(there)), loose
            if loose:
                self.queues[tier].put(holding)
            else:
                self.queues[tier].discard(holding)
        locked = any(locks.any() for locks in holding.locks)
        if not (locked or any(holding.held) or any(holding.arriving)):
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
            holding.locks[lock.tier][first:stop] += step
            if step > 0:
                holding.last_use = self._tick
            self.settle(holding)
