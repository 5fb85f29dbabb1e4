"""Compute and copies side by side on one GPU: what each leaves of the other.

Both streams are held back while the copies are queued, and the compute's time starts when it is
queued as well, so it never has the GPU to itself at first. Only copies that ended in that time
count for the copies' rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

HOLD_CYCLES = 8_000_000  # about 4 ms: a thousand launches, or some forty calls of transfer()


class Duet(NamedTuple):
    """One run of both.

    Attributes:
        compute_seconds: of one repeat.
        copy_seconds: from copy to copy, as they ended in the compute's time; NaN of less than two.
        covered: share of the compute's time in which copies ran.
    """

    compute_seconds: float
    copy_seconds: float
    covered: float


def play(
    main: torch.cuda.Stream,
    aside: torch.cuda.Stream,
    compute: Callable[[], object],
    repeats: int,
    copy: Callable[[int], object],
    copies: int,
) -> Duet:
    """Run `compute` on `main` and `copy(turn)` on `aside`; waits for the device first and last."""
    device = main.device
    torch.cuda.synchronize(device)
    held, start, end, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3 + copies))
    with torch.cuda.device(device):
        with torch.cuda.stream(main):
            torch.cuda._sleep(HOLD_CYCLES)
            held.record()
        aside.wait_stream(main)
        with torch.cuda.stream(aside):
            for turn, copied in enumerate(ends):
                copy(turn)
                copied.record()
        with torch.cuda.stream(main):
            start.record()
            for _ in range(repeats):
                compute()
            end.record()
    torch.cuda.synchronize(device)
    first, last, *copied_at = (held.elapsed_time(event) / 1e3 for event in (start, end, *ends))
    return summarise(first, last, repeats, copied_at)


def summarise(start: float, end: float, repeats: int, ends: Sequence[float]) -> Duet:
    """The duet whose compute ran from `start` to `end`, and whose copies ended at `ends`, seconds.

    `ends` ascend.
    """
    within = [at for at in ends if start <= at <= end]
    seconds = (within[-1] - within[0]) / (len(within) - 1) if len(within) > 1 else math.nan
    covered = min(max(ends[-1] - start, 0.0) / (end - start), 1.0) if ends else 0.0
    return Duet((end - start) / repeats, seconds, covered)
