"""What a request has of each component: a table of window pages, and a state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.cargo import Cargo
from hikv.cache.components import Recurrent
from hikv.cache.holding import ABSENT
from hikv.cache.node import DEVICE, HOST, NO_IDS, Node, join
from hikv.cache.placement import Placement, no_room
from hikv.cache.requests import Request
from hikv.cache.trails import Boundary, Trail, TrailLock
from hikv.errors import ArgumentError


class WindowShare:
    """Window pages, one for each page of the request's own table.

    `pages` are `ABSENT` where the window has passed. `own` are those that no node holds.
    """

    slot = None
    otherwise = "allocate a chunk at a time, with an insert after each"

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.pages = self.own = NO_IDS

    def begin(self, at: Boundary) -> None:
        """Go on from the cached window of a boundary, held or on its way."""
        near = self.trail.read(at)
        self.pages = np.concatenate([np.full(at.num_pages - near.size, ABSENT), near])

    def lacking(self, num_pages: int) -> int:
        """Pages that it takes to cover a prompt of `num_pages`."""
        return max(0, num_pages - self.pages.size)

    def extend(self, pages: PageIds) -> None:
        """New pages of its own."""
        self.pages, self.own = join([self.pages, pages]), join([self.own, pages])

    def insert(self, at: Boundary, given: int | None) -> PageIds:
        """Let the tree hold its pages up to a boundary; its duplicates, which it names no longer,
        for the caller to free."""
        before, node, stop = self.pages[: at.num_pages].copy(), at.node, at.num_pages
        named = np.flatnonzero(before != ABSENT)
        while named.size and stop > named[0]:
            first = stop - node.num_pages
            self.pages[first:stop] = self.trail.put(node, DEVICE, 0, before[first:stop])
            assert node.parent is not None
            stop, node = first, node.parent
        duplicates = before[(before != ABSENT) & (before != self.pages[: at.num_pages])]
        self.pages[: max(0, at.num_pages - self.trail.need)] = ABSENT
        self.own = self.own[~np.isin(self.own, before)]
        return duplicates

    def arrive(self, cargo: Cargo) -> PageIds:
        """Its load-back is through: what another request has overtaken is its own, as its table
        names it. Pages for the caller to free: none."""
        self.own = join([self.own, cargo.surplus])
        return NO_IDS


class StateShare:
    """The state that the request's forward pass reads and writes, in a page that is its alone.

    `slot`: that page, `None` until `allocate`. `own`: all pages that it may hand over with
    `insert`; `slot` is among them, but while the cached state is still being copied there.
    """

    pages = None
    otherwise = "make it larger, or hold fewer states"

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.slot: int | None = None
        self.own = NO_IDS

    def begin(self, at: Boundary) -> None:
        """Nothing to take over: the cached state is another's to read."""

    def lacking(self, num_pages: int) -> int:
        """States that it takes to compute on."""
        return int(self.slot is None)

    def extend(self, pages: PageIds) -> None:
        """A page of its own, of unknown content."""
        self.own = join([self.own, pages])
        self.slot = int(pages[0]) if pages.size else self.slot

    def insert(self, at: Boundary, given: int | None) -> PageIds:
        """Let the tree hold the state `given` as that of the boundary; it is not written any more.
        If the tree has one, `given` is a duplicate for the caller to free."""
        if given is None:
            return NO_IDS
        page = np.array([given])
        now = self.trail.put(at.node, DEVICE, at.node.num_pages - 1, page)
        self.own = self.own[self.own != given]
        self.slot = None if given == self.slot else self.slot
        return page[now != given]

    def arrive(self, cargo: Cargo) -> PageIds:
        """The copy into its slot is through: from here on it may hand that over. Pages for the
        caller to free: the cached state's, if another request has brought it meanwhile."""
        if cargo.private is not None:
            self.own = join([self.own, np.array([cargo.private[-1]])])
        return cargo.surplus


