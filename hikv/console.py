"""What every command line here does with its output, and how it counts in words."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def quantity(number: int, noun: str) -> str:
    """`number` of a `noun`: "1 page", "2 pages", "2 entries"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


def until_reader_leaves(run: Callable[[], int]) -> int:
    """The exit code of `run`; 141 where the reader of the output has gone and 130 where the user
    has interrupted it, as of a program that SIGPIPE or SIGINT ended."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough. Python flushes once more at exit, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 128 + signal.SIGINT
