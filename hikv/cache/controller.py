"""Copies in flight between L1 and L2: queued, fenced, and acknowledged in the order they began.

A copy goes through three states, and from each its pages and locks come back:

- queued or running: its pages are reserved in the tree and not visible, its source is locked. An
  abort stops it as early as its lane can.
- done: still not visible. Progress is published after the bytes, and in order.
- acknowledged: its pages are visible, or came back as surplus; its source is unlocked.

Only the front of a queue is acknowledged, aborted copies too. So ranks that acknowledge equally
many take the same decisions, however their copies were timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from hikv.buffer import KVBuffer
from hikv.cache.allocator import PageIds
from hikv.cache.cargo import Cargo
from hikv.cache.convoy import submit_all
from hikv.cache.lanes import Copy, CopyRequest, Fence, Lane, StreamLane, ThreadLane
from hikv.cache.node import DEVICE, HOST, TIERS, Landed, Node, Operation
from hikv.cache.pools import DevicePool, HostPool, PagePool
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError, CopyFailed, InvariantError


@dataclass(eq=False)
class Ticket:
    """A copy in flight.

    Attributes:
        operation: what the tree knows of it.
        copy: what its lane knows of it.
        mine: which of its pages lie on this owner, bool `[num_pages]`.
        nbytes: payload that this rank moves between the tiers.
        rid: the request that it loads for; `None` for a backup.
        cargo: what moves along by page ids of its own: all of it arrives, or none.
        aborted: whether nothing of it shall become visible.
    """

    operation: Operation
    copy: Copy
    mine: npt.NDArray
    nbytes: int
    rid: Hashable | None = None
    cargo: Sequence[Cargo] = ()
    aborted: bool = False

    def arrived(self) -> int:
        """Once done: how many leading pages may become visible."""
        if self.aborted:
            return 0
        own = np.flatnonzero(self.mine)
        local = self.copy.arrived()
        return int(own[local]) if local < own.size else self.mine.size

    def failure(self) -> BaseException | None:
        """Once done: why some of its pages will not become visible."""
        return CopyFailed("the copy was aborted") if self.aborted else self.copy.failure()

    def loss(self) -> str:
        """Once it is done and not whole: what of it has arrived, and why no more."""
        parts = [f"{self.arrived()} of {self.mine.size} pages"] if self.mine.size else []
        parts += [f"no {each.trail.name}" for each in self.cargo]
        return f"{' and '.join(parts)} arrived: {self.failure()}"


@dataclass(frozen=True)
class Acknowledged:
    """A ticket that left its queue, how many of its pages arrived, and what the tree made of it."""

    ticket: Ticket
    arrived: int
    landed: Landed

    @property
    def whole(self) -> bool:
        """Whether everything arrived."""
        return self.arrived == self.ticket.mine.size and self.ticket.failure() is None


def default_lanes(device: DevicePool, **options: Any) -> tuple[Lane, Lane]:
    """Lanes into the device tier and into the host tier: streams, or threads on the CPU.

    `options`: `path` and `block_quota` of the streams' transfers.
    """
    if device.device.type == "cpu":
        return ThreadLane("hikv-load-back"), ThreadLane("hikv-backup")
    return StreamLane(device.device, **options), StreamLane(device.device, **options)


class Controller:
    """Both directions of copying.

    Args:
        tree: keeps the books of what is on its way.
        device, host: pools of equal geometry; checked here, once.
        lanes: into the device tier and into the host tier.
        fences: asked at every submission for what the copy must wait for on the GPU side: what
            produced the pages there and last used those that are overwritten.
        layerwise: whether load-backs can be waited for layer by layer; else as a whole.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: DevicePool,
        host: HostPool,
        *,
        lanes: tuple[Lane, Lane],
        fences: Callable[[], Sequence[Fence]],
        layerwise: bool,
    ) -> None:
        check_pair(device, host)
        self.tree = tree
        self.pools: tuple[PagePool, PagePool] = (device, host)
        self.queues: tuple[deque[Ticket], deque[Ticket]] = (deque(), deque())
        self._lanes, self._fences, self._layerwise = lanes, fences, layerwise
        self.closed = False

    def start(
        self,
        tier: int,
        nodes: Sequence[Node],
        pages: PageIds,
        rid: Hashable | None = None,
        *,
        cargo: Sequence[Cargo] = (),
        anchor: Node | None = None,
    ) -> Ticket:
        """Copy a path of nodes into `pages` of `tier`, as far as these reach, and `cargo` with it.

        The pages belong to the tree from here on, and come back through `acknowledge`. Without
        nodes there is `cargo` alone, whose source lies on the path down to `anchor`. Raises
        `ArgumentError` as `begin_backup` and `begin_load_back` of the tree do, and whatever a fence
        or the lane raises; nothing is in flight and the pages stay the caller's then.
        """
        try:
            if not nodes and anchor is not None:
                operation = self.tree.begin_beside(tier, anchor)
            elif tier == DEVICE:
                operation = self.tree.begin_load_back(nodes, pages)
            else:
                operation = self.tree.begin_backup(nodes, pages)
            try:
                ticket = self._submit(operation, cargo, rid)
            except BaseException:
                self.tree.finish(operation, 0)
                raise
        except BaseException:
            for each in cargo:
                each.finish(whole=False)
            raise
        self.queues[tier].append(ticket)
        return ticket

    def _submit(self, operation: Operation, cargo: Sequence[Cargo], rid: Hashable | None) -> Ticket:
        tier, fences = operation.tier, self._fences()
        source, target = self.pools[1 - tier], self.pools[tier]
        src_pages, dst_pages = operation.pairs
        mine = target.mine(dst_pages)
        requests = [
            CopyRequest(
                _buffers(each.trail.pools[start], each.trail.pools[tier]),
                src,
                dst,
                fences,
                layerwise=False,
            )
            for each in cargo
            for start, src, dst in each.moves()
        ]
        nbytes = sum(each.nbytes for each in cargo)
        if operation.nodes:
            request = CopyRequest(
                _buffers(source, target),
                source.local(src_pages[mine]),
                target.local(dst_pages[mine]),
                fences,
                layerwise=self._layerwise and tier == DEVICE,
            )
            requests.append(request)
            nbytes += request.nbytes
        copy = submit_all(self._lanes[tier], requests)
        return Ticket(operation, copy, mine, nbytes, rid, cargo)

    def ready(self, tier: int) -> int:
        """How many copies at the front of the queue into `tier` are done."""
        return sum(1 for _ in takewhile(lambda ticket: ticket.copy.done(), self.queues[tier]))

    def acknowledge(self, tier: int, count: int) -> Iterator[Acknowledged]:
        """Take the first `count` copies into `tier` off the queue, waiting for each if need be.

        What fails is acknowledged with what arrived of it. The surplus pages are the caller's, as
        are those of its cargo.
        """
        for ticket in list(islice(self.queues[tier], count)):
            ticket.copy.synchronize()
            arrived = ticket.arrived()
            self.queues[tier].popleft()
            done = Acknowledged(ticket, arrived, self.tree.finish(ticket.operation, arrived))
            for each in ticket.cargo:
                each.finish(done.whole)
            yield done

    def place(self, ticket: Ticket) -> int:
        """How many acknowledgements of its tier it takes until `ticket` is through; 0: it is."""
        queue = self.queues[ticket.operation.tier]
        return queue.index(ticket) + 1 if ticket in queue else 0

    @staticmethod
    def abort(ticket: Ticket) -> None:
        """Let nothing of `ticket` become visible; its acknowledgement, in turn, returns all."""
        ticket.aborted = True
        ticket.copy.withdraw()

    def abort_all(self) -> None:
        """Abort whatever is in flight."""
        for queue in self.queues:
            for ticket in queue:
                self.abort(ticket)

    def check(self) -> None:
        """Every operation of the tree is on one queue. Raises `InvariantError`."""
        tickets = [ticket for queue in self.queues for ticket in queue]
        if {ticket.operation for ticket in tickets} != self.tree.operations:
            raise InvariantError("tickets: the queues and the tree disagree on what is in flight")
        for tier in (DEVICE, HOST):
            serials = [ticket.operation.serial for ticket in self.queues[tier]]
            if serials != sorted(serials):
                raise InvariantError(f"tickets: the {TIERS[tier]} queue is out of order")

    def close(self) -> None:
        """Close both lanes."""
        self.closed = True
        for lane in self._lanes:
            lane.close()


