"""Who moves the bytes of a gather: what every back end answers to, and the one for host memory.

A back end plans a batch once and then moves a layer at a call. `host` and `p2p` (`hikv.cp.peers`)
read straight from the pools of the peers; `nccl` (`hikv.cp.nccl`) packs this rank's pages into a
block and lets NCCL gather the blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cp.handles import BufferHandle, export_buffer, open_buffer
from hikv.cp.plan import GatherPlan
from hikv.cp.scratch import Slot
from hikv.cp.shared_memory import attach, handle_of
from hikv.errors import ArgumentError
from hikv.kernels.copy_engine import descriptors
from hikv.kernels.memcpy import Descriptors
from hikv.plan import CopyPlan, plan_transfer


class Group(Protocol):
    """Ranks that can exchange small picklable objects.

    Attributes: `rank`, `size`.
    """

    rank: int
    size: int

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of the ranks. Collective; bounded in time."""
        ...


class Moved(NamedTuple):
    """What one layer took: copies that were submitted, and bytes written into this rank's memory,
    packing and padding included."""

    copies: int
    nbytes: int


class OwnShard(NamedTuple):
    """How a rank's own pages are copied, and by way the measured rate of a whole layer, GB/s."""

    way: str
    gbps: dict[str, float]


class Backend(Protocol):
    """What a gather asks of a back end. All calls are this rank's own, in this order.

    Attributes:
        name: as users give it.
        engine: who moves the bytes, for reports; settled once every step is done.
        own_shard: how this rank's own pages are copied; `None` where there is one way alone.
    """

    name: str
    engine: str
    own_shard: OwnShard | None

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Why this rank cannot take part with `pool`, or `None`; raises nothing."""
        ...

    def place(self) -> str:
        """What must be equal on all ranks for them to reach each other's memory."""
        ...

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> Any:
        """What the peers need in order to reach `pool` and its fences: picklable."""
        ...

    def connect(self, exports: list[Any]) -> None:
        """Reach the pools of all ranks. Raises `GatherError` naming what is out of reach."""
        ...

    def staging_pages(self, max_pages: int) -> int:
        """Pages of one layer that it packs into, beside slots of `max_pages` each."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Scratch memory of this rank, uint8."""
        ...

    def steps(
        self, slots: list[Slot], staging: Slot | None, group: Group, timeout_s: float
    ) -> Sequence[Callable[[], None]]:
        """What is left to set up over that memory. Every rank does one step, hears that all have
        done it, and only then does the next; so a step may be collective."""
        ...

    def begin(self, plan: GatherPlan) -> None:
        """Prepare the copies of a batch."""
        ...

    def restored(self, layer: int, after: Any) -> None:
        """This rank's pages of `layer` are there once `after` has passed."""
        ...

    def release(self, slot: int, stream: Any) -> None:
        """All that reads `slot` is on `stream` by now."""
        ...

    def copy(self, layer: int, slot: int) -> Moved:
        """Move the bytes of `layer` into `slot`, behind the layer's fences and the slot's."""
        ...

    def acquire(self, slot: int, stream: Any) -> None:
        """Make `stream` wait for what `copy` last put into `slot`."""
        ...

    def drain(self) -> None:
        """Return when every copy has ended."""
        ...

    def close(self) -> None:
        """Let go of the peers' memory and of the scratch."""
        ...


class DirectCopies:
    """A batch read straight from the pools of all ranks: no packing before, no unpacking after."""

    _pools: list[KVBuffer]
    _slots: list[Slot]

    def staging_pages(self, max_pages: int) -> int:
        """None: pages arrive where they are read."""
        return 0

    def begin(self, plan: GatherPlan) -> None:
        """One plan for each slot and each owner that has pages in the batch."""
        self._copies = [direct_copies(self._pools, slot, plan.local_pages) for slot in self._slots]

    def close(self) -> None:
        """Drop what keeps the memory."""
        self._pools, self._slots, self._copies = [], [], []


def direct_copies(
    pools: Sequence[KVBuffer], slot: Slot, local_pages: Sequence[np.ndarray]
) -> dict[int, CopyPlan]:
    """By owner, the copies of its `local_pages` into its block of `slot`."""
    block = max(map(len, local_pages), default=0)
    return {
        owner: plan_transfer(pool, slot.window, pages, owner * block + np.arange(len(pages)))
        for owner, (pool, pages) in enumerate(zip(pools, local_pages, strict=True))
        if len(pages)
    }


def layer_work(plans: Iterable[CopyPlan], layer: int) -> Descriptors:
    """The copies of one layer, of K and V and all of `plans` together."""
    work = [descriptors(plan.for_layers(layer, layer + 1)) for plan in plans]
    empty = np.empty(0, np.int64)
    return Descriptors(
        *(
            np.concatenate([empty, *(getattr(each, column) for each in work)])
            for column in ("src", "dst", "nbytes")
        )
    )


def fences(after: Any) -> list[Any]:
    """The streams, events and `Transfer`s in `after`; raises `ArgumentError` for anything else."""
    several = after if isinstance(after, Iterable) else (after,)
    found = [fence for fence in several if fence is not None]
    for fence in found:
        if not hasattr(fence, "synchronize"):
            raise ArgumentError(
                "after",
                expected="a stream, an event, a Transfer, several of them, or None",
                got=repr(fence),
                remedy="pass what the restore ran on",
            )
    return found


class HostBackend(DirectCopies):
    """Processes of one host over CPU memory that they share: `hikv.cp.shared_host_memory`.

    The calling thread copies, and calls are done on return, so the group's board alone is the
    fence.
    """

    name, engine = "host", "CPU threads"
    own_shard: OwnShard | None = None

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Pools must lie in shared host memory."""
        if pool.device.type != "cpu":
            return f"its pool is on {pool.device}, not in host memory"
        if any(handle_of(anchor) is None for r in pool.regions for anchor in r.anchors.flat):
            return "its pool is not in memory of shared_host_memory()"
        return None

    def place(self) -> str:
        """One host, one namespace of process ids."""
        return this_host()

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> BufferHandle:
        """The pool's handle."""
        return export_buffer(pool, handle_of)

    def connect(self, exports: list[Any]) -> None:
        """Map every pool."""
        self._pools = [open_buffer(handle, attach) for handle in exports]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Private memory: nobody else reads the scratch."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def steps(
        self, slots: list[Slot], staging: Slot | None, group: Group, timeout_s: float
    ) -> Sequence[Callable[[], None]]:
        """None."""
        self._slots = slots
        return ()

    def restored(self, layer: int, after: Any) -> None:
        """Wait here, if there is anything to wait for."""
        for fence in fences(after):
            fence.synchronize()

    def release(self, slot: int, stream: Any) -> None:
        """Nothing: who calls has read the slot."""

    def copy(self, layer: int, slot: int) -> Moved:
        """Copy run by run; the interpreter is free while bytes move."""
        work = layer_work(self._copies[slot].values(), layer)
        copies = zip(work.dst.tolist(), work.src.tolist(), work.nbytes.tolist(), strict=True)
        for dst, src, nbytes in copies:
            ctypes.memmove(dst, src, nbytes)
        return Moved(len(work), int(work.nbytes.sum()))

    def acquire(self, slot: int, stream: Any) -> None:
        """Nothing: `copy` has returned."""

    def drain(self) -> None:
        """Nothing: `copy` has returned."""


def this_host() -> str:
    """What tells this host, since it started, and a namespace of process ids, from any other.

    Shared host memory, the board's too, is reached by process id.
    """
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started} {os.readlink('/proc/self/ns/pid')}"
