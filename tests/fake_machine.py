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
from hikv.transfers import PATHS
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


class FakeGpu(Machine):
    """A machine whose `rate(path, block_quota)` is in GB/s, and whose `fault` may spoil a copy.

    `fault(plan, path, block_quota)` runs after each copy. `refused` maps a path to its obstacle.
    """

    def __init__(
        self,
        rate: Callable[[str, int | None], float] = lambda path, quota: 50.0,
        fault: Callable[[CopyPlan, str, int | None], Any] = lambda plan, path, quota: None,
        refused: dict[str, str] | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"), self, GPU, cold_bytes=0)
        self.rate, self.fault, self.refused = rate, fault, refused or {}
        self.copied: list[tuple[str, int | None]] = []
        self.last: tuple[int, float] = (0, 1.0)

    has_gpu = True

    def time(self, run: Callable[[], object]) -> Sample:
        """The clock: what `rate` says of the copy that `run` made."""
        self.last = (0, 1.0)  # a copy of somebody else's making is done in no time
        run()
        nbytes, gbps = self.last
        return Sample(max(nbytes / gbps / 1e9, 1e-9), 5e-6)

    def _allocate(self, side: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def new_pool(self, side, spec, layout, num_pages) -> KVBuffer:
        return KVBuffer.empty(spec, layout, num_pages)

    def copy(self, plan: CopyPlan, path: str, block_quota: int | None = None) -> None:
        launch(plan)
        self.fault(plan, path, block_quota)
        self.copied.append((path, block_quota))
        self.last = (plan.nbytes, self.rate(path, block_quota))

    def relayout(self, plan: CopyPlan, block_quota: int, config: Any) -> None:
        self.copy(plan, "sm", block_quota)

    def obstacle(self, path: str, plan: CopyPlan) -> str | None:
        return self.refused.get(path)

    def facts(self) -> dict[str, Any]:
        paths = {name: self.refused.get(name) for name in PATHS}
        return examine() | {"gpu": asdict(GPU), "paths": paths}

    def synchronize(self) -> None:
        pass


def flip_a_bit(plan: CopyPlan) -> None:
    """Spoil one byte of the last page that `plan` wrote."""
    ((_, _, view), *_) = plan.dst.regions[-1].tensors(torch.uint8)
    view[int(plan.dst_pages[-1]), -1, -1, -1, -1, -1, -1] ^= 1
