"""Load-back under compute: layer l computes while layer l + 1 still moves.

Whole copies first, computing afterwards, against a copy that announces every layer. The compute is
a GEMM as long as a layer's; `--gemm` and `--pieces` set its length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from hikv.measure import Candidate, Measurement, measure
from hikv.plan import CopyPlan
from hikv.transfers import PATHS

from .case import Case, add_case_options, cases_from, counted, positive
from .compute import Compute, gemm
from .machine import Machine, Workload, workload
from .output import Column, Progress, Report, Table, add_output_options, check_output_options
from .plot import Series, present
from .ways import Way, complaints, divide, parse_ways

WAYS = "sm@2,sm@8,tma@4,ce"

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf overlap`."""
    add_case_options(parser)
    add = parser.add_argument
    add("--ways", type=parse_ways, default=WAYS, metavar="PATH@CTAS,…", help=f"default {WAYS}")
    add("--gemm", type=positive, default=4096, metavar="N", help="rows of a GEMM, default 4096")
    add("--pieces", type=positive, default=1, metavar="N", help="GEMMs a layer, default 1")
    add("--rounds", type=positive, default=10, metavar="N", help="timed runs, default 10")
    add_output_options(parser)
    parser.set_defaults(heads="8:4")


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if any byte was wrong."""
    check_output_options(args)
    machine, case = Machine.of_gpu(), cases_from(args)[0]
    compute = gemm(machine.device, args.gemm)
    report, rows = measured_report(machine, case, compute, args.pieces, args.ways, args.rounds)
    present(report, args, lambda: panels(rows), y="ms")
    return int(any(row["wrong"] for row in rows))


def measured_report(
    machine: Machine,
    case: Case,
    compute: Compute,
    pieces: int,
    ways: Sequence[Way],
    rounds: int,
) -> tuple[Report, list[Row]]:
    """The report, and one row a way."""
    machine.reserve_for([case])
    work = workload(machine, case, "h2d")
    serving, waived = divide(machine, work, ways)
    for way in [way for way in serving if not PATHS[way.path].layerwise]:
        waived[str(way)] = "it moves whole pages, not layer by layer"
        serving.remove(way)
    rows = []
    with Progress(len(serving), "perf overlap") as progress:
        for way in serving:
            progress.step(str(way))
            rows.append(overlap(machine, work, compute, pieces, way, rounds))
    layers = case.spec.num_layers
    subject = f"load-back under {pieces} × {compute.name} a layer, {case.describe()}"
    report = Report("perf overlap", "measured", subject, counted([case]), machine.info)
    report.tables = [overlap_table(rows, waived, layers)]
    return report, rows


def overlap(
    machine: Machine, work: Workload, compute: Compute, pieces: int, way: Way, rounds: int
) -> Row:
    """Compute alone, copy alone, one after the other, and layer by layer, in turns."""
    start, stop = work.plans[0].layers

    def forward() -> None:
        for _ in range(pieces):
            compute.run()

    def alone(turn: int) -> None:
        for _ in range(start, stop):
            forward()

    def in_sequence(plan: CopyPlan) -> None:
        way.copy(machine, plan)
        alone(0)

    def by_layer(plan: CopyPlan) -> None:
        handle = machine.start(plan, way.path, way.block_quota, aside=True, layerwise=True)
        for layer in range(start, stop):
            handle.wait_layer(layer)
            forward()

    def only_layers(plan: CopyPlan) -> None:
        machine.start(plan, way.path, way.block_quota, aside=True, layerwise=True).wait()

    candidates = [
        Candidate("compute", work.nbytes, alone, check=lambda: None),
        work.candidate("copy", partial(way.copy, machine), machine),
        work.candidate("sequence", in_sequence, machine),
        work.candidate("layers", by_layer, machine),
        work.candidate("layers, no compute", only_layers, machine),
    ]
    results = measure(candidates, machine.clock, rounds=rounds, warmup=2)
    return summarise(str(way), results, stop - start)


def summarise(way: str, results: Sequence[Measurement], layers: int) -> Row:
    """Seconds of each, the share of the copy that is hidden, and the best that a pipeline can do.

    A pipeline of L equal layers that take m to move and c to compute needs m + (L−1)·max(m, c) + c.
    """
    row: Row = {"way": way, "wrong": None}
    for result in results:
        if result.timing is None:
            row["wrong"] = f"{result.name}: {result.wrong}"
        else:
            row[result.name] = result.timing.nbytes / result.timing.gbps() / 1e9
    if row["wrong"]:
        return row
    compute, copy = row["compute"], row["layers, no compute"]
    row["best"] = (copy + (layers - 1) * max(copy, compute) + compute) / layers
    row["hidden"] = 1 - (row["layers"] - compute) / row["copy"]
    row["speedup"] = row["sequence"] / row["layers"]
    return row


_TIMES = ("compute", "copy", "layers, no compute", "sequence", "layers", "best")


def overlap_table(rows: Sequence[Row], waived: dict[str, str], layers: int) -> Table:
    """One line a way, in milliseconds."""
    shown = [{**r, **{f"{name} ms": r[name] * 1e3 for name in _TIMES if name in r}} for r in rows]
    columns = [
        Column("way", "way"),
        Column("compute ms", "compute", ".2f", "alone, ms"),
        Column("copy ms", "copy", ".2f", "alone, ms"),
        Column("layers, no compute ms", "by layer", ".2f", "alone, ms"),
        Column("sequence ms", "in sequence", ".2f", "both, ms"),
        Column("layers ms", "by layer", ".2f", "both, ms"),
        Column("best ms", "pipeline", ".2f", "both, ms"),
        Column("hidden", "hidden", ".0%"),
        Column("speedup", "speed-up", ".2f"),
    ]
    notes = [
        f"{layers} layers. in sequence: the whole copy, then the compute. by layer: each layer's "
        "compute waits for that layer alone. pipeline: what both times alone allow at best. "
        "hidden: share of the copy that the compute covers. speed-up: in sequence ÷ by layer.",
        *complaints(waived, rows),
    ]
    return Table("Load-back under compute, measured", columns, shown, notes)


def panels(rows: Sequence[Row]) -> dict[str, list[Series]]:
    """Milliseconds by CTAs, one panel; no CTA shows as a half."""
    right = [row for row in rows if not row["wrong"]]
    quotas = [float(row["way"].partition("@")[2] or 0.5) for row in right]
    lines = [
        Series(name, quotas, [row[name] * 1e3 for row in right], line=False)
        for name in ("compute", "sequence", "layers", "best")
    ]
    return {"H2D": lines}
