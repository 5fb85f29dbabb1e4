"""hikv's choice against everything else that can make the same copy, in one run.

Rivals are one `cudaMemcpyAsync` for each run, `cuMemcpyBatchAsync`, torch indexing and `copy_`, and
the kernels of other systems where those are installed. All of them copy the same bytes, verified on
a poisoned destination, and take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from hikv.measure import Candidate, measure

from .baselines import copy_every_run, index_and_copy
from .case import DIRECTIONS, Case, add_case_options, cases_from, counted, positive, positive_number
from .cta import ceiling_candidate, figures
from .machine import Machine, Workload, workload
from .output import (
    Column,
    Progress,
    Report,
    Table,
    add_output_options,
    check_output_options,
)
from .peers import PEERS, Waived
from .plot import Series, present
from .ways import Way, complaints, divide, parse_ways

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct_group")
WAYS = "sm@2,sm@8,sm@32,tma@8,staged@8,ce,ce3d"
LATENT_HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
MAX_RUNS = 100_000
"""One call for each run is not tried beyond: at 2.3 µs a call (FlexKV #193, H20) that is 0.23 s."""

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf compare`."""
    add_case_options(parser)
    add = parser.add_argument
    add("--ways", type=parse_ways, default=WAYS, metavar="PATH@CTAS,…", help=f"default {WAYS}")
    add("--rounds", type=positive, default=10, metavar="N", help="timed runs, default 10")
    add(
        "--seconds",
        type=positive_number,
        default=2.0,
        metavar="S",
        help="at most, a case; default 2",
    )
    add_output_options(parser)
    parser.set_defaults(heads="8:4", tokens=128)


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if any byte was wrong."""
    check_output_options(args)
    machine = Machine.of_gpu()
    cases = cases_from(args)
    if args.host_layout is None:
        layouts = HOST_LAYOUTS if args.mla is None else LATENT_HOST_LAYOUTS
        cases = [replace(case, host_layout=name) for case, name in product(cases, layouts)]
    report, rows = compared(machine, cases, args.ways, args.rounds, args.seconds)
    present(report, args, lambda: panels(rows), x="run bytes")
    return int(any(row["wrong"] for row in rows))


def compared(
    machine: Machine, cases: Sequence[Case], ways: Sequence[Way], rounds: int, seconds: float
) -> tuple[Report, list[Row]]:
    """The report, and one row per case, direction and rival."""
    machine.reserve_for(cases)
    rows: list[Row] = []
    with Progress(len(DIRECTIONS) * len(cases), "perf compare") as progress:
        for case, direction in product(cases, DIRECTIONS):
            progress.step(f"{direction}, {case.host_layout}")
            rows += compare_case(machine, case, direction, ways, rounds, seconds)
    subject = f"hikv's choice, and others, {cases[0].describe()}"
    report = Report("perf compare", "measured", subject, counted(cases), machine.info)
    report.tables = comparison_tables(rows)
    return report, rows


def compare_case(
    machine: Machine,
    case: Case,
    direction: str,
    ways: Sequence[Way],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """One row a rival, hikv's choice first; `ratio` is its rate over the rival's."""
    work = workload(machine, case, direction)
    plan = work.plans[0]
    label = {
        **case.label,
        "run": plan.run_bytes,
        "host": case.host_layout,
        "direction": direction,
        "copies": plan.num_descriptors,
    }
    candidates, waived = rivals(machine, work, direction, ways)
    results = measure(candidates, machine.clock, rounds=rounds, warmup=1, seconds=seconds)
    rows: list[Row] = [label | {"way": r.name} | figures(r) for r in results]
    ours = rows[0].get("gbps_served")
    for row in rows:
        theirs = row.get("gbps_served")
        row["ratio"] = ours / theirs if ours and theirs else None
    return rows + [label | {"way": name, "why": why, "wrong": None} for name, why in waived.items()]


def rivals(
    machine: Machine, work: Workload, direction: str, ways: Sequence[Way]
) -> tuple[list[Candidate], dict[str, str]]:
    """Every way that can run here, hikv's choice first; and why others cannot, by name."""
    handle = machine.start(work.plans[0])
    machine.synchronize()
    chosen = Way(handle.path, handle.block_quota)
    name = f"hikv: {chosen} ({'default' if handle.config_source == 'default' else 'tuned'})"
    candidates = [work.candidate(name, lambda plan: machine.start(plan).wait(), machine)]
    serving, waived = divide(machine, work, ways)
    candidates += [way.candidate(machine, work) for way in serving]
    runs = work.plans[0].num_descriptors
    if runs > MAX_RUNS:
        waived["cudaMemcpyAsync per run"] = f"{runs:,} calls a copy; at most {MAX_RUNS:,} are tried"
    else:
        few = Workload(work.plans[:2])  # a slice of memory for each of their runs
        every_run = copy_every_run(few.plans)
        candidates.append(few.candidate("cudaMemcpyAsync per run", every_run, machine))
    candidates.append(work.candidate("torch index, copy_", index_and_copy(work.plans), machine))
    for peer in PEERS:
        try:
            candidates.append(peer.candidate(machine, work, direction))
        except Waived as reason:
            waived[peer.name] = str(reason)
    return [*candidates, ceiling_candidate(machine, work)], waived


_CASE = ("host", "direction", "row", "heads", "groups", "run", "copies")


def comparison_tables(rows: Sequence[Row]) -> list[Table]:
    """One table a case and direction, one line a rival that has figures; reasons below the last."""
    columns = [
        Column("way", "way"),
        Column("gbps_served", "GB/s", ".1f"),
        Column("gbps_p20", "p20", ".1f"),
        Column("gbps_p80", "p80", ".1f"),
        Column("submit_us", "submit µs", ",.0f"),
        Column("ratio", "hikv ×", ".2f"),
        Column("verdict", "bytes"),
    ]
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        shown = {**row, "verdict": "WRONG" if row["wrong"] else "right"}
        cases.setdefault(tuple(row.get(name) for name in _CASE), []).append(shown)
    tables = []
    for mine in cases.values():
        wrong = complaints({}, mine)
        timed = [row for row in mine if "why" not in row]
        tables.append(Table(_title(mine[0]), columns, timed, wrong))
    waived = {f"waived, {row['way']}: {row['why']}" for row in rows if "why" in row}
    notes = [
        "GB/s: payload over the longer of the copy and its submission by the CPU, median; p20 and "
        "p80 are of the copy alone. hikv ×: how many times as fast hikv's choice is.",
        "ce: cuMemcpyBatchAsync on joined runs. engine: the copy engine on one contiguous piece.",
        *sorted(waived),
    ]
    tables[-1] = replace(tables[-1], notes=[*tables[-1].notes, *notes])
    return tables


def _title(row: Row) -> str:
    shape = f"rows of {row['row']} B" if "row" in row else f"{row['heads']} heads"
    groups = f" in {row['groups']} groups" if row.get("groups", 1) > 1 else ""
    return (
        f"{row['direction'].upper()}, host {row['host']}, {shape}{groups}: "
        f"{row['copies']:,} runs of {row['run']:,} B, measured"
    )


def panels(rows: Sequence[Row]) -> dict[str, list[Series]]:
    """Rates by run bytes, one series a way."""
    found: dict[str, list[Series]] = {}
    for direction in DIRECTIONS:
        timed = [r for r in rows if r["direction"] == direction and r.get("gbps_served")]
        series = found.setdefault(direction.upper(), [])
        for way in dict.fromkeys(row["way"] for row in timed):
            mine = [row for row in timed if row["way"] == way]
            x, y = [row["run"] for row in mine], [row["gbps_served"] for row in mine]
            series.append(Series(way, x, y, line=False))
    return found
