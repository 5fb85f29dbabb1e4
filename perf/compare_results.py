"""What changed from one result file to another, figure by figure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .case import positive_number
from .output import Column, Table, header_lines, terminal_text
from .show import load, tables_of

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf compare-results`."""
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="written by --json")
    parser.add_argument(
        "--threshold",
        type=positive_number,
        default=0.05,
        metavar="SHARE",
        help="least change, default 0.05",
    )


def run(args: argparse.Namespace) -> int:
    """Print both headers, and the figures that changed by the threshold or more."""
    a, b = load(args.a), load(args.b)
    header = [
        line
        for name, path, told in (("A", args.a, a), ("B", args.b, b))
        for line in (f"{name}: {path}, written {told['date']}", *header_lines(told), "")
    ]
    before = {table.title: table for table in tables_of(a)}
    after = {table.title: table for table in tables_of(b)}
    tables = [changes(before[t], after[t], args.threshold) for t in before if t in after]
    lonely = sorted(before.keys() ^ after.keys())
    header += [f"in one file only: {title}" for title in lonely]
    print(terminal_text(header, [table for table in tables if table is not None]))
    return 0


def changes(a: Table, b: Table, threshold: float) -> Table | None:
    """The figures of two tables of one title that differ; `None` for tables without figures.

    Columns ahead of the first figure, which is one with decimals in its format, tell the rows.
    """
    first = next((i for i, column in enumerate(a.columns) if "." in column.form), None)
    if not first:
        return None
    labels, figures = a.columns[:first], [c for c in a.columns[first:] if "." in c.form]
    old, new = _by_label(a, labels), _by_label(b, labels)
    compared, rows = 0, []
    for key in old:
        for column in figures if key in new else ():
            was, now = old[key].get(column.key), new[key].get(column.key)
            if was and now is not None:
                compared += 1
                if abs(now / was - 1) >= threshold:
                    rows.append(_change(old[key], labels, column, was, now))
    alone = len(old.keys() ^ new.keys())
    notes = [f"{compared} figures compared, {len(rows)} changed by {threshold:.0%} or more."]
    notes += [f"{alone} rows are in one file only."] * bool(alone)
    columns = [
        *labels,
        Column("figure", "figure"),
        Column("a", "A"),
        Column("b", "B"),
        Column("change", "change", "+.1%"),
    ]
    return Table(a.title, columns, rows, notes)


def _by_label(table: Table, labels: Sequence[Column]) -> dict[tuple[str, ...], Row]:
    return {tuple(column.cell(row) for column in labels): row for row in table.rows}


def _change(row: Row, labels: Sequence[Column], column: Column, was: float, now: float) -> Row:
    kept = {label.key: row.get(label.key) for label in labels}
    title = f"{column.group} {column.title}".strip()
    told = {"a": column.cell({column.key: was}), "b": column.cell({column.key: now})}
    return {**kept, "figure": title, **told, "change": now / was - 1}
