"""The search for one case: the fewest CTAs that reach the required share of the ceiling.

Every point is screened in interleaved order; the few that could still be the answer are timed again
until their medians stand. So no single trial decides, and most of the time goes where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from hikv.measure import Sample, Timing
from hikv.tables import Entry
from hikv.transfers import piece_bytes

from .bench import Bench
from .cases import Case
from .space import Point


class Rounds(NamedTuple):
    """Timed runs of a point: in the screening, in a batch afterwards, and how many batches."""

    screen: int
    batch: int
    batches: int


FULL, QUICK = Rounds(5, 15, 4), Rounds(3, 5, 3)
SETTLED = 0.01  # medians that move by less than this from batch to batch stand
EQUAL = 0.02  # rates this close are one rate: the smaller tile wins


@dataclass(frozen=True)
class Found:
    """The entry for a case, `None` if nothing copied it right; what was left out as wrong; and the
    timings of the rest, those of a point that came near being chosen from its last batches."""

    entry: Entry | None
    wrong: Mapping[Point, str]
    timings: Mapping[Point, Timing]


def search(case: Case, bench: Bench, *, target: float, quick: bool, interference: bool) -> Found:
    """The choice for `case` on `bench`.

    Args:
        target: required share of what can be reached: the copy engine's ceiling on this link, or
            the best rate of all points where a case is too small for the ceiling.
        quick: fewer points and rounds.
        interference: measure how much the choice slows a GEMM down.
    """
    ceiling = bench.link()[case.direction]
    plan = QUICK if quick else FULL
    screening = _Trials(case, bench)
    screened = screening.run(bench.points(case, quick), plan.screen)
    if not screened:
        return Found(None, screening.wrong, {})
    finalists = _finalists(screened, target, ceiling)
    # Samples of their own: those of the screening flatter whoever it picked.
    trials, rates = _Trials(case, bench), dict[Point, float]()
    for _ in range(plan.batches):
        before, timings = rates, trials.run(finalists, plan.batch)
        rates = {point: timing.gbps() for point, timing in timings.items()}
        if all(abs(rate - before.get(p, 0)) <= SETTLED * rate for p, rate in rates.items()):
            break
    required = target * min(ceiling, max(rates.values()))
    ranked = rank(rates, required)
    chosen = ranked[0]
    slowdown = bench.slowdown(case, chosen) if interference else None
    record = _record(ranked, timings, bench.predicted(case, chosen), slowdown)
    record |= {"target": target, "required": _figure(required)}
    record["piece_bytes"] = piece_bytes(chosen.path, case.part_plan())
    entry = Entry(case.key, chosen.path, chosen.block_quota, dict(chosen.config), record)
    return Found(entry, screening.wrong, screened | timings)


class _Trials:
    """All samples of a case so far, pooled over batches."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self._case, self._bench, self._seed = case, bench, 0
        self._samples: dict[Point, tuple[Sample, ...]] = {}
        self.wrong: dict[Point, str] = {}

    def run(self, points: Sequence[Point], rounds: int) -> dict[Point, Timing]:
        """Time `points` once more; the pooled timings of those whose bytes are right."""
        batch = self._bench.measure(self._case, points, rounds, self._seed)
        self._seed += 1
        timings = {}
        for point, result in zip(points, batch, strict=True):
            if result.timing is None:
                self.wrong[point] = str(result.wrong)
            else:
                pooled = self._samples.get(point, ()) + result.timing.samples
                self._samples[point] = pooled
                timings[point] = Timing(result.timing.nbytes, pooled)
        return timings


def _finalists(timings: Mapping[Point, Timing], target: float, ceiling: float) -> list[Point]:
    """The points that could still be chosen, and the fastest, which sets what is required.

    By rising grids those whose best sample is enough, two of a grid, up to the first grid of which
    even the worst sample is.
    """
    rates = {point: timing.gbps() for point, timing in timings.items()}
    fastest = max(rates, key=lambda point: rates[point])
    required = target * min(ceiling, rates[fastest])
    hopeful = [
        point
        for point in sorted(rates, key=lambda p: (p.block_quota, -rates[p]))
        if timings[point].gbps(100) >= required
    ]
    finalists: list[Point] = []
    for _, grid in groupby(hopeful, key=lambda point: point.block_quota):
        finalists += (best := list(grid)[:2])
        if any(timings[point].gbps(0) >= required for point in best):
            break
    return list(dict.fromkeys([*finalists, fastest]))


def rank(rates: Mapping[Point, float], required: float) -> list[Point]:
    """Points by merit: those that reach `required` first, smallest grid first, then the fastest.

    Of rates within 2 % of the fastest with a grid of that size, the smallest tile comes first.
    """
    best: dict[int, float] = {}
    for point, rate in rates.items():
        best[point.block_quota] = max(rate, best.get(point.block_quota, 0.0))

    def merit(point: Point) -> tuple[Any, ...]:
        rate = rates[point]
        if rate < required:
            return (1, -rate, point.block_quota, point)
        slower = rate < (1 - EQUAL) * best[point.block_quota]
        return (0, point.block_quota, slower, _tile(point), point)

    return sorted(rates, key=merit)


def _tile(point: Point) -> int:
    config = dict(point.config)
    return config.get("num_warps", 1) * config.get("loads", 1) * config.get("buffers", 1)


def _record(
    ranked: Sequence[Point],
    timings: Mapping[Point, Timing],
    predicted: float | None,
    slowdown: float | None,
) -> dict[str, Any]:
    """What the choice, first of `ranked`, rests on."""
    timing = timings[ranked[0]]
    runner_up = None
    if len(ranked) > 1:
        second = ranked[1]
        runner_up = {
            "path": second.path,
            "block_quota": second.block_quota,
            "config": dict(second.config),
            "gbps": _figure(timings[second].gbps()),
        }
    return {
        "gbps": {f"p{p}": _figure(timing.gbps(p)) for p in (20, 50, 80)},
        "rounds": len(timing.samples),
        "predicted": predicted and _figure(predicted),
        "gemm_slowdown": slowdown and round(slowdown, 3),
        "runner_up": runner_up,
    }


def _figure(rate: float) -> float:
    """A rate to four digits: a table's differences should be differences."""
    return float(f"{rate:.4g}")
