"""How a setting is declared: its default, the values it takes, and one line on what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple


class Allowed(NamedTuple):
    """The values that an option takes: in words, and as a test."""

    text: str
    holds: Callable[[Any], bool]


def one_of(*names: str) -> Allowed:
    """One of some names."""
    return Allowed(", ".join(names), lambda value: value in names)


def _number(text: str, holds: Callable[[float], bool], *kinds: type) -> Allowed:
    def check(value: Any) -> bool:
        number = isinstance(value, kinds) and not isinstance(value, bool)
        return number and math.isfinite(value) and holds(value)

    return Allowed(text, check)


SWITCH = Allowed("True, False", lambda value: isinstance(value, bool))
COUNT = _number("int ≥ 1", lambda n: n >= 1, int)
FROM_0 = _number("int ≥ 0", lambda n: n >= 0, int)
SECONDS = _number("seconds ≥ 0", lambda s: s >= 0, int, float)
POSITIVE = _number("number > 0", lambda x: x > 0, int, float)
SHARE = _number("0 < share ≤ 1", lambda x: 0 < x <= 1, int, float)
NAME = Allowed("a name", lambda value: isinstance(value, str) and bool(value.strip()))
ENTRIES = Allowed("a mapping", lambda value: isinstance(value, Mapping))


def option(default: Any, allowed: Allowed, meaning: str) -> Any:
    """A dataclass field with `allowed` and `meaning` in its metadata.

    `default`: `None` for unset, which is allowed too; `dict` for a new mapping each time.
    """
    about = {"allowed": allowed, "meaning": meaning}
    if default is dict:
        return field(default_factory=dict, metadata=about, hash=False)
    return field(default=default, metadata=about)
