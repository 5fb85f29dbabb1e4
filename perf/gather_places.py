"""Where the ranks of `perf gather` are: their memory, their clock, and the all-gather beside them.

A page's bytes follow from its owner, number and layer, so any rank can tell what it should have
gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from hikv.buffer import KVBuffer
from hikv.cp.shared_memory import shared_host_memory
from hikv.cp.witness import device_work, kernels
from hikv.spec import KVSpec

from .compute import gemm

Run = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What all ranks gather, `rounds` times each way.

    Attributes:
        gpus: the GPU of each rank; empty for ranks on this CPU.
        gemm: rows of the GEMM that runs beside the copies on a GPU; 0 for none.
        seconds: what all of it may take.
    """

    spec: KVSpec
    tokens: int
    rounds: int
    backend: str = "host"
    gpus: tuple[int, ...] = ()
    gemm: int = 0
    seconds: float = 240.0


class Place(Protocol):
    """Where ranks are: their memory, and the all-gather to compare with."""

    rival: str
    device: torch.device

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory of a pool, uint8."""

    def synchronize(self) -> None:
        """Wait for all that was queued."""

    def obstacle(self) -> str | None:
        """Why the rival cannot run here, as far as this rank knows."""

    def open_rival(self) -> None:
        """Make the rival's communicator; collective."""

    def all_gather(self, gathered: torch.Tensor, block: torch.Tensor) -> None:
        """The rival's, queued at least."""

    def kernels(self, run: Run) -> list[str] | None:
        """Kernels that ran on SMs for `run`; `None` where nobody can tell, or there are no SMs."""

    def compute(self, repeats: int, run: Run | None) -> float:
        """Seconds of so many GEMMs while `run` runs."""


class Host:
    """Processes on this CPU: shared memory, and gloo."""

    rival = "gloo"
    device = torch.device("cpu")

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory that peers can attach."""
        return shared_host_memory(nbytes)

    def synchronize(self) -> None:
        """Nothing is queued."""

    def obstacle(self) -> str | None:
        """It always can."""
        return None

    def open_rival(self) -> None:
        """The ranks' own group."""

    def all_gather(self, gathered: torch.Tensor, block: torch.Tensor) -> None:
        """Into views of `gathered`."""
        dist.all_gather(list(gathered.chunk(len(gathered) // len(block))), block)

    def kernels(self, run: Run) -> list[str] | None:
        """No SMs."""
        return None

    def compute(self, repeats: int, run: Run | None) -> float:
        """No GPU whose time would count."""
        raise NotImplementedError


class Gpu:
    """A GPU a rank, or one that ranks share: device memory, and NCCL."""

    rival = "nccl"

    def __init__(self, rank: int, work: Work) -> None:
        self.device = torch.device("cuda", work.gpus[rank])
        torch.cuda.set_device(self.device)
        self._work = work
        self._stream = torch.cuda.Stream()
        self._gemm = gemm(self.device, work.gemm) if work.gemm else None

    def memory(self, nbytes: int) -> torch.Tensor:
        """From torch's allocator, which CUDA IPC can share."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        """The whole device."""
        torch.cuda.synchronize(self.device)

    def obstacle(self) -> str | None:
        """NCCL takes one GPU a rank."""
        if not dist.is_nccl_available():
            return "this torch is built without NCCL"
        gpus = self._work.gpus
        return None if len(set(gpus)) == len(gpus) else "NCCL takes one GPU a rank"

    def open_rival(self) -> None:
        """With NCCL's own choice of CTAs."""
        timeout = timedelta(seconds=self._work.seconds)
        self._group = dist.new_group(backend="nccl", timeout=timeout, device_id=self.device)

    def all_gather(self, gathered: torch.Tensor, block: torch.Tensor) -> None:
        """On the current stream."""
        dist.all_gather_into_tensor(gathered.view(-1), block.view(-1), group=self._group)

    def kernels(self, run: Run) -> list[str] | None:
        """As torch's profiler sees them; one that sees no copies either proves nothing."""
        seen = device_work(run, self.device)
        return kernels(seen) if seen else None

    def compute(self, repeats: int, run: Run | None) -> float:
        """GEMMs on a stream of their own, queued before `run` is called."""
        assert self._gemm is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        with torch.cuda.stream(self._stream):
            start.record()
            for _ in range(repeats):
                self._gemm.run()
            end.record()
        if run is not None:
            run()
        self.synchronize()
        return start.elapsed_time(end) / 1e3


def pattern(
    owner: int, pages: np.ndarray, layer: int, kv: int, nbytes: int, device: torch.device
) -> torch.Tensor:
    """The bytes of K (`kv` 0) or V of `pages` of `owner` in one layer, uint8 `[page, byte]`."""
    number = torch.from_numpy(np.asarray(pages, np.int64)).to(device)
    base = (((owner << 24) + number) * 1024 + layer) * 2 + kv
    words = base[:, None] * 1_000_003 + torch.arange(-(-nbytes // 8), device=device)
    mixed = words * 0x1E3779B97F4A7C15
    return (mixed ^ (mixed >> 29)).view(torch.uint8)[:, :nbytes]


def filled_pool(spec: KVSpec, num_pages: int, owner: int, place: Place) -> KVBuffer:
    """The pool of `owner`, in layer_first."""
    kinds, slab = slab_of(spec)
    memory = place.memory(num_pages * spec.bytes_per_page)
    rows = memory.view(kinds, spec.num_layers, num_pages, slab)
    pages = np.arange(num_pages)
    for layer in range(spec.num_layers):
        for kv in range(kinds):
            rows[kv, layer] = pattern(owner, pages, layer, kv, slab, place.device)
    return KVBuffer.from_tensor(memory, spec, "layer_first")


def slab_of(spec: KVSpec) -> tuple[int, int]:
    """1 for latent rows and 2 for K and V, and bytes of a page of either in one layer."""
    kinds = spec.components[0].kv
    return kinds, spec.page_size * spec.bytes_per_token_layer // kinds
