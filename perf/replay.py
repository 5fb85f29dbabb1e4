"""Replay requests through real pools with real bytes: hits by tier, bytes moved, evictions.

Every page that a request reuses is compared with what it should hold. Nothing here is timed:
first-token times are estimates by a stated model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hikv.cache.config import HOST_RATIO
from hikv.cache.eviction import POLICIES
from hikv.errors import ArgumentError
from hikv.picture import check_picture

from . import sharded
from .case import positive, positive_number
from .output import Column, Table
from .player import Player, Row
from .plot import Series, draw
from .traces import WORKLOADS, Workload, make_workload, read_trace

_TRACES = """A trace is a file of one JSON object a line, as Mooncake publishes them, for example
  {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]}
timestamp in milliseconds; input_length in tokens; hash_ids one id a block of the prompt, equal
leading ids for an equal prefix. Other keys are not read. Made workloads, in blocks of 64 tokens:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf replay`."""
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _TRACES + "\n".join(f"  {name:<15}{what}" for name, what in WORKLOADS.items())
    add("trace", metavar="TRACE", help=f"a file, or a workload: {', '.join(WORKLOADS)}")
    add("--capacity", type=_capacities, default="0", metavar="N,…", help="GPU pages; 0 = unbounded")
    ratio = f"host pages a GPU page; default 0: no host tier, where a cache's own is {HOST_RATIO:g}"
    add("--host-ratio", type=float, default=0.0, metavar="RATIO", help=ratio)
    add("--policy", choices=POLICIES, default="lru", help="eviction, default lru")
    add("--granularity", choices=("segment", "page"), default="segment", help="what leaves at once")
    policies = ("write_through", "write_through_selective", "write_back")
    add("--write-policy", choices=policies, default="write_through", help="when L2 gets its copy")
    add("--block-tokens", type=positive, help="tokens of one id of a trace; default by its lengths")
    add("--cp", type=positive, metavar="N", help="compare pages sharded over N ranks with replicas")
    add("--layers", type=positive, default=61, metavar="L", help="of the model, for --cp's scratch")
    add("--json", action="store_true", help="one JSON object a capacity, instead of the table")
    add("--plot", type=Path, metavar="FILE", help="hit rate against capacity")
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The figures of the model that estimates first-token times."""
    add = parser.add_argument
    add(
        "--prefill-rate",
        type=positive_number,
        default=20_000.0,
        help="model: tokens computed a second",
    )
    add(
        "--h2d-gbps",
        type=positive_number,
        default=50.0,
        help="model: decimal GB/s from host to GPU",
    )
    add("--token-bytes", type=positive, default=163_840, help="model: bytes of a token's KV")


def _capacities(text: str) -> list[int]:
    pages = text.split(",")
    if not all(item.isdecimal() for item in pages):
        raise argparse.ArgumentTypeError(f"expected whole numbers from 0 on, got {text!r}")
    return [int(item) for item in pages]


def run(args: argparse.Namespace) -> int:
    """Print one row for each capacity. A wrong byte raises `HikvError`."""
    if args.plot is not None:
        check_picture(args.plot)
    path = Path(args.trace)
    made = args.trace in WORKLOADS and not path.exists()
    if not made and not path.is_file():
        raise ArgumentError(
            "trace",
            expected=f"a file, or one of {', '.join(WORKLOADS)}",
            got=args.trace,
            remedy="correct the path or the name",
        )
    workload = make_workload(args.trace) if made else read_trace(path, args.block_tokens)
    names = {"eviction": args.policy, "granularity": args.granularity}
    settings = names | {"write_policy": args.write_policy}
    if args.cp is not None:
        return sharded.run(workload, settings, args)
    rows = []
    for capacity in args.capacity:
        row = replay(workload, capacity, host_ratio=args.host_ratio, **settings)
        row["estimated_ttft_ms"] = estimate_of(row, workload, args)
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        print(table(workload, rows, args).terminal())
    if args.plot is not None:
        plot(workload, rows, args.plot)
    return 0


def replay(workload: Workload, capacity: int, *, host_ratio: float = 0.0, **settings: Any) -> Row:
    """Play `workload` on a cache of `capacity` GPU pages and count.

    Each request is matched and locked, loads back what the host holds, computes the rest, inserts
    its prompt and its output, and is released before the next one comes. The arguments are those of
    `Player`, and so is what is raised.
    """
    player = Player(workload, capacity, host_ratio, settings)
    row = player.play()
    player.finish()
    return row


def estimate_of(row: Row, workload: Workload, args: argparse.Namespace) -> float:
    """Mean milliseconds to the first token, modelled: see `model_note`.

    Loading is charged in full, as if no layer of it were hidden behind computing; queueing, storage
    and sampling are left out.
    """
    computed = (row["touches"] - row["hits"]) * workload.block_tokens / args.prefill_rate
    loaded_bytes = row["loaded"] * workload.block_tokens * args.token_bytes
    seconds = computed + loaded_bytes / (args.h2d_gbps * 1e9)
    return 1e3 * seconds / max(1, row["requests"])


def model_note(args: argparse.Namespace) -> str:
    """What the estimates rest on."""
    return (
        f"Estimated, not measured: computed tokens at {args.prefill_rate:,.0f} a second plus "
        f"loaded bytes ({args.token_bytes:,} B a token) at {args.h2d_gbps:g} GB/s; no overlap, "
        "no queue."
    )


def table(workload: Workload, rows: Sequence[Row], args: argparse.Namespace) -> Table:
    """The rows for people."""
    columns = [
        Column("capacity", "L1", group="pages"),
        Column("host_pages", "L2", group="pages"),
        Column("hits", "all", ",", group="hits"),
        Column("device_hits", "L1", ",", group="hits"),
        Column("loaded", "L2", ",", group="hits"),
        Column("hit_rate", "rate", ".1%", group="hits"),
        Column("backed_up", "backed up", ",", group="pages moved"),
        Column("loaded", "loaded", ",", group="pages moved"),
        Column("evicted_device", "L1", ",", group="evicted"),
        Column("evicted_host", "L2", ",", group="evicted"),
        Column("dropped", "lost", ",", group="evicted"),
        Column("estimated_ttft_ms", "TTFT ms, estimated", ",.1f"),
    ]
    notes = [
        f"A page is one block of {workload.block_tokens} tokens; L1 0 is unbounded. Every reused "
        "page was compared with the hash of its prefix.",
        model_note(args),
    ]
    title = (
        f"{workload.name}: {len(workload.arrivals):,} requests, {workload.touches:,} block "
        f"touches, {args.policy}, {args.granularity}, "
        f"{args.write_policy if args.host_ratio else 'no host tier'}"
    )
    return Table(title, columns, rows, notes)


def plot(workload: Workload, rows: Sequence[Row], file: Path) -> None:
    """Hit rate against GPU pages; an unbounded cache has a page for every block."""
    pages = [row["capacity"] or workload.blocks for row in rows]
    order = sorted(range(len(rows)), key=pages.__getitem__)
    series = [
        Series(label, [pages[i] for i in order], [rows[i][key] / rows[i]["touches"] for i in order])
        for label, key in (("L1 and L2", "hits"), ("L1", "device_hits"))
    ]
    draw(
        f"perf replay: {workload.name}",
        {f"{workload.touches:,} block touches": series},
        file,
        x="pages on the GPU",
        y="share of blocks reused",
    )
