"""The `nccl` back end: this rank's pages packed by the copy engine, blocks gathered by NCCL.

NCCL gathers blocks of equal length, each contiguous on its rank. So this rank's scattered pages
first go into a staging block, K and behind it V, by one batch for the copy engine; then one
all-gather for K and one for V put every rank's block, padding included, where the plan has it. Each
page of this rank moves twice; what that costs beside `p2p` is in `GatherReport.moved_bytes`.

Asked for no SM, NCCL still takes some where it must, in silence. So a rehearsal is watched: unless
`allow_sm`, a kernel seen on any rank ends the set-up on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cp.backends import Group, Moved, OwnShard, layer_work
from hikv.cp.collective import Collective, NcclCollective
from hikv.cp.peers import check_reach
from hikv.cp.plan import GatherPlan
from hikv.cp.scratch import POISON, Slot
from hikv.cp.streams import StreamOrder
from hikv.cp.witness import kernels
from hikv.errors import GatherError
from hikv.kernels.copy_engine import unavailable
from hikv.plan import CopyPlan, plan_transfer


class NcclBackend(StreamOrder):
    """NCCL's all-gather with its zero-CTA policy, over torch's symmetric memory.

    Args:
        allow_sm: take NCCL's kernels where it will not do without; the engine is `"sm"` then.
    """

    name = "nccl"
    own_shard: OwnShard | None = None

    def __init__(self, allow_sm: bool = False) -> None:
        self.engine = "copy engine"
        self._allow_sm = allow_sm
        self._collective: Collective = NcclCollective()
        self._kernels: list[str] = []

    def obstacle(self, pool: KVBuffer) -> str | None:
        """What NCCL and torch lack here, and what the copy engine does."""
        return self._collective.obstacle(pool.device) or unavailable()

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> int | None:
        """The GPU; nobody else reads this pool."""
        self._own, self._rank, self._num_ranks = pool, rank, num_ranks
        self._order_on(pool.device, pool.spec.num_layers, interprocess=False)
        return pool.device.index

    def connect(self, exports: list[Any]) -> None:
        """Every rank on a GPU of its own, in reach of the others."""
        for owner, index in enumerate(exports):
            if owner == self._rank:
                continue
            if index == self._device.index:
                raise GatherError(
                    f"ranks {self._rank} and {owner} are both on GPU {index}",
                    remedy="give NCCL one GPU a rank",
                )
            check_reach(self._device.index, index, owner)

    def staging_pages(self, max_pages: int) -> int:
        """The longest block: a rank's share of the scratch."""
        return max_pages // self._num_ranks

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Symmetric memory."""
        return self._collective.allocate(nbytes, self._device)

    def steps(
        self, slots: list[Slot], staging: Slot | None, group: Group, timeout_s: float
    ) -> Sequence[Callable[[], None]]:
        """Members and witness, communicator, windows, the watched rehearsal and its verdict."""
        self._slots, self._staging = slots, staging
        return (
            lambda: self._name_members(group),
            self._try_witness,
            lambda: self._collective.open(self._members, self._device, timeout_s),
            self._register,
            self._rehearse,
            lambda: self._settle(group),
        )

    def begin(self, plan: GatherPlan) -> None:
        """One plan: this rank's pages, in the order of its block, into the staging block."""
        self._plan = plan
        pages = plan.local_pages[self._rank]
        self._pack: list[CopyPlan] = []
        if len(pages):
            assert self._staging is not None
            window, block = self._staging.window, np.arange(len(pages))
            self._pack = [plan_transfer(self._own, window, pages, block)]

    def copy(self, layer: int, slot: int) -> Moved:
        """Queue the packing of a layer and its all-gathers.

        NCCL waits for the peers by itself: for their packing, and for their readers of the slot.
        """
        self._stream.wait_event(self._restored[layer])
        if slot in self._free:
            self._stream.wait_event(self._free[slot])
        work = layer_work(self._pack, layer)
        with self._driver.primary_context(self._device.index):
            self._driver.copy(work, self._stream.cuda_stream)
        gathered = self._gather(slot, self._plan.block_pages)
        self._ready[slot] = self._stream.record_event()
        return Moved(len(work), int(work.nbytes.sum()) + gathered)

    def close(self) -> None:
        """Leave the communicator, and drop the memory."""
        self._collective.close()
        self._slots, self._staging, self._pack = [], None, []

    def _gather(self, slot: int, pages: int) -> int:
        """Queue the all-gather of every rank's first `pages` staging pages; bytes that arrive."""
        nbytes = 0
        for whole, block in self._pairs(slot):
            share = pages * block.shape[1]
            if share:
                gathered = whole.view(-1)[: share * self._num_ranks]
                self._collective.all_gather(gathered, block.view(-1)[:share], self._stream)
            nbytes += share * self._num_ranks
        return nbytes

    def _pairs(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K of a slot and of the staging block, then V: bytes, `[page, bytes of a page]`."""
        if self._staging is not None:
            into, own = self._slots[slot], self._staging
            for whole, block in ((into.k, own.k), (into.v, own.v)):
                if whole is not None and block is not None:
                    yield _page_bytes(whole), _page_bytes(block)

    def _name_members(self, group: Group) -> None:
        members = getattr(group, "ranks", None)
        if members is None:
            raise GatherError(
                "its group does not say which ranks of torch.distributed it is made of",
                remedy="meet in a TorchGroup",
            )
        self._members: list[int] = members

    def _register(self) -> None:
        for memory in (*self._slots, *([self._staging] if self._staging else [])):
            self._collective.register(memory.memory)

    def _try_witness(self) -> None:
        """A profiler that is blind, or taken, must show before others wait for this rank."""
        memory = self._slots[0].memory
        if not self._collective.watch(lambda: memory[:1].copy_(memory[1:2]), self._device):
            raise _blind()

    def _rehearse(self) -> None:
        """Gather the shortest and the longest block into each slot, watched, and compare.

        Whatever is found, every rank takes part in all of them first.
        """
        if self._staging is None:
            return
        self._staging.memory.fill_(self._rank)
        sizes = sorted({1, len(self._staging.k)})
        watched, wrong = [], []
        for slot, pages in product(range(len(self._slots)), sizes):
            self._slots[slot].memory.fill_(POISON)
            trial = partial(self._trial, slot, pages)
            watched.append(self._collective.watch(trial, self._device))
            wrong += [pages for whole, _ in self._pairs(slot) if not self._right(whole, pages)]
        if not all(watched):
            raise _blind()
        if wrong:
            raise GatherError(
                f"the rehearsal of blocks of {wrong[0]} pages brought other bytes than were sent",
                remedy="use another back end, and report the versions of NCCL and the driver",
            )
        self._kernels = kernels(chain.from_iterable(watched))

    def _trial(self, slot: int, pages: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._gather(slot, pages)

    def _right(self, whole: torch.Tensor, pages: int) -> bool:
        """Whether each byte of a block is its rank's number, and the poison behind them is left."""
        found, end = whole.cpu(), pages * self._num_ranks
        ranks = torch.arange(self._num_ranks, dtype=torch.uint8).repeat_interleave(pages)
        return bool((found[:end] == ranks[:, None]).all() and (found[end:] == POISON).all())

    def _settle(self, group: Group) -> None:
        """Refuse kernels, or own up to them on every rank if they are on any."""
        anywhere = any(group.exchange(bool(self._kernels)))
        if self._kernels and not self._allow_sm:
            raise GatherError(
                f"NCCL, asked to use no SM, launched {', '.join(self._kernels)}",
                remedy="gather by p2p, or allow it with allow_sm=True",
            )
        if anywhere:
            self.engine = "sm"


def _blind() -> GatherError:
    return GatherError(
        "torch's profiler sees no copy, so it would see no kernel of NCCL's either",
        remedy="let CUPTI trace this process",
    )


def _page_bytes(pages: torch.Tensor) -> torch.Tensor:
    """`[page, byte]` of `[page, token, ...]`, the same memory."""
    return pages.view(torch.uint8).view(len(pages), -1)
