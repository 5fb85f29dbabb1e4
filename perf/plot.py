"""Pictures of one figure against another, drawn by matplotlib where that is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .case import DIRECTIONS, Case
from .model import BASELINE_IN_FLIGHT, Link, predict
from .output import Report, pyplot, write_outputs
from .published import published


@dataclass(frozen=True)
class Series:
    """One line of a panel, or loose points; `spread` is the low and the high end of each point."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True
    spread: Sequence[tuple[float, float]] | None = None


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
            kernels = {"16 KiB a CTA": BASELINE_IN_FLIGHT, "hikv": in_flight[direction]}
            for label, nbytes in kernels.items():
                curve = [predict(link, direction, quota, nbytes, ceiling) for quota in CURVE]
                series.append(Series(f"predicted, {label}", CURVE, curve))
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


def draw(
    title: str,
    panels: Mapping[str, Sequence[Series]],
    file: Path,
    x: str = "CTAs",
    y: str = "GB/s (10⁹ payload bytes)",
) -> None:
    """One panel a name, `x` on a logarithmic axis; the format follows the file's name."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    top = max((value for series in panels.values() for one in series for value in one.y), default=1)
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        for one in series:
            errors = None
            if one.spread is not None:
                pairs = zip(one.y, one.spread, strict=True)
                errors = list(zip(*((y - low, high - y) for y, (low, high) in pairs), strict=True))
            axis.errorbar(
                one.x,
                one.y,
                yerr=errors,
                label=one.label,
                linestyle="-" if one.line else "none",
                marker="" if one.line else "o",
                capsize=3,
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(title=name, xlabel=x, ylim=(0, 1.1 * top))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=150)
    plt.close(figure)
