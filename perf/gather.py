"""Gather of sharded pages by ranks of one host, beside an all-gather of the same bytes.

Every rank is a process with a pool of its own, its pages scattered. One run gathers all layers of
one batch; the other is an all-gather of blocks that were packed beforehand at no cost: by NCCL
between GPUs, and by gloo on this CPU, which shows what the plan and the hand-shakes cost and says
nothing about a GPU. The gathered bytes are compared first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hikv.device import device_info, probe_failure
from hikv.errors import Unavailable
from hikv.spec import KVSpec

from .case import DTYPES, positive, positives
from .gather_places import Work
from .gather_ranks import HIKV, rank_row
from .output import Column, Report, Table, add_output_options, check_output_options
from .plot import Series, present
from .ranks import run_ranks
from .room import check_room

TOKENS = {"cpu": 16_384, "gpu": 131_072}
LAYERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf gather`."""
    add = parser.add_argument
    add("--ranks", type=positives, default=(2, 4), metavar="N,…", help="processes, default 2,4")
    add("--backend", choices=("host", "p2p", "nccl"), help="default p2p on GPUs, else host")
    add("--tokens", type=positive, metavar="N", help="of the prefix, default 16384, 131072 on GPUs")
    add("--page", type=positive, default=64, metavar="TOKENS", help="tokens a page, default 64")
    add("--layers", type=positive, default=LAYERS, metavar="N", help=f"default {LAYERS}")
    add("--heads", type=positive, metavar="H", help="K/V heads of 128; default latent rows")
    add("--mla", type=positive, default=1152, metavar="ROW_BYTES", help="latent rows, default 1152")
    add("--dtype", choices=DTYPES, default="bf16", help="of K/V heads, default bf16")
    add("--rounds", type=positive, default=9, metavar="N", help="timed runs each way, default 9")
    add("--gemm", type=positive, default=4096, metavar="N", help="rows of the GEMM beside, on GPUs")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 if any byte was wrong, a kernel was seen, or nothing could be measured.

    Kernels are no fault of `nccl`, which owns up to them.
    """
    check_output_options(args)
    rows = [measure_ranks(work_of(args, num_ranks), num_ranks) for num_ranks in args.ranks]
    present(_report(args, rows), args, lambda: {"": _series(rows)}, x="ranks")
    figures = [row for row in rows if "refused" not in row]
    return int(not figures or any(row["wrong bytes"] or row.get("kernels") for row in figures))


def work_of(args: argparse.Namespace, num_ranks: int) -> Work:
    """What so many ranks are to do; ranks share GPUs in turn where there are too few."""
    if args.heads:
        spec = KVSpec(args.layers, args.heads, 128, args.page, DTYPES[args.dtype])
    else:
        spec = KVSpec(args.layers, 1, args.mla, args.page, torch.uint8, latent=True)
    backend = args.backend or ("p2p" if device_info() is not None else "host")
    if backend != "host" and device_info() is None:
        what, reason = f"back end {backend!r}", str(probe_failure())
        raise Unavailable(what, reason, remedy="use --backend host")
    if backend == "host":
        work = Work(spec, args.tokens or TOKENS["cpu"], args.rounds)
        # The pools hold twice the prefix; every rank gathers two layers, and one more by the rival.
        batch = spec.pages_for(work.tokens) * spec.bytes_per_page
        remedy = "pass fewer --tokens, --layers or --ranks"
        check_room(2 * batch + 3 * num_ranks * batch // spec.num_layers, remedy)
        return work
    count = max(1, torch.cuda.device_count())
    gpus = tuple(rank % count for rank in range(num_ranks))
    tokens = args.tokens or TOKENS["gpu"]
    return Work(spec, tokens, args.rounds, backend, gpus, args.gemm)


def measure_ranks(work: Work, num_ranks: int) -> dict[str, Any]:
    """One row: `num_ranks` processes. Raises `GatherError` where they do not end in time."""
    row: dict[str, Any] = run_ranks(rank_row, num_ranks, work.seconds, work)
    return row


def _report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Report:
    work = work_of(args, rows[0]["ranks"])
    spec, place = work.spec, "between GPUs" if work.gpus else "on this CPU"
    return Report(
        "perf gather",
        f"measured {place}",
        f"{work.tokens} tokens on scattered pages of {spec.page_size}, {spec.num_layers} layers, "
        f"rows of {spec.bytes_per_token_layer} B a token, {work.rounds} rounds each way",
        "GB/s = 10⁹ payload bytes a second that each rank receives, its own shard included and "
        "padding not, hand-shakes included, until the slowest rank is done",
        device_info(),
        gather_tables(rows, work.backend, place),
    )


def gather_tables(rows: Sequence[dict[str, Any]], backend: str, place: str) -> list[Table]:
    """What all ranks received, and who read from whom at which rate."""
    rival = next((row["rival"] for row in rows if "rival" in row), "all-gather")
    shown = [row | {"sms": _kernels_in(row)} for row in rows if "refused" not in row]
    columns = [
        Column("ranks", "ranks"),
        Column("layer MiB", "MiB a layer", ".1f"),
        Column("copies", "copies a layer"),
        *(
            Column(key, title, ".2f", group=f"{way}, GB/s a rank")
            for way in (HIKV, rival)
            for key, title in ((f"{way} p10", "p10"), (way, "median"), (f"{way} p90", "p90"))
        ),
        Column("ratio", f"{HIKV} / {rival}", ".2f"),
    ]
    if any("kernels" in row and row["kernels"] is not None for row in shown):
        columns.append(Column("sms", "SM kernels"))
    if any(f"{HIKV} gemm" in row for row in shown):
        columns += [Column(f"{way} gemm", way, ".3f", "GEMM beside, ×") for way in (HIKV, rival)]
    columns.append(Column("wrong bytes", "wrong bytes"))
    title = f"{backend} back end beside {rival}'s all-gather, measured {place}"
    return [
        Table(title, columns, shown, _notes(rows, rival)),
        *(_matrix(row) for row in shown if row.get("by owner")),
    ]


def _kernels_in(row: dict[str, Any]) -> int | None:
    return None if row.get("kernels") is None else len(row["kernels"])


def _notes(rows: Sequence[dict[str, Any]], rival: str) -> list[str]:
    notes = [
        f"{HIKV} / {rival}: median over rounds of the ratio of the rates; above 1 hikv is faster. "
        f"{rival}'s blocks are packed beforehand and not timed; hikv reads scattered pages."
    ]
    for row in rows:
        at = f"{row['ranks']} ranks"
        if "refused" in row:
            notes.append(f"waived, {at}: {row['refused']}")
        if row.get("waived"):
            notes.append(f"waived, {row['rival']} with {at}: {row['waived']}")
        if row.get("own shard"):
            rates = ", ".join(f"{way} {gbps:.1f}" for way, gbps in row["own shard gbps"].items())
            notes.append(f"{at}: rank 0's own pages go {row['own shard']} (GB/s: {rates})")
        if row.get("kernels"):
            notes.append(f"SM KERNELS, {at}: {', '.join(row['kernels'])}")
    return notes


def _matrix(row: dict[str, Any]) -> Table:
    """Who reads from whom: batches of one owner's pages alone, which all ranks read at once."""
    owners = range(row["ranks"])
    columns = [
        Column("reader", "rank"),
        *(Column(f"owner {owner}", str(owner), ".2f", "reads from rank") for owner in owners),
    ]
    lines = [
        {"reader": reader} | {f"owner {owner}": gbps for owner, gbps in enumerate(rates)}
        for reader, rates in enumerate(row["by owner"])
    ]
    title = f"{row['ranks']} ranks, GB/s from each owner, all ranks reading at once"
    return Table(title, columns, lines, ["A rank's own pages are a copy within its memory."])


def _series(rows: Sequence[dict[str, Any]]) -> list[Series]:
    timed = [row for row in rows if "refused" not in row]
    ways = [HIKV, *dict.fromkeys(row["rival"] for row in timed if row["rival"] in row)]
    return [
        Series(
            f"{way}, GB/s a rank",
            [row["ranks"] for row in timed if way in row],
            [row[way] for row in timed if way in row],
            spread=[(row[f"{way} p10"], row[f"{way} p90"]) for row in timed if way in row],
        )
        for way in ways
    ]
