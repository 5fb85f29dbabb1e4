"""The open requests: which locks each holds, which pages its table names, which are its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from hikv.cache.allocator import PageIds
from hikv.cache.controller import Acknowledged
from hikv.cache.node import DEVICE, Acquired, Inserted, Lock, Match, Namespace, Node, Tokens, join
from hikv.cache.placement import Placement
from hikv.cache.requests import Lengths, Request
from hikv.errors import ArgumentError, HikvError


class Ledger:
    """Requests by id, and what moves a page between a request and the tree.

    Every page that a request's table names is held by a node that the request locks, or on its way
    to such a node, or the request's own. So none is freed while it is named.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement, self.tree = placement, placement.tree
        self.requests: dict[Hashable, Request] = {}

    def __getitem__(self, rid: Hashable) -> Request:
        """The open request `rid`. Raises `ArgumentError`."""
        if rid not in self.requests:
            raise ArgumentError(
                "rid", expected="an open request", got=repr(rid), remedy="acquire it first"
            )
        return self.requests[rid]

    def open(
        self, rid: Hashable, namespace: Namespace, tokens: Tokens, acquired: Acquired
    ) -> Request:
        """A request that holds both receipts of `acquired`."""
        match, device_lock, host_lock = acquired
        lengths, pages = match_lengths(match, tokens.size), match.pages(DEVICE)
        request = Request(rid, namespace, tokens, pages, lengths, device_lock, host_lock)
        self.requests[rid] = request
        return request

    def close(self, request: Request) -> None:
        """Give back its locks and its own pages."""
        del self.requests[request.rid]
        for lock in self.locks(request):
            self.tree.release(lock)
        self.placement.free(DEVICE, request.own)

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

    def catch_up(self, request: Request) -> list[Node]:
        """Take in what reached the GPU since the match; the nodes that are still on the host alone.

        The request has only cached pages yet.
        """
        assert request.host_lock is not None
        path = request.host_lock.node.path()
        held = [node for node in path if node.pages[DEVICE] is not None]
        lengths = request.lengths
        if held and (moved := held[-1].end - lengths.device_len) > 0:
            self.protect(request, held[-1])
            request.pages = join([node.pages[DEVICE] for node in held])
            request.lengths = replace(
                lengths,
                device_len=held[-1].end,
                host_len=lengths.host_len - moved,
                extend_len=lengths.extend_len - moved,
            )
        return path[len(held) :]

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

    def loaded(self, done: Acknowledged) -> Request | None:
        """A load-back is through; returns its request if that is open and has lost pages."""
        ticket, surplus = done.ticket, done.landed.surplus
        request = self.requests.get(ticket.rid)
        if request is None or request.ticket is not ticket:
            self.placement.free(DEVICE, surplus)
            return None
        # Its table names these pages, those too that another request has overtaken.
        request.own, request.ticket = join([request.own, surplus]), None
        held = [node for node in ticket.operation.nodes if node.pages[DEVICE] is not None]
        if held:
            self.protect(request, held[-1])
        if done.whole:
            return None
        request.failed = f"{done.arrived} of {ticket.mine.size} pages arrived: {ticket.failure()}"
        request.reasons = ("copy_failed",)
        self.set_loaded(request, done.arrived)
        return request

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
        self.protect(request, done.node)
        if request.host_lock is not None:
            self.tree.release(request.host_lock)
            request.host_lock = None
        request.pages = join([done.pages, request.pages[count:]])
        if request.own.size:
            request.own = request.own[~np.isin(request.own, before)]
        self.placement.free(DEVICE, done.duplicates)

    def check(self) -> None:
        """Every page that a request's table names is in the tree or its own. Raises `HikvError`."""
        held = self.tree.owned(DEVICE)
        for request in self.requests.values():
            astray = np.setdiff1d(request.pages, [*held, *request.own])
            if astray.size and request.failed is None:
                raise HikvError(f"table: {request!r} names pages {astray} that it has no hold on")

    def own_pages(self) -> PageIds:
        """Every page that some request owns."""
        return join([request.own for request in self.requests.values()])


def match_lengths(match: Match, prompt_len: int) -> Lengths:
    """The lengths of a prompt of which `match` is cached."""
    return Lengths(match.device_len, match.host_len, 0, None, prompt_len - match.device_len)
