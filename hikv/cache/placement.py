"""Who lives in which tier: room is made here, and copies in host memory are ordered here.

| write policy | when a node gets its host copy |
|---|---|
| `write_through` | as soon as a request has computed it |
| `write_through_selective` | as soon as requests have used it often enough |
| `write_back` | when it has to leave the GPU |

A copy made ahead of need takes free host pages only. Into a full host it could only push what the
GPU has lost, or another copy made ahead of need, which would have to be made again. So under every
policy a victim that deserves a copy and has none gets one before it leaves the GPU; if the host has
no room even then, it is dropped, and counted. What is needed now, a victim's copy or a prefetch,
takes the room of host copies first whose nodes are still on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import dropwhile, takewhile

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.cargo import Cargo
from hikv.cache.controller import Acknowledged, Controller, Ticket
from hikv.cache.events import EventStream
from hikv.cache.hybrid import Hybrid
from hikv.cache.metrics import Metrics
from hikv.cache.node import DEVICE, HOST, NO_IDS, TIERS, Node
from hikv.cache.pools import PagePool
from hikv.cache.trails import Trail
from hikv.errors import CapacityError


class Placement:
    """The tree's pages in both tiers.

    `backup_after_uses`: requests that must have used a node before it gets its copy; `None` leaves
    that to eviction. Where a verb takes a `trail`, it is that component's pool instead of full KV.

    `counts` collects pages: `dropped_pages` were evicted from the GPU without a copy,
    `unbacked_pages` wanted a copy for which the host had no room; and `failed_backups`, copies of
    which not all arrived.
    """

    def __init__(
        self,
        controller: Controller,
        events: EventStream,
        metrics: Metrics,
        backup_after_uses: int | None,
        hybrid: Hybrid | None = None,
    ) -> None:
        self.hybrid = hybrid or Hybrid()
        self.controller, self.events, self.metrics = controller, events, metrics
        self.tree, self.pools = controller.tree, controller.pools
        self.counts = Counter(dropped_pages=0, unbacked_pages=0, failed_backups=0)
        self._failures: list[str] = []
        self._eager = backup_after_uses is not None
        self._uses = backup_after_uses or 1

    def alloc(
        self, tier: int, count: int, owner: int | None, trail: Trail | None = None
    ) -> PageIds | None:
        """`count` pages of `tier`, evicting as needed; `None` where there is no room for all.

        Evicts nothing when that could not be enough.
        """
        keeper, allocator = trail or self.tree, (trail or self).pools[tier].allocator
        within_reach = allocator.num_free + keeper.evictable[tier]
        waiting = tier == DEVICE and self.controller.queues[HOST]
        if (within_reach < count and not waiting) or self.room(tier, count, owner, trail) < count:
            return None
        return allocator.alloc(count, owner)

    def room(self, tier: int, count: int, owner: int | None, trail: Trail | None = None) -> int:
        """How many of `count` pages `tier` can give, after evicting as many as that takes."""
        allocator = (trail or self).pools[tier].allocator
        while (free := allocator.longest_chain(owner)) < count:
            if not self.evict(tier, count - free, trail):
                break
        return min(count, allocator.longest_chain(owner))

    def evict(self, tier: int, num_pages: int, trail: Trail | None = None) -> int:
        """Free about `num_pages` pages of `tier`; returns how many, 0 when none can go.

        On the GPU it waits for the copies of victims that need one, and for other backups in flight
        where nothing else may leave: those hold their sources.
        """
        freed = 0
        while freed < num_pages:
            leaving: list[Node] = []
            pending = 0
            while freed + pending < num_pages:
                wanted = num_pages - freed - pending
                node = self.tree.victim(tier, wanted) if trail is None else trail.victim(tier)
                if node is None:
                    break
                if tier == DEVICE and self._save(node, wanted, trail):
                    leaving.append(node)
                    pending += node.num_pages if trail is None else trail.need
                else:
                    freed += self._drop(node, tier, wanted, trail)
            if freed >= num_pages or tier == HOST or not self.controller.queues[HOST]:
                break
            self.acknowledge_backups(len(self.controller.queues[HOST]))
            freed += sum(self._drop(node, DEVICE, num_pages, trail) for node in leaving)
        return freed

    def write(self, node: Node) -> None:
        """Start the copies that an eager policy wants on the path down to `node`, parents first."""
        path = list(takewhile(self._deserves, node.path())) if self._eager else []
        if path:
            self._back_up(path, ahead=True)

    def start(
        self,
        tier: int,
        nodes: list[Node],
        pages: PageIds,
        rid: Hashable | None = None,
        *,
        cargo: Sequence[Cargo] = (),
        anchor: Node | None = None,
    ) -> Ticket:
        """`Controller.start`; the pages, those of `cargo` too, are freed if that raises."""
        try:
            return self.controller.start(tier, nodes, pages, rid, cargo=cargo, anchor=anchor)
        except BaseException:
            self.free(tier, pages)
            self.free_cargo(cargo)
            raise

    def acknowledge_backups(self, count: int) -> int:
        """Acknowledge so many backups, waiting if need be; returns the pages that arrived."""
        arrived = 0
        for done in self.controller.acknowledge(HOST, count):
            self.count(done)
            self.free(HOST, done.landed.surplus)
            self.free_cargo(done.ticket.cargo)
            for node in done.landed.nodes:
                self.events.stored(node, HOST)
            arrived += done.arrived
            if not done.whole and not done.ticket.aborted:
                self.counts["failed_backups"] += 1
                self._failures.append(done.ticket.loss())
        return arrived

    def failures(self) -> list[str]:
        """What the backups that have failed since this was last asked say of it."""
        failures, self._failures = self._failures, []
        return failures

    def count(self, done: Acknowledged) -> None:
        """Put an acknowledged copy into the metrics."""
        hop = "backup" if done.ticket.operation.tier == HOST else "load_back"
        if not done.whole:
            self.metrics.copy_failures[hop].add()
        elif done.ticket.nbytes:  # else it stayed within its tier, or had no page on this owner
            self.metrics.copied_bytes[hop].add(done.ticket.nbytes)
            if (seconds := done.ticket.copy.seconds()) is not None:
                self.metrics.copy_seconds[hop].observe(seconds)

    def free(self, tier: int, pages: PageIds) -> None:
        """Give pages back to their pool."""
        self.pools[tier].allocator.free(pages)

    @staticmethod
    def free_cargo(cargo: Sequence[Cargo]) -> None:
        """Give back what finished `cargo` did not bring to a node, private pages included."""
        for each in cargo:
            private = [] if each.private is None else [each.private[-1]]
            each.trail.pools[each.tier].allocator.free([*each.surplus.tolist(), *private])

    def _deserves(self, node: Node) -> bool:
        return node.hit_count >= self._uses

    def _save(self, node: Node, wanted: int, trail: Trail | None) -> bool:
        """Whether a copy of what leaves of the victim `node` is on its way now; that is locked
        then."""
        if trail is not None:
            leaving = self.hybrid.leaving(trail, node, DEVICE, wanted)
            done = not any(np.isin(each.unsaved(node), at).any() for each, at in leaving)
        else:
            lack = any(each.unsaved(node).size for each in self.hybrid.trails.values())
            done = node.pages[HOST] is not None and not lack
        return not done and self._deserves(node) and self._back_up(node.path(), ahead=False)

    def _back_up(self, path: list[Node], ahead: bool) -> bool:
        """Copy what the host lacks of `path`, evicting for it; or `ahead` of need as much of it as
        the host has free pages for."""
        lacking = list(dropwhile(lambda node: node.occupies(HOST), path))
        if any(node.occupies(HOST) for node in lacking):
            return False
        pages = self._host_pages(lacking, ahead) if lacking else NO_IDS
        end = lacking[0].start + pages.size * self.tree.page_size if lacking else path[-1].end
        cargo = self._host_cargo([node for node in path if node.end <= end], ahead)
        if pages.size or cargo:
            nodes = lacking if pages.size else []
            self.start(HOST, nodes, pages, cargo=cargo, anchor=path[-1])
        return bool(pages.size or cargo)

    def _host_pages(self, lacking: list[Node], ahead: bool) -> PageIds:
        """Host pages for the full KV of `lacking`, or for the beginning of it."""
        anchor = lacking[0].parent
        assert anchor is not None
        owner = (lacking[0].rotation + lacking[0].start // self.tree.page_size) % (
            self.tree.num_owners
        )
        # The copy above is what this one hangs on: it must not make the room.
        guard = None if anchor.pages[HOST] is None else self.tree.lock(anchor, HOST)
        count = sum(node.num_pages for node in lacking)
        if ahead:
            allocator = self.pools[HOST].allocator
            pages = allocator.alloc(min(count, allocator.longest_chain(owner)), owner)
        else:
            found = self.alloc(HOST, count, owner)
            pages = NO_IDS if found is None else found
        if guard is not None:
            self.tree.release(guard)
        self.counts["unbacked_pages"] += count - pages.size
        return pages

    def _host_cargo(self, path: list[Node], ahead: bool) -> list[Cargo]:
        """What goes along to the host, all or nothing of what a boundary at a node's end needs: of
        the nodes of `path` that are not there yet, and for the end of `path`."""
        loads = []
        for name, trail in self.hybrid.trails.items():
            cargo, allocator = Cargo(trail, HOST), trail.pools[HOST].allocator
            near = {node for node, _, _ in trail.needed(self.hybrid.end(path[-1]))} if path else ()
            for node in path:
                at = trail.unsaved(node)
                if not at.size or (node.occupies(HOST) and node not in near):
                    continue
                if ahead:
                    pages = allocator.alloc(at.size) if at.size <= allocator.num_free else None
                else:
                    pages = self.alloc(HOST, at.size, None, trail)
                if pages is None:
                    self.counts[f"{name}_unbacked_pages"] += at.size
                else:
                    cargo.add(node, at, pages)
            loads += [cargo] if cargo.holdings else []
        return loads

    def _drop(self, node: Node, tier: int, num_pages: int, trail: Trail | None) -> int:
        """Take `node` out of `tier`, or of its component about `num_pages`; how many that frees."""
        if trail is not None:
            return self.hybrid.shed(trail, node, tier, num_pages)
        pages = self.tree.drop(node, tier)
        self.free(tier, pages)
        self.hybrid.leave(node, tier)
        self.events.removed(node, tier)
        self.metrics.evicted_pages[TIERS[tier]].add(pages.size)
        if tier == DEVICE and node.gone:
            self.counts["dropped_pages"] += pages.size
        return pages.size


def no_room(
    what: str, count: int, pool: PagePool, *, available: int, attainable: int, otherwise: str
) -> CapacityError:
    """That `count` pages of `pool` are not there: now, or, where they are more than is
    `attainable`, ever; `otherwise` is what to do then."""
    remedy = "poll, or release a request, and try again"
    if count > attainable:
        remedy = f"the pool has {pool.num_pages} pages in all: {otherwise}"
    return CapacityError(what, required=count, available=available, unit="pages", remedy=remedy)
