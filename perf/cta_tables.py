"""The tables of `perf cta`: columns, titles, and the notes that say what a column is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .case import DIRECTIONS
from .model import BASELINE_IN_FLIGHT, Link
from .output import Column, Table, label_columns, label_notes
from .published import SOURCE

Row = Mapping[str, Any]


def _heading(direction: str, quota: int) -> str:
    return f"{direction.upper()} @{quota} CTA"


def predicted_table(rows: Sequence[Row], quotas: Sequence[int], link: Link) -> Table:
    """The model's bounds, for a baseline kernel and for ours, and the published figures."""
    columns = label_columns(rows)
    has_published = any(value for row in rows for key, value in row.items() if "published" in key)
    for quota in quotas:
        for direction in DIRECTIONS:
            at, group = f"{direction}@{quota}", _heading(direction, quota)
            columns += [
                Column(f"{at} baseline", "16K", ".1f", group),
                Column(f"{at} hikv", "hikv", ".1f", group, "≤"),
            ]
            if has_published:
                columns.append(Column(f"{at} published", "B200", ".1f", group))
    notes = [
        "Model: min(ceiling, CTAs × bytes in flight ÷ latency), however short the runs are.",
        f"  16K   a kernel with {BASELINE_IN_FLIGHT >> 10} KiB in flight a CTA; fitted at 2 CTAs",
        "        to what was published of one, so that it agrees there is no test",
        "  hikv  ours at most: bytes in flight as in the machine code below, and no limit on what",
        "        an SM keeps outstanding; at the ceiling it tells of the link alone",
    ]
    if has_published:
        notes.append(f"  B200  published by others for a kernel like 16K ({SOURCE})")
    ceiling, latency = link.ceiling, {way: s * 1e6 for way, s in link.latency.items()}
    notes += [
        *label_notes(rows),
        f"Link: {link.name}, {link.theoretical:.1f} GB/s in theory. From {link.source}:",
        f"  ceiling  H2D {ceiling['h2d']}, D2H {ceiling['d2h']} GB/s, the most observed at 32 CTAs",
        f"  latency  H2D {latency['h2d']:.2f}, D2H {latency['d2h']:.2f} µs, fitted at 2 CTAs",
        "Assumed: D2H stores are posted, so a CTA waits for its loads from GPU memory alone.",
    ]
    return Table("GB/s at most, by a model; not measured", columns, rows, notes)


def host_table(rows: Sequence[Row]) -> Table:
    """The CPU path's figures, which say nothing of a GPU; one row a case."""
    columns = label_columns(rows)
    for direction in DIRECTIONS:
        group = f"{direction.upper()} order"
        columns += [
            Column(f"{direction} gbps_p50", "GB/s", ".2f", group),
            Column(f"{direction} gbps_p20", "p20", ".2f", group),
            Column(f"{direction} gbps_p80", "p80", ".2f", group),
            Column(f"{direction} bytes", "bytes", "", group),
        ]
    rounds = max(row.get("rounds", 0) for row in rows)
    note = (
        f"The same copies between two pools in host memory, {rounds} timed rounds: no GPU and no "
        "link, not comparable with the figures above. Every byte was compared first."
    )
    title = "Measured on this host's CPU, path cpu"
    return Table(title, columns, _one_a_case(map(_with_verdict, rows)), [note, *_complaints(rows)])


def _one_a_case(rows: Iterable[Row], *, quota: bool = False) -> list[dict[str, Any]]:
    """Rows of one case joined; every value that is not its label under `direction[@quota] name`."""
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        label = {name: row[name] for name in ("row", "heads", "groups", "run") if name in row}
        into = joined.setdefault(tuple(label.values()), label)
        at = f"{row['direction']}@{row['quota']}" if quota else row["direction"]
        into |= {f"{at} {name}": value for name, value in row.items() if name not in label}
    return list(joined.values())


def summary_table(rows: Sequence[Row], quotas: Sequence[int], path: str) -> Table:
    """Median rates in one row a case, the copy engine's ceiling beside them."""
    columns = label_columns(rows)
    for direction in DIRECTIONS:
        group = f"{direction.upper()}, CTAs"
        columns += [Column(f"{direction}@{q} gbps_p50", str(q), ".1f", group) for q in quotas]
        columns.append(Column(f"{direction}@{quotas[0]} ceiling", "engine", ".1f", group))
    engine = "engine: the copy engine on one contiguous piece of the same memory, in the same run."
    notes = [engine, *label_notes(rows)]
    return Table(f"GB/s, measured, path {path}", columns, _one_a_case(rows, quota=True), notes)


def detail_table(rows: Sequence[Row]) -> Table:
    """Spread, ratio to the ceiling, prediction and published figure of every measurement."""
    columns = [
        *label_columns(rows),
        Column("direction", "copy"),
        Column("quota", "CTAs"),
        Column("gbps_p50", "GB/s", ".1f"),
        Column("gbps_p20", "p20", ".1f"),
        Column("gbps_p80", "p80", ".1f"),
        Column("ratio", "of engine", ".0%"),
        Column("predicted", "at most", ".1f", mark="≤"),
        Column("published", "B200", ".1f"),
        Column("submit_us", "submit µs", ".0f"),
        Column("bytes", "bytes"),
    ]
    notes = [
        "at most: a model's bound, min(engine, CTAs × bytes in flight ÷ latency), latency fitted "
        "elsewhere, no limit on what an SM keeps outstanding.",
        f"B200: published, measured by its authors: {SOURCE}.",
        "submit: host time until the call returned, not part of GB/s.",
        *_complaints(rows),
    ]
    return Table("Measured, with spread", columns, list(map(_with_verdict, rows)), notes)


def _with_verdict(row: Row) -> dict[str, Any]:
    return {**row, "bytes": "WRONG" if row["wrong"] else "right"}


def _complaints(rows: Sequence[Row]) -> list[str]:
    return [f"WRONG, {row['direction']}: {row['wrong']}" for row in rows if row["wrong"]]