class Shares:
    """The shares of all requests. Without components no verb does anything."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.hybrid = placement, placement.hybrid

    def open(self, request: Request, at: Boundary, end: Node) -> None:
        """Begin at the boundary that is usable on the GPU, and keep in both tiers what the one at
        `end` needs, for a load-back."""
        for name, trail in self.hybrid.trails.items():
            if name not in request.shares:
                state = trail.component.kind == Recurrent.kind
                request.shares[name] = StateShare(trail) if state else WindowShare(trail)
            request.shares[name].begin(at)
        locks = self.hybrid.hold(at, DEVICE)
        last = self.hybrid.end(end)
        if last.num_pages > at.num_pages:
            locks += self.hybrid.hold(last, DEVICE, HOST)
        self.go_on(request, at, locks)

    def go_on(self, request: Request, at: Boundary, locks: list[TrailLock]) -> None:
        """Let it compute from `at`, under `locks` instead of those it has."""
        self.hybrid.let_go(request.trail_locks)
        request.trail_locks, request.boundary = locks, at

    def close(self, request: Request) -> None:
        """Give back its receipts and its own pages."""
        self.hybrid.let_go(request.trail_locks)
        for share in request.shares.values():
            share.trail.pools[DEVICE].allocator.free(share.own)

    def cost(self, request: Request, at: Boundary, num_pages: int) -> dict[str, int]:
        """GPU pages by component that it takes to load what `at` needs and to compute from there to
        `num_pages`."""
        costs = {}
        for name, share in request.shares.items():
            load = sum(where.size for _, where in share.trail.lacking(at))
            past = 0 if isinstance(share, StateShare) else at.num_pages - share.pages.size
            costs[name] = load + max(0, share.lacking(num_pages) - max(0, past))
        return costs

    def attainable(self, request: Request, at: Boundary) -> dict[str, int]:
        """GPU pages by component that it could get if it were alone: the pool's less its own and
        what `at` needs and has there."""
        most = {}
        for name, share in request.shares.items():
            needed = sum(stop - first for _, first, stop in share.trail.needed(at))
            lacking = sum(where.size for _, where in share.trail.lacking(at))
            has = needed - lacking + share.own.size
            most[name] = share.trail.pools[DEVICE].num_pages - has
        return most

    def load(self, request: Request, at: Boundary) -> list[Cargo]:
        """Take GPU pages, which must be free, for what `at` lacks there, and a state of its own."""
        loads = []
        for share in request.shares.values():
            cargo, allocator = Cargo(share.trail, DEVICE), share.trail.pools[DEVICE].allocator
            for node, where in share.trail.lacking(at):
                cargo.add(node, where, allocator.alloc(where.size))
            if isinstance(share, StateShare):
                self._fork(cargo, at, int(allocator.alloc(1)[0]))
            loads += [cargo] if cargo.holdings or cargo.private else []
        return loads

    def loading(self, request: Request, at: Boundary, cargo: Sequence[Cargo]) -> None:
        """`cargo` is on its way; its tables name it."""
        for share in request.shares.values():
            share.begin(at)
        self._name_slots(request, cargo)

    def allocate(self, request: Request, num_pages: int) -> None:
        """Cover a prompt of `num_pages`, and give it a state to write.

        Where it goes on from a cached state that is a copy, and its ticket says when it is there.
        All or nothing: raises `CapacityError`, and whatever a lane raises.
        """
        if not request.shares:
            return
        taken: dict[str, PageIds] = {}
        try:
            for name, share in request.shares.items():
                taken[name] = self._take(request, share.trail, share.lacking(num_pages))
            forks = self._forks(request, taken)
            if forks:
                request.ticket = self.placement.start(
                    DEVICE, [], NO_IDS, request.rid, cargo=forks, anchor=request.boundary.node
                )
        except BaseException:
            self._free(request, taken)
            raise
        self._name_slots(request, forks)
        for name, pages in taken.items():
            request.shares[name].extend(pages)

    def spare_state(self, request: Request, name: str) -> int:
        """One more state page of its own, of unknown content. Raises as `allocate` does, and
        `ArgumentError` for a component that has no states."""
        share = request.shares.get(name)
        if not isinstance(share, StateShare):
            raise _no_state(request, name)
        pages = self._take(request, share.trail, 1)
        share.own = join([share.own, pages])
        return int(pages[0])

    def check_states(self, request: Request, count: int, states: Mapping[str, int]) -> None:
        """Raise `ArgumentError` unless `states` are its own, to hand over at `count` pages, and
        it has had a state to compute those with."""
        for name, each in request.shares.items():
            idle = isinstance(each, StateShare) and each.slot is None
            if idle and count > request.boundary.num_pages:
                raise ArgumentError(
                    f"state {name!r}",
                    expected=f"at most {request.boundary.num_pages} pages of tokens, as many as "
                    "had been computed when the request handed its state over",
                    got=f"{count} pages",
                    remedy="allocate() a state to go on with first",
                )
        for name, page in states.items():
            share = request.shares.get(name)
            if not isinstance(share, StateShare):
                raise _no_state(request, name)
            if not count or page not in share.own:
                raise ArgumentError(
                    f"states[{name!r}]",
                    expected=f"a state of the request's own, {share.own.tolist()}, and tokens of "
                    "at least one page",
                    got=f"{page!r}, {count} pages",
                    remedy="hand over its slot, or one from spare_state(), once",
                )

    def insert(self, request: Request, at: Boundary, states: Mapping[str, int]) -> dict[str, int]:
        """Let the tree hold what it has up to `at`, the end of an insert; its duplicates by name,
        which are free then."""
        if not request.shares:
            return {}
        doubled = {
            name: share.insert(at, states.get(name)) for name, share in request.shares.items()
        }
        locks = self.hybrid.hold(at, DEVICE)
        if at.num_pages >= request.boundary.num_pages:
            self.go_on(request, at, locks)
        else:
            request.trail_locks += locks
        self._free(request, doubled)
        return {name: pages.size for name, pages in doubled.items()}

    def arrived(self, request: Request, cargo: Sequence[Cargo]) -> None:
        """A copy for it is through, in whichever way; what found no place is free or its own."""
        for each in cargo:
            left = request.shares[each.trail.name].arrive(each)
            each.trail.pools[DEVICE].allocator.free(left)

    def _take(self, request: Request, trail: Trail, count: int) -> PageIds:
        """`count` GPU pages, evicting as needed, or `CapacityError`."""
        pages = self.placement.alloc(DEVICE, count, None, trail)
        if pages is None:
            pool = trail.pools[DEVICE]
            raise no_room(
                f"GPU pages of {trail.name!r} for request {request.rid!r}",
                count,
                pool,
                available=pool.allocator.num_free,
                attainable=self.attainable(request, request.boundary)[trail.name],
                otherwise=request.shares[trail.name].otherwise,
            )
        return pages

    def _forks(self, request: Request, taken: dict[str, PageIds]) -> list[Cargo]:
        """Copies of the cached states that it goes on from, into pages that leave `taken`."""
        forks, at = [], request.boundary
        for name, share in request.shares.items():
            if at.num_pages and isinstance(share, StateShare) and taken[name].size:
                forks.append(Cargo(share.trail, DEVICE))
                self._fork(forks[-1], at, int(taken.pop(name)[0]))
        return forks

    def _fork(self, cargo: Cargo, at: Boundary, page: int) -> None:
        """Let `cargo` bring the state of `at`, from wherever it is, to the request's `page`."""
        node, _, stop = next(cargo.trail.needed(at))
        tier, source = cargo.trail.find(node, stop - 1)
        cargo.private = (tier, source, page)

    @staticmethod
    def _name_slots(request: Request, cargo: Sequence[Cargo]) -> None:
        for each in cargo:
            share = request.shares[each.trail.name]
            if each.private is not None and isinstance(share, StateShare):
                share.slot = each.private[-1]

    @staticmethod
    def _free(request: Request, pages: Mapping[str, PageIds]) -> None:
        for name, taken in pages.items():
            request.shares[name].trail.pools[DEVICE].allocator.free(taken)


def _no_state(request: Request, name: str) -> ArgumentError:
    names = [n for n, share in request.shares.items() if isinstance(share, StateShare)]
    return ArgumentError(
        f"state {name!r}",
        expected=f"a recurrent component of the cache: {', '.join(names) or 'it has none'}",
        got=repr(name),
        remedy="name the component as it was declared",
    )
