"""Which path wins for how many runs of how many bytes, measured beside what the model predicts.

Each run is a scattered page of its own, so none join. A kernel pays once for its launch and then
hangs on the bytes that its CTAs keep in flight; the copy engine pays for every run. Without a GPU
the prediction is all there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from hikv.device import device_info
from hikv.errors import ArgumentError
from hikv.measure import measure
from hikv.spec import KVSpec

from .case import DIRECTIONS, Case, positive, positives
from .cta import ceiling_candidate, default_in_flight, figures
from .machine import Machine, workload
from .model import (
    DESCRIPTOR_SECONDS,
    LAUNCH_SECONDS,
    PCIE5,
    Link,
    engine_seconds,
    kernel_seconds,
    link_of,
)
from .output import Column, Progress, Report, Table, add_output_options, check_output_options
from .plot import Series, present
from .ways import Way, divide, parse_ways

PAGE_BYTES = "1024,4096,16384,65536,262144"
RUNS = "16,256,4096"
WAYS = "sm@2,sm@8,sm@32,ce"
MAX_COPY_BYTES = 256 << 20
"""Beyond it a rate has settled."""

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf crossover`."""
    add = parser.add_argument
    add("--page-bytes", type=positives, default=PAGE_BYTES, metavar="N,…", help="bytes of a run")
    add("--runs", type=positives, default=RUNS, metavar="N,…", help=f"runs a copy, default {RUNS}")
    add("--ways", type=parse_ways, default=WAYS, metavar="PATH@CTAS,…", help=f"default {WAYS}")
    add("--rounds", type=positive, default=10, metavar="N", help="timed runs, default 10")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 if any byte was wrong."""
    check_output_options(args)
    cases = list(grid(args.page_bytes, args.runs))
    if not cases:
        raise ArgumentError(
            "--runs",
            expected=f"a copy of at most {MAX_COPY_BYTES >> 20} MiB among the sizes and runs",
            got=f"none of {args.page_bytes} B × {args.runs}",
            remedy="pass fewer runs or shorter ones",
        )
    if device_info() is None:
        report, rows = predicted_report(cases, args.ways)
    else:
        report, rows = measured_report(Machine.of_gpu(), cases, args.ways, args.rounds)
    key = "predicted" if report.device is None else "gbps"
    present(report, args, lambda: panels(rows, args.ways, key), x="bytes of a run")
    return int(any(row.get("wrong") for row in rows))


def grid(page_bytes: Sequence[int], runs: Sequence[int]) -> Iterator[Case]:
    """A case for each, but for copies of more than `MAX_COPY_BYTES`."""
    for nbytes, count in product(page_bytes, runs):
        if nbytes * count <= MAX_COPY_BYTES:
            spec = KVSpec(1, 1, nbytes, 1, torch.uint8, latent=True)
            yield Case(spec, "layer_first", "page_first_direct", count)


def _label(case: Case, direction: str) -> Row:
    return {"direction": direction, "bytes": case.spec.bytes_per_page, "runs": case.num_pages}


def predicted(
    case: Case, direction: str, way: Way, link: Link, ceiling: float | None = None
) -> float | None:
    """GB/s from the call on, by the model; `None` for a path that it does not describe."""
    if way.path == "sm":
        in_flight = default_in_flight(case, direction)
        quota = way.block_quota
        seconds = kernel_seconds(link, direction, quota, in_flight, case.nbytes, ceiling)
    elif way.path == "ce":
        seconds = engine_seconds(link, direction, case.num_pages, case.nbytes, ceiling)
    else:
        return None
    return case.nbytes / seconds / 1e9


def predicted_rows(
    cases: Sequence[Case], ways: Sequence[Way], link: Link, ceilings: Mapping[str, float]
) -> list[Row]:
    """One row a case and direction: `predicted` by way, and which way wins."""
    rows = []
    for direction, case in product(DIRECTIONS, cases):
        row = _label(case, direction)
        rates = {
            str(way): predicted(case, direction, way, link, ceilings.get(direction)) for way in ways
        }
        row |= {f"predicted {name}": rate for name, rate in rates.items()}
        rows.append(row | {"predicted wins": _winner(rates)})
    return rows


def _winner(rates: Mapping[str, float | None]) -> str | None:
    """The fastest; of those within half a percent of it, the one with the fewest CTAs."""
    known = {name: rate for name, rate in rates.items() if rate}
    top = max(known.values(), default=0.0)
    equal = [name for name, rate in known.items() if rate >= 0.995 * top]
    return min(equal, key=lambda name: int(name.partition("@")[2] or 0), default=None)


def predicted_report(cases: Sequence[Case], ways: Sequence[Way]) -> tuple[Report, list[Row]]:
    """The report of a machine without a GPU."""
    rows = predicted_rows(cases, ways, PCIE5, {})
    report = _report("predicted, not measured", None)
    report.tables = [_prediction(rows, ways, PCIE5)]
    return report, rows


def _report(kind: str, machine: Machine | None) -> Report:
    subject = "scattered runs between GPU and pinned host memory"
    counted = "GB/s = 10⁹ payload bytes a second from the call on, each byte once"
    info = machine.info if machine else None
    return Report("perf crossover", kind, subject, counted, info)


def measured_report(
    machine: Machine, cases: Sequence[Case], ways: Sequence[Way], rounds: int
) -> tuple[Report, list[Row]]:
    """The report of a GPU, the model's prediction for the ceilings of the same run beside it."""
    machine.reserve_for(cases)
    measured, ceilings = [], dict.fromkeys(DIRECTIONS, 0.0)
    with Progress(len(DIRECTIONS) * len(cases), "perf crossover") as progress:
        for direction, case in product(DIRECTIONS, cases):
            progress.step(f"{direction}, {case.num_pages} runs of {case.spec.bytes_per_page} B")
            row, ceiling = measured_row(machine, case, direction, ways, rounds)
            measured.append(row)
            ceilings[direction] = max(ceilings[direction], ceiling)
    report, link = _report("measured", machine), link_of(machine.info)
    rows = measured
    if link is not None:
        forecast = predicted_rows(cases, ways, link, {k: v for k, v in ceilings.items() if v})
        rows = [row | told for row, told in zip(measured, forecast, strict=True)]
    for row in rows:
        follows, best = row.get("predicted wins"), row["wins"]
        kept = row.get(f"gbps {follows}") or 0.0  # nothing of a way that cannot run, or is wrong
        row["kept"] = kept / row[f"gbps {best}"] if follows and best else None
    report.tables = [_measurement(rows, ways)]
    report.tables += [_prediction(rows, ways, link)] if link is not None else []
    report.facts = {"ceilings": ceilings}
    return report, rows