def _buffers(source: PagePool, target: PagePool) -> list[tuple[KVBuffer, KVBuffer]]:
    return [(source.buffers[name], target.buffers[name]) for name in source.buffers]


def check_pair(device: DevicePool, host: HostPool) -> None:
    """Both pools hold the same rows in the same shards, where copies between them can run.

    Raises `ArgumentError`.
    """
    for what, ours, theirs in (
        ("buffers", sorted(device.buffers), sorted(host.buffers)),
        ("owners", (device.num_owners, device.owner), (host.num_owners, host.owner)),
        ("host device", "cpu", host.device.type),
    ):
        if ours != theirs:
            raise ArgumentError(
                "host",
                expected=f"{what} {ours}",
                got=str(theirs),
                remedy="make it with HostPool.beside(device)",
            )
    for name, buffer in device.buffers.items():
        mirror = host.buffers[name]
        if not buffer.spec.same_geometry(mirror.spec):
            raise ArgumentError(
                f"host buffer {name!r}",
                expected=f"the geometry of the device's, {buffer.spec.geometry}",
                got=str(mirror.spec.geometry),
                remedy="take the rows from the device's own tensors: HostPool.beside(device)",
            )
        if buffer.device.type != "cpu" and not mirror.pinned:
            raise ArgumentError(
                f"host buffer {name!r}",
                expected="pinned memory beside a GPU",
                got=repr(mirror),
                remedy="make it with HostPool.beside(device), or KVBuffer.empty(…, pinned=True)",
            )
