"""What a copy in flight brings beside the full KV: entries of one component."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.holding import ABSENT, Holding, Positions
from hikv.cache.node import NO_IDS, Node, join
from hikv.cache.trails import Trail


@dataclass(eq=False)
class Cargo:
    """Entries on their way into `tier`; their sources are locked until `finish`.

    Attributes:
        holdings: whose entries arrive; a split adds the upper half.
        sources, pages: page ids to copy from the other tier, pair by pair.
        private: `(source tier, source page, page)`: a page of `tier` that comes to belong to a
            request instead of a node. That request's receipts keep the source; once it is closed,
            nobody reads the copy.
        surplus: once finished, the pages that found no place.
    """

    trail: Trail
    tier: int
    holdings: list[Holding] = field(default_factory=list)
    sources: list[PageIds | None] = field(default_factory=list)
    pages: list[PageIds | None] = field(default_factory=list)
    private: tuple[int, int, int] | None = None
    surplus: PageIds = field(default_factory=lambda: NO_IDS)

    def add(self, node: Node, where: Positions, pages: PageIds) -> None:
        """Let `pages` be on their way to the entries `where` of `node`, which the other tier has
        and nothing else brings."""
        holding, source = self.trail.of(node), 1 - self.tier
        assert holding is not None
        ids = np.full(node.num_pages, ABSENT)
        ids[where] = pages
        holding.arriving[self.tier] = (self, ids)
        self.holdings.append(holding)
        self.sources.append(holding.ids[source][where])
        self.pages.append(pages)
        self.trail.change(holding, source, where, step=1)

    def moves(self) -> Iterator[tuple[int, PageIds, PageIds]]:
        """`(source tier, source pages, pages)` of each copy that it takes."""
        if self.pages:
            yield 1 - self.tier, join(self.sources), join(self.pages)
        if self.private is not None:
            tier, source, page = self.private
            yield tier, np.array([source]), np.array([page])

    @property
    def nbytes(self) -> int:
        """Payload between the tiers."""
        moved = sum(pages.size for tier, _, pages in self.moves() if tier != self.tier)
        return moved * self.trail.pools[self.tier].bytes_per_page

    def finish(self, whole: bool) -> None:
        """Let the sources go, and make the entries visible if the copy was `whole`, where their
        nodes have full KV and nobody else has filled them; the rest is `surplus`."""
        surplus: list[PageIds | None] = []
        for holding in self.holdings:
            awaited, tier = holding.arriving[self.tier], self.tier
            assert awaited is not None
            _, ids = awaited
            at = np.flatnonzero(ids != ABSENT)
            free = whole and holding.node.pages[tier] is not None
            lands = at[(holding.ids[tier][at] == ABSENT) & free]
            surplus.append(ids[np.setdiff1d(at, lands)])
            holding.arriving[tier] = None
            self.trail.change(holding, tier, lands, ids[lands])
            self.trail.change(holding, 1 - tier, at, step=-1)
        self.surplus = join(surplus)
