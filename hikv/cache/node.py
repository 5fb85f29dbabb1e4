"""What the radix tree is made of: namespaces, nodes, receipts and the results of its verbs.

Every node describes a run of whole pages and says, per tier, which pages hold it. The two tiers
obey one rule alike: a node held in a tier has a parent held in that tier. So any path reads, from
the root, "both tiers, then GPU only" or "both tiers, then host only", and the four states of a node
are

| `pages[DEVICE]` | `pages[HOST]` | |
|---|---|---|
| yes | no | on the GPU only: lost when evicted |
| yes | yes | backed up: eviction demotes it |
| no | yes | host only: a load-back restores it |
| `arriving[tier]` | | bytes are on their way into `tier`; not visible there until acknowledged |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds
from hikv.errors import ArgumentError

DEVICE, HOST = 0, 1
TIERS = ("device", "host")

Tokens = npt.NDArray[Any]

NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Namespace:
    """Who may share a prefix: named fields, kept apart by name and type, in no order.

    `Namespace.of(lora="X")` and `Namespace.of(salt="X")` never meet, nor do `1` and `"1"`.
    """

    fields: tuple[tuple[str, str | int | bytes], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        for name, value in self.fields:
            if type(value) not in (str, int, bytes) or names.count(name) > 1:
                raise ArgumentError(
                    f"namespace field {name!r}",
                    expected="one str, int or bytes value",
                    got=repr(value),
                    remedy="give each field once, and leave out what does not apply",
                )
        object.__setattr__(self, "fields", tuple(sorted(self.fields, key=lambda field: field[0])))

    @classmethod
    def of(cls, **fields: str | int | bytes) -> Namespace:
        """The namespace of these fields."""
        return cls(tuple(fields.items()))


class Node:
    """A run of whole pages that all its requests share; `start … end` are its tokens in the prompt.

    Per tier (index `DEVICE` or `HOST`): `pages` (ids `[num_pages]`, or `None` where it is not
    held), `arriving` (pages under way), `lock` (receipts that protect it), `below` (children held
    or arriving). `tokens` are compared, never only hashed; `first_page` is their first page as
    bytes, the key under which the parent keeps the node. `rotation` is the owner of the prompt's
    first page. `reach` is where the latest request through this node ended. `hashes` and `payload`
    belong to the floors above: one hash a page, filled in when needed and split with the node;
    anything else.
    """

    __slots__ = (
        "arriving",
        "below",
        "children",
        "created",
        "first_page",
        "hashes",
        "hit_count",
        "last_access",
        "lock",
        "namespace",
        "num_pages",
        "pages",
        "parent",
        "payload",
        "priority",
        "reach",
        "rotation",
        "serial",
        "start",
        "tokens",
    )

    def __init__(self, namespace: Namespace, parent: Node | None, serial: int) -> None:
        self.namespace, self.parent, self.serial = namespace, parent, serial
        self.children: dict[bytes, Node] = {}
        self.tokens: Tokens = NO_IDS
        self.first_page = b""
        self.start = self.num_pages = 0
        self.pages: list[PageIds | None] = [None, None]
        self.arriving: list[Arrival | None] = [None, None]
        self.lock, self.below = [0, 0], [0, 0]
        self.hashes: list[bytes] | None = None
        self.payload: Any = None
        self.rotation = self.priority = self.hit_count = 0
        self.created = self.last_access = self.reach = 0

    @property
    def end(self) -> int:
        """The token of the prompt after its last."""
        return self.start + self.tokens.size

    def occupies(self, tier: int) -> bool:
        """Whether its pages are in `tier` or on their way there."""
        return self.pages[tier] is not None or self.arriving[tier] is not None

    @property
    def gone(self) -> bool:
        """Whether no tier holds it; then it has left the tree."""
        return self.pages[DEVICE] is None and self.pages[HOST] is None

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def __repr__(self) -> str:
        held = "+".join(
            name for name, pages in zip(TIERS, self.pages, strict=True) if pages is not None
        )
        return f"Node({self.start}…{self.end}, {held or 'nowhere'}, lock {self.lock})"


def new_root(namespace: Namespace) -> Node:
    """A root: no tokens, held in both tiers, so that no verb needs a special case for it."""
    root = Node(namespace, None, 0)
    root.pages = [NO_IDS, NO_IDS]
    return root


@dataclass(frozen=True, eq=False)
class Lock:
    """A receipt: it protects the path down to `node` in `tier` until it is released, once.

    Splits need no change to it: the lower half of a split node stays `node`. `deadline`, in seconds
    of the tree's clock, makes it a pin, which is released when that has passed.
    """

    node: Node
    tier: int
    serial: int
    deadline: float = inf


@dataclass(frozen=True, eq=False)
class Operation:
    """A copy in flight into `tier` for a path of nodes, top first.

    A split puts the new half into `nodes`, so an acknowledgement reaches both. `lock` protects the
    source. Operations that began later have a greater `serial`.
    """

    tier: int
    nodes: list[Node]
    lock: Lock
    serial: int

    @property
    def pairs(self) -> tuple[PageIds, PageIds]:
        """`(source pages, destination pages)`, in prompt order, for `transfer()`."""
        sources = [node.pages[1 - self.tier] for node in self.nodes]
        arrivals = [node.arriving[self.tier] for node in self.nodes]
        return join(sources), join([None if a is None else a.pages for a in arrivals])


class Arrival(NamedTuple):
    """A node's share of an operation: the pages that will hold it once acknowledged."""

    operation: Operation
    pages: PageIds


