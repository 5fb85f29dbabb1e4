"""What a GPU was seen to do, by torch's profiler: the proof that a gather launched no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_COPIES = ("Memcpy", "Memset")
_ANNOTATION = "nccl:"  # torch marks a collective's span on the GPU's timeline by this


def device_work(run: Callable[[], object], device: torch.device) -> list[str]:
    """Names of everything that `device` did while `run()` was made and waited for, in order.

    Raises `RuntimeError` where another profiler is at work.
    """
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


def kernels(names: Iterable[str]) -> list[str]:
    """Those of `device_work` that ran on SMs: neither copies nor marks; each once, sorted.

    What carries out a copy within one GPU the profiler does not tell; it counts as a copy.
    """
    return sorted({name for name in names if not name.startswith((*_COPIES, _ANNOTATION))})
