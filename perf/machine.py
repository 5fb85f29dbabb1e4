"""Where copies run: memory, paths and clock of a GPU and its host, or of a host alone.

A benchmark takes a `Machine`, so a test can stand one in whose copies and times are its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo, device_info, probe_failure
from hikv.doctor import examine
from hikv.errors import Unavailable
from hikv.kernels.relayout import PATH as REGISTERS
from hikv.kernels.relayout import Config
from hikv.measure import (
    COLD_BYTES,
    Candidate,
    Clock,
    GpuClock,
    HostClock,
    Sample,
    cold_sets,
    fill_random,
    wrong_bytes,
)
from hikv.pinned import allocate_pinned
from hikv.plan import CopyPlan, plan_transfer
from hikv.spec import KVSpec
from hikv.transfers import Transfer, obstacle, transfer

from .case import Case, sides
from .duet import Duet, play
from .room import check_room


@dataclass(frozen=True)
class CallerClock:
    """Wall time of a call and of waiting for what it queued."""

    synchronize: Callable[[], object]

    def time(self, run: Callable[[], object]) -> Sample:
        """Time `run` and the wait that follows; nothing is queued before."""
        self.synchronize()
        start = time.perf_counter()
        run()
        submit_seconds = time.perf_counter() - start
        self.synchronize()
        return Sample(time.perf_counter() - start, submit_seconds)


class Machine:
    """One GPU and its host. Without a GPU, both sides are pools in host memory.

    Attributes:
        device: where the `"gpu"` side lies.
        clock: how a copy is timed.
        info: the GPU, or `None`.
        cold_bytes: what copies must move before they come back to the same pages.
    """

    def __init__(
        self, device: torch.device, clock: Clock, info: DeviceInfo | None, cold_bytes: int
    ) -> None:
        self.device, self.clock, self.info = device, clock, info
        self.cold_bytes = cold_bytes
        self._memory: dict[str, torch.Tensor] = {}

    @classmethod
    def of_gpu(cls) -> Machine:
        """Torch's current GPU; raises `Unavailable` where there is none."""
        info = device_info()
        if info is None:
            remedy = "run where torch sees a GPU"
            raise Unavailable("a GPU", str(probe_failure()), remedy=remedy)
        device = torch.device("cuda", info.index)
        return cls(device, GpuClock(device), info, COLD_BYTES)

    @classmethod
    def of_host(cls) -> Machine:
        """This host's CPU alone."""
        return cls(torch.device("cpu"), HostClock(), None, cold_bytes=0)

    @property
    def has_gpu(self) -> bool:
        """Whether the two sides are different memories."""
        return self.device.type != "cpu"

    def reserve_for(self, cases: Sequence[Case]) -> None:
        """Make room for the pools of each of `cases`, one after another."""
        self.reserve(max(pool_pages(self, case) * case.spec.bytes_per_page for case in cases))

    def reserve(self, nbytes: int) -> None:
        """Make room for pools of `nbytes` on both sides; pools made earlier lose their bytes."""
        for side in ("gpu", "host"):
            if side not in self._memory or self._memory[side].numel() < nbytes:
                self._memory.pop(side, None)
                self._memory[side] = self._allocate(side, nbytes)

    def _allocate(self, side: str, nbytes: int) -> torch.Tensor:
        if side == "host" or not self.has_gpu:
            check_room(nbytes, "pass fewer --tokens, --layers or heads")
        if side == "host" and self.has_gpu:
            return allocate_pinned(nbytes, page_bytes=nbytes).tensor
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pool(self, side: str, spec: KVSpec, layout: str, num_pages: int) -> KVBuffer:
        """A dense pool on `side`, in the memory that every pool of this side shares."""
        nbytes = num_pages * spec.bytes_per_page
        self.reserve(nbytes)
        pinned = side == "host" and self.has_gpu
        return KVBuffer.from_tensor(self._memory[side][:nbytes], spec, layout, pinned=pinned)

    def new_pool(self, side: str, spec: KVSpec, layout: str, num_pages: int) -> KVBuffer:
        """A dense pool on `side` in memory of its own."""
        pinned = side == "host" and self.has_gpu
        device = self.device if side == "gpu" else "cpu"
        return KVBuffer.empty(spec, layout, num_pages, device=device, pinned=pinned)

    def layered_pool(self, spec: KVSpec, num_pages: int) -> KVBuffer:
        """An engine's pool on the GPU side: one K and one V tensor a layer, allocated apart."""

        def layer(width: int) -> torch.Tensor:
            shape = (num_pages, spec.page_size, spec.num_kv_heads, width)
            return torch.empty(shape, dtype=spec.dtype, device=self.device)

        widths = [component.width for component in spec.components for _ in range(component.kv)]
        lists = [[layer(width) for _ in range(spec.num_layers)] for width in widths]
        return KVBuffer.from_layers(lists[0], lists[1] if len(lists) > 1 else None, spec)

    def copy(self, plan: CopyPlan, path: str, block_quota: int | None = None) -> None:
        """Make the copy of `plan` by `path`, in order with torch's current stream."""
        self.start(plan, path, block_quota).wait()

    def start(
        self,
        plan: CopyPlan,
        path: str | None = None,
        block_quota: int | None = None,
        *,
        aside: bool = False,
        layerwise: bool = False,
    ) -> Transfer:
        """Queue the copy of `plan` behind torch's current stream; `None` leaves hikv the choice.

        With `aside` it runs on a stream of its own, so that what is queued later runs beside it.
        """
        current = torch.cuda.current_stream(self.device) if self.has_gpu else None
        return transfer(
            plan.src,
            plan.dst,
            plan.src_pages,
            plan.dst_pages,
            layers=plan.layers,
            block_quota=block_quota,
            path=path,
            after=current,
            stream=self._streams[1] if aside and self.has_gpu else current,
            layerwise=layerwise,
        )

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Of compute, and of copies beside it; kept, since torch hands out few streams in turn."""
        return torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def duet(
        self,
        compute: Callable[[], object],
        repeats: int,
        copy: Callable[[int], object],
        copies: int,
    ) -> Duet:
        """Run `compute` `repeats` times on one stream and `copies` turns of `copy` on another."""
        return play(*self._streams, compute, repeats, copy, copies)

    def relayout(self, plan: CopyPlan, block_quota: int, config: Config) -> None:
        """Make the copy of `plan` with the register kernel, configured by hand."""
        REGISTERS.launch(plan, block_quota=block_quota, config=config)

    def obstacle(self, path: str, plan: CopyPlan) -> str | None:
        """Why `path` cannot serve `plan` here, or `None`."""
        return obstacle(path, plan)

    def facts(self) -> dict[str, Any]:
        """What `hikv doctor` says of this machine."""
        return examine()

    @property
    def caller(self) -> Clock:
        """The clock of one who calls and waits: until the bytes are there, launch included."""
        return CallerClock(self.synchronize)

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, eq=False)
class Workload:
    """One copy, as plans over lists of pages that share none: copies take turns with them."""

    plans: tuple[CopyPlan, ...]

    @property
    def nbytes(self) -> int:
        """Payload of one copy."""
        return self.plans[0].nbytes

    def candidate(self, name: str, copy: Callable[[CopyPlan], Any], machine: Machine) -> Candidate:
        """`copy` as a candidate of `hikv.measure`, verified on the first plan."""
        first = self.plans[0]
        return Candidate(
            name,
            self.nbytes,
            run=lambda turn: copy(self.plans[turn % len(self.plans)]),
            check=lambda: wrong_bytes(first, lambda: copy(first), machine.synchronize),
        )


MAX_TURNS = 256
"""Copies of less than 2 MiB come back to their pages before an L2 cache has lost them."""


def _turns(machine: Machine, case: Case) -> int:
    return min(cold_sets(case.nbytes, machine.cold_bytes), MAX_TURNS)


def pool_pages(machine: Machine, case: Case) -> int:
    """Pages of a pool for the case's copies to take turns in, and an eighth that stays free."""
    turns = _turns(machine, case)
    return case.num_pages * turns + case.num_pages // 8 + 1