class Match(NamedTuple):
    """The longest cached prefix, as it stands until the tree next changes.

    `nodes`: the path; all but the last are used whole, of which the first `tail_pages` pages count.
    `device_len`: tokens readable on the GPU. `host_len`: the tokens after them that the host holds.
    Both are whole pages; together they are the prefix.
    """

    nodes: list[Node]
    tail_pages: int
    device_len: int
    host_len: int

    @property
    def matched_len(self) -> int:
        """Tokens of the prefix, whichever tier holds them."""
        return self.device_len + self.host_len

    @property
    def segments(self) -> list[tuple[Node, int]]:
        """`(node, pages used of it)` from the top."""
        used = [node.num_pages for node in self.nodes]
        used[-1:] = [self.tail_pages] if used else []
        return list(zip(self.nodes, used, strict=True))

    def pages(self, tier: int) -> PageIds:
        """Page ids `[n]` that hold the prefix in `tier`, as far as it is held there."""
        held = [(node.pages[tier], used) for node, used in self.segments]
        return join([pages if pages is None else pages[:used] for pages, used in held])


class Acquired(NamedTuple):
    """A match, and for each tier the receipt that keeps it as far as it is held there."""

    match: Match
    device: Lock
    host: Lock


class Inserted(NamedTuple):
    """What an insert did.

    `node`: the end of the covered prefix; lock it before the old receipt is released. `pages`: the
    canonical page ids of the covered prefix: write them into the request's page table first, then
    free `duplicates`, the caller's pages that did not enter the tree. `revived`: nodes that the
    host alone held and that are on the GPU again. `created`: the new node, or `None`.
    """

    node: Node
    pages: PageIds
    duplicates: PageIds
    revived: list[Node]
    created: Node | None


class Landed(NamedTuple):
    """What an acknowledgement made of its pages: held by `nodes` now, or `surplus` to free."""

    nodes: list[Node]
    surplus: PageIds


class Evicted(NamedTuple):
    """One victim and its `pages`, to free in the tier it left; `node.gone` tells if it is lost."""

    node: Node
    pages: PageIds


def join(parts: list[PageIds | None]) -> PageIds:
    """The parts that are there, as one array of its own."""
    return np.concatenate([NO_IDS, *(part for part in parts if part is not None)])


def part(array: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """`array[low:high]`, as a view only while it keeps at most twice its own size alive.

    Trimming a long node from its end is then O(1) amortised, and a small rest never pins a large
    buffer.
    """
    view = array[low:high]
    base = view.base
    return view if isinstance(base, np.ndarray) and base.size <= 2 * view.size else view.copy()
