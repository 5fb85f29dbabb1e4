"""Ranks of a benchmark: spawned processes that talk over gloo, and never outlive their time."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from hikv.errors import GatherError


def run_ranks(body: Callable[..., Any], num_ranks: int, seconds: float, *arguments: Any) -> Any:
    """What rank 0 returns of `body(rank, num_ranks, *arguments)`, run by `num_ranks` processes.

    `body` is a function of a module. Raises what a rank raised, and `GatherError` where the ranks
    do not end within `seconds`; every process is gone then.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        given = (body, num_ranks, store, seconds, arguments, answers)
        ranks = spawn(_rank, given, nprocs=num_ranks, join=False)
        until = time.monotonic() + seconds
        try:
            while not ranks.join(timeout=0.5):
                if time.monotonic() > until:
                    raise GatherError(
                        f"the ranks did not end within {seconds:g} s", remedy="measure less"
                    )
            return answers.get()
        finally:  # an interrupt too, or this program would wait for them at its end
            for process in ranks.processes:
                process.kill()
                process.join()


def _rank(
    rank: int,
    body: Callable[..., Any],
    num_ranks: int,
    store: str,
    seconds: float,
    arguments: tuple[Any, ...],
    answers: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=seconds),
    )
    answer = body(rank, num_ranks, *arguments)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()
