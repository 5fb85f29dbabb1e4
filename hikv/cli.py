"""The command line: `hikv COMMAND …`, the same as `python -m hikv COMMAND …`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from hikv.console import until_reader_leaves
from hikv.errors import HikvError

USAGE = """usage: hikv COMMAND …

  doctor [--json]   the GPU, its link and limits, and which paths can run here
  tune …            find how this GPU copies best, for transfer() to use; also show, compare, check
  bench …           benchmarks; `hikv bench --help` lists them
  replay TRACE …    hits of the cache on a trace or a made workload, every reused byte verified
  compile …         what Triton makes of every kernel variant for a target, without a GPU
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for a failed check, 2 for a refusal."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return until_reader_leaves(lambda: _run(command, rest))
    except HikvError as error:
        print(f"hikv {command}: {error}", file=sys.stderr)
        return 2


def _run(command: str, arguments: list[str]) -> int:
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command not in _COMMANDS:
        print(f"hikv: no command {command!r}\n{USAGE}", end="", file=sys.stderr)
        return 2
    return _COMMANDS[command](arguments)


def side(name: str) -> ModuleType:
    """Module `name` of a side folder: installed under `hikv.`, at the top level of a checkout."""
    folder = name.partition(".")[0]
    try:
        return import_module(f"hikv.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"hikv.{folder}":
            raise
        return import_module(name)


def _doctor(arguments: list[str]) -> int:
    about = "The GPU, its link and limits, and which paths can run here."
    parser = argparse.ArgumentParser(prog="hikv doctor", description=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(arguments).json
    from hikv.doctor import describe, examine  # loads torch, which help does not need

    facts = examine()
    print(json.dumps(facts, indent=2) if as_json else describe(facts))
    return 0


def _tune(arguments: list[str]) -> int:
    code: int = side("autotune.__main__").main(arguments, prog="hikv tune")
    return code


def _bench(arguments: list[str]) -> int:
    code: int = side("perf.__main__").main(arguments, prog="hikv bench")
    return code


def _replay(arguments: list[str]) -> int:
    code: int = side("perf.__main__").main(["replay", *arguments], prog="hikv")
    return code


def _compile(arguments: list[str]) -> int:
    code: int = side("perf.__main__").main(["compile", *arguments], prog="hikv")
    return code


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "doctor": _doctor,
    "tune": _tune,
    "bench": _bench,
    "replay": _replay,
    "compile": _compile,
}
