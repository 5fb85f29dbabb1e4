"""The one protocol for timing a copy: verify, warm up, interleave, and report the spread.

A figure counts only if the bytes were right, so a candidate is first run on a poisoned destination
and compared. Candidates then take turns in a fresh order every round, so that drifting clocks and
neighbours on the machine meet all of them alike, and every turn takes other pages, so that none
finds its bytes in a cache. Rates are GB/s = 10⁹ payload bytes a second, each byte counted once.

What "seconds" are is the `Clock`'s business: events on a GPU, `perf_counter` on the host, or any
object with the same one method for a simulated machine.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.plan import CopyPlan

COLD_BYTES = 512 << 20
"""Payload of one cycle over the rotated pages: four times the largest L2 of a GPU (B200: 126 MB),
so that least-recently-used bytes are gone when their turn comes again."""

MIN_ROUNDS = 3
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Sample(NamedTuple):
    """One timed copy: until its bytes had arrived, and until the submitting call had returned."""

    seconds: float
    submit_seconds: float


class Clock(Protocol):
    """Times one copy on an otherwise idle machine, and returns when the copy is over."""

    def time(self, run: Callable[[], object]) -> Sample:
        """Run `run` once and say how long that took."""
        ...


class HostClock:
    """Wall time of a call that is done on return."""

    def time(self, run: Callable[[], object]) -> Sample:
        """Time `run` by `perf_counter`."""
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        return Sample(seconds, seconds)


class GpuClock:
    """CUDA events around what `run` queues on torch's current stream.

    A kernel that only spins is queued ahead, so that the GPU finds the copy waiting and its time
    holds no launch. A submission longer than the spin shows in the rate, as it would in service.
    """

    SPIN_CYCLES = 4_000_000  # about 2 ms; descriptors for 4000 copies take that long to submit

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def time(self, run: Callable[[], object]) -> Sample:
        """Time `run` on a stream of this clock's own; waits for the device first and last."""
        device = self._stream.device
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            torch.cuda._sleep(self.SPIN_CYCLES)
            start.record()
            called = time.perf_counter()
            run()
            submit_seconds = time.perf_counter() - called
            end.record()
        torch.cuda.synchronize(device)
        return Sample(start.elapsed_time(end) / 1e3, submit_seconds)


@dataclass(frozen=True)
class Candidate:
    """One way to make a copy.

    Attributes:
        name: unique among the candidates of one call.
        nbytes: payload of one run.
        run: `run(turn)` makes one copy; successive turns use other pages.
        check: makes the same copy with nobody else about, and says what is wrong with it, or
            `None`. `wrong_bytes` is one.
    """

    name: str
    nbytes: int
    run: Callable[[int], object]
    check: Callable[[], str | None]


@dataclass(frozen=True)
class Timing:
    """The samples of one candidate, in the order they were taken."""

    nbytes: int
    samples: tuple[Sample, ...]

    def gbps(self, percentile: float = 50) -> float:
        """Rate that `percentile` percent of the samples do not exceed; 50 is the median."""
        rates = sorted(self.nbytes / sample.seconds / 1e9 for sample in self.samples)
        place = (len(rates) - 1) * percentile / 100
        below, above = rates[math.floor(place)], rates[math.ceil(place)]
        return below + (place - math.floor(place)) * (above - below)

    @property
    def spread(self) -> float:
        """Distance of the 20th and the 80th percentile as a share of the median."""
        return (self.gbps(80) - self.gbps(20)) / self.gbps()

    @property
    def submit_seconds(self) -> float:
        """Median time until the submitting call returned."""
        return float(np.median([sample.submit_seconds for sample in self.samples]))

    def summary(self) -> dict[str, float | int]:
        """The figures to keep, ready for JSON."""
        return {
            "gbps_p20": self.gbps(20),
            "gbps_p50": self.gbps(50),
            "gbps_p80": self.gbps(80),
            "submit_seconds": self.submit_seconds,
            "rounds": len(self.samples),
        }


@dataclass(frozen=True)
class Measurement:
    """What became of one candidate: `wrong` says why it was not timed, or `timing` is there."""

    name: str
    wrong: str | None = None
    timing: Timing | None = None


