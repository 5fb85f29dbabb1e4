"""Who moves the bytes of a gather, and what orders it: one class per kind of memory.

Both execute the same list of copies, straight from the pools of the peers, with no packing before
and no unpacking after. `host` lets the calling thread copy; `p2p` hands each layer to the copy
engines as one batch, K and V of all peers together, and orders it by events that other processes
may wait for.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch

from hikv.buffer import KVBuffer
from hikv.cp.handles import BufferHandle, export_buffer, open_buffer
from hikv.cp.shared_memory import attach, handle_of
from hikv.errors import ArgumentError, GatherError
from hikv.kernels.copy_engine import unavailable
from hikv.kernels.memcpy import Descriptors, memcpy_driver


class Backend(Protocol):
    """What `ZeroSMGather` asks of a back end. All calls are this rank's own.

    Attributes:
        name: as users give it.
        engine: who moves the bytes, for reports.
    """

    name: str
    engine: str

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Why this rank cannot take part with `pool`, or `None`; raises nothing."""
        ...

    def place(self) -> str:
        """What must be equal on all ranks for them to reach each other's memory."""
        ...

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> Any:
        """What the peers need in order to reach `pool` and its fences: picklable."""
        ...

    def connect(self, exports: list[Any], rank: int) -> list[KVBuffer]:
        """Reach the pools of all ranks. Raises `GatherError` naming what is out of reach."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Scratch memory of this rank, uint8."""
        ...

    def restored(self, layer: int, after: Any) -> None:
        """This rank's pages of `layer` are there once `after` has passed."""
        ...

    def release(self, slot: int, stream: Any) -> None:
        """All that reads `slot` is on `stream` by now."""
        ...

    def copy(self, layer: int, slot: int, work: Descriptors) -> None:
        """Move the bytes of `layer` into `slot`, behind the layer's fences and the slot's."""
        ...

    def acquire(self, slot: int, stream: Any) -> None:
        """Make `stream` wait for what `copy` last put into `slot`."""
        ...

    def drain(self) -> None:
        """Return when every copy has ended."""
        ...


class HostBackend:
    """Processes of one host over CPU memory that they share: `hikv.cp.shared_host_memory`.

    Calls are done on return, so the group's board alone is the fence.
    """

    name, engine = "host", "CPU threads"

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Pools must lie in shared host memory."""
        if pool.device.type != "cpu":
            return f"its pool is on {pool.device}, not in host memory"
        if any(handle_of(anchor) is None for r in pool.regions for anchor in r.anchors.flat):
            return "its pool is not in memory of shared_host_memory()"
        return None

    def place(self) -> str:
        """One host, one namespace of process ids."""
        return f"{_boot_id()} {os.readlink('/proc/self/ns/pid')}"

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> BufferHandle:
        """The pool's handle."""
        return export_buffer(pool, handle_of)

    def connect(self, exports: list[Any], rank: int) -> list[KVBuffer]:
        """Map every pool."""
        return [open_buffer(handle, attach) for handle in exports]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Private memory: nobody else reads the scratch."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def restored(self, layer: int, after: Any) -> None:
        """Wait here, if there is anything to wait for."""
        if after is not None:
            after.synchronize()

    def release(self, slot: int, stream: Any) -> None:
        """Nothing: who calls has read the slot."""

    def copy(self, layer: int, slot: int, work: Descriptors) -> None:
        """Copy run by run; the interpreter is free while bytes move."""
        copies = zip(work.dst.tolist(), work.src.tolist(), work.nbytes.tolist(), strict=True)
        for dst, src, nbytes in copies:
            ctypes.memmove(dst, src, nbytes)

    def acquire(self, slot: int, stream: Any) -> None:
        """Nothing: `copy` has returned."""

    def drain(self) -> None:
        """Nothing: `copy` has returned."""


