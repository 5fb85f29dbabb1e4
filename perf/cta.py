"""Bandwidth of a copy by the number of CTAs that it may launch.

One row per head grid, pages scattered on both sides. On a GPU every figure is measured, the copy
engine's ceiling in the same run included. Without one the figures are a model's upper bounds, for
the machine code that the compiler made, and the same copies then run on the CPU, so that bytes do
move and are checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from hikv.compiled import Report as Compiled
from hikv.device import DeviceInfo, device_info
from hikv.errors import ArgumentError
from hikv.kernels.relayout import default_config
from hikv.measure import Candidate, Measurement, measure
from hikv.transfers import PATHS

from .case import DIRECTIONS, Case, add_case_options, cases_from, counted, positive, positives
from .compiler_table import COMPILERS, compiler_table, outcome, variant
from .cta_tables import detail_table, host_table, predicted_table, summary_table
from .machine import Machine, Workload, one_piece, workload
from .model import BASELINE_IN_FLIGHT, PCIE5, Link, link_of, predict
from .output import Progress, Report, add_output_options, check_output_options
from .plot import cta_panels, present
from .published import published

CEILING = "engine, one piece"
HOST_ROUNDS, GPU_ROUNDS = 3, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf cta`."""
    add_case_options(parser)
    add = parser.add_argument
    add("--quotas", type=positives, default="2,32", metavar="N,…", help="CTAs, default 2,32")
    add("--path", choices=tuple(PATHS), default="sm", help="default sm")
    add("--target", default="sm_90", help="without a GPU: sm_90 or another to compile for")
    add(
        "--rounds",
        type=positive,
        metavar="N",
        help=f"timed runs, default {GPU_ROUNDS} or {HOST_ROUNDS}",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if any byte was wrong."""
    check_output_options(args)
    cases = cases_from(args)
    quotas = args.quotas if PATHS[args.path].block_quota else (0,)
    if device_info() is not None:
        report, rows = measured_report(
            Machine.of_gpu(), cases, quotas, args.path, args.rounds or GPU_ROUNDS
        )
    else:
        report, rows = predicted_report(
            Machine.of_host(),
            cases,
            quotas,
            args.target,
            args.rounds or HOST_ROUNDS,
            args.path,
        )
    in_flight, link = report.facts["in_flight"], link_of(report.device)
    present(report, args, lambda: cta_panels(cases[0], rows, in_flight, link))
    return int(any(row["wrong"] for row in rows))


def predicted_report(
    machine: Machine,
    cases: Sequence[Case],
    quotas: Sequence[int],
    target: str,
    rounds: int,
    path: str = "sm",
) -> tuple[Report, list[dict[str, Any]]]:
    """The report of a machine without a GPU, and the rows of the copies that ran on its CPU."""
    if path not in COMPILERS:
        raise ArgumentError(
            "--path",
            expected=f"{' or '.join(COMPILERS)} where there is no GPU; nothing else is predicted",
            got=path,
            remedy="leave it out, or run on a GPU",
        )
    compiled, made = {}, []
    with Progress(4 * len(cases), "perf cta") as progress:
        for case, direction in product(cases, DIRECTIONS):
            progress.step(f"compile {direction}")
            part = case.plan(direction).parts[0]
            compiled[case, direction] = COMPILERS[path](part, target)
            made.append(variant(path, case, direction, part) | outcome(compiled[case, direction]))
        rows = host_rows(machine, cases, rounds, progress)
    link = PCIE5
    report = _report("predicted, not measured", cases, None)
    report.tables = [
        predicted_table(predicted_rows(cases, quotas, link, compiled), quotas, link),
        compiler_table(made, target),
        host_table(rows),
    ]
    in_flight = {way: compiled[cases[0], way].bytes_in_flight for way in DIRECTIONS}
    report.facts = {"target": target, "in_flight": in_flight}
    return report, rows


def _report(kind: str, cases: Sequence[Case], info: DeviceInfo | None) -> Report:
    return Report("perf cta", kind, cases[0].describe(), counted(cases), info)


def predicted_rows(
    cases: Sequence[Case],
    quotas: Sequence[int],
    link: Link,
    compiled: dict[tuple[Case, str], Compiled],
) -> list[dict[str, Any]]:
    """One row a case: the model of a baseline kernel, our upper bound, and what was published."""
    rows = []
    for case in cases:
        row: dict[str, Any] = {**case.label, "run": case.plan("h2d").row_run}
        for direction in DIRECTIONS:
            ours = compiled[case, direction].bytes_in_flight
            for quota in quotas:
                at = f"{direction}@{quota}"
                row[f"{at} baseline"] = predict(link, direction, quota, BASELINE_IN_FLIGHT)
                row[f"{at} hikv"] = predict(link, direction, quota, ours)
                row[f"{at} published"] = published(case, direction, quota)
        rows.append(row)
    return rows


def host_rows(
    machine: Machine, cases: Sequence[Case], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row a case and direction: the CPU path, verified and timed on this host."""
    machine.reserve_for(cases)
    rows = []
    for case, direction in product(cases, DIRECTIONS):
        progress.step(f"copy {direction}")
        (result,) = measure_case(machine, case, direction, "cpu", (0,), rounds, ceiling=False)
        run_bytes = case.plan(direction).row_run
        rows.append(case.label | {"direction": direction, "run": run_bytes} | figures(result))
    return rows


def measured_report(
    machine: Machine,
    cases: Sequence[Case],
    quotas: Sequence[int],
    path: str,
    rounds: int,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Report, list[dict[str, Any]]]:
    """The report of a GPU, and one row per case, direction and quota; `stop` ends it early."""
    machine.reserve_for(cases)
    rows: list[dict[str, Any]] = []
    with Progress(2 * len(cases), "perf cta") as progress:
        for case, direction in product(cases, DIRECTIONS):
            if not stop():
                progress.step(f"measure {direction}")
                rows += measured_rows(machine, case, direction, quotas, path, rounds)
    report = _report("measured", cases, machine.info)
    if rows:
        report.tables = [summary_table(rows, quotas, path), detail_table(rows)]
    report.facts = {"in_flight": {way: default_in_flight(cases[0], way) for way in DIRECTIONS}}
    return report, rows


def measured_rows(
    machine: Machine,
    case: Case,
    direction: str,
    quotas: Sequence[int],
    path: str,
    rounds: int,
) -> list[dict[str, Any]]:
    """One row a quota: measured beside the ceiling of the same run, the model, and published."""
    *results, top = measure_case(machine, case, direction, path, quotas, rounds)
    plan, link = case.plan(direction), link_of(machine.info)
    ceiling = top.timing.gbps() if top.timing else None
    in_flight = default_in_flight(case, direction)
    rows = []
    for quota, result in zip(quotas, results, strict=True):
        row = {**case.label, "direction": direction, "run": plan.row_run, "quota": quota}
        row |= figures(result)
        row["wrong"] = row["wrong"] or (top.wrong and f"copy engine: {top.wrong}")
        row["ceiling"] = ceiling
        row["ratio"] = result.timing.gbps() / ceiling if result.timing and ceiling else None
        row["published"] = published(case, direction, quota)
        if path == "sm" and link is not None and ceiling is not None:
            row["predicted"] = predict(link, direction, quota, in_flight, ceiling)
        rows.append(row)
    return rows


def default_in_flight(case: Case, direction: str) -> int:
    """Bytes a CTA of path sm has in flight as it is configured by default."""
    vector = case.plan(direction).vector_bytes
    return default_config(vector).tile * vector


def measure_case(
    machine: Machine,
    case: Case,
    direction: str,
    path: str,
    quotas: Sequence[int],
    rounds: int,
    *,
    ceiling: bool = True,
) -> list[Measurement]:
    """Verify and time `path` at every quota, and last the copy engine on one contiguous piece."""
    work = workload(machine, case, direction)
    candidates = [
        work.candidate(
            f"{path}@{quota}", partial(machine.copy, path=path, block_quota=quota), machine
        )
        for quota in quotas
    ]
    if ceiling:
        candidates.append(ceiling_candidate(machine, work))
    warmup = 2 if machine.has_gpu else 0  # on a CPU the verified copy warmed what there is to warm
    return measure(candidates, machine.clock, rounds=rounds, warmup=warmup)


def ceiling_candidate(machine: Machine, work: Workload) -> Candidate:
    """The copy engine on one contiguous piece of the same memory: what the link gives."""
    engine = partial(machine.copy, path="ce", block_quota=0)
    return one_piece(work).candidate(CEILING, engine, machine)


def figures(result: Measurement) -> dict[str, Any]:
    """A measurement as part of a row."""
    if result.timing is None:
        return {"wrong": result.wrong}
    summary = result.timing.summary()
    submit, gbps = summary["submit_seconds"], summary["gbps_p50"]
    return {
        "wrong": None,
        **summary,
        "submit_us": submit * 1e6,
        # What a caller gets: a copy is over when it is submitted and its bytes are there.
        "gbps_served": min(gbps, result.timing.nbytes / submit / 1e9) if submit else gbps,
    }
