"""Real ranks for tests: spawned processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 180


def run_ranks(
    body: Callable[..., Any], num_ranks: int, store: Path, *arguments: Any, may_die: bool = False
) -> list[Any]:
    """`body(rank, num_ranks, *arguments)` in `num_ranks` processes; what each returned.

    `store` is a file that does not exist yet. Raises the text of a rank's traceback; with `may_die`
    the answer of a rank that ended without one is `None`. Bounded: whatever happens, every process
    is gone on return.
    """
    context = multiprocessing.get_context("spawn")
    ranks, answers = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, body, rank, num_ranks, str(store), arguments), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        deadline = time.monotonic() + DEADLINE_S
        for rank, (_, pipe) in enumerate(ranks):
            if not wait([pipe], max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not answer within {DEADLINE_S} s")
            try:
                ok, answer = pipe.recv()
            except EOFError:
                ok, answer = may_die, None if may_die else f"rank {rank} ended without an answer"
            if not ok:
                raise RuntimeError(answer)
            answers.append(answer)
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()
    return answers


def _rank(
    pipe: Connection,
    body: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: str,
    arguments: tuple[Any, ...],
) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        pipe.send((True, body(rank, num_ranks, *arguments)))
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    # Stays until it is killed: a peer that is still at work must not find this rank gone.
    time.sleep(DEADLINE_S)
