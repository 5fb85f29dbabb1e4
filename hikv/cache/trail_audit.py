"""Proves the books of the components: one walk, every invariant by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

import numpy as np

from hikv.cache.cargo import Cargo
from hikv.cache.holding import ABSENT, Tally
from hikv.cache.hybrid import Hybrid
from hikv.cache.node import DEVICE, HOST, TIERS, Node, join
from hikv.cache.requests import Request
from hikv.cache.trails import Trail
from hikv.cache.tree import RadixTree
from hikv.errors import InvariantError


def check_trails(
    hybrid: Hybrid, tree: RadixTree, requests: Collection[Request], flying: list[Cargo]
) -> None:
    """`flying`: the cargo of every copy in flight. Raises `InvariantError`, whose message begins
    with the component and the name of the first broken rule."""
    nodes = list(tree.nodes())
    owned = {lock for request in requests for lock in request.trail_locks}
    owned.update(hybrid.pinned())
    for name, trail in hybrid.trails.items():
        cargo = [each for each in flying if each.trail is trail]
        for problem in chain(
            _entries(trail, nodes),
            _flights(trail, nodes, cargo),
            _locks(trail, nodes, cargo),
            _counts(trail, nodes),
            _tables(trail, nodes, requests, cargo),
        ):
            raise InvariantError(f"{name}: {problem}")
        if strange := trail.locks ^ {lock for lock in owned if lock.trail is trail}:
            raise InvariantError(
                f"{name}: locks: {strange} are held by nobody, or owned but not held"
            )
        own = [request.shares[name].own for request in requests]
        private = [np.array(each.private[-1:]) for each in cargo if each.private is not None]
        trail.pools[DEVICE].allocator.check(join([*_pages(trail, nodes, DEVICE), *own, *private]))
        trail.pools[HOST].allocator.check(join(_pages(trail, nodes, HOST)))


def _pages(trail: Trail, nodes: list[Node], tier: int) -> list:
    """What the entries of `tier` name, those on their way included."""
    parts = []
    for holding in filter(None, map(trail.of, nodes)):
        awaited = holding.arriving[tier]
        for ids in (holding.ids[tier], *([] if awaited is None else [awaited[1]])):
            parts.append(ids[ids != ABSENT])
    return parts


def _entries(trail: Trail, nodes: list[Node]) -> Iterator[str]:
    """Each holding by itself and against the full KV of its node."""
    for node in nodes:
        if (holding := trail.of(node)) is None:
            continue
        if holding.node is not node or any(ids.size != node.num_pages for ids in holding.ids):
            yield f"entries: what is kept of {node} describes another run"
        for tier, name in enumerate(TIERS):
            if node.pages[tier] is None and holding.there(tier).any():
                yield f"entry without KV: {node} has {name} entries"


def _flights(trail: Trail, nodes: list[Node], flying: list[Cargo]) -> Iterator[str]:
    """Whatever arrives is on board of one copy, and the other way round."""
    for node in nodes:
        if (holding := trail.of(node)) is None:
            continue
        for tier, awaited in enumerate(holding.arriving):
            if awaited is None:
                continue
            cargo, ids = awaited
            if cargo not in flying or holding not in cargo.holdings or cargo.tier != tier:
                yield f"cargo: {node} awaits entries that no copy brings to the {TIERS[tier]}"
            if np.any((ids != ABSENT) & ~holding.there(1 - tier)):
                yield f"cargo: the source of entries of {node} left while it was copied"
    for cargo in flying:
        if any(each.arriving[cargo.tier] is None for each in cargo.holdings):
            yield "cargo: a copy in flight brings entries that nobody awaits"


def _locks(trail: Trail, nodes: list[Node], flying: list[Cargo]) -> Iterator[str]:
    """Locks of entries, against the receipts and the copies in flight."""
    found = {tier: {node: np.zeros(node.num_pages, int) for node in nodes} for tier in (0, 1)}
    for lock in trail.locks:
        for node, first, stop in trail.needed(lock.at):
            if node in found[lock.tier]:
                found[lock.tier][node][first:stop] += 1
    for cargo in flying:
        for each in cargo.holdings:
            awaited = each.arriving[cargo.tier]
            if awaited is not None and each.node in found[1 - cargo.tier]:
                found[1 - cargo.tier][each.node] += awaited[1] != ABSENT
    for tier, counts in found.items():
        for node, count in counts.items():
            holding = trail.of(node)
            have = np.zeros_like(count) if holding is None else holding.locks[tier]
            if np.any(have != count):
                yield f"receipts: {node} has {TIERS[tier]} locks {have}, receipts for {count}"


def _counts(trail: Trail, nodes: list[Node]) -> Iterator[str]:
    """Every count that is kept, against a recount."""
    holdings = [holding for holding in map(trail.of, nodes) if holding is not None]
    for tier, name in enumerate(TIERS):
        loose = 0
        for holding in holdings:
            kept = Tally(holding.held[tier], holding.loose[tier], holding.guards[tier])
            found = holding.tally(tier, slice(None))
            loose += found.loose
            if kept != found:
                yield f"counts: {holding.node} counts {kept} {name} entries, {found} found"
        if loose != trail.evictable[tier]:
            yield f"evictable: {trail.evictable[tier]} {name} entries counted, {loose} found"
        for problem in trail.queues[tier].problems({h for h in holdings if h.loose[tier]}):
            yield f"queue: the {name} queue {problem}"


def _tables(
    trail: Trail, nodes: list[Node], requests: Collection[Request], flying: list[Cargo]
) -> Iterator[str]:
    """Every page that a request names is in the tree or its own; a state is its own alone."""
    shared = set(join(_pages(trail, nodes, DEVICE)).tolist())
    for request in requests:
        share, pages = request.shares[trail.name], request.pages
        own = set(share.own.tolist())
        if share.pages is not None and share.pages.size != pages.size:
            yield f"table: {request!r} has {share.pages.size} entries for {pages.size} pages"
        if share.pages is not None and request.failed is None:
            named = set(share.pages[share.pages != ABSENT].tolist())
            if astray := named - shared - own:
                yield f"table: {request!r} names pages {astray} that it has no hold on"
        if share.slot is not None:
            private = {each.private[-1] for each in flying if each.private is not None}
            if share.slot in shared or share.slot not in own | private:
                yield f"state: {request!r} writes page {share.slot}, which is not its alone"
