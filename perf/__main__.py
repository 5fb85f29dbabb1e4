"""`python -m perf`: the benchmarks, one sub-command each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from hikv.console import until_reader_leaves
from hikv.errors import HikvError

from . import (
    compare,
    compare_results,
    compiled,
    crossover,
    cta,
    gather,
    gpu_check,
    interference,
    matrix,
    overlap,
    replay,
    show,
)

COMMANDS = {
    "cta": cta,
    "compare": compare,
    "crossover": crossover,
    "interference": interference,
    "overlap": overlap,
    "gather": gather,
    "replay": replay,
    "matrix": matrix,
    "gpu-check": gpu_check,
    "compile": compiled,
    "show": show,
    "compare-results": compare_results,
}


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m perf") -> int:
    """Run one command; the exit code: 0, 1 where a byte or a check was wrong, 2 for a refusal."""
    parser = argparse.ArgumentParser(prog=prog, description="Benchmarks of hikv.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except (HikvError, torch.OutOfMemoryError) as error:
        print(f"{prog} {args.command}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(until_reader_leaves(main))
