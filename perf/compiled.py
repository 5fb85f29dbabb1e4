"""What Triton makes of every kernel variant of the CTA table for a target, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from hikv.compiled import Report, compile_relayout, compile_relayout_tma
from hikv.errors import ArgumentError, PathUnavailable

from .case import DIRECTIONS, add_case_options, cases_from
from .output import Column, Progress, Table

_COMPILERS: dict[str, Callable[..., Report]] = {"sm": compile_relayout, "tma": compile_relayout_tma}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hikv compile`."""
    add_case_options(parser)
    parser.add_argument("--target", default="sm_90", help="sm_NN or gfx9NN, default sm_90")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write PTX and SASS here")


def run(args: argparse.Namespace) -> int:
    """Print one row per variant; a kernel that the target lacks has a reason instead of figures."""
    rows = list(_rows(args))
    if args.json:
        print(json.dumps({"target": args.target, "variants": rows}, indent=2))
    else:
        print(_table(args.target, rows).terminal())
    return 0


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    variants = list(product(cases_from(args), DIRECTIONS, _COMPILERS))
    with Progress(len(variants), "hikv compile") as progress:
        for case, direction, path in variants:
            progress.step(f"{path} {direction}")
            for part in case.plan(direction).parts:
                label = {"path": path, **case.label, "direction": direction, "part": part.name}
                try:
                    report = _COMPILERS[path](part, args.target)
                except (ArgumentError, PathUnavailable) as refusal:
                    if path == "sm":
                        raise
                    yield {**label, "refused": str(refusal)}
                    continue
                name = "-".join(map(str, label.values()))
                files = _write(args.assembly, name, report) if args.assembly else []
                yield {**label, "run": part.row_run, **report.summary(), "files": files}


def _write(folder: Path, name: str, report: Report) -> list[str]:
    """Write the assembly of one variant; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, content in report.assembly.items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    return paths


def _table(target: str, rows: list[dict[str, Any]]) -> Table:
    shown = [
        {
            **row,
            "loads": _accesses(row, "load"),
            "stores": _accesses(row, "store"),
        }
        for row in rows
    ]
    label = "row" if "row" in rows[0] else "heads"
    columns = [
        Column("path", "path"),
        Column(label, "row B" if label == "row" else "H"),
        *([] if label == "row" else [Column("groups", "HG")]),
        Column("direction", "copy"),
        Column("run", "run B"),
        Column("loads", "loads"),
        Column("stores", "stores"),
        Column("registers", "regs"),
        Column("spill_bytes", "spill B"),
        Column("ring_buffers", "ring"),
        Column("shared_bytes", "shared B"),
        Column("bytes_in_flight", "in flight B"),
    ]
    refused = sorted({row["refused"] for row in rows if "refused" in row})
    notes = [
        "Accesses to global memory per thread as count×bytes, page ids and tables included; box: "
        "instructions that move one; ring: boxes in flight; in flight B: per CTA.",
        *(f"No figures: {reason}" for reason in refused),
    ]
    return Table(f"Compiled for {target}, not run", columns, shown, notes)


def _accesses(row: dict[str, Any], kind: str) -> str | None:
    """Accesses of one kind; boxes of a tensor descriptor after those of single threads."""
    if "refused" in row:
        return None
    widths = sorted(row[f"{kind}_widths"].items())
    boxes = row[f"bulk_{kind}s"]
    counts = [f"{count}×{width}" for width, count in widths] + [f"{boxes} box"] * bool(boxes)
    return " ".join(counts)
