"""What the cache knows of one request, and what its verbs answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from hikv.cache.allocator import PageIds
from hikv.cache.controller import Ticket
from hikv.cache.lanes import Copy
from hikv.cache.node import NO_IDS, Lock, Namespace, Node, Tokens
from hikv.cache.trails import Boundary, TrailLock
from hikv.errors import ArgumentError, CopyFailed

if TYPE_CHECKING:
    from hikv.cache.shares import StateShare, WindowShare


@dataclass(frozen=True)
class Lengths:
    """The five lengths of a prompt, in tokens, never to be mixed.

    Attributes:
        device_len: readable on the GPU now.
        host_len: the tokens after them that the host holds, or completes with a window or a state.
            A candidate, no promise: none of them is usable before `load_back`.
        loaded_len: of those, the ones that `load_back` brings for this request.
        storage_len: what storage holds beyond; `None` until `prefetch` has asked it.
        extend_len: what has to be computed: the prompt less `device_len` less `loaded_len`.
    """

    device_len: int
    host_len: int
    loaded_len: int
    storage_len: int | None
    extend_len: int


class LoadBack(NamedTuple):
    """What `load_back` decided.

    `outcome`: `"loading"` (`loaded_len` tokens are on their way; wait for them per layer or as a
    whole), `"nothing"` (the host holds no more than the GPU), `"recompute"` (loading does not pay,
    or there will be no room) or `"defer"` (room, or these very pages, may be there after a `poll`:
    ask again, or compute). `reasons`, keys of `explain.REASONS`, say why tokens stay on the host.
    """

    outcome: str
    loaded_len: int = 0
    reasons: tuple[str, ...] = ()


class AdmissionCost(NamedTuple):
    """What admitting a request takes.

    `load_len`, `extend_len`: tokens to load back and to compute. `pages`: GPU pages that it would
    take of each buffer and component. `available`: pages of each that are free or could be evicted.
    `attainable`: pages of each that would be available if it were alone in the cache, so the pool's
    less those that it has already.
    """

    load_len: int
    extend_len: int
    pages: Mapping[str, int]
    available: Mapping[str, int]
    attainable: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether every pool has the pages."""
        return all(self.available[name] >= count for name, count in self.pages.items())

    @property
    def ever_fits(self) -> bool:
        """Whether every pool would have the pages for the request alone. Where not, waiting is in
        vain: a prompt that only a window is too small for enters chunk by chunk, any other has to
        be refused."""
        return all(self.attainable[name] >= count for name, count in self.pages.items())


class InsertResult(NamedTuple):
    """What `insert` did.

    `pages`: the request's page table, rewritten to the canonical pages. `inserted_len`: tokens
    whose full KV others can find now; components may serve less. `duplicates`: pages of the request
    that gave way to pages already there, and are free again; `doubled` those of each component.
    `private`: why nothing was inserted, or `None`; the pages stay the request's own.
    """

    pages: PageIds
    inserted_len: int
    duplicates: int
    private: str | None
    doubled: Mapping[str, int] = MappingProxyType({})


class Progress(NamedTuple):
    """What a `poll` acknowledged, and what has failed since the last one.

    `backed_up`, `loaded`: pages. `failed`: the open requests whose load-back failed, each of which
    has to be cancelled and acquired again. `failed_backups`: for each backup that failed, how many
    of how many pages arrived, and why no more; they are tried again when they are used or leave.
    """

    backed_up: int
    loaded: int
    failed: list[Hashable]
    failed_backups: list[str]


@dataclass(eq=False)
class Request:
    """A request between `acquire` and `release`.

    Attributes:
        rid: the caller's name for it.
        namespace, tokens: its prompt.
        pages: its page table so far: cached, then loading, then allocated pages.
        num_layers: layers that `wait_layer` counts: those of the GPU pool's first buffer.
        lengths: as of now.
        own: those of `pages` that no node of the tree holds, and pages that gave way to others
            while they were loaded; freed with the request.
        failed: why its load-back failed, if it did. Its pages must not be read then.
        loads: whether a load-back was started for it.
        missing: components for which the cached prefix was usable only in part.
        unusable_len: tokens of which some tier has the full KV, and which they make useless.
        shares: its part in each component.
        reasons: why tokens that the host holds are computed, keys of `explain.REASONS`.
    """

    rid: Hashable
    namespace: Namespace = field(repr=False)  # a user's data, as the tokens are: not for logs
    tokens: Tokens = field(repr=False)
    pages: PageIds = field(repr=False)
    num_layers: int = field(repr=False)
    lengths: Lengths
    device_lock: Lock = field(repr=False)
    host_lock: Lock | None = field(repr=False)
    boundary: Boundary = field(repr=False)
    own: PageIds = field(default_factory=lambda: NO_IDS, repr=False)
    trail_locks: list[TrailLock] = field(default_factory=list, repr=False)
    shares: dict[str, WindowShare | StateShare] = field(default_factory=dict, repr=False)
    missing: tuple[str, ...] = ()
    unusable_len: int = 0
    ticket: Ticket | None = field(default=None, repr=False)
    loads: bool = False
    failed: str | None = None
    reasons: tuple[str, ...] = ("gpu_quota",)  # until load_back is called, it has no quota

    @property
    def windows(self) -> dict[str, PageIds]:
        """By component the window's page of each page of the prompt, −1 where it has passed."""
        return {name: s.pages for name, s in self.shares.items() if s.pages is not None}

    @property
    def states(self) -> dict[str, int]:
        """By component the page of the state that its forward pass reads and writes: from
        `allocate` or `load_back` until it is handed over with `insert`. It begins as a copy of the
        cached one; where nothing is cached, its content is unknown."""
        return {name: s.slot for name, s in self.shares.items() if s.slot is not None}

    @property
    def started(self) -> bool:
        """Whether it has pages of its own."""
        taken = [self.own, *(share.own for share in self.shares.values())]
        return bool(self.ticket) or any(pages.size for pages in taken)

    @property
    def end(self) -> Node:
        """Where what it acquired ends, whichever tier holds it."""
        nodes = [lock.node for lock in (self.device_lock, self.host_lock) if lock is not None]
        return max(nodes, key=lambda node: node.end)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Before layer `layer` is computed: let `stream` (on the CPU: the caller) wait for what is
        loading of it. Layers count from this rank's first. Raises `CopyFailed` when that failed,
        and `ArgumentError` for a layer that the GPU pool's first buffer has not."""
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(
                "layer",
                expected=f"0 … {self.num_layers - 1}, counted from this rank's first layer",
                got=layer,
                remedy="subtract the stage's first layer once",
            )
        self._await(lambda copy: copy.wait_layer(layer, stream))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """The same for all layers at once, for a runtime that steps as a whole."""
        self._await(lambda copy: copy.wait(stream))

    def refuse_failed(self) -> None:
        """Raise `CopyFailed` if the request's load-back failed."""
        if self.failed is not None:
            raise self._failure(self.failed)

    def _await(self, wait: Callable[[Copy], None]) -> None:
        self.refuse_failed()
        if self.ticket is None:
            return
        try:
            wait(self.ticket.copy)
        except CopyFailed as error:
            self.ticket.copy.synchronize()  # what has arrived is known only then
            raise self._failure(self.ticket.loss()) from error.__cause__

    def _failure(self, loss: str) -> CopyFailed:
        return CopyFailed(f"request {self.rid!r}: {loss}; cancel it and acquire again")
