"""`python -m autotune`: find out how this GPU copies pages best, and look at what was found."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hikv.console import quantity, until_reader_leaves
from hikv.device import cpu_numa_nodes, device_info, numa_mismatch, probe_failure
from hikv.env import read_env
from hikv.errors import ArgumentError, HikvError
from hikv.picture import check_file, check_picture
from hikv.tables import SHIPPED, file_name, read_table

from . import report
from .bench import Bench
from .cases import parse_cases
from .picture import draw_search
from .session import Options, Outcome, tune
from .simulate import PRESETS, SimulatedGpu

_DESCRIPTION = """Search for the fewest CTAs that move KV pages at the required share of the copy
engine's rate, case by case, and write the table that transfer() then uses. Also: show [FILE],
compare FILE FILE, check [FILE]."""

_SIMULATE = f"search a model instead; its table is never used: {', '.join(PRESETS)}"
_EXIT_CODES = """Exit code 0: the table is written; 1: it is not, or some way to copy gave wrong
bytes; 2: refused, nothing was timed."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m autotune") -> int:
    """Run one command; 0, 1 where a search or a check failed, 2 for a refusal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in _LOOKS:
            return _look(arguments, prog)
        return _tune(_parser(prog).parse_args(arguments))
    except HikvError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=_DESCRIPTION, epilog=_EXIT_CODES)
    add = parser.add_argument
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick",
        action="store_true",
        help="the default: default kernels, every second size, then between different choices",
    )
    extent.add_argument("--full", action="store_true", help="every kernel, every size")
    extent.add_argument(
        "--cases", metavar="CASE,…", help="DIRECTION:RUNxCOUNT[:VECTOR], every kernel"
    )
    add("--budget", type=float, metavar="SECONDS", help="begin no case after this; run again")
    add("--target", type=float, default=0.9, metavar="SHARE", help="of the ceiling, default 0.9")
    add("--no-interference", action="store_true", help="leave out the GEMM beside the copies")
    add("--ship", action="store_true", help="write to the package, not to HIKV_TUNED_DIR")
    add(
        "--plot", type=Path, metavar="FILE", help="draw GB/s by CTAs (needs matplotlib: hikv[plot])"
    )
    add("--simulate", choices=PRESETS, metavar="GPU", help=_SIMULATE)
    return parser


def _tune(args: argparse.Namespace) -> int:
    options = Options(
        target=args.target,
        cases=() if args.cases is None else parse_cases(args.cases),
        quick=not args.full and args.cases is None,
        interference=not args.no_interference,
        budget=args.budget,
    )
    if args.plot is not None:
        check_picture(args.plot)
    bench = _bench(args)
    if spoilt := bench.disturbances():
        raise ArgumentError(
            "GPU", expected="an idle GPU", got="; ".join(spoilt), remedy="then tune again"
        )
    path = _destination(args.ship) / file_name(bench.info.name, bench.info.num_sms)
    check_file("table", path)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    outcome = tune(bench, path, options, date=today, progress=_progress)
    _progress(0, 0, "")
    if args.plot is not None and outcome.timings:
        draw_search(outcome.table, outcome.timings, args.plot)
    return _tell(outcome, path, args.plot)


def _destination(ship: bool) -> Path:
    """The folder of the table, made before a search that could not be kept."""
    folder = SHIPPED if ship else read_env().tuned_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            "HIKV_TUNED_DIR",
            expected="a folder, or the name of one that can be made",
            got=f"{folder} ({error.strerror})",
            remedy="name another folder",
        ) from error
    return folder


def _bench(args: argparse.Namespace) -> Bench:
    if args.simulate is not None:
        if args.ship:
            raise ArgumentError(
                "--ship",
                expected="a table measured on a GPU",
                got=f"--simulate {args.simulate}",
                remedy="leave one of the two out",
            )
        return SimulatedGpu(PRESETS[args.simulate])
    from .gpu import GpuBench  # loads Triton, which a simulation does not need

    bench = GpuBench.of_gpu()
    if far := numa_mismatch(bench.info.numa_node, cpu_numa_nodes()):
        print(far, file=sys.stderr)
    return bench


def _tell(outcome: Outcome, path: Path, plot: Path | None) -> int:
    print(report.show(outcome.table))
    for (case, point), why in outcome.wrong.items():
        print(f"{case} by {point} was left out: {why}", file=sys.stderr)
    if outcome.failed:
        print(f"stopped, no table written: {outcome.stopped}; then run again to go on from here")
        return 1
    entries = quantity(len(outcome.table.entries), "entry")
    print(f"\n{quantity(outcome.searched, 'case')} searched, {entries} in {path}")
    if outcome.stopped:
        print(f"stopped: {outcome.stopped}; run again to go on from here")
    if plot is not None:
        print(f"drawn: {plot}" if outcome.timings else "nothing drawn: no case was left to time")
    return int(bool(outcome.wrong))


def _progress(done: int, total: int, label: str) -> None:
    if sys.stderr.isatty():
        filled = 24 * done // max(total, 1)
        bar = f"{'█' * filled}{'░' * (24 - filled)} {done}/{total} {label}" if total else ""
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def _look(arguments: list[str], prog: str) -> int:
    """Run one of `_LOOKS`."""
    name, *rest = arguments
    run, files, description = _LOOKS[name]
    parser = argparse.ArgumentParser(prog=f"{prog} {name}", description=description)
    parser.add_argument("files", nargs=files, type=Path, metavar="FILE", help="a tuned table")
    return run(parser.parse_args(rest).files)


def _show(files: Path | None) -> int:
    print(report.show(read_table(files or _own_file())))
    return 0


def _compare(files: list[Path]) -> int:
    print(report.compare(*map(read_table, files)))
    return 0


def _check(files: Path | None) -> int:
    path = files or _own_file()
    used, words = report.check(read_table(path), device_info())
    print(f"{path}: {words}")
    return 0 if used else 1


_LOOKS: dict[str, tuple[Callable[[Any], int], int | str, str]] = {
    "show": (_show, "?", "Print a tuned table; without FILE, the one of this GPU."),
    "compare": (_compare, 2, "Print where two tuned tables choose differently."),
    "check": (
        _check,
        "?",
        "Tell whether transfer() would use a tuned table here; without FILE, the one of this GPU. "
        "Exit code 0: it would; 1: it would not, as it never uses a simulated one.",
    ),
}
"""What looks at tables: its function, how many files it takes, and its help."""


def _own_file() -> Path:
    """The table of this GPU that a transfer would find first."""
    info = device_info()
    if info is None:
        raise ArgumentError(
            "FILE",
            expected="one tuned table, or a GPU whose own can be found",
            got=str(probe_failure()),
            remedy="name one file",
        )
    name = file_name(info.name, info.num_sms)
    places = [read_env().tuned_dir / name, SHIPPED / name]
    found = next((path for path in places if path.exists()), None)
    if found is None:
        raise ArgumentError(
            "table",
            expected=f"one for {info.name}",
            got=f"none at {' or '.join(map(str, places))}; transfer() uses its defaults",
            remedy="run hikv tune",
        )
    return found


if __name__ == "__main__":
    sys.exit(until_reader_leaves(main))
