"""All components of a cache as one: how far a prefix is usable, and what moves with its full KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hikv.cache.components import Component, Recurrent, SlidingWindow, Usable, usable_pages
from hikv.cache.controller import check_pair
from hikv.cache.holding import Positions
from hikv.cache.node import DEVICE, HOST, Lock, Match, Node
from hikv.cache.pools import DevicePool, HostPool, PagePool
from hikv.cache.trails import Boundary, Trail, TrailLock
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError


class Hybrid:
    """The components of one cache, none for a model of full attention alone.

    `trails`: windows first, then states. That is the order of worth: what leaves a tier takes with
    it what comes later in this order and needs it. Full KV comes before all.
    """

    def __init__(self, page_size: int = 1, components: Sequence[Component] = ()) -> None:
        ranked = sorted(components, key=lambda each: each.kind == Recurrent.kind)
        self.trails = {each.name: Trail(each, page_size) for each in ranked}
        self.page_size = page_size
        self._pins: list[tuple[Lock, list[TrailLock]]] = []

    def at(self, node: Node, num_pages: int) -> Boundary:
        """The boundary after `num_pages` pages of the prompt that ends with `node`."""
        return Boundary(node, node.end // self.page_size - num_pages, num_pages)

    def end(self, node: Node) -> Boundary:
        """The boundary at the end of `node`."""
        return Boundary(node, 0, node.end // self.page_size)

    def boundary(self, node: Node, most: int, *tiers: int) -> Usable:
        """The longest prefix of at most `most` pages of the path down to `node` that every
        component can serve from `tiers`. Whether its full KV is there is the caller's business."""
        at = self.at(node, most)
        if all(trail.serves(at, *tiers) for trail in self.trails.values()):
            return Usable(most, ())
        return usable_pages(
            {
                name: (trail.rule, trail.held(node, *tiers)[:most])
                for name, trail in self.trails.items()
            }
        )

    def usable(self, match: Match) -> tuple[int, Usable]:
        """Pages of `match` that are usable on the GPU, and those that are once the host has helped.

        An entry in either tier counts for the second: a load-back brings what the GPU lacks.
        """
        ready, matched = match.device_len // self.page_size, match.matched_len // self.page_size
        if not self.trails or not match.nodes:
            return ready, Usable(matched, ())
        node = match.nodes[-1]
        whole = self.boundary(node, matched, DEVICE, HOST)
        return self.boundary(node, min(ready, whole.pages), DEVICE).pages, whole

    def hold(self, at: Boundary, *tiers: int) -> list[TrailLock]:
        """Protect what a boundary needs in `tiers`."""
        return [trail.lock(at, tier) for tier in tiers for trail in self.trails.values()]

    @staticmethod
    def let_go(locks: list[TrailLock]) -> None:
        """Give receipts of `hold` back."""
        for lock in locks:
            lock.trail.release(lock)

    def pin(self, at: Boundary, lock: Lock) -> None:
        """Let what a boundary needs stay in the lock's tier as long as the tree holds `lock`."""
        self._pins.append((lock, self.hold(at, lock.tier)))

    def expire_pins(self, tree: RadixTree) -> None:
        """Give back what was pinned with a lock that the tree has let go of."""
        for _, locks in (gone := [pin for pin in self._pins if pin[0] not in tree.locks]):
            self.let_go(locks)
        if gone:
            self._pins = [pin for pin in self._pins if pin[0] in tree.locks]

    def pinned(self) -> list[TrailLock]:
        """The receipts of all pins."""
        return [lock for _, locks in self._pins for lock in locks]

    def split(self, upper: Node, lower: Node) -> None:
        """The tree's `on_split`."""
        for trail in self.trails.values():
            trail.split(upper, lower)

    def leave(self, node: Node, tier: int) -> None:
        """Full KV of `node` has left `tier`: everything else of it leaves too."""
        for trail in self.trails.values():
            trail.pools[tier].allocator.free(trail.take(node, tier))

    def leaving(
        self, trail: Trail, node: Node, tier: int, at_most: int
    ) -> list[tuple[Trail, Positions]]:
        """Which entries of `node` leave `tier` for about `at_most` pages of `trail`: its own come
        first, then the states that need one of them."""
        at = trail.leaving(node, tier, at_most)
        going = [(trail, at)]
        if trail.component.kind == SlidingWindow.kind and np.any(at >= node.num_pages - trail.need):
            for state in self.trails.values():
                if state.component.kind == Recurrent.kind:
                    going.append((state, state.leaving(node, tier, node.num_pages)))
        return going

    def shed(self, trail: Trail, node: Node, tier: int, at_most: int) -> int:
        """Let them leave; how many pages of `trail` that frees."""
        freed = []
        for each, at in self.leaving(trail, node, tier, at_most):
            freed.append(each.take(node, tier, at))
            each.pools[tier].allocator.free(freed[-1])
        return freed[0].size


def check_components(device: DevicePool, host: HostPool, components: Sequence[Component]) -> None:
    """Refuse, by name, components that cannot be kept beside the full KV's pools."""
    names: list[str] = list(device.buffers)
    pools: list[PagePool] = [device, host]
    for each in components:
        if not isinstance(each, SlidingWindow | Recurrent):
            raise ArgumentError(
                "components",
                expected="a SlidingWindow or a Recurrent each",
                got=repr(each),
                remedy="a sidecar is one more buffer of the pool whose page ids it rides on",
            )
        window = each.window if isinstance(each, SlidingWindow) else None
        size = 1 if window is None else device.page_size
        for what, holds, got in (
            ("a name that no other pool or component has", each.name not in names, each.name),
            ("pools of its own", each.device not in pools and each.host not in pools, each),
            ("a window of at least 1 token", window is None or window >= 1, window),
            (f"pages of size {size}", each.device.page_size == size, each.device.page_size),
            (
                "no context parallelism, whose owners hold no window and no state of others",
                each.device.num_owners == device.num_owners == 1,
                f"{device.num_owners} owners",
            ),
            (f"pools on {device.device}", each.device.device == device.device, each.device.device),
        ):
            if not holds:
                raise ArgumentError(
                    f"component {each.name!r}",
                    expected=what,
                    got=repr(got),
                    remedy="docs/hybrid.md says what each kind takes, and what is refused",
                )
        check_pair(each.device, each.host)
        names.append(each.name)
        pools += [each.device, each.host]
