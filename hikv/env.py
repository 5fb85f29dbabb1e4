"""Every `HIKV_*` environment variable, parsed in one place; a bad value is an error, never ignored.

| variable | meaning | default |
|---|---|---|
| `HIKV_TUNED_DIR` | directory of the user's tuned tables | `~/.cache/hikv/tuned` |
| `HIKV_PINNED_BUDGET` | most bytes of pinned memory for this process | from cgroup and host |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hikv.errors import ArgumentError

KNOWN = ("HIKV_TUNED_DIR", "HIKV_PINNED_BUDGET")


@dataclass(frozen=True)
class Env:
    """The parsed variables. `pinned_budget` is in bytes, `None` where the variable is unset."""

    tuned_dir: Path
    pinned_budget: int | None


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Parse `environ` (default `os.environ`).

    Raises `ArgumentError` for a value that does not parse and for an unknown `HIKV_*` name, which
    is most likely a misspelt one.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith("HIKV_") and name not in KNOWN:
            raise ArgumentError(
                name, expected=f"one of {', '.join(KNOWN)}", got=name, remedy="unset or rename it"
            )
    return Env(
        tuned_dir=_tuned_dir(environ),
        pinned_budget=_positive(environ, "HIKV_PINNED_BUDGET"),
    )


def _tuned_dir(environ: Mapping[str, str]) -> Path:
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "hikv", "tuned")
    try:
        return Path(environ.get("HIKV_TUNED_DIR") or cache).expanduser()
    except RuntimeError as error:
        raise ArgumentError(
            "HIKV_TUNED_DIR",
            expected="an absolute path, since nobody knows this home",
            got=repr(environ.get("HIKV_TUNED_DIR")),
            remedy="set it, or set HOME",
        ) from error


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentError(
            name,
            expected="a positive whole number of bytes",
            got=repr(text),
            remedy=f"write digits alone, {64 << 30} for 64 GiB, or unset it",
        )
    return int(text)
