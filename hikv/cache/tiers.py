"""What can be done with nodes in two tiers: protect them, copy them across, let them go.

Verbs of one tier take it as an argument, `DEVICE` or `HOST`: both obey the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds, as_ids
from hikv.cache.eviction import OrderedQueue, Policy
from hikv.cache.node import (
    DEVICE,
    HOST,
    TIERS,
    Arrival,
    Evicted,
    Landed,
    Lock,
    Node,
    Operation,
    join,
)
from hikv.cache.structure import Structure
from hikv.errors import ArgumentError


class TieredNodes(Structure):
    """Locks, pins, copies between the tiers and eviction."""

    def __init__(
        self,
        page_size: int,
        num_owners: int,
        policy: Policy,
        *,
        granularity: str,
        clock: Callable[[], float],
        on_split: Callable[[Node, Node], None] | None,
    ) -> None:
        super().__init__(page_size, num_owners, policy, on_split)
        self.granularity, self._clock = granularity, clock
        self._pins: OrderedQueue[Lock] = OrderedQueue(lambda pin: pin.deadline)

    def lock(self, node: Node, tier: int, deadline: float = inf) -> Lock:
        """Protect the path down to `node` in `tier`; raises `ArgumentError` if not held there.

        `deadline`: see `pin`.
        """
        if node.pages[tier] is None:
            raise ArgumentError(
                "node",
                expected=f"a node held on the {TIERS[tier]}",
                got=repr(node),
                remedy="match again: it was evicted, or its copy is not acknowledged yet",
            )
        lock = Lock(node, tier, self._next_serial(), deadline)
        self.locks.add(lock)
        if deadline < inf:
            self._pins.put(lock)
        self._guard(node, tier, 1)
        return lock

    def release(self, lock: Lock) -> None:
        """Give a receipt back. Raises `ArgumentError` the second time."""
        if lock not in self.locks:
            raise ArgumentError(
                "lock",
                expected="a receipt still held",
                got=f"one on {lock.node!r} that was released",
                remedy="release each receipt once; a pin releases itself at its deadline",
            )
        self.locks.remove(lock)
        self._pins.discard(lock)
        self._guard(lock.node, lock.tier, -1)

    def pin(self, node: Node, tier: int, seconds: float) -> Lock:
        """A lock that ends `seconds` from now, unless it is released earlier."""
        return self.lock(node, tier, self._clock() + seconds)

    def expire_pins(self) -> None:
        """Release the pins whose deadline has passed; `victim` does so by itself."""
        while (pin := self._pins.first()) is not None and pin.deadline <= self._clock():
            self.release(pin)

    def begin_backup(self, nodes: Sequence[Node], host_pages: npt.ArrayLike) -> Operation:
        """Reserve `host_pages` for a path of nodes, top first; the caller copies its `pairs`.

        Fewer pages than the nodes have serve their beginning: the node where they end is split. The
        source stays locked until `finish`. Raises `ArgumentError`, changing nothing, for nodes that
        are not a path on the GPU, are on the host or on their way there already, or hang below a
        parent that is neither.
        """
        return self._begin(HOST, nodes, "host_pages", host_pages)

    def begin_load_back(self, nodes: Sequence[Node], device_pages: npt.ArrayLike) -> Operation:
        """The same from the host to the GPU; a quota simply gives fewer pages."""
        return self._begin(DEVICE, nodes, "device_pages", device_pages)

    def begin_beside(self, tier: int, node: Node) -> Operation:
        """An operation that brings no page of the tree's own, for a copy of what others keep beside
        it; until `finish` it locks the path down to `node` as far as the other tier holds that."""
        while node.pages[1 - tier] is None and node.parent is not None:
            node = node.parent
        operation = Operation(tier, [], self.lock(node, 1 - tier), self._next_serial())
        self.operations.add(operation)
        return operation

    def finish(self, operation: Operation, arrived: int | None = None) -> Landed:
        """Acknowledge a copy: its first `arrived` pages (`None` = all) become visible; 0 aborts it.

        The rest comes back as surplus, as do pages whose parent has failed to arrive, or whose node
        an insert has revived meanwhile. Raises `ArgumentError`, changing nothing, for a second
        acknowledgement, and for a copy acknowledged before the one above it.
        """
        tier, nodes = operation.tier, operation.nodes
        total = sum(node.num_pages for node in nodes)
        arrived = total if arrived is None else arrived
        above = nodes[0].parent.arriving[tier] if nodes and nodes[0].parent else None
        if operation not in self.operations:
            fault = "one acknowledged before"
        elif arrived and above is not None and above.operation.serial < operation.serial:
            fault = "one too early, the one above it is still on its way"
        else:
            fault = "" if 0 <= arrived <= total else f"{arrived} pages"
        if fault:
            raise ArgumentError(
                "operation, arrived",
                expected=f"one in flight, after the one above it, and 0 … {total} pages",
                got=fault,
                remedy="acknowledge each operation once, in the order they began",
            )
        complete = set(self._cover(nodes, arrived))
        landed: list[Node] = []
        surplus: list[PageIds | None] = []
        for node in nodes:
            arrival, parent = node.arriving[tier], node.parent
            assert arrival is not None
            assert parent is not None
            wanted = node in complete and node.pages[tier] is None
            if wanted and parent.pages[tier] is not None:
                self._hold(node, tier, arrival.pages)
                landed.append(node)
            else:
                surplus.append(arrival.pages)
            self._expect(node, tier, None)
        self.operations.remove(operation)
        self.release(operation.lock)
        return Landed(landed, join(surplus))

    def victim(self, tier: int, at_most: int | None = None) -> Node | None:
        """The next node to leave `tier`, or `None` when it has no unlocked leaf.

        With page granularity a leaf of more than `at_most` pages is split first, and its end
        returned.
        """
        self.expire_pins()
        node = self.queues[tier].first()
        if node and at_most and self.granularity == "page" and node.num_pages > at_most:
            self._split(node, node.num_pages - at_most)
        return node

    def evict(self, tier: int, num_pages: int) -> list[Evicted]:
        """Let victims leave `tier` until `num_pages` pages are free, or none is left to take."""
        victims: list[Evicted] = []
        while num_pages > 0 and (node := self.victim(tier, num_pages)) is not None:
            pages = self.drop(node, tier)
            num_pages -= pages.size
            victims.append(Evicted(node, pages))
        return victims

    def drop(self, node: Node, tier: int) -> PageIds:
        """Take `node` out of `tier` and return its pages, the caller's to free.

        On the device this demotes a node that is backed up; on the host it drops the copy of a node
        that is still on the GPU. A node that no tier holds any more leaves the tree. Raises
        `ArgumentError` unless it is an unlocked leaf of `tier`.
        """
        pages = node.pages[tier]
        if node not in self.queues[tier] or pages is None:
            raise ArgumentError(
                "node",
                expected=f"an unlocked leaf of the {TIERS[tier]} tier",
                got=repr(node),
                remedy="take it from victim() or evict()",
            )
        self._hold(node, tier, None)
        if node.gone:
            self._detach(node)
        return pages

    def _begin(
        self, tier: int, nodes: Sequence[Node], name: str, pages: npt.ArrayLike
    ) -> Operation:
        ids, room = as_ids(name, pages), sum(node.num_pages for node in nodes)
        if not 1 <= ids.size <= room or not self._may_move(tier, nodes):
            raise ArgumentError(
                f"nodes, {name}",
                expected=f"1 … {room} pages, and a path held on the {TIERS[1 - tier]}, absent from "
                f"the {TIERS[tier]}, its parent there or on its way",
                got=f"{ids.size} pages, {list(nodes)}",
                remedy="move parents first, and each node once",
            )
        self._rotation(name, list(nodes), ids, nodes[0].start // self.page_size)
        path = self._cover(nodes, ids.size)
        operation = Operation(tier, path, self.lock(path[-1], 1 - tier), self._next_serial())
        self.operations.add(operation)
        bounds = np.cumsum([node.num_pages for node in path])[:-1]
        for node, share in zip(path, np.split(ids, bounds), strict=True):
            self._expect(node, tier, Arrival(operation, share.copy()))
        return operation

    @staticmethod
    def _may_move(tier: int, nodes: Sequence[Node]) -> bool:
        above = nodes[0].parent
        linked = all(lower.parent is node for node, lower in pairwise(nodes))
        held = all(node.pages[1 - tier] is not None for node in nodes)
        absent = not any(node.occupies(tier) for node in nodes)
        return above is not None and above.occupies(tier) and linked and held and absent

    def _rotation(self, name: str, path: list[Node], pages: PageIds, first: int) -> int:
        """The rotation of a prompt, of which `pages` are to be the pages from number `first` on."""
        if self.num_owners == 1 or not pages.size:
            return path[0].rotation if path else 0
        starts = (pages - np.arange(first, first + pages.size)) % self.num_owners
        rotation = path[0].rotation if path else int(starts[0])
        if np.any(starts != rotation):
            at = int(np.argmax(starts != rotation))
            raise ArgumentError(
                name,
                expected=f"page {first + at} of the prompt on owner "
                f"{(rotation + first + at) % self.num_owners}, as its prefix rotates",
                got=f"page id {pages[at]} on owner {pages[at] % self.num_owners}",
                remedy="allocate in the prefix's rotation, or keep these pages out of the cache",
            )
        return rotation
