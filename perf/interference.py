"""What a copy costs the compute beside it: GEMM, attention and launches, per path and CTAs.

Copies follow each other on a stream of their own for as long as the compute runs. The copy engine
uses no SM, so what it costs is memory bandwidth and power; a kernel costs its CTAs' SMs as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from hikv.measure import Candidate

from .case import DIRECTIONS, Case, add_case_options, cases_from, counted, positive
from .compute import Compute, attention, gemm, one_element
from .duet import Duet
from .machine import Machine, workload
from .output import Column, Progress, Report, Table, add_output_options, check_output_options
from .plot import Series, present
from .ways import Way, complaints, divide, parse_ways

WAYS = "ce,sm@1,sm@2,sm@4,sm@8,sm@16,sm@32,tma@4,staged@8"
COMPUTE_SECONDS = 0.02
"""Of one timed stretch of compute: a hundred times a launch, and shorter than clocks drift."""
LAUNCHES = 200
COVER = 1.25
MAX_COPIES = 200

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf interference`."""
    add_case_options(parser)
    add = parser.add_argument
    add("--ways", type=parse_ways, default=WAYS, metavar="PATH@CTAS,…", help=f"default {WAYS}")
    add("--gemm", type=positive, default=4096, metavar="N", help="rows of a GEMM, default 4096")
    add("--attention", type=positive, default=8192, metavar="N", help="tokens, default 8192")
    add("--rounds", type=positive, default=10, metavar="N", help="timed runs, default 10")
    add_output_options(parser)
    parser.set_defaults(heads="8:4", tokens=512)


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 if any byte was wrong."""
    check_output_options(args)
    machine, case = Machine.of_gpu(), cases_from(args)[0]
    computes = [
        gemm(machine.device, args.gemm),
        attention(machine.device, args.attention),
        one_element(machine.device),
    ]
    report, rows = measured_report(machine, case, computes, args.ways, args.rounds)
    present(report, args, lambda: panels(rows), y="times as long")
    return int(any(row["wrong"] for row in rows))


def measured_report(
    machine: Machine,
    case: Case,
    computes: Sequence[Compute],
    ways: Sequence[Way],
    rounds: int,
) -> tuple[Report, list[Row]]:
    """The report, and one row per direction, way and compute."""
    machine.reserve_for([case])
    rows: list[Row] = []
    waived: dict[str, str] = {}
    with Progress(len(DIRECTIONS) * len(computes), "perf interference") as progress:
        for direction in DIRECTIONS:
            work = workload(machine, case, direction)
            serving, lacking = divide(machine, work, ways)
            waived |= lacking
            copies = {way: way.candidate(machine, work) for way in serving}
            wrong = {way: candidate.check() for way, candidate in copies.items()}
            right = {way: copy for way, copy in copies.items() if wrong[way] is None}
            rows += [_row(direction, way) | {"wrong": why} for way, why in wrong.items() if why]
            for compute in computes:
                progress.step(f"{direction}, {compute.name}")
                rows += beside(machine, direction, compute, right, rounds)
    subject = f"compute beside copies, {case.describe()}"
    report = Report("perf interference", "measured", subject, counted([case]), machine.info)
    report.tables = [interference_table(rows, direction, waived) for direction in DIRECTIONS]
    return report, rows


def _row(direction: str, way: Way) -> Row:
    return {"direction": direction, "way": str(way), "quota": way.block_quota, "wrong": None}


def beside(
    machine: Machine,
    direction: str,
    compute: Compute,
    copies: dict[Way, Candidate],
    rounds: int,
) -> list[Row]:
    """The compute alone and beside every way, in turns; one row a way."""
    alone = partial(machine.duet, compute.run, copy=lambda turn: None, copies=0)
    alone(repeats=3)
    once = alone(repeats=3).compute_seconds
    repeats = LAUNCHES if not compute.flops else max(1, round(COMPUTE_SECONDS / once))
    seconds = {
        way: float(np.median([machine.clock.time(partial(c.run, i)).seconds for i in range(3)]))
        for way, c in copies.items()
    }
    plays: dict[Way | None, Callable[[], Duet]] = {None: partial(alone, repeats=repeats)}
    for way, candidate in copies.items():
        needed = math.ceil(COVER * repeats * once / seconds[way]) + 2
        plays[way] = partial(
            machine.duet, compute.run, repeats, candidate.run, min(needed, MAX_COPIES)
        )
    found = in_turns(plays, rounds)
    base = _middle(found[None]).compute_seconds
    told = {"compute": compute.name, "flops": compute.flops, "alone_seconds": base}
    rows = []
    for way, candidate in copies.items():
        middle, gbps = _middle(found[way]), candidate.nbytes / 1e9
        rows.append(
            _row(direction, way)
            | told
            | {
                "seconds": middle.compute_seconds,
                "slowdown": middle.compute_seconds / base,
                "copy_gbps": gbps / middle.copy_seconds if middle.copy_seconds > 0 else None,
                "copy_alone_gbps": gbps / seconds[way],
                "covered": middle.covered,
            }
        )
    return rows


def in_turns(
    plays: dict[Way | None, Callable[[], Duet]], rounds: int
) -> dict[Way | None, list[Duet]]:
    """`rounds` duets of each, in a fresh order every round."""
    found: dict[Way | None, list[Duet]] = {way: [] for way in plays}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for at in rng.permutation(len(plays)):
            way = list(plays)[at]
            found[way].append(plays[way]())
    return found


def _middle(duets: Sequence[Duet]) -> Duet:
    """The median of each figure; NaN where one is."""
    return Duet(*(float(np.median(figures)) for figures in zip(*duets, strict=True)))


def interference_table(rows: Sequence[Row], direction: str, waived: dict[str, str]) -> Table:
    """One line a way: how much longer each compute takes, and the copy's rate meanwhile."""
    mine = [row for row in rows if row["direction"] == direction]
    computes = {row["compute"]: row for row in mine if "compute" in row}
    lines: dict[str, Row] = {}
    for row in mine:
        line = lines.setdefault(row["way"], {"way": row["way"], "quota": row["quota"]})
        if "compute" not in row:
            continue
        name = row["compute"]
        line["alone"] = row["copy_alone_gbps"]
        line[f"{name} slower"] = row["slowdown"]
        line[f"{name} µs"] = row["seconds"] * 1e6
        line[f"{name} rate"] = row["flops"] / row["seconds"] / 1e12
        line[f"{name} copy"] = row["copy_gbps"]
    columns = [Column("way", "way"), Column("quota", "CTAs"), Column("alone", "alone", ".1f")]
    for name, row in computes.items():
        columns.append(Column(f"{name} slower", "×", ".3f", name))
        figure = ("rate", "TFLOPS", ".0f") if row["flops"] else ("µs", "µs", ".2f")
        columns.append(Column(f"{name} {figure[0]}", *figure[1:], name))
        columns += [Column(f"{name} copy", "copy", ".1f", name)] if row["flops"] else []
    short: dict[str, list[str]] = {}
    for row in mine:
        if row.get("covered", 1.0) < 0.95:
            short.setdefault(row["compute"], []).append(row["way"])
    notes = [
        "×: how many times as long the compute takes as with nothing beside it. copy: its GB/s "
        "meanwhile; alone: its GB/s with nothing beside it. launch: from kernel to kernel of one "
        "element each.",
        *(f"alone, {name}: {_alone(row)}" for name, row in computes.items()),
        *(f"copies ended before {name} did: {', '.join(ways)}" for name, ways in short.items()),
        *complaints(waived, mine),
    ]
    return Table(f"Beside copies {direction.upper()}, measured", columns, [*lines.values()], notes)


def _alone(row: Row) -> str:
    seconds = row["alone_seconds"]
    rate = f", {row['flops'] / seconds / 1e12:.0f} TFLOPS" if row["flops"] else ""
    return f"{seconds * 1e6:,.2f} µs{rate}"


def panels(rows: Sequence[Row]) -> dict[str, list[Series]]:
    """Slowdown by CTAs: a panel a direction, a line a path and compute; no CTA shows as a half."""
    found: dict[str, list[Series]] = {}
    timed = [row for row in rows if "compute" in row]
    kinds = dict.fromkeys((row["compute"], row["way"].partition("@")[0]) for row in timed)
    for direction, (compute, path) in product(DIRECTIONS, kinds):
        mine = [
            (row["quota"] or 0.5, row["slowdown"])
            for row in timed
            if (row["direction"], row["compute"]) == (direction, compute)
            and row["way"].partition("@")[0] == path
        ]
        x, y = [quota for quota, _ in mine], [slowdown for _, slowdown in mine]
        series = Series(f"{compute}, {path}", x, y, line=len(mine) > 1)
        found.setdefault(direction.upper(), []).append(series)
    return found
