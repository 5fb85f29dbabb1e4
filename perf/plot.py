"""Pictures of rate against CTAs, drawn by matplotlib where that is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .case import DIRECTIONS, Case
from .model import BASELINE_IN_FLIGHT, Link, predict
from .output import pyplot
from .published import published


@dataclass(frozen=True)
class Series:
    """One line of a panel, or loose points; `spread` is the low and the high end of each point."""

    label: str
    quotas: Sequence[int]
    gbps: Sequence[float]
    line: bool = True
    spread: Sequence[tuple[float, float]] | None = None


CURVE = tuple(range(1, 65))


def cta_panels(
    case: Case, rows: Sequence[Mapping[str, Any]], in_flight: Mapping[str, int], link: Link | None
) -> dict[str, list[Series]]:
    """`case` both ways: the model, what was published, and what `rows` measured at a quota.

    `in_flight` is by direction, bytes per CTA of our kernel.
    """
    panels: dict[str, list[Series]] = {direction: [] for direction in DIRECTIONS}
    for direction, series in panels.items():
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


def plot_quotas(title: str, panels: Mapping[str, Sequence[Series]], file: Path) -> None:
    """One panel a direction, CTAs on a logarithmic axis; the format follows the file's name."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    top = max(gbps for series in panels.values() for one in series for gbps in one.gbps)
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        for one in series:
            errors = None
            if one.spread is not None:
                pairs = zip(one.gbps, one.spread, strict=True)
                errors = list(zip(*((y - low, high - y) for y, (low, high) in pairs), strict=True))
            axis.errorbar(
                one.quotas,
                one.gbps,
                yerr=errors,
                label=one.label,
                linestyle="-" if one.line else "none",
                marker="" if one.line else "o",
                capsize=3,
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(title=name.upper(), xlabel="CTAs", ylim=(0, 1.1 * top))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s (10⁹ payload bytes)")
    axes[0][0].legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=150)
    plt.close(figure)
