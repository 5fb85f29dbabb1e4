"""What a search saw, drawn: GB/s by CTAs for a handful of its cases.

A curve leaves out the configurations that a search tries beside each kernel's default: the best of
many noisy medians would flatter every number of CTAs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hikv.measure import Timing
from hikv.picture import Series, draw
from hikv.tables import Table

from .cases import DIRECTIONS, Case
from .space import Point

_LINES = 4  # a panel holds no more cases than the eye tells apart

Timings = Mapping[Case, Mapping[Point, Timing]]


def draw_search(table: Table, timings: Timings, file: Path) -> None:
    """One panel a direction of `timings`: a line a case, the ceiling, and what `table` chose."""
    header = table.header
    kind, _, source = str(header["kind"]).partition(": ")
    word = "simulated, not measured" if kind == "simulated" else kind
    name = source.partition(";")[0] or f"{header['name']}, {header['link']}"
    title = f"hikv tune, {word}: {name}\nthe best path at each number of CTAs, kernels by default"
    draw(title, panels(table, timings), file, x="CTAs (0: the copy engine alone)")


def panels(table: Table, timings: Timings) -> dict[str, list[Series]]:
    """Series by panel: a line a case, from short runs to long, the ceiling, and the choices."""
    found = {}
    for direction in DIRECTIONS:
        cases = handful([case for case in timings if case.direction == direction])
        if not cases:
            continue
        curves = {case: best_by_quota(timings[case]) for case in cases}
        lines = [Series(_label(case), [*curves[case]], [*curves[case].values()]) for case in cases]
        last = max(quota for curve in curves.values() for quota in curve)
        ceiling = table.header["link_gbps_and_latency"][direction]
        lines.append(Series("copy engine, one piece", [0, last], [ceiling, ceiling]))
        chosen = [table.entries[case.key] for case in cases]
        rates = [entry.record["gbps"]["p50"] for entry in chosen]
        lines.append(Series("chosen", [e.block_quota for e in chosen], rates, line=False))
        found[direction.upper()] = lines
    return found


def handful(cases: list[Case]) -> list[Case]:
    """At most four of `cases`: the longest copy of a length of runs, lengths evenly apart."""
    longest: dict[int, Case] = {}
    for case in sorted(cases, key=lambda c: (c.vector_bytes, c.num_runs)):
        longest[case.run_bytes] = case
    runs = sorted(longest)
    if len(runs) > _LINES:
        runs = [runs[i * (len(runs) - 1) // (_LINES - 1)] for i in range(_LINES)]
    return [longest[run] for run in runs]


def best_by_quota(timings: Mapping[Point, Timing]) -> dict[int, float]:
    """GB/s of the fastest path at each quota, by rising quota."""
    best: dict[int, float] = {}
    for point in sorted(timings, key=lambda point: point.block_quota):
        if not point.config:
            rate = timings[point].gbps()
            best[point.block_quota] = max(rate, best.get(point.block_quota, 0.0))
    return best


def _label(case: Case) -> str:
    narrow = "" if case.vector_bytes == 16 else f", {case.vector_bytes}-byte accesses"
    return f"{case.num_runs:,} runs of {case.run_bytes:,} B{narrow}"
