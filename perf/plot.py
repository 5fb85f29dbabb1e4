"""What the commands draw, and how each presents its report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hikv.picture import Series, draw

from .case import DIRECTIONS, Case
from .model import BASELINE_IN_FLIGHT, Link, predict
from .output import Report, write_outputs
from .published import published

__all__ = ["CURVE", "Series", "cta_panels", "draw", "present"]

CURVE = tuple(range(1, 65))


def cta_panels(
    case: Case, rows: Sequence[Mapping[str, Any]], in_flight: Mapping[str, int], link: Link | None
) -> dict[str, list[Series]]:
    """`case` both ways: the model, what was published, and what `rows` measured at a quota.

    `in_flight` is by direction, bytes per CTA of our kernel.
    """
    panels: dict[str, list[Series]] = {}
    for direction in DIRECTIONS:
        series = panels.setdefault(direction.upper(), [])
        mine = [
            row
            for row in rows
            if row["direction"] == direction and case.label.items() <= row.items()
        ]
        ceiling = next((row["ceiling"] for row in mine if row.get("ceiling")), None)
        if link is not None:
            kernels = {
                "model, 16 KiB a CTA": BASELINE_IN_FLIGHT,
                "upper bound, hikv": in_flight[direction],
            }
            for label, nbytes in kernels.items():
                curve = [predict(link, direction, quota, nbytes, ceiling) for quota in CURVE]
                series.append(Series(label, CURVE, curve))
        points = {q: figure for q in CURVE if (figure := published(case, direction, q))}
        if points:
            series.append(Series("published, B200", [*points], [*points.values()], line=False))
        timed = [row for row in mine if row.get("gbps_p50") and row.get("quota")]
        if timed:
            quotas, gbps = [row["quota"] for row in timed], [row["gbps_p50"] for row in timed]
            spread = [(row["gbps_p20"], row["gbps_p80"]) for row in timed]
            series.append(Series("measured", quotas, gbps, line=False, spread=spread))
    return panels


def present(
    report: Report,
    args: argparse.Namespace,
    panels: Callable[[], Mapping[str, Sequence[Series]]],
    **axes: str,
) -> None:
    """Write what was asked for, print a report, and `draw` its panels, titled by its header."""
    write_outputs(report, args)
    print(report.terminal())
    if args.plot is not None:
        draw(f"{report.command}: {report.kind}\n{report.subject}", panels(), args.plot, **axes)
