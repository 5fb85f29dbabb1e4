"""How much of what the host holds is worth loading back, and the loads on their way."""

from __future__ import annotations

from hikv.cache.config import HiCacheConfig
from hikv.cache.events import EventStream
from hikv.cache.ledger import Ledger
from hikv.cache.node import DEVICE, HOST, Node, join
from hikv.cache.requests import LoadBack, Request
from hikv.cache.trails import Boundary


class Loader:
    """Load-backs of the requests of `ledger`."""

    def __init__(self, ledger: Ledger, events: EventStream, config: HiCacheConfig) -> None:
        self.ledger, self.events = ledger, events
        self.placement, self.hybrid, self.shares = ledger.placement, ledger.hybrid, ledger.shares
        self._least = -(-config.load_back_threshold // self.hybrid.page_size)  # pages that pay

    def load_back(self, request: Request, quota: int | None) -> LoadBack:
        """`HiRadixCache.load_back`, for a request that may load.

        Full KV comes as far as quota, room and threshold let it; then what the components need at
        the boundary which that reaches, all of it or nothing.
        """
        if not request.lengths.host_len:
            return LoadBack("nothing")
        page = self.hybrid.page_size
        path, have, ready = self.ledger.catch_up(request)
        end, waiting = request.end.end // page, [n for n in path if n.pages[DEVICE] is None]
        if ready == end:
            return LoadBack("nothing")
        if waiting and waiting[0].arriving[DEVICE] is not None:
            return LoadBack("defer", reasons=("in_flight",))
        cap = end if quota is None else min(end, have + quota // page)
        wanted = self._goal(request.end, have, cap)
        if wanted <= ready:
            short = "load_back_threshold" if cap == end else "gpu_quota"
            return LoadBack("recompute", reasons=(short,))
        owner = self.ledger.next_owner(request)
        room = self.placement.room(DEVICE, max(0, wanted - have), owner)
        goal = self._goal(request.end, have, min(cap, have + room))
        if goal <= ready:
            return self._no_room()
        at = self.hybrid.at(request.end, goal)
        locks = self.hybrid.hold(at, DEVICE, HOST)
        try:
            refused = self._obstacle(request, at)
            if refused is None:
                self._start(request, at, have)
                locks, request.trail_locks = request.trail_locks, locks
        finally:
            self.hybrid.let_go(locks)
        if refused is not None:
            return refused
        self.ledger.set_loaded(request, goal - ready)
        left = [("gpu_quota", cap < end), ("no_room", have + room < wanted)]
        reasons = tuple(why for why, holds in left if holds)
        if goal < end and not reasons:
            reasons = ("load_back_threshold",)
        return LoadBack("loading", (goal - ready) * page, reasons)

    def acknowledge(self, count: int) -> int:
        """Take so many load-backs off the queue; returns the pages that arrived."""
        loaded = 0
        for done in self.placement.controller.acknowledge(DEVICE, count):
            self.placement.count(done)
            for node in done.landed.nodes:
                self.events.stored(node, DEVICE)
            loaded += done.arrived
            self.ledger.loaded(done)
        return loaded

    def _goal(self, node: Node, have: int, cap: int) -> int:
        """The boundary to load up to, at most `cap` pages: one that pays, or needs no full KV."""
        goal = self.hybrid.boundary(node, cap, DEVICE, HOST).pages
        if 0 < goal - have < self._least:
            goal = self.hybrid.boundary(node, have, DEVICE, HOST).pages
        return goal

    def _obstacle(self, request: Request, at: Boundary) -> LoadBack | None:
        """Why the components cannot be loaded up to `at` now, or `None` once there is room."""
        if any(trail.awaited(at) for trail in self.hybrid.trails.values()):
            return LoadBack("defer", reasons=("in_flight",))
        for name, count in self.shares.cost(request, at, at.num_pages).items():
            if self.placement.room(DEVICE, count, None, self.hybrid.trails[name]) < count:
                return self._no_room()
        return None

    def _no_room(self) -> LoadBack:
        others = len(self.ledger.requests) > 1 or any(self.placement.controller.queues)
        outcome, why = ("defer", "locked") if others else ("recompute", "no_room")
        return LoadBack(outcome, reasons=(why,))

    def _start(self, request: Request, at: Boundary, have: int) -> None:
        path, owner = at.node.path(), self.ledger.next_owner(request)
        pages = self.placement.pools[DEVICE].allocator.alloc(max(0, at.num_pages - have), owner)
        nodes = [node for node in path if node.pages[DEVICE] is None] if pages.size else []
        held = join([node.pages[DEVICE] for node in path])
        cargo = self.shares.load(request, at)
        request.ticket = self.placement.start(
            DEVICE, nodes, pages, request.rid, cargo=cargo, anchor=at.node
        )
        request.pages = join([held[: at.num_pages], pages])
        request.loads, request.boundary = True, at
        self.shares.loading(request, at, cargo)
