"""Everything a first GPU should show in under six minutes, from checked copies to a gather.

Every section has a budget and starts nothing new beyond it; a section that fails is recorded and
the others still run. The whole result goes into one JSON file.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hikv.device import probe_failure

from .case import DIRECTIONS
from .cta import CEILING
from .gpu_sections import (
    Deadline,
    Findings,
    comparison,
    copies,
    facts,
    gather,
    sweep,
    sweep_panels,
    table,
)
from .machine import Machine
from .output import Column, Report, Table, add_output_options, check_output_options
from .plot import present

Run = Callable[[Machine, Deadline], Findings]

SECTIONS: Mapping[str, tuple[Run, float]] = {
    # name: (section, seconds); 330 in all, the rest of six minutes is for starting up.
    "facts": (facts, 10),
    "copies": (copies, 130),
    "table": (table, 70),
    "sweep": (sweep, 45),
    "comparison": (comparison, 35),
    "gather": (gather, 40),
}
ENOUGH = 0.9
"""Share of the copy engine's rate at which more CTAs are not worth their SMs."""


@dataclass
class Section:
    """What became of a section: its findings, or the error that ended it."""

    name: str
    seconds: float
    findings: Findings = field(default_factory=Findings)
    error: str | None = None

    @property
    def status(self) -> str:
        """One or two words for the summary."""
        if self.error:
            return "failed"
        if self.findings.wrong:
            return "wrong bytes"
        return "cut short" if self.findings.remarks else "complete"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf gpu-check`."""
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run all sections: 0 if every byte was right, 1 if not or a section failed, 2 with no GPU."""
    check_output_options(args)
    if reason := probe_failure():
        print(f"perf gpu-check: no GPU to check: {reason}", file=sys.stderr)
        return 2
    machine = Machine.of_gpu()
    sections = run_sections(machine, SECTIONS)
    args.json = args.json or default_file(machine)
    report = report_on(machine, sections, args.json)
    rows = next((s.findings.rows for s in sections if s.name == "sweep"), [])
    present(report, args, lambda: sweep_panels(rows))
    return int(any(section.error or section.findings.wrong for section in sections))


def run_sections(
    machine: Machine,
    sections: Mapping[str, tuple[Run, float]],
    now: Callable[[], float] = time.monotonic,
) -> list[Section]:
    """Run each section within its own seconds. An error ends its section alone."""
    done = []
    for name, (section, seconds) in sections.items():
        print(f"perf gpu-check: {name}, at most {seconds:.0f} s", file=sys.stderr)
        start, findings, error = now(), Findings(), None
        try:
            findings = section(machine, Deadline(seconds, now))
        except Exception:
            error = traceback.format_exc()
        done.append(Section(name, now() - start, findings, error))
    return done


def report_on(machine: Machine, sections: Sequence[Section], file: Path) -> Report:
    """All tables, the short one last."""
    report = Report(
        "perf gpu-check",
        "measured",
        "scattered pages between GPU and host; the tables say which",
        "GB/s = 10⁹ payload bytes a second, each byte counted once",
        machine.info,
    )
    report.tables = [table for section in sections for table in section.findings.tables]
    report.tables.append(_summary(sections, file))
    report.facts = {
        section.name: {
            "status": section.status,
            "seconds": section.seconds,
            "error": section.error,
            "wrong": section.findings.wrong,
            "remarks": section.findings.remarks,
            "rows": section.findings.rows,
        }
        for section in sections
    }
    return report


def _summary(sections: Sequence[Section], file: Path) -> Table:
    rows = []
    for section in sections:
        lines = [*section.findings.wrong[:3], *section.findings.remarks]
        if section.error:
            lines.append(section.error.strip().splitlines()[-1])
        told = "; ".join([f"{section.status}, {section.seconds:.0f} s", *lines])
        rows.append({"what": section.name, "found": told})
        rows += [{"what": "", "found": line} for line in _headlines(section)]
    rows.append({"what": "written", "found": str(file)})
    return Table("In short", [Column("what", "section"), Column("found", "found")], rows)


def _headlines(section: Section) -> list[str]:
    """What a section's rows come to, in a line or two."""
    rows = section.findings.rows
    if section.name == "copies":
        sums = {key: sum(row[key] for row in rows) for key in ("right", "wrong", "waived")}
        return [", ".join(f"{count} {key}" for key, count in sums.items())]
    if section.name == "table":
        return [
            f"{row['direction'].upper()} @{row['quota']} CTAs, 8 heads in 8 groups: "
            f"{row['gbps_p50']:.1f} GB/s, {row['ratio']:.0%} of the copy engine"
            for row in rows
            if row["groups"] == row["heads"] == 8 and row["ratio"] is not None
        ]
    if section.name == "gather":
        return [
            f"2 ranks on one GPU: {row['hikv']:.1f} GB/s a rank, {_count(row['kernels'])} SM "
            f"kernels, a GEMM beside takes {row['hikv gemm']:.2f} times as long"
            for row in rows
            if "refused" not in row
        ]
    if section.name == "sweep":
        return [line for direction in DIRECTIONS if (line := _fewest(rows, direction))]
    return []


def _count(seen: Sequence[str] | None) -> str:
    return "who knows how many" if seen is None else str(len(seen))


def _fewest(rows: Sequence[Mapping[str, Any]], direction: str) -> str | None:
    """The fewest CTAs that come to `ENOUGH` of the copy engine, measured side by side."""
    mine = [row for row in rows if row["direction"] == direction and row.get("gbps_p50")]
    tops = {row["quota"]: row["gbps_p50"] for row in mine if row["way"] == CEILING}
    enough = [
        row
        for row in mine
        if row["way"] != CEILING and row["gbps_p50"] >= ENOUGH * tops.get(row["quota"], 1e9)
    ]
    if not mine:
        return None
    if not enough:
        return f"{direction.upper()}: no choice comes to {ENOUGH:.0%} of the copy engine"
    best = min(enough, key=lambda row: (row["quota"], -row["gbps_p50"]))
    return (
        f"{direction.upper()}: {best['quota']} CTAs come to {ENOUGH:.0%} of the copy engine "
        f"({best['way']}: {best['gbps_p50']:.1f} GB/s)"
    )


def default_file(machine: Machine) -> Path:
    """`<gpu>-<date>.json` in `perf/results` of a checkout, else in the current folder."""
    name = re.sub(r"\W+", "-", machine.info.name if machine.info else "none").strip("-").lower()
    folder = Path("perf", "results")
    date = datetime.date.today().isoformat()
    return (folder if folder.is_dir() else Path()) / f"{name}-{date}.json"
