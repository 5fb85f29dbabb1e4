"""Tables for a terminal, for Markdown and for JSON, and what a result says of its machine."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from hikv.device import DeviceInfo, probe_failure, software_versions
from hikv.picture import check_file, check_picture

WIDTH = 100
SCHEMA = 1
"""Of the JSON that `Report.json` returns; raised when the meaning of a field changes."""


@dataclass(frozen=True)
class Column:
    """A column: `key` in the rows, `title` above it, under a `group` that neighbours may share.

    `form` is the format of numbers, for example `".1f"`, and `mark` stands before each: `"≤"` says
    that they are upper bounds by a model. Text is aligned left, the rest right.
    """

    key: str
    title: str
    form: str = ""
    group: str = ""
    mark: str = ""

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of this column in `row`; a value that is missing shows as a dash."""
        value = row.get(self.key)
        if value is None:
            return "–"
        return value if isinstance(value, str) else self.mark + format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows of named values under a title that says what kind of figures they are."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    def terminal(self) -> str:
        """Aligned text, without colour; prose is wrapped at `WIDTH`, columns are not."""
        cells = [[column.cell(row) for row in self.rows] for column in self.columns]
        widths = [
            max(map(len, [column.title, *texts]))
            for column, texts in zip(self.columns, cells, strict=True)
        ]
        gaps = [
            3 if i and c.group != self.columns[i - 1].group else 2 * (i > 0)
            for i, c in enumerate(self.columns)
        ]
        over = _group_line([column.group for column in self.columns], widths, gaps)
        padded = []
        for column, texts, width, gap in zip(self.columns, cells, widths, gaps, strict=True):
            is_text = any(isinstance(row.get(column.key), str) for row in self.rows)
            pad = str.ljust if is_text else str.rjust
            padded.append([" " * gap + pad(text, width) for text in [column.title, *texts]])
        lines = [over, *("".join(line) for line in zip(*padded, strict=True))]
        blocks = [_wrap([self.title]), [line.rstrip() for line in lines if line.strip()]]
        blocks += [_wrap(self.notes)] if self.notes else []
        return "\n\n".join("\n".join(block) for block in blocks)

    def markdown(self) -> str:
        """A GitHub table; a group becomes part of the titles below it."""
        titles = [f"{c.group} {c.title}".strip() for c in self.columns]
        rows = [[column.cell(row) for column in self.columns] for row in self.rows]
        lines = [f"### {self.title}", "", _pipes(titles), _pipes(["---:"] * len(titles))]
        lines += map(_pipes, rows)
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        """Everything in the rows, shown or not."""
        return {
            "title": self.title,
            "columns": [asdict(column) for column in self.columns],
            "rows": list(self.rows),
            "notes": list(self.notes),
        }


def label_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """What tells a case from its neighbours, `Case.label`, and its run."""
    run = Column("run", "run B")
    if "row" in rows[0]:
        return [Column("row", "row B"), run]
    return [Column("heads", "H"), Column("groups", "HG"), run]


