"""What a router or another engine may follow: which pages this cache holds in which tier.

Events are numbered without gaps and wait in order until the cache is at rest; `deliver` hands them
to the callback. So a callback never sees a change half done, and whatever it raises leaves the
cache whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from hikv.cache.keys import prefix_hash
from hikv.cache.node import TIERS, Namespace, Node


class KVEvent(NamedTuple):
    """One change.

    `sequence` counts from 0. `kind` is `"stored"`, `"removed"` or `"cleared"`; the rest is empty
    for `"cleared"`, which voids everything before it. `tier` is `"device"` or `"host"`. `hashes`
    name the pages in prompt order, each with its whole prefix; `parent` names the page before them
    and is `None` where they begin the prompt.
    """

    sequence: int
    kind: str
    tier: str | None = None
    hashes: tuple[bytes, ...] = ()
    parent: bytes | None = None
    namespace: Namespace | None = None


class EventStream:
    """Numbered events for `callback`; without one nothing is recorded and no hash computed."""

    def __init__(self, callback: Callable[[KVEvent], None] | None) -> None:
        self._callback = callback
        self._pending: deque[KVEvent] = deque()
        self._next = 0

    def stored(self, node: Node, tier: int) -> None:
        """`node` is held in `tier` from now on."""
        self._record("stored", node, tier)

    def removed(self, node: Node, tier: int) -> None:
        """`node` has left `tier`."""
        self._record("removed", node, tier)

    def cleared(self) -> None:
        """Both tiers are empty."""
        self._append("cleared")

    def deliver(self) -> None:
        """Hand over what waits, in order. An event whose callback raises counts as delivered."""
        while self._pending and self._callback is not None:
            self._callback(self._pending.popleft())

    def _record(self, kind: str, node: Node, tier: int) -> None:
        if self._callback is None:
            return
        prefix_hash(node)
        above = node.parent
        first = above is None or above.parent is None
        parent = None if above is None or first else prefix_hash(above)
        self._append(kind, TIERS[tier], tuple(node.hashes or ()), parent, node.namespace)

    def _append(self, kind: str, *details: object) -> None:
        if self._callback is not None:
            self._pending.append(KVEvent(self._next, kind, *details))  # type: ignore[arg-type]
            self._next += 1