def workload(machine: Machine, case: Case, direction: str) -> Workload:
    """Copies of the case's pages in random order on both sides; fills the source."""
    turns = _turns(machine, case)
    num_pages, total = case.num_pages, pool_pages(machine, case)
    src, dst = (
        machine.pool(side, case.spec, case.layout(side), total) for side in sides(direction)
    )
    fill_random(src)
    rng = np.random.default_rng(0)
    src_lists, dst_lists = (
        rng.permutation(total)[: turns * num_pages].reshape(turns, num_pages) for _ in range(2)
    )
    return Workload(
        tuple(plan_transfer(src, dst, *ids) for ids in zip(src_lists, dst_lists, strict=True))
    )


def one_piece(work: Workload) -> Workload:
    """The same memory and bytes as `work`, each copy one contiguous stretch: a link's best case."""
    first = work.plans[0]
    spec = KVSpec(1, 1, first.src.spec.bytes_per_page, 1, torch.uint8, latent=True)
    src, dst = (
        KVBuffer.from_tensor(
            pool.regions[0].anchors[0, 0], spec, "page_first_direct", pinned=pool.pinned
        )
        for pool in (first.src, first.dst)
    )
    stretches = np.arange(len(work.plans) * first.num_pages).reshape(len(work.plans), -1)
    return Workload(tuple(plan_transfer(src, dst, ids, ids) for ids in stretches))