class PeerBackend:
    """GPUs of one host that reach each other's memory: the batched copy engine, and no SM.

    Pools come from torch's allocator and are opened by CUDA IPC. All ranks see the GPUs under the
    same numbers. The local shard is in the batch too; what carries out a copy within one GPU is up
    to the driver.
    """

    name, engine = "p2p", "copy engine"

    def __init__(self) -> None:
        self._peers: list[list[torch.cuda.Event]] = []

    def obstacle(self, pool: KVBuffer) -> str | None:
        """Pools must be on a GPU whose driver takes batches of copies."""
        if pool.device.type != "cuda":
            return f"its pool is on {pool.device}, not on a GPU"
        return unavailable()

    def place(self) -> str:
        """One host, and the GPUs in one order."""
        gpus = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        return f"{_boot_id()} {' '.join(gpus)}"

    def export(self, pool: KVBuffer, rank: int, num_ranks: int) -> Any:
        """The pool's handle, and one event per layer."""
        self._device = pool.device
        with torch.cuda.device(pool.device):
            self._restored = [
                torch.cuda.Event(interprocess=True) for _ in range(pool.spec.num_layers)
            ]
            fences = [event.ipc_handle() for event in self._restored]
            self._stream = torch.cuda.Stream()
            self._fence_stream = torch.cuda.Stream()
        self._free: dict[int, torch.cuda.Event] = {}
        self._ready: dict[int, torch.cuda.Event] = {}
        self._driver = memcpy_driver()
        self._own = pool

        def share(storage: torch.Tensor) -> list[bytes | None]:
            # One per peer: torch counts the receivers of what it pickles.
            return [None if r == rank else _ipc_bytes(storage) for r in range(num_ranks)]

        return pool.device.index, fences, export_buffer(pool, share)

    def connect(self, exports: list[Any], rank: int) -> list[KVBuffer]:
        """Open every pool and its events."""
        pools = []
        for owner, (index, fences, handle) in enumerate(exports):
            if owner == rank:
                pools.append(self._own)
                self._peers.append(self._restored)
                continue
            near, far = self._device.index, index
            if near != far and not torch.cuda.can_device_access_peer(near, far):
                raise GatherError(
                    f"GPU {near} cannot reach the memory of GPU {far} (rank {owner})",
                    remedy="use GPUs joined by NVLink or by one PCIe root",
                )
            pools.append(open_buffer(handle, lambda shared: self._open(shared[rank])))
            device = torch.device("cuda", index)
            self._peers.append([torch.cuda.Event.from_ipc_handle(device, f) for f in fences])
        return pools

    def _open(self, shared: bytes) -> torch.Tensor:
        """A peer's storage. torch lets two GPUs reach each other when it first copies between them;
        the driver alone would route its batches through the host."""
        storage: torch.Tensor = pickle.loads(shared)
        storage[:1].to(self._device)
        return storage

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory beside the pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def restored(self, layer: int, after: Any) -> None:
        """Record the layer's event behind `after`: a stream, an event, a `Transfer`, several."""
        for fence in after if isinstance(after, Iterable) else (after,):
            if isinstance(fence, torch.cuda.Stream):
                self._fence_stream.wait_stream(fence)
            elif isinstance(fence, torch.cuda.Event):
                self._fence_stream.wait_event(fence)
            elif hasattr(fence, "wait_layer"):
                fence.wait_layer(layer, self._fence_stream)
            elif fence is not None:
                raise ArgumentError(
                    "after",
                    expected="a stream, an event, a Transfer, several of them, or None",
                    got=repr(fence),
                    remedy="pass what the restore ran on",
                )
        self._restored[layer].record(self._fence_stream)

    def release(self, slot: int, stream: torch.cuda.Stream | None) -> None:
        """Remember the point on `stream` up to which the slot is read."""
        self._free[slot] = (stream or torch.cuda.current_stream(self._device)).record_event()

    def copy(self, layer: int, slot: int, work: Descriptors) -> None:
        """Queue one batch."""
        for events in self._peers:
            self._stream.wait_event(events[layer])
        if slot in self._free:
            self._stream.wait_event(self._free[slot])
        with self._driver.primary_context(self._device.index):
            self._driver.copy(work, self._stream.cuda_stream)
        self._ready[slot] = self._stream.record_event()

    def acquire(self, slot: int, stream: torch.cuda.Stream | None) -> None:
        """Order `stream` behind the batch."""
        (stream or torch.cuda.current_stream(self._device)).wait_event(self._ready[slot])

    def drain(self) -> None:
        """Block until the gather's stream is idle."""
        self._stream.synchronize()


BACKENDS: dict[str, Callable[[], Backend]] = {"host": HostBackend, "p2p": PeerBackend}
"""Every back end by name. None of them launches a kernel."""


def _ipc_bytes(storage: torch.Tensor) -> bytes:
    import torch.multiprocessing  # noqa: F401  teaches the pickler how tensors are shared

    return bytes(ForkingPickler.dumps(storage))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
