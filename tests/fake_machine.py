"""A GPU that is not there: its memory is the host's, its copies are torch's, its times are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo
from hikv.doctor import examine
from hikv.kernels.reference import launch
from hikv.measure import Sample
from hikv.plan import CopyPlan
from hikv.transfers import PATHS, Transfer
from perf.duet import Duet
from perf.machine import Machine

GPU = DeviceInfo(
    index=0,
    name="NVIDIA Fake 100",
    uuid="GPU-0",
    vendor="nvidia",
    capability=(9, 0),
    num_sms=132,
    memory_bytes=80 << 30,
    driver_version="580.0",
    cuda_driver_version=13000,
    link="pcie",
    pcie_generation=5,
    pcie_width=16,
    link_gbps=63.0,
)


class FakeTransfer(Transfer):
    """A handle whose waits move the machine's time on to the arrival of what is waited for."""

    arrivals: dict[int, float]

    def __init__(self, machine: FakeGpu, *told: Any) -> None:
        super().__init__(*told)
        self.machine = machine

    def wait(self, stream: Any = None) -> None:
        self.machine.now = max(self.machine.now, *self.arrivals.values())

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.machine.now = max(self.machine.now, self.arrivals[layer])


class FakeGpu(Machine):
    """A machine whose `rate(path, block_quota)` is in GB/s, and whose `fault` may spoil a copy.

    `fault(plan, path, block_quota)` runs after each copy. `refused` maps a path to its obstacle.
    `now` is the time on it, in seconds; `contention` says by which share a copy and compute slow
    each other down.
    """

    def __init__(
        self,
        rate: Callable[[str, int | None], float] = lambda path, quota: 50.0,
        fault: Callable[[CopyPlan, str, int | None], Any] = lambda plan, path, quota: None,
        refused: dict[str, str] | None = None,
        contention: Callable[[tuple[str, int | None]], float] = lambda way: 0.0,
    ) -> None:
        super().__init__(torch.device("cpu"), self, GPU, cold_bytes=0)
        self.rate, self.fault, self.refused = rate, fault, refused or {}
        self.contention = contention
        self.copied: list[tuple[str, int | None]] = []
        self.choice: tuple[str, int] = ("sm", 2)
        self.submit_seconds = 5e-6
        self.now = 0.0
        self.duets: list[tuple[int, int]] = []

    has_gpu = True

    @property
    def caller(self) -> FakeGpu:
        return self

    def time(self, run: Callable[[], object]) -> Sample:
        """The clock: what `rate` says of the copy that `run` made."""
        before = self.now
        run()
        # A copy of somebody else's making is done in no time.
        return Sample(max(self.now - before, 1e-9), self.submit_seconds)

    def _allocate(self, side: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def new_pool(self, side, spec, layout, num_pages) -> KVBuffer:
        return KVBuffer.empty(spec, layout, num_pages)

    def start(
        self,
        plan: CopyPlan,
        path: str | None = None,
        block_quota: int | None = None,
        *,
        aside: bool = False,
        layerwise: bool = False,
    ) -> FakeTransfer:
        path, block_quota = (path, block_quota) if path else self.choice
        before = self.now
        self.copy(plan, path, block_quota)
        handle = FakeTransfer(self, plan, path, block_quota or 0, "default")
        spent, self.now = self.now - before, before if aside else self.now
        layers = range(*plan.layers) if layerwise else range(plan.layers[1] - 1, plan.layers[1])
        handle.arrivals = {
            layer: before + spent * (i + 1) / len(layers) for i, layer in enumerate(layers)
        }
        return handle

    def work(self, seconds: float) -> None:
        """Compute for `seconds`."""
        self.now += seconds

    def copy(self, plan: CopyPlan, path: str, block_quota: int | None = None) -> None:
        launch(plan)
        self.fault(plan, path, block_quota)
        self.copied.append((path, block_quota))
        self.now += plan.nbytes / self.rate(path, block_quota) / 1e9

    def relayout(self, plan: CopyPlan, block_quota: int, config: Any) -> None:
        self.copy(plan, "sm", block_quota)

    def obstacle(self, path: str, plan: CopyPlan) -> str | None:
        return self.refused.get(path)

    def facts(self) -> dict[str, Any]:
        paths = {name: self.refused.get(name) for name in PATHS}
        return examine() | {"gpu": asdict(GPU), "paths": paths}

    def synchronize(self) -> None:
        pass

    def duet(self, compute, repeats, copy, copies) -> Duet:
        before = self.now
        for _ in range(repeats):
            compute()
        spent, before = self.now - before, self.now
        for turn in range(copies):
            copy(turn)
        copying = self.now - before
        slower = 1 + self.contention(self.copied[-1]) if copies else 1.0
        self.duets.append((repeats, copies))
        covered = min(1.0, copying / (spent * slower))
        return Duet(spent * slower / repeats, copying * slower / max(copies, 1), covered)


def flip_a_bit(plan: CopyPlan) -> None:
    """Spoil one byte of the last page that `plan` wrote."""
    ((_, _, view), *_) = plan.dst.regions[-1].tensors(torch.uint8)
    view[int(plan.dst_pages[-1]), -1, -1, -1, -1, -1, -1] ^= 1
