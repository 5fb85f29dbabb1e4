"""A whole search: the cases in order, a budget, and a table on disk to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hikv.errors import ArgumentError
from hikv.measure import Timing
from hikv.tables import HARD, Entry, Key, Table, differences, identity, read_table, write_table
from hikv.tuning import distance

from .bench import Bench
from .cases import Case, full_cases, quick_cases
from .search import search
from .space import Point

_SAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """What to search for.

    Attributes:
        target: required share of the ceiling, above 0, at most 1.
        cases: exactly these; empty for the whole grid.
        quick: of the grid every second size, then what lies between different choices; of the
            space the default configurations.
        interference: measure the slowdown of a GEMM beside each choice.
        budget: seconds after which no further case begins.
    """

    target: float = 0.9
    cases: Sequence[Case] = ()
    quick: bool = False
    interference: bool = True
    budget: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ArgumentError(
                "--target",
                expected="a share of the ceiling above 0, at most 1",
                got=self.target,
                remedy="pass 0.9 for nine tenths of what the copy engine reaches",
            )
        if self.budget is not None and not self.budget > 0:
            raise ArgumentError(
                "--budget", expected="seconds above 0", got=self.budget, remedy="leave it out"
            )


@dataclass
class Outcome:
    """What a search left.

    Attributes:
        table: all entries, with those that were there before.
        searched: cases of this run.
        timings: what each of them was timed at, by point.
        wrong: what copied wrong bytes, by case and point.
        stopped: why it ended before its cases did, or `None`.
        failed: whether that was no choice of ours: a disturbed machine, or wrong bytes alone.
    """

    table: Table
    searched: int = 0
    timings: dict[Case, Mapping[Point, Timing]] = field(default_factory=dict)
    wrong: dict[tuple[Case, Point], str] = field(default_factory=dict)
    stopped: str | None = None
    failed: bool = False


def tune(
    bench: Bench,
    path: Path,
    options: Options,
    *,
    date: str,
    progress: Callable[[int, int, str], Any] = lambda done, total, label: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Search on `bench`, and write the table to `path`.

    Meanwhile the table so far is kept beside it, and a later call with the same goal goes on from
    there. A disturbed machine, and a case that nothing copies right, end the search and leave the
    table at `path` as it was. Entries of one that still fits are kept where no case replaces them.
    """
    started = clock()
    made = {"kind": bench.kind, "date": date, "link_gbps_and_latency": bench.link()}
    header = {**identity(bench.info), **made}
    partial = path.with_suffix(f".{'quick' if options.quick else 'full'}.partial")
    entries = {
        key: entry
        for key, entry in _earlier(partial, header).items()
        if entry.record.get("target") == options.target
    }
    outcome = Outcome(Table(header, entries))
    written = started
    try:
        for case, left in _todo(options, entries):
            progress(len(entries), len(entries) + left, str(case))
            outcome.stopped, outcome.failed = _end(bench, options, clock() - started)
            if outcome.stopped is not None:
                break
            found = search(
                case,
                bench,
                target=options.target,
                quick=options.quick,
                interference=options.interference,
            )
            outcome.wrong.update({(case, point): why for point, why in found.wrong.items()})
            if found.entry is None:
                outcome.stopped, outcome.failed = f"no way to copy {case} is right", True
                break
            entries[case.key] = found.entry
            outcome.timings[case] = found.timings
            outcome.searched += 1
            if clock() - written >= _SAVE_SECONDS:
                write_table(partial, outcome.table)
                written = clock()
    finally:
        if entries:
            write_table(partial, outcome.table)
    if entries and not outcome.failed:
        outcome.table = Table(header, _earlier(path, header) | entries)
        write_table(path, outcome.table)
    if outcome.stopped is None:
        partial.unlink(missing_ok=True)
    return outcome


def _end(bench: Bench, options: Options, spent: float) -> tuple[str | None, bool]:
    """Why no further case begins, or `None`, and whether that is no choice of ours."""
    if spoilt := bench.disturbances():
        return "; ".join(spoilt), True
    if options.budget is not None and spent >= options.budget:
        return f"the budget of {options.budget:g} s is spent", False
    return None, False


def _earlier(path: Path, header: dict[str, Any]) -> dict[Key, Entry]:
    """Entries of the table at `path`, if one is there that was made on this machine."""
    try:
        table = read_table(path)
    except ArgumentError:
        return {}  # none, or nothing to go on from: it is replaced
    return {} if differences(table.header, header, (*HARD, "kind")) else dict(table.entries)


def _todo(options: Options, entries: dict[Key, Entry]) -> Iterator[tuple[Case, int]]:
    """The cases without an entry, and how many are known to be left; `entries` grows meanwhile.

    The coarse ones come first, so that wherever a budget ends, there is something near every copy.
    """
    if options.cases:
        yield from _missing(options.cases, entries)
        return
    grid = full_cases()
    yield from _missing(quick_cases(), entries)
    if not options.quick:
        yield from _missing(grid, entries)
        return
    while disputed := [c for c in grid if c.key not in entries and _disputed(c, entries)]:
        yield from _missing(disputed, entries)


def _missing(cases: Sequence[Case], entries: dict[Key, Entry]) -> Iterator[tuple[Case, int]]:
    missing = [case for case in cases if case.key not in entries]
    yield from ((case, len(missing) - done) for done, case in enumerate(missing))


def _disputed(case: Case, entries: dict[Key, Entry]) -> bool:
    """Whether the entries that could speak for `case` say different things, or there are none."""
    near = [entry for key, entry in entries.items() if distance(key, case.key) is not None]
    return len({(entry.path, entry.block_quota) for entry in near}) != 1
