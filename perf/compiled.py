"""What Triton makes of every kernel variant of the CTA table for a target, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from hikv.compiled import Report
from hikv.errors import ArgumentError, PathUnavailable

from .case import DIRECTIONS, add_case_options, cases_from
from .compiler_table import COMPILERS, compiler_table, outcome, variant
from .output import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hikv compile`."""
    add_case_options(parser)
    parser.add_argument("--target", default="sm_90", help="sm_NN or gfx9NN, default sm_90")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write PTX and SASS here")


def run(args: argparse.Namespace) -> int:
    """Print one row per variant; a kernel that the target lacks has a reason instead of figures."""
    if args.assembly is not None and args.assembly.exists() and not args.assembly.is_dir():
        raise ArgumentError(
            "--assembly", expected="a folder", got=args.assembly, remedy="name another folder"
        )
    rows = list(_rows(args))
    if args.json:
        print(json.dumps({"target": args.target, "variants": rows}, indent=2))
    else:
        print(compiler_table(rows, args.target).terminal())
    return 0


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    variants = list(product(cases_from(args), DIRECTIONS, COMPILERS))
    with Progress(len(variants), "hikv compile") as progress:
        for case, direction, path in variants:
            progress.step(f"{path} {direction}")
            for part in case.plan(direction).parts:
                row = variant(path, case, direction, part)
                try:
                    report = COMPILERS[path](part, args.target)
                except (ArgumentError, PathUnavailable) as refusal:
                    if path == "sm":
                        raise
                    yield {**row, "refused": str(refusal)}
                    continue
                name = "-".join(str(row[key]) for key in row if key not in ("run", "merged"))
                files = _write(args.assembly, name, report) if args.assembly else []
                yield {**row, **outcome(report), "files": files}


def _write(folder: Path, name: str, report: Report) -> list[str]:
    """Write the assembly of one variant; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, content in report.assembly.items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    return paths