def measure(
    candidates: Sequence[Candidate],
    clock: Clock,
    *,
    rounds: int = 20,
    warmup: int = 3,
    seconds: float | None = None,
    seed: int = 0,
) -> list[Measurement]:
    """Time `candidates` against each other; one `Measurement` each, in their order.

    Args:
        rounds: timed runs of each.
        warmup: untimed runs of each that pass, interleaved like the timed ones.
        seconds: end after the round in which the samples add up to this, and after three rounds at
            the least.
        seed: of the order within a round.

    An exception of a candidate is not caught. Raises `ArgumentError` on a name given twice, and on
    fewer than one round.
    """
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise ArgumentError(
            "candidates", expected="names of their own", got=names, remedy="rename one"
        )
    if rounds < 1:
        raise ArgumentError("rounds", expected="at least 1", got=rounds, remedy="pass 20")
    wrong = {candidate.name: candidate.check() for candidate in candidates}
    order = [candidate for candidate in candidates if wrong[candidate.name] is None]
    samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in order}
    shuffle, spent, turn = random.Random(seed).shuffle, 0.0, 0
    for number in range(-warmup, rounds if order else 0):
        if seconds is not None and number >= MIN_ROUNDS and spent >= seconds:
            break
        shuffle(order)
        for candidate in order:
            sample = clock.time(functools.partial(candidate.run, turn))
            turn += 1
            if number >= 0:
                samples[candidate.name].append(sample)
                spent += sample.seconds
    return [
        Measurement(c.name, wrong[c.name])
        if wrong[c.name] is not None
        else Measurement(c.name, timing=Timing(c.nbytes, tuple(samples[c.name])))
        for c in candidates
    ]


def cold_sets(nbytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Sets of pages to take turns with: one cycle of copies of `nbytes` moves `cold_bytes`."""
    return max(1, math.ceil(cold_bytes / nbytes))


def wrong_bytes(
    plan: CopyPlan, run: Callable[[], object], synchronize: Callable[[], object]
) -> str | None:
    """Poison the plan's destination pages, `run` the copy, wait, and compare every byte.

    Returns `None`, or what is wrong and where. Layers outside the plan's span must keep the poison,
    and pages that it does not name their checksums. Fill both sides with `fill_random` first.
    """
    word = _word(plan.src, plan.dst)
    named = set(plan.dst_pages.tolist())
    others = [page for page in range(plan.dst.num_pages) if page not in named]
    before = {page: _checksum(plan.dst, page, word) for page in others}
    for page in named:
        for slab in _slabs(plan.dst, page, word):
            slab.fill_(-1)
    run()
    synchronize()
    for src_page, dst_page in zip(plan.src_pages.tolist(), plan.dst_pages.tolist(), strict=True):
        pairs = zip(_slabs(plan.src, src_page, word), _slabs(plan.dst, dst_page, word), strict=True)
        for number, (want, got) in enumerate(pairs):
            layer = number % plan.dst.spec.num_layers
            moved = plan.layers[0] <= layer < plan.layers[1]
            if not _same(want if moved else torch.full_like(got, -1), got):
                told = f"is not page {src_page} of the source" if moved else "was not to be written"
                return f"page {dst_page}, layer {layer} of the destination {told}"
    for page, checksum in before.items():
        if _checksum(plan.dst, page, word) != checksum:
            return f"page {page} of the destination was not to be written"
    return None


def fill_random(buffer: KVBuffer, seed: int = 0) -> None:
    """Random bytes in every row of `buffer`."""
    generator = torch.Generator(buffer.device).manual_seed(seed)
    word = _word(buffer)
    limits = torch.iinfo(word)
    for region in buffer.regions:
        for _, _, view in region.tensors(word):
            view.random_(limits.min, limits.max, generator=generator)


def _slabs(buffer: KVBuffer, page: int, word: torch.dtype) -> Iterator[torch.Tensor]:
    """Every layer of `page` as a view `[token, group, head, word]`; components and kv outermost."""
    for region in buffer.regions:
        for _, _, view in region.tensors(word):
            for kv in view[page].unbind(1):
                yield from (layer.movedim(1, 0) for layer in kv.unbind(0))


def _checksum(buffer: KVBuffer, page: int, word: torch.dtype) -> int:
    """The sum of all words of `page`, modulo 2⁶⁴."""
    views = [view for region in buffer.regions for _, _, view in region.tensors(word)]
    return int(torch.stack([view[page].sum(dtype=torch.int64) for view in views]).sum())


def _word(*buffers: KVBuffer) -> torch.dtype:
    """The widest integer that divides every row, stride and address."""
    numbers = [8]
    for region in (region for buffer in buffers for region in buffer.regions):
        strides = [stride for axis, stride in region.strides.items() if axis != "dim"]
        numbers += [region.row_bytes, region.alignment, *strides]
    return _WORDS[math.gcd(*numbers)]


def _same(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether two layers of a page hold the same bytes; their head grids may differ."""
    return torch.equal(want.flatten(1, 2).cpu(), got.flatten(1, 2).cpu())
