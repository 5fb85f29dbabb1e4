"""What sharding pages over ranks does to hits, with the same memory a rank both ways.

Replicated, every GPU holds the same pages, and the host memory of all ranks is one pool that holds
each page once, as latent rows allow. Sharded, a page is on one GPU and in one host's share, so the
GPUs together hold as many times the pages as there are ranks, less the scratch that each needs to
gather them, and the hosts hold as many as before.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hikv.cp.scratch import NUM_SLOTS

from .output import Column, Table
from .player import Player, Row
from .plot import Series, draw
from .traces import Workload

KINDS = ("replicated", "sharded")


def run(workload: Workload, settings: Mapping[str, Any], args: Namespace) -> int:
    """`perf replay --cp`: print one comparison for each capacity."""
    rows = []
    scratch = scratch_pages(workload, args.layers)
    for capacity in args.capacity:
        rows.append(
            compare(workload, capacity, args.cp, args.host_ratio, settings, scratch=scratch)
        )
        if args.json:
            print(json.dumps(rows[-1]), flush=True)
    if not args.json:
        print("\n\n\n".join(table.terminal() for table in tables(workload, rows, settings)))
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def compare(
    workload: Workload,
    capacity: int,
    num_ranks: int,
    host_ratio: float,
    settings: Mapping[str, Any],
    *,
    scratch: int = 0,
) -> Row:
    """Both ways for one size of a rank: `capacity` GPU pages, and host pages by `host_ratio`.

    `scratch`: GPU pages of each sharded rank that its gather takes. Raises as `Player` does.
    """
    size = (workload, capacity, host_ratio, settings)
    players = {
        "replicated": Player(*size, hosts=num_ranks),
        "sharded": Player(*size, num_ranks=num_ranks, scratch=scratch),
    }
    found: dict[str, Row] = {}
    for kind, player in players.items():
        found[kind] = _in_tokens(player.play(), workload.block_tokens)
        player.finish()
    own: Row = {"workload": workload.name, "ranks": num_ranks, "capacity": capacity}
    own["scratch_pages"] = scratch
    own["host_pages"] = found["sharded"].pop("host_pages")
    found["replicated"].pop("host_pages")
    return own | found | {"difference": _difference(*found.values())}


def scratch_pages(workload: Workload, layers: int) -> int:
    """Pages whose memory the gather's slots take, two layers of the longest request."""
    return -(-NUM_SLOTS * workload.longest // layers)


def _in_tokens(row: Row, block_tokens: int) -> Row:
    """The figures of a run, a page's tokens counted whole."""
    names = {
        "prompt_tokens": "touches",
        "gpu_hit_tokens": "device_hits",
        "host_served_tokens": "loaded",
        "hit_tokens": "hits",
        "backed_up_tokens": "backed_up",
    }
    tokens = {name: row[source] * block_tokens for name, source in names.items()}
    asked = max(1, tokens["prompt_tokens"])
    return tokens | {
        "requests": row["requests"],
        "host_pages": row["host_pages"],
        "gpu_hit_rate": tokens["gpu_hit_tokens"] / asked,
        "hit_rate": tokens["hit_tokens"] / asked,
    }


def _difference(replicated: Row, sharded: Row) -> Row:
    """Sharded less replicated; `None` where the latter is nothing to compare with."""
    points = {
        f"{name}_points": 100 * (sharded[name] - replicated[name])
        for name in ("gpu_hit_rate", "hit_rate")
    }
    return points | {
        f"{name}_percent": 100 * (sharded[name] / replicated[name] - 1)
        if replicated[name]
        else None
        for name in ("gpu_hit_tokens", "host_served_tokens", "hit_tokens")
    }


def tables(workload: Workload, rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Table]:
    """The figures, and their differences."""
    pages = [
        Column("capacity", "L1", group="pages a rank"),
        Column("host_pages", "L2", group="pages a rank"),
    ]
    figures = [
        *pages,
        Column("kind", "pages are"),
        Column("gpu", "L1", ",.1f", group="hits, 10⁶ tokens"),
        Column("host", "from L2", ",.1f", group="hits, 10⁶ tokens"),
        Column("all", "all", ",.1f", group="hits, 10⁶ tokens"),
        Column("gpu_hit_rate", "L1", ".2%", group="hit rate"),
        Column("hit_rate", "all", ".2%", group="hit rate"),
    ]
    differences = [
        *pages,
        Column("gpu_hit_rate_points", "L1", "+.2f", group="hit rate, points"),
        Column("hit_rate_points", "all", "+.2f", group="hit rate, points"),
        Column("gpu_hit_tokens_percent", "L1", "+.1f", group="hit tokens, %"),
        Column("host_served_tokens_percent", "from L2", "+.1f", group="hit tokens, %"),
        Column("hit_tokens_percent", "all", "+.1f", group="hit tokens, %"),
    ]
    ranks = rows[0]["ranks"]
    host = settings["write_policy"] if rows[0]["host_pages"] else "no host tier"
    title = (
        f"{workload.name} on {ranks} ranks: {len(workload.arrivals):,} requests, "
        f"{workload.touches * workload.block_tokens / 1e6:,.1f} · 10⁶ prompt tokens, "
        f"{settings['eviction']}, {settings['granularity']}, {host}"
    )
    return [
        Table(title, figures, [_figures(row, kind) for row in rows for kind in KINDS]),
        Table(
            "Sharded less replicated",
            differences,
            [row | row["difference"] for row in rows],
            _notes(workload, rows[0]),
        ),
    ]


def _figures(row: Row, kind: str) -> Row:
    found = row[kind]
    counted = {"gpu": "gpu_hit_tokens", "host": "host_served_tokens", "all": "hit_tokens"}
    return row | found | {"kind": kind} | {key: found[name] / 1e6 for key, name in counted.items()}


def _notes(workload: Workload, row: Row) -> list[str]:
    ranks, scratch = row["ranks"], row["scratch_pages"]
    return [
        f"A page is one block of {workload.block_tokens} tokens, counted whole; L1 0 is unbounded.",
        "Replicated: one cache stands for all ranks, which would do the same; its L2 is the host "
        f"memory of {ranks} ranks as one pool that holds each page once.",
        f"Sharded: {ranks} caches over pools of their own, told the same requests, exchange "
        "nothing. At every request they had the same page table, and every reused page was "
        f"compared, on its owner, with the hash of its prefix. Of its L1 a rank gives {scratch} "
        "pages for the gather's scratch, two layers of the longest request.",
        "Simulated: the ranks are caches in one process, both tiers lie in this host's memory, a "
        "page's content is that hash, and nothing is timed.",
    ]


def plot(rows: Sequence[Row], file: Path) -> None:
    """Hit rates against GPU pages of a rank, both ways; an unbounded cache is left out."""
    shown = sorted((row for row in rows if row["capacity"]), key=lambda row: row["capacity"])
    pages = [row["capacity"] for row in shown]
    panel = [
        Series(f"{kind}, {label}", pages, [row[kind][key] for row in shown])
        for kind in KINDS
        for label, key in (("L1 and L2", "hit_rate"), ("L1", "gpu_hit_rate"))
    ]
    name, ranks = rows[0]["workload"], rows[0]["ranks"]
    axes = {"x": "pages on each GPU", "y": "share of prompt tokens reused"}
    draw(f"perf replay --cp {ranks}: {name}", {"": panel}, file, **axes)
