"""A radix tree over KV pages: match, insert, lock, evict, and copies between the two tiers.

Pure: no I/O, no clock but the one injected for pins, no torch. Tokens are compared, never only
hashed: a child is found by the bytes of its first page, the rest of its run is compared in place by
numpy. The tree names pages and neither allocates nor frees one; a verb that takes pages out hands
them to its caller. Nothing recurses, so depth has no limit. Not thread-safe: one thread owns a
tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds, as_ids
from hikv.cache.eviction import Policy, find_policy
from hikv.cache.node import (
    DEVICE,
    HOST,
    Acquired,
    Inserted,
    Match,
    Namespace,
    Node,
    Tokens,
    join,
    new_root,
)
from hikv.cache.tiers import TieredNodes
from hikv.errors import ArgumentError, check_count, check_type


class RadixTree(TieredNodes):
    """Prefixes of whole pages, by namespace.

    Args:
        page_size: tokens a page.
        policy: a name of `eviction.POLICIES` or a key function; both tiers follow it.
        granularity: `"segment"` evicts a leaf as a whole; `"page"` cuts off its end just the pages
            that are asked for, deepest first.
        num_owners: ranks that pages are sharded over, page id `q` on owner `q mod num_owners`.
        token_dtype: int32 or int64. A token id that does not fit is refused.
        clock: seconds, for the deadlines of pins.
        on_split: called with (upper, lower) after a split, to divide `payload`; the lower half is
            the node that was there before.
    """

    def __init__(
        self,
        page_size: int,
        *,
        policy: str | Policy = "lru",
        granularity: str = "segment",
        num_owners: int = 1,
        token_dtype: npt.DTypeLike = np.int32,
        clock: Callable[[], float] = time.monotonic,
        on_split: Callable[[Node, Node], None] | None = None,
    ) -> None:
        if page_size < 1 or num_owners < 1 or granularity not in ("segment", "page"):
            raise ArgumentError(
                "page_size, num_owners, granularity",
                expected="1 or more, 1 or more, and 'segment' or 'page'",
                got=f"{page_size}, {num_owners}, {granularity!r}",
                remedy="pass the pool's page size and the number of shard ranks",
            )
        super().__init__(
            page_size,
            num_owners,
            find_policy(policy),
            granularity=granularity,
            clock=clock,
            on_split=on_split,
        )
        self.token_dtype = np.dtype(token_dtype)
        self._tick = 0

    def as_tokens(self, tokens: npt.ArrayLike) -> Tokens:
        """`tokens` `[n]` as the tree compares them; raises `ArgumentError` as `as_ids` does."""
        wider = "keep them as HiRadixCache(…, token_dtype=np.int64)"
        return as_ids("tokens", tokens, self.token_dtype, wider=wider)

    def match(self, namespace: Namespace, tokens: npt.ArrayLike, limit: int | None = None) -> Match:
        """The longest cached prefix. Pure: splits nothing, touches no recency, protects nothing.

        `tokens`: `[n]`, int32 or int64; a list is converted. `limit`: reuse at most so many of
        them; `n − 1` leaves one to compute (page 4: cached prompts of 9 and 8 tokens reuse 8 and
        4).
        """
        return self._match(self._root(namespace), self.as_tokens(tokens), limit)

    def acquire(
        self, namespace: Namespace, tokens: npt.ArrayLike, limit: int | None = None
    ) -> Acquired:
        """Match and lock in one step, and count the use; a node in which the match ends is split.

        Both receipts are the caller's to `release`, those of an empty match too.
        """
        root, prompt = self._root(namespace), self.as_tokens(tokens)
        found = self._match(root, prompt, limit)
        nodes = self._cover(found.nodes, found.matched_len // self.page_size)
        for node in nodes:
            node.hit_count += 1
        self._touch(nodes, prompt.size)
        match = found._replace(nodes=nodes, tail_pages=nodes[-1].num_pages if nodes else 0)
        ends = [
            next((node for node in reversed(nodes) if node.pages[tier] is not None), root)
            for tier in (DEVICE, HOST)
        ]
        return Acquired(match, self.lock(ends[DEVICE], DEVICE), self.lock(ends[HOST], HOST))

    def insert(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        device_pages: npt.ArrayLike,
        *,
        priority: int = 0,
    ) -> Inserted:
        """Make a computed prompt findable.

        Args:
            tokens: those whose KV is computed, `[n]`; the last sampled token has none, leave it
            out.
            device_pages: the request's page table `[n // page_size]`, its cached prefix included.
            priority: raises that of the whole path.

        Where the GPU holds the prefix its pages stay, and the caller's differing ones come back as
        duplicates; where only the host holds it, and beyond its end, the caller's pages enter.
        Raises `ArgumentError`, changing nothing, for lengths that differ, and for entering pages
        that are not on the owners which the prefix's rotation gives them: two rotations never join.
        """
        prompt = self.as_tokens(tokens)
        pages = self._pages("device_pages", device_pages, prompt.size // self.page_size)
        root = self._root(namespace)
        found = self._match(root, prompt)
        held, matched = found.device_len // self.page_size, found.matched_len // self.page_size
        rotation = self._rotation("device_pages", found.nodes, pages[held:], held)
        path = self._cover(found.nodes, matched)
        canonical = join([*(node.pages[DEVICE] for node in path), pages[held:]])
        differs = pages[:held] != canonical[:held]
        revived = [node for node in path if node.pages[DEVICE] is None]
        for node in path:
            first, last = node.start // self.page_size, node.end // self.page_size
            if node.pages[DEVICE] is None:
                self._hold(node, DEVICE, pages[first:last].copy())
            elif not differs[last - 1]:
                continue  # the request reused these pages: its acquire counted that
            node.hit_count += 1
        self._touch(path, prompt.size, priority)
        node, created = path[-1] if path else root, None
        if matched < pages.size:
            node = created = self._grow(node, prompt, pages[matched:], DEVICE, rotation, priority)
        return Inserted(node, canonical, pages[:held][differs], revived, created)

    def insert_host(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        host_pages: npt.ArrayLike,
        start: int,
    ) -> Inserted:
        """Add what a prefetch brought: `host_pages` hold the tokens from `start` (a whole page) on.

        A new node needs a parent on the host. So nothing enters where the cached prefix is on the
        GPU alone, or ends before `start` because its end was evicted meanwhile. In the result,
        `pages` are those that entered and `duplicates` all others. Raises as `insert` does.
        """
        if start % self.page_size:
            raise ArgumentError(
                "start", expected="whole pages", got=start, remedy="begin where a match ended"
            )
        prompt, first = self.as_tokens(tokens), start // self.page_size
        pages = self._pages("host_pages", host_pages, prompt.size // self.page_size - first)
        root = self._root(namespace)
        found = self._match(root, prompt)
        matched = found.matched_len // self.page_size
        fits = first <= matched and (not found.nodes or found.nodes[-1].pages[HOST] is not None)
        kept = min(matched - first, pages.size) if fits else pages.size
        rotation = self._rotation("host_pages", found.nodes, pages[kept:], matched)
        path = self._cover(found.nodes, matched)
        node, created = path[-1] if path else root, None
        if kept < pages.size:
            self._touch(path, prompt.size)
            node = created = self._grow(node, prompt, pages[kept:], HOST, rotation, 0)
        return Inserted(node, pages[kept:].copy(), pages[:kept].copy(), [], created)

    def owner_at(self, match: Match, page: int) -> int | None:
        """Who must own page number `page` of a matched prompt; `None` leaves it to the allocator.

        An extension asks for the page after the match, a load-back for the first that the GPU
        lacks.
        """
        return (match.nodes[0].rotation + page) % self.num_owners if match.nodes else None

    def _match(self, root: Node, tokens: Tokens, limit: int | None = None) -> Match:
        page = self.page_size
        stop = tokens.size
        if limit is not None:
            check_count("limit", limit, remedy="pass None to reuse all that is cached")
            stop = min(stop, limit)
        stop -= stop % page
        nodes: list[Node] = []
        node, at, used = root, 0, 0
        while at < stop:
            child = node.children.get(tokens[at : at + page].tobytes())
            if child is None:
                break
            nodes.append(child)
            used = child.num_pages
            if used > 1:  # a run of one page was compared as the key
                room = stop - at
                differ = child.tokens[:room] != tokens[at : at + min(used * page, room)]
                first = int(differ.argmax())
                used = (first if differ[first] else differ.size) // page
                if used < child.num_pages:
                    break
            node, at = child, at + used * page
        tail = nodes[-1].start + used * page if nodes else 0
        held = next((node.end for node in reversed(nodes) if node.pages[DEVICE] is not None), 0)
        device = min(held, tail)
        return Match(nodes, used if nodes else 0, device, tail - device)

    def _touch(self, nodes: Iterable[Node], reach: int, priority: int | None = None) -> None:
        """Make `nodes` the most recent, as used by a prompt of `reach` tokens."""
        self._tick += 1
        for node in nodes:
            node.last_access, node.reach = self._tick, reach
            if priority is not None:
                node.priority = max(node.priority, priority)
            for tier in (DEVICE, HOST):
                if node.pages[tier] is not None and not (node.lock[tier] or node.below[tier]):
                    self._refresh(node, tier)

    def _grow(
        self,
        parent: Node,
        prompt: Tokens,
        pages: PageIds,
        tier: int,
        rotation: int,
        priority: int,
    ) -> Node:
        """Hang the rest of `prompt` below `parent`, held in `tier`."""
        node = self._attach(parent, prompt[parent.end :], pages.size)
        node.rotation, node.priority, node.hit_count = rotation, priority, 1
        node.last_access, node.reach = self._tick, prompt.size
        self._hold(node, tier, pages.copy())
        return node

    def _root(self, namespace: Namespace) -> Node:
        check_type("namespace", namespace, Namespace, remedy="pass Namespace.of(tenant=…)")
        return self.roots.get(namespace) or new_root(namespace)

    def _pages(self, name: str, pages: npt.ArrayLike, count: int) -> PageIds:
        ids = as_ids(name, pages)
        if ids.size != count or (count and ids.min() < 0):
            raise ArgumentError(
                name,
                expected=f"{count} page ids, one for each whole page of tokens",
                got=f"{ids.size}, of which the least is {ids.min() if ids.size else 'none'}",
                remedy="pass the page table of exactly these tokens",
            )
        return ids
