"""Print a result file as it was printed when it was written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hikv.errors import ArgumentError
from hikv.picture import check_file

from .output import SCHEMA, Column, Table, header_lines, markdown_text, terminal_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf show`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="written by --json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")


def run(args: argparse.Namespace) -> int:
    """Print the header, the date and the tables."""
    if args.markdown is not None:
        check_file("--markdown", args.markdown)
    told = load(args.file)
    header, tables = [*header_lines(told), f"written {told['date']}"], tables_of(told)
    print(terminal_text(header, tables))
    if args.markdown is not None:
        args.markdown.write_text(markdown_text(header, tables))
    return 0


def load(path: Path) -> dict[str, Any]:
    """The content of a result file; raises `ArgumentError` where it is not one."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {told['schema']}")
        tables_of(told)
        header_lines(told)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            str(path),
            expected=f"a result of perf, schema {SCHEMA}",
            got=f"{type(error).__name__}: {error}",
            remedy="write one with --json",
        ) from error
    return told


def tables_of(told: Mapping[str, Any]) -> list[Table]:
    """The tables of a result file."""
    return [
        Table(
            table["title"], [Column(**c) for c in table["columns"]], table["rows"], table["notes"]
        )
        for table in told["tables"]
    ]
