"""The open requests: which locks each holds, which pages its table names, which are its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.controller import Acknowledged, Ticket
from hikv.cache.node import DEVICE, Inserted, Lock, Match, Namespace, Node, Tokens, join
from hikv.cache.placement import Placement, no_room
from hikv.cache.requests import AdmissionCost, Lengths, Request
from hikv.cache.shares import Shares
from hikv.errors import ArgumentError, InvariantError


class Ledger:
    """Requests by id, and what moves a page between a request and the tree.

    Every page that a request's table names is held by a node that the request locks, or on its way
    to such a node, or the request's own. So none is freed while it is named.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement, self.tree = placement, placement.tree
        self.hybrid, self.shares = placement.hybrid, Shares(placement)
        self.requests: dict[Hashable, Request] = {}
        self._failed: list[Request] = []
        self.num_layers = next(iter(placement.pools[DEVICE].buffers.values())).spec.num_layers

    def __getitem__(self, rid: Hashable) -> Request:
        """The open request `rid`. Raises `ArgumentError`."""
        if rid not in self.requests:
            raise ArgumentError(
                "rid", expected="an open request", got=repr(rid), remedy="acquire it first"
            )
        return self.requests[rid]

    def lengths(self, match: Match, prompt_len: int) -> Lengths:
        """What is usable of a prompt of which `match` is cached."""
        ready, beyond = match.device_len, match.host_len
        if self.hybrid.trails:
            held, whole = self.hybrid.usable(match)
            ready = held * self.tree.page_size
            beyond = whole.pages * self.tree.page_size - ready
        return Lengths(ready, beyond, 0, None, prompt_len - ready)

    def open(
        self, rid: Hashable, namespace: Namespace, prompt: Tokens, limit: int | None
    ) -> Request:
        """Match, lock, and make a request that holds the receipts."""
        if rid in self.requests:
            raise ArgumentError(
                "rid", expected="one not in use", got=repr(rid), remedy="release it first"
            )
        if self.placement.controller.closed:
            raise ArgumentError(
                "cache", expected="an open one", got="one after close()", remedy="make another"
            )
        page, unusable = self.tree.page_size, 0
        missing: tuple[str, ...] = ()
        if self.hybrid.trails:
            found = self.tree.match(namespace, prompt, limit)
            _, (pages, missing) = self.hybrid.usable(found)
            limit, unusable = pages * page, found.matched_len - pages * page
        match, device_lock, host_lock = self.tree.acquire(namespace, prompt, limit)
        lengths = self.lengths(match, prompt.size)
        ready = lengths.device_len // page
        request = Request(
            rid,
            namespace,
            prompt,
            match.pages(DEVICE)[:ready],
            self.num_layers,
            lengths,
            device_lock,
            host_lock,
            self.hybrid.at(device_lock.node, ready),
            missing=missing,
            unusable_len=unusable,
        )
        if self.hybrid.trails:
            self.shares.open(request, request.boundary, request.end)
        self.requests[rid] = request
        return request

    def close(self, request: Request) -> None:
        """Give back its locks and its own pages."""
        del self.requests[request.rid]
        for lock in self.locks(request):
            self.tree.release(lock)
        self.placement.free(DEVICE, request.own)
        self.shares.close(request)

    @staticmethod
    def locks(request: Request) -> list[Lock]:
        """The receipts that it holds."""
        held = (request.device_lock, request.host_lock)
        return [lock for lock in held if lock is not None]

    def next_owner(self, request: Request) -> int | None:
        """Who must own the next page of its table; `None` leaves it to the allocator."""
        if request.pages.size:
            return int(request.pages[0] + request.pages.size) % self.tree.num_owners
        path = request.host_lock.node.path() if request.host_lock else []
        return path[0].rotation if path else None

    def cost(self, request: Request, num_tokens: int) -> AdmissionCost:
        """What it takes if all that the host holds of it is loaded, and the rest of its first
        `num_tokens` computed."""
        pool, lengths = self.placement.pools[DEVICE], request.lengths
        waits = request.host_lock is not None and not (request.loads or request.started)
        at = self.hybrid.end(request.end) if waits else request.boundary
        total = max(-(-num_tokens // self.tree.page_size), at.num_pages)
        have = request.device_lock.node.end // self.tree.page_size if waits else 0
        have = max(have, request.pages.size)
        free = pool.allocator.longest_chain(self.next_owner(request))
        takes = dict.fromkeys(pool.buffers, max(0, total - have))
        there = dict.fromkeys(pool.buffers, free + self.tree.evictable[DEVICE])
        most = dict.fromkeys(pool.buffers, pool.num_pages - have)
        for name, trail in self.hybrid.trails.items():
            spare = trail.pools[DEVICE].allocator.num_free
            there[name] = spare + trail.evictable[DEVICE]
        takes |= self.shares.cost(request, at, total)
        most |= self.shares.attainable(request, at)
        load = lengths.host_len if waits else lengths.loaded_len
        extend = max(0, num_tokens - lengths.device_len - load)
        return AdmissionCost(load, extend, takes, there, most)

    def allocate(self, request: Request, num_tokens: int) -> PageIds:
        """`HiRadixCache.allocate`."""
        pool, had = self.placement.pools[DEVICE], request.pages.size
        count = max(0, -(-num_tokens // self.tree.page_size) - had)
        owner = self.next_owner(request)
        pages = self.placement.alloc(DEVICE, count, owner)
        if pages is None:
            raise no_room(
                f"GPU pages for request {request.rid!r}",
                count,
                pool,
                available=pool.allocator.longest_chain(owner),
                attainable=pool.num_pages - had,
                otherwise="refuse the prompt",
            )
        try:
            self.shares.allocate(request, had + count)
        except BaseException:
            self.placement.free(DEVICE, pages)
            raise
        request.pages, request.own = join([request.pages, pages]), join([request.own, pages])
        return pages

    def catch_up(self, request: Request) -> tuple[list[Node], int, int]:
        """Take in what reached the GPU since the match, while the request has only cached pages.

        Returns the nodes that it acquired, and how many of their pages are on the GPU, and usable
        there.
        """
        path, page = request.end.path(), self.tree.page_size
        held = [node for node in path if node.pages[DEVICE] is not None]
        have = held[-1].end // page if held else 0
        ready, lengths = self.hybrid.boundary(request.end, have, DEVICE).pages, request.lengths
        if held and held[-1].end > request.device_lock.node.end:
            self.protect(request, held[-1])
        if (moved := ready * page - lengths.device_len) > 0:
            request.pages = join([node.pages[DEVICE] for node in held])[:ready]
            request.lengths = replace(
                lengths,
                device_len=ready * page,
                host_len=lengths.host_len - moved,
                extend_len=lengths.extend_len - moved,
            )
            if self.hybrid.trails:
                self.shares.open(request, self.hybrid.at(held[-1], ready), request.end)
        return path, have, ready

    def protect(self, request: Request, node: Node) -> None:
        """Hold the path down to `node` on the GPU instead of what is held now."""
        lock = self.tree.lock(node, DEVICE)
        self.tree.release(request.device_lock)
        request.device_lock = lock

    def set_loaded(self, request: Request, num_pages: int) -> None:
        """So many pages are loaded, or loading, for it."""
        loaded = num_pages * self.tree.page_size
        extend = request.tokens.size - request.lengths.device_len - loaded
        request.lengths = replace(request.lengths, loaded_len=loaded, extend_len=extend)

    def loaded(self, done: Acknowledged) -> None:
        """A load-back is through, in whichever way."""
        ticket, surplus = done.ticket, done.landed.surplus
        request = self.requests.get(ticket.rid)
        if request is None or request.ticket is not ticket:
            self.placement.free(DEVICE, surplus)
            self.placement.free_cargo(ticket.cargo)
            return
        self.shares.arrived(request, ticket.cargo)
        # Its table names these pages, those too that another request has overtaken.
        request.own, request.ticket = join([request.own, surplus]), None
        held = [node for node in ticket.operation.nodes if node.pages[DEVICE] is not None]
        if held:
            self.protect(request, held[-1])
        if done.whole:
            return
        self._fail(request, ticket)
        self._failed.append(request)

    def notice(self, request: Request) -> None:
        """Take note of a copy for it that has failed before a `poll` says so; never waits."""
        ticket = request.ticket
        if ticket is not None and ticket.copy.done() and ticket.failure() is not None:
            self._fail(request, ticket)

    def _fail(self, request: Request, ticket: Ticket) -> None:
        request.failed, request.reasons = ticket.loss(), ("copy_failed",)
        if request.loads:
            self.set_loaded(request, 0 if ticket.cargo else ticket.arrived())

    def failures(self) -> list[Hashable]:
        """Open requests whose load-back has failed since this was last asked."""
        failed, self._failed = self._failed, []
        return [each.rid for each in failed if self.requests.get(each.rid) is each]

    def misfit(self, request: Request, prompt: Tokens) -> str | None:
        """Why its pages for `prompt` cannot join the cached prefix, or `None`."""
        match = self.tree.match(request.namespace, prompt)
        owners, held = self.tree.num_owners, match.device_len // self.tree.page_size
        entering = request.pages[held : prompt.size // self.tree.page_size]
        if owners == 1 or not entering.size:
            return None
        first = self.tree.owner_at(match, held)
        first = int(entering[0] % owners) if first is None else first
        expected = (first + np.arange(entering.size)) % owners
        wrong = np.flatnonzero(entering % owners != expected)
        if not wrong.size:
            return None
        at = int(wrong[0])
        return (
            f"page {held + at} of the prompt is on owner {entering[at] % owners}, "
            f"in the cached prefix's rotation it belongs on owner {expected[at]}"
        )

    def adopt(self, request: Request, done: Inserted) -> None:
        """Let it name the canonical pages and hold their node; only then free its duplicates."""
        count = done.pages.size
        before = request.pages[:count]
        if done.node.end >= request.device_lock.node.end:
            self.protect(request, done.node)
        if request.host_lock is not None:
            self.tree.release(request.host_lock)
            request.host_lock = None
        request.pages = join([done.pages, request.pages[count:]])
        if request.own.size:
            request.own = request.own[~np.isin(request.own, before)]
        self.placement.free(DEVICE, done.duplicates)

    def check(self) -> None:
        """Every page that a table names is the tree's or its own. Raises `InvariantError`."""
        held = self.tree.owned(DEVICE)
        for request in self.requests.values():
            astray = np.setdiff1d(request.pages, [*held, *request.own])
            if astray.size and request.failed is None:
                raise InvariantError(
                    f"table: {request!r} names pages {astray} that it has no hold on"
                )

    def own_pages(self) -> PageIds:
        """Every page that some request owns."""
        return join([request.own for request in self.requests.values()])
