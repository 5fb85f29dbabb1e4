"""What a component has of one node of the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds
from hikv.cache.node import TIERS, Node

if TYPE_CHECKING:
    from hikv.cache.cargo import Cargo

ABSENT = -1
"""The id of an entry that is not there."""

ALL = slice(None)

Positions = npt.NDArray[np.int64]
Where: TypeAlias = "slice | Positions"


class Tally(NamedTuple):
    """Counts of entries: that are there, of those without a lock, and locks on whichever."""

    held: int
    loose: int
    guards: int


class Holding:
    """The entries of one node: per tier `ids` and `locks` `[num_pages]`, the ids that some cargo
    brings, and the parts of their `Tally`.
    """

    __slots__ = ("arriving", "guards", "held", "ids", "last_use", "locks", "loose", "node")

    def __init__(self, node: Node, last_use: int) -> None:
        self.node, self.last_use = node, last_use
        self.ids = [np.full(node.num_pages, ABSENT) for _ in TIERS]
        self.locks = [np.zeros(node.num_pages, np.int32) for _ in TIERS]
        self.arriving: list[tuple[Cargo, PageIds] | None] = [None, None]
        self.held, self.loose, self.guards = [0, 0], [0, 0], [0, 0]

    @property
    def serial(self) -> int:
        """Its node's."""
        return self.node.serial

    def there(self, *tiers: int, where: Where = ALL) -> npt.NDArray[np.bool_]:
        """Which of the entries `where` some of `tiers` has, bool."""
        first, *others = (self.ids[tier][where] != ABSENT for tier in tiers)
        for there in others:
            first |= there
        return first

    def tally(self, tier: int, where: Where) -> Tally:
        """The counts of the entries `where`."""
        there, locks = self.ids[tier][where] != ABSENT, self.locks[tier][where]
        loose = there & (locks == 0)
        return Tally(int(np.count_nonzero(there)), int(np.count_nonzero(loose)), int(locks.sum()))
