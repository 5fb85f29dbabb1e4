"""In what order nodes leave a tier: six policies over one ordered structure.

A policy is a key, the smallest leaves first. The queue keeps only nodes that may leave now, always
in order: no rebuild over the leaves, no stale entries, the same order on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from hikv.cache.node import Node
from hikv.errors import ArgumentError

Policy = Callable[[Node], Any]

BLOCK = 512  # entries a block aims at; a removal moves at most 2 × BLOCK pointers, 8 KiB


def length_aware(free_tail: int = 256) -> Policy:
    """Tail-optimised LRU (arXiv:2510.15152): first what a conversation can lose without being late.

    A leaf goes first when the latest request through it would then lack at most `free_tail` tokens:
    the prefill that the latency target absorbs, less the next prompt. The rest follows by recency.
    The default is that of the prefetch threshold: what is too short to fetch is cheap to compute.
    """
    return lambda node: (node.reach - node.start > free_tail, node.last_access)


POLICIES: dict[str, Policy] = {
    "lru": lambda node: node.last_access,
    "lfu": lambda node: (node.hit_count, node.last_access),
    "slru": lambda node: (node.hit_count >= 2, node.last_access),  # once used: probation
    "fifo": lambda node: node.created,
    "priority": lambda node: (node.priority, node.last_access),
    "length_aware": length_aware(),
}


def find_policy(policy: str | Policy) -> Policy:
    """The key of a policy's name; a key function passes through. Raises `ArgumentError`."""
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise ArgumentError(
            "policy",
            expected=f"one of {', '.join(POLICIES)}, or a key function",
            got=repr(policy),
            remedy="correct the name",
        )
    return POLICIES[policy]


class Serial(Protocol):
    """Whatever can be queued."""

    @property
    def serial(self) -> int:
        """Unlike any other's; what a key leaves equal goes in its order, the older first."""


Item = TypeVar("Item", bound=Serial)


class OrderedQueue(Generic[Item]):
    """Items in the order of a key: `put`, `discard` and `first`, each O(log n).

    A sorted list in blocks: two bisections find an entry, and adding or removing it moves pointers
    within one block. Ties go by `serial`, so the order does not depend on that of the calls.
    """

    def __init__(self, key: Callable[[Item], Any]) -> None:
        self._key = key
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        self._blocks: list[list[tuple[Any, int, Item]]] = []
        self._last: list[tuple[Any, int, Item]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def first(self) -> Item | None:
        """The item with the least key, or `None`."""
        return self._blocks[0][0][2] if self._blocks else None

    def put(self, item: Item) -> None:
        """Add `item`, or move it to where its present key belongs."""
        entry = (self._key(item), item.serial, item)
        old = self._entries.get(item)
        if old is not None:
            if old[0] == entry[0]:
                return
            self._remove(old)
        self._entries[item] = entry
        self._add(entry)

    def discard(self, item: Item) -> None:
        """Remove `item` if it is there."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._remove(entry)

    def problems(self, leaves: set[Item]) -> Iterator[str]:
        """What is wrong with the queue when `leaves` are the items that may leave."""
        entries = [entry for block in self._blocks for entry in block]
        if {item for _, _, item in entries} != leaves or len(entries) != len(leaves):
            yield f"has {len(entries)} nodes, not the {len(leaves)} unlocked leaves"
        if entries != sorted(entries) or self._last != [block[-1] for block in self._blocks]:
            yield "is out of order"
        if any(key != self._key(item) for key, _, item in entries):
            yield "keeps a node under a key it no longer has"

    def _add(self, entry: tuple[Any, int, Item]) -> None:
        at = bisect_left(self._last, entry)
        if at < len(self._last):
            block = self._blocks[at]
            insort(block, entry)
        elif self._blocks:
            at -= 1
            block = self._blocks[at]
            block.append(entry)
            self._last[at] = entry
        else:
            block = [entry]
            self._blocks.append(block)
            self._last.append(entry)
        if len(block) > 2 * BLOCK:
            self._blocks.insert(at + 1, block[BLOCK:])
            del block[BLOCK:]
            self._last.insert(at, block[-1])

    def _remove(self, entry: tuple[Any, int, Item]) -> None:
        at = bisect_left(self._last, entry)
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        if not block:
            del self._blocks[at], self._last[at]
        else:
            self._last[at] = block[-1]
