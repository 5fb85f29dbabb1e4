"""A way to make a copy, path and CTAs, as options name it: `sm@8`, `ce`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hikv.measure import Candidate
from hikv.plan import CopyPlan
from hikv.transfers import PATHS

from .machine import Machine, Workload

ENGINE = "ce"


@dataclass(frozen=True)
class Way:
    """A path, and the CTAs it may occupy: 0 for one without a kernel."""

    path: str
    block_quota: int = 0

    def __str__(self) -> str:
        return f"{self.path}@{self.block_quota}" if self.block_quota else self.path

    def copy(self, machine: Machine, plan: CopyPlan) -> None:
        """Make the copy of `plan` this way."""
        machine.copy(plan, self.path, self.block_quota)

    def candidate(self, machine: Machine, work: Workload) -> Candidate:
        """This way as a candidate of `hikv.measure`."""
        return work.candidate(str(self), partial(self.copy, machine), machine)


def parse_ways(text: str) -> tuple[Way, ...]:
    """`"sm@2,sm@8,ce"`, for argparse."""
    return tuple(dict.fromkeys(_parse(item) for item in text.split(",")))


def _parse(item: str) -> Way:
    path, _, quota = item.partition("@")
    kernels = [name for name in PATHS if PATHS[name].block_quota]
    engines = [name for name in PATHS if name not in (*kernels, "cpu")]
    if (path in kernels and quota.isdecimal() and int(quota)) or (path in engines and not quota):
        return Way(path, int(quota or 0))
    known = ", ".join([*(f"{name}@CTAS" for name in kernels), *engines])
    raise argparse.ArgumentTypeError(f"expected {known}, got {item!r}")


def divide(
    machine: Machine, work: Workload, ways: Sequence[Way]
) -> tuple[list[Way], dict[str, str]]:
    """Those of `ways` that can make the copy here, and the reasons of the others by name."""
    reasons = {way: machine.obstacle(way.path, work.plans[0]) for way in ways}
    waived = {str(way): reason for way, reason in reasons.items() if reason is not None}
    return [way for way in ways if reasons[way] is None], waived


def complaints(waived: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes below a table: the ways that could not run, by name, and those with wrong bytes."""
    return [
        *(f"waived, {name}: {why}" for name, why in waived.items()),
        *(f"WRONG, {row['way']}: {row['wrong']}" for row in rows if row["wrong"]),
    ]