def measured_row(
    machine: Machine, case: Case, direction: str, ways: Sequence[Way], rounds: int
) -> tuple[Row, float]:
    """The rates of every way that serves, the winner, and the link's ceiling beside them."""
    work = workload(machine, case, direction)
    serving, waived = divide(machine, work, ways)
    candidates = [way.candidate(machine, work) for way in serving]
    results = measure(candidates, machine.caller, rounds=rounds, warmup=2, seconds=2.0)
    (top,) = measure([ceiling_candidate(machine, work)], machine.clock, rounds=3, seconds=0.5)
    details = {result.name: figures(result) for result in [*results, top]}
    wrong = "; ".join(f"{name}: {f['wrong']}" for name, f in details.items() if f["wrong"]) or None
    ceiling: float = details.pop(top.name).get("gbps_p50", 0.0)
    rates = {name: found.get("gbps_p50") for name, found in details.items()}
    row = _label(case, direction) | {f"gbps {name}": rate for name, rate in rates.items()}
    row |= {"wins": _winner(rates), "wrong": wrong, "waived": waived, "details": details}
    return row, ceiling


_LABELS = (Column("direction", "copy"), Column("bytes", "run B", ","), Column("runs", "runs", ","))


def _measurement(rows: Sequence[Row], ways: Sequence[Way]) -> Table:
    columns = [
        *_LABELS,
        *(Column(f"gbps {way}", str(way), ".1f", "GB/s") for way in ways),
        Column("wins", "wins"),
        Column("predicted wins", "predicted"),
        Column("kept", "kept", ".0%"),
    ]
    notes = [
        "GB/s: payload over the time from the call until its bytes are there, for one who waits. "
        "wins: the fastest; within 0.5 %, the one with the fewest CTAs. kept: what following the "
        "prediction would keep of the winner's rate.",
        *sorted({f"waived, {n}: {why}" for row in rows for n, why in row["waived"].items()}),
        *(f"WRONG, {row['direction']}, {row['wrong']}" for row in rows if row["wrong"]),
    ]
    return Table("Who wins, measured", columns, rows, notes)


def _prediction(rows: Sequence[Row], ways: Sequence[Way], link: Link) -> Table:
    columns = [
        *_LABELS,
        *(Column(f"predicted {way}", str(way), ".1f", "GB/s") for way in ways),
        Column("predicted wins", "wins"),
    ]
    latency = ", ".join(f"{way.upper()} {s * 1e6:.2f} µs" for way, s in link.latency.items())
    notes = [
        f"A kernel: {LAUNCH_SECONDS * 1e6:.0f} µs for its launch (vLLM #57555), then min(ceiling, "
        f"CTAs × bytes in flight ÷ latency). Latency {latency}, from {link.source}.",
        "An upper bound: an SM's own limits on outstanding accesses are left out.",
        f"ce: the longer of {DESCRIPTOR_SECONDS * 1e6:.2f} µs a run (vLLM #48434) and the link.",
    ]
    return Table("Who wins, predicted, not measured", columns, rows, notes)


def panels(rows: Sequence[Row], ways: Sequence[Way], key: str) -> dict[str, list[Series]]:
    """Rates by bytes of a run for the most runs of the grid, a line a way; a panel a direction."""
    found = {}
    most = max(row["runs"] for row in rows)
    for direction in DIRECTIONS:
        mine = [row for row in rows if (row["direction"], row["runs"]) == (direction, most)]
        lines = []
        for way in ways:
            points = [(r["bytes"], r[f"{key} {way}"]) for r in mine if r.get(f"{key} {way}")]
            lines.append(Series(str(way), [x for x, _ in points], [y for _, y in points]))
        found[f"{direction.upper()}, {most:,} runs, {key}"] = lines
    return found
