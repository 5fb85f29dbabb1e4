"""Proves that the tree is what it claims to be: one walk, every invariant by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.node import TIERS, Node
from hikv.errors import InvariantError

if TYPE_CHECKING:
    from hikv.cache.structure import Structure


def check_structure(tree: Structure) -> None:
    """Raises `InvariantError`, whose message begins with the name of the first broken rule."""
    nodes = list(tree.nodes())
    for problem in (*_shapes(tree, nodes), *_holdings(tree, nodes), *_books(tree, nodes)):
        raise InvariantError(problem)


def _shapes(tree: Structure, nodes: list[Node]) -> Iterator[str]:
    """Each node by itself and against its parent."""
    for node in nodes:
        parent = node.parent
        if node.num_pages < 1 or node.tokens.size != node.num_pages * tree.page_size:
            yield f"empty or ragged key: {node} has {node.tokens.size} tokens"
        if parent is None or parent.children.get(node.first_page) is not node:
            yield f"child key: the parent of {node} does not keep it under its first page"
        elif node.first_page != node.tokens[: tree.page_size].tobytes():
            yield f"child key: {node} is kept under a page that is not its first"
        elif node.start != parent.end or node.namespace != parent.namespace:
            yield f"position: {node} does not continue its parent"
        elif node.rotation != parent.rotation and parent.parent is not None:
            yield f"rotation: {node} has {node.rotation}, its parent {parent.rotation}"
        if node.hashes is not None and len(node.hashes) != node.num_pages:
            yield f"hashes: {node} has {len(node.hashes)} for {node.num_pages} pages"


def _holdings(tree: Structure, nodes: list[Node]) -> Iterator[str]:
    """Who holds which page, and that no tier has a hole above a node."""
    for node in nodes:
        if node.gone:
            yield f"held nowhere: {node} is in the tree but in no tier"
    for tier, name in enumerate(TIERS):
        owned = tree.owned(tier)
        if np.unique(owned).size != owned.size:
            yield f"page twice: a {name} page is in two places"
        for node in nodes:
            pages, arrival = node.pages[tier], node.arriving[tier]
            if pages is not None:
                yield from _held(tree, node, tier, pages)
            if arrival is None:
                continue
            listed = arrival.operation in tree.operations and node in arrival.operation.nodes
            if not listed or arrival.pages.size != node.num_pages:
                yield f"operation: {node} awaits {name} pages that no operation will bring"
            if node.pages[1 - tier] is None:
                yield f"operation: the source of {node} left while it was copied to the {name}"
    for operation in tree.operations:
        if any(node.arriving[operation.tier] is None for node in operation.nodes):
            yield "operation: one in flight lists a node that awaits nothing"
        if operation.lock not in tree.locks:
            yield "operation: one in flight does not hold the lock of its source"


def _held(tree: Structure, node: Node, tier: int, pages: PageIds) -> Iterator[str]:
    """The pages that hold one node in one tier."""
    name, parent = TIERS[tier], node.parent
    if pages.size != node.num_pages:
        yield f"page count: {node} has {pages.size} {name} pages for {node.num_pages}"
    first = node.start // tree.page_size + node.rotation
    if np.any((pages - np.arange(first, first + pages.size)) % tree.num_owners):
        yield f"rotation: {node} has {name} pages on other owners than it should"
    if parent is not None and parent.pages[tier] is None:
        yield f"{name} hole: {node} is held on the {name} below a parent that is not"


def _books(tree: Structure, nodes: list[Node]) -> Iterator[str]:
    """Every count that is kept, against a recount."""
    receipts: Counter[tuple[Node, int]] = Counter()
    for receipt in tree.locks:
        receipts.update((node, receipt.tier) for node in receipt.node.path())
    for tier, name in enumerate(TIERS):
        counts = {True: 0, False: 0}
        leaves = set()
        for node in nodes:
            lock, parent = node.lock[tier], node.parent
            if lock < 0:
                yield f"negative lock: {node} on the {name}"
            if parent is not None and parent.parent is not None and lock > parent.lock[tier]:
                yield f"lock order: {node} has more {name} locks than its parent"
            if lock and node.pages[tier] is None:
                yield f"lock on nothing: {node} is locked on the {name} but not held there"
            if lock != receipts[node, tier]:
                yield f"receipts: {node} has {lock} {name} locks, {receipts[node, tier]} receipts"
            below = sum(child.occupies(tier) for child in node.children.values())
            if below != node.below[tier]:
                yield f"below: {node} counts {node.below[tier]} {name} children of {below}"
            if node.pages[tier] is not None:
                counts[lock > 0] += node.num_pages
                if not lock and not below:
                    leaves.add(node)
        if counts[False] != tree.evictable[tier]:
            yield f"evictable: {tree.evictable[tier]} {name} pages counted, {counts[False]} found"
        if counts[True] != tree.protected[tier]:
            yield f"protected: {tree.protected[tier]} {name} pages counted, {counts[True]} found"
        for problem in tree.queues[tier].problems(leaves):
            yield f"queue: the {name} queue {problem}"