def label_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the titles of `label_columns` stand for."""
    what = "row B: bytes of a latent row." if "row" in rows[0] else "H heads in HG groups."
    return [f"{what} run B: bytes of one token that stay together on both sides."]


def _group_line(groups: Sequence[str], widths: list[int], gaps: Sequence[int]) -> str:
    """Group titles, each ruled over its columns; widens the first of a group that is too narrow."""
    line = ""
    for group, members in groupby(range(len(groups)), key=groups.__getitem__):
        first, *rest = members
        title = f"─ {group} ─" if group else ""
        inside = sum(gaps[i] + widths[i] for i in rest)
        widths[first] = max(widths[first], len(title) - inside)
        line += " " * gaps[first] + title.center(inside + widths[first], "─" if group else " ")
    return line


def _wrap(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@dataclass
class Report:
    """What one command found.

    Attributes:
        command: for example `"perf cta"`.
        kind: `"measured"` or `"predicted, not measured"`: of the report's first table.
        subject: what was copied.
        counted: what a rate counts.
        device: the GPU, or `None`.
        tables: in the order they are shown.
        facts: anything else worth keeping, ready for JSON.
    """

    command: str
    kind: str
    subject: str
    counted: str
    device: DeviceInfo | None
    tables: list[Table] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def terminal(self) -> str:
        """Everything for a person to read."""
        return terminal_text(header_lines(self.json()), self.tables)

    def markdown(self) -> str:
        """The same as a Markdown document, its own headings from level 3 on."""
        return markdown_text(header_lines(self.json()), self.tables)

    def json(self) -> dict[str, Any]:
        """The envelope that every result file shares, plain values only."""
        info = self.device
        return {
            "schema": SCHEMA,
            "command": self.command,
            "kind": self.kind,
            "subject": self.subject,
            "counted": self.counted,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": None if info is None else asdict(info),
            "no_gpu": probe_failure() if info is None else None,
            "link": None if info is None else info.fingerprint()["link"],
            "driver": None if info is None else info.driver_version,
            "versions": versions(),
            "host": host(),
            "tables": [table.json() for table in self.tables],
            "facts": self.facts,
        }


def versions() -> dict[str, str | None]:
    """Of everything that decides what runs."""
    found = software_versions()
    found.pop("driver")
    return {
        "hikv": _version("hikv"),
        **found,
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    import hikv

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return hikv.__version__


def host() -> dict[str, str | int]:
    """The host's processor and how much of it this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, "") or platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def terminal_text(header: Sequence[str], tables: Sequence[Table]) -> str:
    """A header, wrapped, and the tables below it."""
    return "\n\n\n".join(["\n".join(_wrap(header)), *(table.terminal() for table in tables)])


def markdown_text(header: Sequence[str], tables: Sequence[Table]) -> str:
    """The same for Markdown."""
    return "\n\n".join(["  \n".join(header), *(table.markdown() for table in tables)]) + "\n"


def header_lines(told: Mapping[str, Any]) -> list[str]:
    """What was run, on what, and what was counted, from the envelope of a result."""
    found, here, gpu = told["versions"], told["host"], told["device"]
    names = (("hikv", "hikv"), ("torch", "torch"), ("Triton", "triton"), ("Python", "python"))
    software = ", ".join(f"{title} {found[key] or 'missing'}" for title, key in names)
    lines = [f"{here['cpu']}, {here['cpus']} CPUs; {software}"]
    if gpu is None:
        lines.append(f"no GPU: {told['no_gpu']}")
    else:
        limit = f" ({gpu['link_gbps']:.1f} GB/s theoretical)" if gpu["link_gbps"] else ""
        link = f"{told['link'] or 'unknown link'}{limit}"
        lines.insert(0, f"{gpu['name']}, {gpu['num_sms']} SMs, {link}, driver {told['driver']}")
    return [f"{told['command']}: {told['kind']}", *lines, told["subject"], told["counted"]]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a picture (needs matplotlib: hikv[plot])"
    )


def check_output_options(args: argparse.Namespace) -> None:
    """Refuse before the work what could not be written after it; raises `ArgumentError`."""
    for name in ("json", "markdown"):
        path: Path | None = getattr(args, name)
        if path is not None:
            check_file(f"--{name}", path)
    if args.plot is not None:
        check_picture(args.plot)


def write_outputs(report: Report, args: argparse.Namespace) -> None:
    """Write the JSON and the Markdown that were asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(report.json(), indent=1, ensure_ascii=False) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(report.markdown())


class Progress:
    """A bar on standard error while a `with` block works, drawn only where that is a terminal."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._shown = sys.stderr.isatty()

    def step(self, label: str = "") -> None:
        """One more of `total` begins; `label` says which."""
        filled = 24 * self._done // max(self._total, 1)
        bar = "█" * filled + "░" * (24 - filled)
        self._draw(f"{self._what} {bar} {self._done}/{self._total} {label}"[:WIDTH])
        self._done += 1

    def _draw(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._draw("")
