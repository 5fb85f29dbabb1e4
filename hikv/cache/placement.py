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
from collections.abc import Hashable
from itertools import dropwhile, takewhile

from hikv.cache.allocator import PageIds
from hikv.cache.controller import Acknowledged, Controller, Ticket
from hikv.cache.events import EventStream
from hikv.cache.metrics import Metrics
from hikv.cache.node import DEVICE, HOST, NO_IDS, TIERS, Node


class Placement:
    """The tree's pages in both tiers.

    `backup_after_uses`: requests that must have used a node before it gets its copy; `None` leaves
    that to eviction.

    `counts` collects pages: `dropped_pages` were evicted from the GPU without a copy,
    `unbacked_pages` wanted a copy for which the host had no room.
    """

    def __init__(
        self,
        controller: Controller,
        events: EventStream,
        metrics: Metrics,
        backup_after_uses: int | None,
    ) -> None:
        self.controller, self.events, self.metrics = controller, events, metrics
        self.tree, self.pools = controller.tree, controller.pools
        self.counts: Counter[str] = Counter()
        self._eager = backup_after_uses is not None
        self._uses = backup_after_uses or 1

    def alloc(self, tier: int, count: int, owner: int | None) -> PageIds | None:
        """`count` pages of `tier`, evicting as needed; `None` where there is no room for all.

        Evicts nothing when that could not be enough.
        """
        within_reach = self.pools[tier].allocator.num_free + self.tree.evictable[tier]
        waiting = tier == DEVICE and self.controller.queues[HOST]
        if (within_reach < count and not waiting) or self.room(tier, count, owner) < count:
            return None
        return self.pools[tier].allocator.alloc(count, owner)

    def room(self, tier: int, count: int, owner: int | None) -> int:
        """How many of `count` pages `tier` can give, after evicting as many as that takes."""
        allocator = self.pools[tier].allocator
        while (free := allocator.longest_chain(owner)) < count:
            if not self.evict(tier, count - free):
                break
        return min(count, allocator.longest_chain(owner))

    def evict(self, tier: int, num_pages: int) -> int:
        """Free about `num_pages` pages of `tier`; returns how many, 0 when none can go.

        On the GPU it waits for the copies of victims that need one, and for other backups in flight
        where nothing else may leave: those hold their sources.
        """
        freed = 0
        while freed < num_pages:
            leaving: list[Node] = []
            pending = 0
            while freed + pending < num_pages:
                node = self.tree.victim(tier, num_pages - freed - pending)
                if node is None:
                    break
                if tier == DEVICE and self._save(node):
                    leaving.append(node)
                    pending += node.num_pages
                else:
                    freed += self._drop(node, tier)
            if freed >= num_pages or tier == HOST or not self.controller.queues[HOST]:
                break
            self.acknowledge_backups(len(self.controller.queues[HOST]))
            freed += sum(self._drop(node, DEVICE) for node in leaving)
        return freed

    def write(self, node: Node) -> None:
        """Start the copies that an eager policy wants on the path down to `node`, parents first."""
        path = list(takewhile(self._deserves, node.path())) if self._eager else []
        if path:
            self._back_up(path, ahead=True)

    def start(
        self, tier: int, nodes: list[Node], pages: PageIds, rid: Hashable | None = None
    ) -> Ticket:
        """`Controller.start`; the pages are freed if that raises."""
        try:
            return self.controller.start(tier, nodes, pages, rid)
        except BaseException:
            self.free(tier, pages)
            raise

    def acknowledge_backups(self, count: int) -> int:
        """Acknowledge so many backups, waiting if need be; returns the pages that arrived."""
        arrived = 0
        for done in self.controller.acknowledge(HOST, count):
            self.count(done)
            self.free(HOST, done.landed.surplus)
            for node in done.landed.nodes:
                self.events.stored(node, HOST)
            arrived += done.arrived
        return arrived

    def count(self, done: Acknowledged) -> None:
        """Put an acknowledged copy into the metrics."""
        hop = "backup" if done.ticket.operation.tier == HOST else "load_back"
        if done.whole:
            self.metrics.copied_bytes[hop].add(done.ticket.nbytes)
        else:
            self.metrics.copy_failures[hop].add()

    def free(self, tier: int, pages: PageIds) -> None:
        """Give pages back to their pool."""
        self.pools[tier].allocator.free(pages)

    def _deserves(self, node: Node) -> bool:
        return node.hit_count >= self._uses

    def _save(self, node: Node) -> bool:
        """Whether a copy of the victim `node` is on its way now; it is locked then."""
        if node.pages[HOST] is not None or not self._deserves(node):
            return False
        return self._back_up(node.path(), ahead=False)

    def _back_up(self, path: list[Node], ahead: bool) -> bool:
        """Copy what the host lacks of `path`, evicting for it; or `ahead` of need as much of it as
        the host has free pages for."""
        lacking = list(dropwhile(lambda node: node.occupies(HOST), path))
        if not lacking or any(node.occupies(HOST) for node in lacking):
            return False
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
        if pages.size:
            self.start(HOST, lacking, pages)
        return pages.size > 0

    def _drop(self, node: Node, tier: int) -> int:
        """Take `node` out of `tier`; how many pages that frees."""
        pages = self.tree.drop(node, tier)
        self.free(tier, pages)
        self.events.removed(node, tier)
        self.metrics.evicted_pages[TIERS[tier]].add(pages.size)
        if tier == DEVICE and node.gone:
            self.counts["dropped_pages"] += pages.size
        return pages.size
