"""How ranks meet: they show each other what they have, and all draw the same conclusion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from hikv.buffer import KVBuffer
from hikv.cp.backends import Backend, Group, HostBackend
from hikv.cp.board import Board, reason
from hikv.cp.nccl import NcclBackend
from hikv.cp.peers import PeerBackend
from hikv.cp.scratch import NUM_SLOTS, Slot, make_slot
from hikv.cp.shard_map import ShardMap
from hikv.cp.shared_memory import MemoryHandle
from hikv.errors import ArgumentError, GatherError

BACKENDS: dict[str, Callable[[bool], Backend]] = {
    "host": lambda allow_sm: HostBackend(),
    "p2p": lambda allow_sm: PeerBackend(),
    "nccl": NcclBackend,
}
"""Every back end by name. None launches a kernel, but `nccl` where NCCL's own are allowed."""


class TorchGroup:
    """A process group of torch.distributed that carries CPU tensors, gloo for example.

    Its time-out, set where it was made, bounds an exchange; `GatherError` tells of one that failed.

    Attributes:
        ranks: its members, as the default group numbers them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, value: Any) -> list[Any]:
        """All-gather of objects."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise GatherError(
                "a rank is gone or did not answer while the group met",
                remedy="start all ranks again",
            ) from error
        return values


class Met(NamedTuple):
    """What a successful meeting gives: a back end that is set up, pages of each rank's pool, and
    scratch for what the least of the ranks has room for."""

    backend: Backend
    board: Board
    pool_pages: list[int]
    slots: list[Slot]
    max_pages: int


@dataclass(frozen=True)
class _Facts:
    """What a rank shows. `problem`: why it cannot take part."""

    problem: str | None
    backend: str
    shards: ShardMap
    geometry: dict[str, object]
    max_pages: int
    allow_sm: bool
    pool_pages: int
    place: str = ""


def meet(
    pool: KVBuffer,
    shards: ShardMap,
    group: Group,
    *,
    max_pages: int,
    backend: str,
    allow_sm: bool,
    timeout_s: float,
) -> Met:
    """Agree on a gather; collective. Returns on every rank or raises the same on every rank.

    Nothing is raised before the ranks have exchanged it: a rank that left early would keep the
    others waiting. Nothing is made before all of them can take part: torch never takes back what
    it shared with a process that did not open it.
    """
    own = (shards, pool.spec.geometry, max_pages, allow_sm, pool.num_pages)
    mine, mover = _Facts(None, backend, *own), None
    try:
        mover = BACKENDS[backend](allow_sm) if backend in BACKENDS else None
        mine = replace(mine, problem=_problem(mine, mover, pool, group, timeout_s))
        if mover is not None and mine.problem is None:
            mine = replace(mine, place=mover.place())
    except Exception as error:  # whatever it is, the peers must hear of it
        mine = replace(mine, problem=reason(error))
    facts: list[_Facts] = group.exchange(mine)
    _conclude([fact.problem for fact in facts], facts[0].backend)
    _same(facts)
    assert mover is not None
    return _set_up(mover, pool, facts, group, timeout_s)


def _set_up(
    mover: Backend,
    pool: KVBuffer,
    facts: list[_Facts],
    group: Group,
    timeout_s: float,
) -> Met:
    """Share the pools and a board, reach them, allocate, and do the back end's steps, abreast."""
    max_pages = min(fact.max_pages for fact in facts)
    board: Board | None = None
    keep: object = None
    slots: list[Slot] = []
    steps: Sequence[Callable[[], None]] = ()

    def share() -> tuple[Any, MemoryHandle | None]:
        nonlocal keep
        handle = None
        if group.rank == 0:
            keep, handle = Board.memory(group.size, pool.spec.num_layers)
        return mover.export(pool, group.rank, group.size), handle

    def reach() -> None:
        nonlocal board, slots, steps
        assert handles[0] is not None
        board = Board(handles[0], group.rank, group.size, pool.spec.num_layers)
        mover.connect(exports)
        slots = [make_slot(pool.spec, max_pages, mover.allocate) for _ in range(NUM_SLOTS)]
        pages = mover.staging_pages(max_pages)
        staging = make_slot(pool.spec, pages, mover.allocate) if pages else None
        steps = mover.steps(slots, staging, group, timeout_s)

    try:
        shared = _abreast(share, group, mover.name)
        exports, handles = map(list, zip(*shared, strict=True))
        _abreast(reach, group, mover.name)
        del keep  # every rank has the board's memory by now
        for step in steps:
            _abreast(step, group, mover.name)
    except BaseException:  # an interrupt too must not leave this rank's lock and memory behind
        mover.close()
        if board is not None:
            board.close()
        raise
    assert board is not None
    pool_pages = [fact.pool_pages for fact in facts]
    return Met(mover, board, pool_pages, slots, max_pages)


def _abreast(step: Callable[[], Any], group: Group, backend: str) -> list[Any]:
    """Do `step`; what it returned on every rank, or raises the same on every rank."""
    problem, value = None, None
    try:
        value = step()
    except Exception as error:  # whatever it is, the peers must hear of it
        problem = reason(error)
    told = group.exchange((problem, value))
    _conclude([other for other, _ in told], backend)
    return [found for _, found in told]


def _problem(
    mine: _Facts, mover: Backend | None, pool: KVBuffer, group: Group, timeout_s: float
) -> str | None:
    if mover is None:
        return f"there is no back end {mine.backend!r}, only {', '.join(BACKENDS)}"
    if mine.shards.num_ranks != group.size:
        return f"its map is of {mine.shards.num_ranks} ranks in a group of {group.size}"
    if mine.shards.page_size != pool.spec.page_size:
        return f"its map has pages of {mine.shards.page_size}, its pool of {pool.spec.page_size}"
    if type(mine.max_pages) is not int or mine.max_pages < 1:
        return f"max_pages is {mine.max_pages!r}, not a positive int"
    if not 0 < timeout_s < math.inf:
        return f"timeout_s is {timeout_s!r}, not a finite number of seconds above 0"
    return mover.obstacle(pool)


def _conclude(problems: list[str | None], backend: str) -> None:
    """Raise if any rank has a problem: on every rank the same, naming all of them."""
    named = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if named:
        raise GatherError(
            f"back end {backend!r} cannot serve the group ({'; '.join(named)})",
            remedy="choose another back end on every rank",
        )


def _same(facts: list[_Facts]) -> None:
    """Refuse ranks that differ in what must be equal."""
    for name in ("backend", "shards", "geometry", "allow_sm", "place"):
        values = [getattr(fact, name) for fact in facts]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ArgumentError(
                    name,
                    expected=f"the same on every rank, {values[0]} as on rank 0",
                    got=f"{value} on rank {rank}",
                    remedy="build the gather alike on every rank, on one host",
                )
