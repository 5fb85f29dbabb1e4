"""The tree's own arithmetic: whatever changes a node goes through here, so every count stays right.

What is kept beside the nodes, per tier: pages held under a lock and pages held under none, how many
children of each node are held or arriving, and the queue of unlocked leaves in the policy's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hikv.cache.allocator import PageIds
from hikv.cache.audit import check_structure
from hikv.cache.eviction import OrderedQueue, Policy
from hikv.cache.node import (
    DEVICE,
    HOST,
    Arrival,
    Lock,
    Namespace,
    Node,
    Operation,
    Tokens,
    join,
    part,
)


class Structure:
    """Nodes under one root a namespace.

    `evictable` and `protected` count the pages held in each tier that no lock, or some lock,
    covers; an evictable page above one that is arriving waits for that acknowledgement. `locks` and
    `operations` are the receipts not yet released and the copies not yet acknowledged.
    """

    def __init__(
        self,
        page_size: int,
        num_owners: int,
        policy: Policy,
        on_split: Callable[[Node, Node], None] | None,
    ) -> None:
        self.page_size, self.num_owners = page_size, num_owners
        self.roots: dict[Namespace, Node] = {}
        # A host copy of what is still on the GPU goes first: losing it costs nothing now.
        self.queues: list[OrderedQueue[Node]] = [
            OrderedQueue(policy),
            OrderedQueue(lambda node: (node.pages[DEVICE] is None, policy(node))),
        ]
        self.evictable, self.protected = [0, 0], [0, 0]
        self.locks: set[Lock] = set()
        self.operations: set[Operation] = set()
        self._on_split = on_split
        self._serial = 0

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def owned(self, tier: int) -> PageIds:
        """Every page that the tree answers for in `tier`, those on their way included."""
        held: list[PageIds | None] = []
        for node in self.nodes():
            arrival = node.arriving[tier]
            held += [node.pages[tier], None if arrival is None else arrival.pages]
        return join(held)

    def check(self) -> None:
        """Walk everything; raises `InvariantError` naming the first broken rule."""
        check_structure(self)

    def _attach(self, parent: Node, tokens: Tokens, num_pages: int) -> Node:
        """A new leaf under `parent`: `num_pages` pages of `tokens`, held nowhere yet."""
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        node = Node(parent.namespace, parent, self._next_serial())
        node.start, node.num_pages, node.created = parent.end, num_pages, node.serial
        node.tokens = tokens[: num_pages * self.page_size].copy()
        node.first_page = node.tokens[: self.page_size].tobytes()
        parent.children[node.first_page] = node
        return node

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.first_page]
        if parent.parent is None and not parent.children:
            del self.roots[node.namespace]

    def _cover(self, nodes: Sequence[Node], num_pages: int) -> list[Node]:
        """The leading nodes that hold exactly `num_pages` pages; one that reaches beyond splits."""
        covered = []
        for node in list(nodes):
            if num_pages <= 0:
                break
            whole = node if node.num_pages <= num_pages else self._split(node, num_pages)
            covered.append(whole)
            num_pages -= whole.num_pages
        return covered

    def _split(self, node: Node, num_pages: int) -> Node:
        """Put the first `num_pages` pages of `node` into a new parent of it, which is returned.

        Whatever names `node` covers the new half as well: receipts lock the path down to `node`,
        and an operation under way gets the new half into its list.
        """
        cut, parent = num_pages * self.page_size, node.parent
        assert parent is not None
        upper = Node(node.namespace, parent, self._next_serial())
        for name in ("start", "first_page", "rotation", "reach", "priority", "hit_count"):
            setattr(upper, name, getattr(node, name))
        upper.created, upper.last_access, upper.lock = node.created, node.last_access, [*node.lock]
        upper.num_pages, upper.tokens = num_pages, part(node.tokens, 0, cut)
        node.start, node.tokens = node.start + cut, part(node.tokens, cut, node.tokens.size)
        node.num_pages -= num_pages
        node.first_page = node.tokens[: self.page_size].tobytes()
        parent.children[upper.first_page] = upper
        upper.children[node.first_page], node.parent = node, upper
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[:num_pages], node.hashes[num_pages:]
        for tier in (DEVICE, HOST):
            upper.below[tier] = int(node.occupies(tier))
            self._divide(upper, node, tier)
            self._refresh(node, tier)  # its key may depend on where it starts
        if self._on_split is not None:
            self._on_split(upper, node)
        return upper

    @staticmethod
    def _divide(upper: Node, node: Node, tier: int) -> None:
        """Share out what `node` held or awaited in `tier`."""
        pages, arrival, cut = node.pages[tier], node.arriving[tier], upper.num_pages
        if pages is not None:
            upper.pages[tier], node.pages[tier] = part(pages, 0, cut), part(pages, cut, pages.size)
        if arrival is not None:
            operation, pages = arrival
            upper.arriving[tier] = Arrival(operation, part(pages, 0, cut))
            node.arriving[tier] = Arrival(operation, part(pages, cut, pages.size))
            operation.nodes.insert(operation.nodes.index(node), upper)

    def _hold(self, node: Node, tier: int, pages: PageIds | None) -> None:
        """Make `pages` what holds `node` in `tier`; `None` takes it out of the tier."""
        before = node.occupies(tier)
        counter = self.protected if node.lock[tier] else self.evictable
        counter[tier] += node.num_pages * ((pages is not None) - (node.pages[tier] is not None))
        node.pages[tier] = pages
        self._settle(node, tier, before)
        if tier == DEVICE:
            self._refresh(node, HOST)

    def _expect(self, node: Node, tier: int, arrival: Arrival | None) -> None:
        """Make `arrival` what is on its way to `node` in `tier`, or end the wait for it."""
        before = node.occupies(tier)
        node.arriving[tier] = arrival
        self._settle(node, tier, before)

    def _settle(self, node: Node, tier: int, before: bool) -> None:
        parent, change = node.parent, node.occupies(tier) - before
        assert parent is not None
        if change:
            parent.below[tier] += change
            self._refresh(parent, tier)
        self._refresh(node, tier)

    def _guard(self, node: Node, tier: int, step: int) -> None:
        """Add `step` to the locks from `node` up to the root."""
        while node.parent is not None:
            before = node.lock[tier]
            node.lock[tier] = before + step
            if not before or before + step == 0:
                change = node.num_pages if step > 0 else -node.num_pages
                self.protected[tier] += change
                self.evictable[tier] -= change
                self._refresh(node, tier)
            node = node.parent

    def _refresh(self, node: Node, tier: int) -> None:
        """Queue `node` for eviction from `tier` under its present key, or take it off the queue."""
        held = node.pages[tier] is not None and node.parent is not None
        if held and not node.lock[tier] and not node.below[tier]:
            self.queues[tier].put(node)
        else:
            self.queues[tier].discard(node)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial
