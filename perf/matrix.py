"""The matrix of an experiment: GPU alone, then L2 under each write policy, two rounds of each set.

Round 1 fills the cache, round 2 shows the reuse. Every reused page is compared with its prefix.
Replayed, not timed: first-token times are estimates by the model of `perf replay`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .case import positive_number
from .output import Column, Table
from .player import Player, Row
from .replay import add_model_options, estimate_of, model_note
from .traces import WORKLOADS, make_workload

CONFIGURATIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "off": (0.0, {}),
    "L2, write_back": (1.0, {"write_policy": "write_back"}),
    "L2, selective": (1.0, {"write_policy": "write_through_selective"}),
    "L2, write_through": (1.0, {"write_policy": "write_through"}),
}
"""By name: whether there is a host tier, and settings. Rows with storage need an adapter."""
SETS = tuple(name for name in WORKLOADS if len(name) == 1)
ROUNDS = (1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf matrix`."""
    add = parser.add_argument
    names = ",".join(SETS)
    add("--sets", type=_sets, default=names, metavar="NAME,…", help=f"default {names}")
    add(
        "--gpu-share",
        type=positive_number,
        default=0.4,
        help="GPU pages a block of the set, default 0.4",
    )
    add("--host-ratio", type=float, default=2.0, help="host pages a GPU page, default 2")
    add("--json", action="store_true", help="one JSON object a row, instead of the table")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a set, configuration and round. A wrong byte raises `HikvError`."""
    rows = [row for name in args.sets for row in play_set(name, args)]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    columns = [
        Column("workload", "set"),
        Column("configuration", "HiCache"),
        Column("round", "round"),
        Column("device_hits", "L1", ",", group="reused pages"),
        Column("loaded", "L2", ",", group="reused pages"),
        Column("hit_rate", "rate", ".1%", group="reused pages"),
        Column("backed_up", "backed up", ",", group="pages moved"),
        Column("evicted_device", "L1", ",", group="evicted"),
        Column("evicted_host", "L2", ",", group="evicted"),
        Column("estimated_ttft_ms", "TTFT ms, estimated", ",.1f"),
    ]
    title = f"GPU pages for {args.gpu_share:.0%} of a set's blocks, host × {args.host_ratio:g}"
    print(Table(title, columns, rows, [__doc__ or "", model_note(args)]).terminal())
    return 0


def _sets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(WORKLOADS)}, got {unknown[0]!r}")
    return names


def play_set(name: str, args: argparse.Namespace) -> list[Row]:
    """Both rounds of one set under every configuration."""
    workload, rows = make_workload(name), []
    pages = max(workload.longest, int(workload.blocks * args.gpu_share))
    for label, (tier, settings) in CONFIGURATIONS.items():
        player = Player(workload, pages, tier * args.host_ratio, settings)
        for number in ROUNDS:
            row = player.play() | {"configuration": label, "round": number}
            rows.append(row | {"estimated_ttft_ms": estimate_of(row, workload, args)})
        player.finish()
    return rows
