"""All that is ever called of NCCL: memory that it may write from afar, and one all-gather.

What it takes to gather with no SM, from the documentation and the tests of NCCL and torch:

- NCCL 2.28, whose zero-CTA policy hands an all-gather to the copy engines if all ranks are GPUs of
  one host that reach each other, and both buffers lie in symmetric windows. Where NCCL finds
  anything amiss it launches a kernel and says nothing.
- A driver for CUDA 12.5. Not the default stream.
- torch 2.10, which lets a communicator have that policy (`NCCLConfig.cta_policy`) and has NCCL's
  symmetric memory. The communicator must have been used before memory is registered with it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hikv.cp.witness import device_work
from hikv.device import device_info

NCCL_NEEDED = (2, 28)
DRIVER_NEEDED = 12050
SYMMETRIC = "NCCL"
_NAMES_NEEDED = ("get_backend", "set_backend", "empty", "rendezvous")


class Collective(Protocol):
    """An all-gather over memory of its own, for the back end `nccl`."""

    def obstacle(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, as far as this rank alone can see, or `None`."""
        ...

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory, uint8, that `register` takes."""
        ...

    def open(self, ranks: list[int], device: torch.device, timeout_s: float) -> None:
        """Make the communicator; collective."""
        ...

    def register(self, memory: torch.Tensor) -> None:
        """Let every rank write `memory`; collective."""
        ...

    def all_gather(self, gathered: torch.Tensor, block: torch.Tensor, stream: Any) -> None:
        """Queue on `stream`: everybody's `block`, in the order of the ranks, into `gathered`."""
        ...

    def watch(self, run: Callable[[], object], device: torch.device) -> list[str]:
        """Names of all that `device` does for `run()`, as `hikv.cp.witness.device_work`."""
        ...

    def close(self) -> None:
        """Leave the communicator."""
        ...


class NcclCollective:
    """NCCL's, through torch, with the zero-CTA policy.

    Choosing NCCL for torch's symmetric memory holds for the process, and torch refuses it where
    other symmetric memory is in use.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._registered: list[Any] = []

    def obstacle(self, device: torch.device) -> str | None:
        """Versions, and what torch was built with."""
        if device.type != "cuda":
            return f"its pool is on {device}, not on a GPU"
        if torch.version.hip is not None or not dist.is_nccl_available():
            return "this torch is built without NCCL"
        found = torch.cuda.nccl.version()
        if found[:2] < NCCL_NEEDED:
            return f"NCCL is {_dotted(found)}, and has a zero-CTA policy from 2.28 on"
        symmetric = _symmetric_memory()
        lacking = [name for name in _NAMES_NEEDED if not hasattr(symmetric, name)]
        if lacking or not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
            return f"torch {torch.__version__} cannot set NCCL's zero-CTA policy; 2.10 can"
        info = device_info(device.index)
        driver = info.cuda_driver_version if info is not None else None
        if driver is not None and driver < DRIVER_NEEDED:
            return f"its driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, not 12.5"
        return None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """From NCCL's allocator."""
        symmetric = _symmetric_memory()
        if symmetric.get_backend(device) != SYMMETRIC:
            symmetric.set_backend(SYMMETRIC)
        memory: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        return memory

    def open(self, ranks: list[int], device: torch.device, timeout_s: float) -> None:
        """A communicator of its own, used once: NCCL registers nothing with an unused one."""
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        self._group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout_s),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            device_id=device,
        )
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        torch.cuda.synchronize(device)

    def register(self, memory: torch.Tensor) -> None:
        """Into a symmetric window of the communicator."""
        assert self._group is not None
        self._registered.append(_symmetric_memory().rendezvous(memory, self._group.group_name))

    def all_gather(
        self, gathered: torch.Tensor, block: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """On NCCL's own stream, behind and before what is on `stream`."""
        with torch.cuda.stream(stream):
            work = dist.all_gather_into_tensor(gathered, block, group=self._group, async_op=True)
            assert work is not None  # as for those alone who are not in the group
            work.wait()

    def watch(self, run: Callable[[], object], device: torch.device) -> list[str]:
        """By torch's profiler."""
        return device_work(run, device)

    def close(self) -> None:
        """Destroy the communicator."""
        self._registered.clear()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory  # an alpha interface; imported where it is used

    return _symmetric_memory


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
