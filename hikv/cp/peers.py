"""The `p2p` back end: GPUs of one host that reach each other's memory, and their copy engines.

Each layer is one batch for the copy engines, K and V of all peers together, ordered by events that
other processes may wait for. This rank's own pages are copied within its GPU, which a copy engine
does at a fraction of the rate between GPUs; whether they then go into the peers' batch or beside it
is measured when the group meets, and never again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cp.backends import (
    DirectCopies,
    Group,
    Moved,
    OwnShard,
    direct_copies,
    layer_work,
)
from hikv.cp.handles import export_buffer, open_buffer
from hikv.cp.scratch import POISON, Slot
from hikv.cp.streams import StreamOrder
from hikv.errors import GatherError
from hikv.kernels.copy_engine import unavailable
from hikv.measure import Candidate, GpuClock, measure
from hikv.plan import CopyPlan

TOGETHER, APART = "in the peers' batch", "in a batch beside it"
ROUNDS = 7
TRIAL_BYTES = 16 << 20
"""Of one owner in a trial: enough for the rate, and little beside a GPU that its pool fills."""


class PeerBackend(DirectCopies, StreamOrder):
    """The batched copy engine, straight from the peers' pools, and no SM.

    Pools come from torch's allocator and are opened by CUDA IPC. All ranks see the GPUs under the
    same numbers. Pools must be at rest while the group meets: what decides how the own pages are
    copied is timed on them, and compared byte for byte.
    """

    name, engine = "p2p", "copy engine"
    own_shard: OwnShard | None = None

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Pools must be on a GPU whose driver takes batches of copies."""
        if pool.device.type != "cuda":
            return f"its pool is on {pool.device}, not on a GPU"
        return unavailable()

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> Any:
        """The pool's handle, and one event per layer."""
        self._own, self._rank, self._apart = pool, rank, False
        self._order_on(pool.device, pool.spec.num_layers, interprocess=True)
        with torch.cuda.device(pool.device):
            self._beside = torch.cuda.Stream()
            fences = [event.ipc_handle() for event in self._restored]

        def share(storage: torch.Tensor) -> list[bytes | None]:
            # One per peer: torch counts the receivers of what it pickles.
            return [None if r == rank else _ipc_bytes(storage) for r in range(num_ranks)]

        return pool.device.index, fences, export_buffer(pool, share)

    def connect(self, exports: list[Any]) -> None:
        """Open every pool and its events."""
        self._pools, self._fences = [], []
        for owner, (index, fences, handle) in enumerate(exports):
            if owner == self._rank:
                self._pools.append(self._own)
                self._fences.append(self._restored)
                continue
            check_reach(self._device.index, index, owner)
            self._pools.append(open_buffer(handle, lambda shared: self._open(shared[self._rank])))
            device = torch.device("cuda", index)
            self._fences.append([torch.cuda.Event.from_ipc_handle(device, f) for f in fences])

    def _open(self, shared: bytes) -> torch.Tensor:
        """A peer's storage. torch lets two GPUs reach each other when it first copies between them;
        the driver alone would route its batches through the host."""
        storage: torch.Tensor = pickle.loads(shared)
        storage[:1].to(self._device)
        return storage

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory beside the pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def steps(
        self, slots: list[Slot], staging: Slot | None, group: Group, timeout_s: float
    ) -> Sequence[Callable[[], None]]:
        """The choice of how the own pages are copied."""
        self._slots = slots
        return (self._choose,)

    def copy(self, layer: int, slot: int) -> Moved:
        """Queue one batch, or two, each behind the restores of what it reads."""
        for stream, owners in self._shares(self._apart):
            for owner in owners:
                stream.wait_event(self._fences[owner][layer])
            if slot in self._free:
                stream.wait_event(self._free[slot])
        moved = self._queue(self._copies[slot], layer, self._apart)
        self._ready[slot] = self._stream.record_event()
        return moved

    def _shares(self, apart: bool) -> list[tuple[torch.cuda.Stream, list[int]]]:
        """Which stream copies the pages of which owners."""
        owners = list(range(len(self._pools)))
        if not apart:
            return [(self._stream, owners)]
        return [(self._beside, [owners.pop(self._rank)]), (self._stream, owners)]

    def _queue(self, copies: dict[int, CopyPlan], layer: int, apart: bool) -> Moved:
        """Queue the copies of a layer; what comes next on the gather's stream is behind them."""
        moved = Moved(0, 0)
        with self._driver.primary_context(self._device.index):
            for stream, owners in self._shares(apart):
                work = layer_work([copies[owner] for owner in owners if owner in copies], layer)
                self._driver.copy(work, stream.cuda_stream)
                moved = Moved(moved.copies + len(work), moved.nbytes + int(work.nbytes.sum()))
        if apart:
            self._stream.wait_event(self._beside.record_event())
        return moved

    def _choose(self) -> None:
        """Time both ways on pages that do not join, as many as the scratch and `TRIAL_BYTES` allow.

        Raises `GatherError` where either way brings other bytes.
        """
        ranks, slot, spec = len(self._pools), self._slots[0], self._own.spec
        most = TRIAL_BYTES // (spec.page_size * spec.bytes_per_token_layer)
        block = min(slot.window.num_pages // ranks, max(1, most))
        pages = [np.arange(0, pool.num_pages, 2)[:block] for pool in self._pools]
        if ranks == 1 or not block:
            return
        copies = direct_copies(self._pools, slot, pages)
        nbytes = sum(plan.for_layers(0, 1).nbytes for plan in copies.values())

        def trial(apart: bool) -> None:
            caller = torch.cuda.current_stream(self._device)
            for stream, _ in self._shares(apart):
                stream.wait_stream(caller)
            self._queue(copies, 0, apart)
            caller.wait_stream(self._stream)

        def candidate(way: str) -> Candidate:
            apart = way == APART
            check = partial(self._wrong, copies, partial(trial, apart))
            return Candidate(way, nbytes, lambda turn: trial(apart), check)

        ways = [candidate(TOGETHER), candidate(APART)]
        found = measure(ways, GpuClock(self._device), rounds=ROUNDS)
        for result in found:
            if result.wrong is not None:
                raise GatherError(
                    f"own pages {result.name}: {result.wrong}",
                    remedy="let nothing write to the pools while the group meets",
                )
        rates = {result.name: result.timing.gbps() for result in found if result.timing}
        best = max(rates, key=rates.__getitem__)  # of equals the first, which is one batch
        self._apart, self.own_shard = best == APART, OwnShard(best, rates)

    def _wrong(self, copies: dict[int, CopyPlan], run: Callable[[], None]) -> str | None:
        """Poison the slot, run the copies, wait, and compare layer 0 of every page."""
        self._slots[0].memory.fill_(POISON)
        run()
        torch.cuda.synchronize(self._device)
        for owner, plan in copies.items():
            found = plan.dst.layer_range(0, 1).logical(plan.dst_pages.tolist())
            held = plan.src.layer_range(0, 1).logical(plan.src_pages.tolist()).to(found.device)
            if not torch.equal(found.view(torch.uint8), held.view(torch.uint8)):
                return f"what arrived is not what rank {owner} has"
        return None


def check_reach(near: int, far: int, owner: int) -> None:
    """Raise `GatherError` where GPU `near` cannot read GPU `far`, which is rank `owner`'s."""
    if near != far and not torch.cuda.can_device_access_peer(near, far):
        raise GatherError(
            f"GPU {near} cannot reach the memory of GPU {far} (rank {owner})",
            remedy="use GPUs joined by NVLink or by one PCIe root",
        )


def _ipc_bytes(storage: torch.Tensor) -> bytes:
    import torch.multiprocessing  # noqa: F401  teaches the pickler how tensors are shared

    return bytes(ForkingPickler.dumps(storage))
