"""The link alone: what the copy engine reaches on it, and how long one load takes to come back."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hikv.measure import Clock

_HOPS = 2000
_HOP_BYTES = 256  # further than a sector or a line, so that no hop finds what another fetched
_CHASED_BYTES = 64 << 20


@triton.jit
def chase_kernel(links, at, HOPS: tl.constexpr):
    """Follow `HOPS` links, each loaded from where the last one led; the place is kept in `at`."""
    place = tl.load(at)
    for _ in range(HOPS):
        place = tl.load(links + place)
    tl.store(at, place)


def chain(words: int, step: int, generator: np.random.Generator) -> np.ndarray:
    """int64 links that visit every `step`-th of `words` once, from 0 at random, and return."""
    order = np.append(0, 1 + generator.permutation(words // step - 1)) * step
    links = np.zeros(words, np.int64)
    links[order] = np.roll(order, -1)
    return links


def measure_link(clock: Clock, host: torch.Tensor, gpu: torch.Tensor) -> dict[str, Any]:
    """Figures of `Bench.link`, by copies of half of `host` and `gpu`, flat uint8 tensors of equal
    size. Both are overwritten."""
    (up, down), (into, out_of) = host.chunk(2), gpu.chunk(2)
    side = torch.cuda.Stream(gpu.device)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            down.copy_(out_of, non_blocking=True)
        into.copy_(up, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def rate(nbytes: int, run: Callable[[], Any]) -> float:
        return round(nbytes / median_seconds(clock, run) / 1e9, 2)

    return {
        "h2d": rate(up.numel(), lambda: into.copy_(up, non_blocking=True)),
        "d2h": rate(up.numel(), lambda: down.copy_(out_of, non_blocking=True)),
        "both": rate(2 * up.numel(), both),
        "latency": load_latency(clock, host, gpu),
    }


def load_latency(clock: Clock, host: torch.Tensor, gpu: torch.Tensor) -> float:
    """Seconds of one load from `host` by the GPU, each waiting for the last: a pointer chase."""
    links = host[:_CHASED_BYTES].view(torch.int64)
    hops = chain(links.numel(), _HOP_BYTES // 8, np.random.default_rng(0))
    links.copy_(torch.from_numpy(hops))
    at = torch.zeros(1, dtype=torch.int64, device=gpu.device)
    chase = chase_kernel[(1,)]
    return median_seconds(clock, lambda: chase(links, at, _HOPS, num_warps=1)) / _HOPS


def median_seconds(clock: Clock, run: Callable[[], Any], rounds: int = 10) -> float:
    """Median of `rounds` runs after two that do not count."""
    samples = [clock.time(run).seconds for _ in range(rounds + 2)]
    return statistics.median(samples[2:])
