"""Gather of sharded pages by ranks on this CPU, beside an all-gather of the same bytes.

Every rank is a process with a pool of its own in shared memory, its pages scattered. One run
gathers all layers of one batch through the `host` back end; the other is an all-gather over gloo,
of blocks that were packed beforehand at no cost. The gathered bytes are compared first. This shows
what the plan and the hand-shakes cost; it says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from hikv.buffer import KVBuffer
from hikv.cp.gather import ZeroSMGather
from hikv.cp.group import TorchGroup
from hikv.cp.plan import GatherPlan, Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.cp.shared_memory import shared_host_memory
from hikv.device import device_info
from hikv.errors import GatherError
from hikv.spec import KVSpec

from .case import DTYPES, positive
from .output import Column, Report, Table, add_output_options, check_output_options
from .plot import Series, present

TIMEOUT_S = 120


@dataclass(frozen=True)
class Workload:
    """What all ranks gather, `rounds` times each way."""

    spec: KVSpec
    tokens: int
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `perf gather`."""
    add = parser.add_argument
    add("--ranks", type=_ranks, default=(2, 4), metavar="N,…", help="processes, default 2,4")
    add("--tokens", type=positive, default=16384, metavar="N", help="of the prefix, default 16384")
    add("--page", type=positive, default=64, metavar="TOKENS", help="tokens a page, default 64")
    add("--layers", type=positive, default=8, metavar="N", help="default 8")
    add("--heads", type=positive, metavar="H", help="K/V heads of 128; default latent rows")
    add("--mla", type=positive, default=1152, metavar="ROW_BYTES", help="latent rows, default 1152")
    add("--dtype", choices=DTYPES, default="bf16", help="of K/V heads, default bf16")
    add("--rounds", type=positive, default=9, metavar="N", help="timed runs each way, default 9")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if any byte was wrong."""
    check_output_options(args)
    if args.heads:
        spec = KVSpec(args.layers, args.heads, 128, args.page, DTYPES[args.dtype])
    else:
        spec = KVSpec(args.layers, 1, args.mla, args.page, torch.uint8, latent=True)
    work = Workload(spec, args.tokens, args.rounds)
    rows = [measure_ranks(work, num_ranks) for num_ranks in args.ranks]
    present(_report(work, rows), args, lambda: {"": _series(rows)}, x="ranks")
    return int(any(row["wrong bytes"] for row in rows))


def measure_ranks(work: Workload, num_ranks: int) -> dict[str, Any]:
    """One row: `num_ranks` processes. Raises `GatherError` where they do not end in time."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        ranks = spawn(_rank, (num_ranks, store, work, answers), nprocs=num_ranks, join=False)
        until = time.monotonic() + 2 * TIMEOUT_S
        while not ranks.join(timeout=1.0):
            if time.monotonic() > until:
                for process in ranks.processes:
                    process.kill()
                raise GatherError("the ranks did not end in time", remedy="measure less")
        row: dict[str, Any] = answers.get()
        return row


def _rank(rank: int, num_ranks: int, store: str, work: Workload, answers: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    shards, group = ShardMap(num_ranks, work.spec.page_size), TorchGroup()
    num_pages = work.spec.pages_for(work.tokens)
    own_pages = shards.local_pages(num_pages + num_ranks, 0) * 2
    memory = shared_host_memory(own_pages * work.spec.bytes_per_page)
    memory.random_(generator=torch.Generator().manual_seed(rank))
    pool = KVBuffer.from_tensor(memory, work.spec, "layer_first")
    scattered = np.random.default_rng(0).permutation(num_ranks * own_pages)[:num_pages]
    plan = plan_gather(shards, [Request(scattered, num_pages * work.spec.page_size)])
    gather = ZeroSMGather(
        pool, shards, group, max_pages=plan.num_pages, backend="host", timeout_s=TIMEOUT_S
    )
    # Every layer's block of this rank, packed and padded as the scratch holds it.
    block = _block(pool, plan, rank)
    gathered = [torch.empty_like(block[0]) for _ in range(num_ranks)]

    wrong = 0
    gather.begin(plan)
    gather.restored()
    for layer in range(work.spec.num_layers):
        dist.all_gather(gathered, block[layer])
        wrong += _wrong_bytes(gather.wait(layer), gathered, plan)
    gather.end()

    def by_gather() -> None:
        gather.begin(plan)
        gather.restored()
        for layer in range(work.spec.num_layers):
            gather.wait(layer)
        gather.end()

    def by_gloo() -> None:
        for layer in range(work.spec.num_layers):
            dist.all_gather(gathered, block[layer])

    seconds: dict[str, list[float]] = {"hikv": [], "gloo": []}
    for turn in range(work.rounds):
        ways = [("hikv", by_gather), ("gloo", by_gloo)]
        for name, way in ways if turn % 2 else reversed(ways):
            dist.barrier()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    report = gather.report()
    gather.close()
    everybody = group.exchange((seconds, wrong))
    if rank == 0:
        answers.put(_row(work, plan, report, everybody))
    dist.barrier()


def _block(pool: KVBuffer, plan: GatherPlan, rank: int) -> torch.Tensor:
    """`[layer, kv, block page, bytes]` of this rank's pages, zero where padded."""
    spec, pages = pool.spec, plan.local_pages[rank]
    kv = spec.components[0].kv
    rows = (
        pool.logical(pages.tolist()).view(torch.uint8).reshape(len(pages), spec.num_layers, kv, -1)
    )
    block = torch.zeros(spec.num_layers, kv, plan.block_pages, rows.shape[-1], dtype=torch.uint8)
    block[:, :, : len(pages)] = rows.permute(1, 2, 0, 3)
    return block


def _wrong_bytes(layer: Any, gathered: list[torch.Tensor], plan: GatherPlan) -> int:
    wrong = 0
    for owner, block in enumerate(gathered):
        places = torch.from_numpy(plan.block(owner))
        for tensor, expected in zip((layer.k, layer.v), block, strict=False):
            found = tensor[places].view(torch.uint8).reshape(len(places), -1)
            wrong += int((found != expected[: len(places)]).sum())
    return wrong


def _row(work: Workload, plan: GatherPlan, report: Any, everybody: list[Any]) -> dict[str, Any]:
    """A round lasts until its slowest rank is done."""
    spec = work.spec
    nbytes = plan.gathered_pages * spec.bytes_per_page
    row: dict[str, Any] = {
        "ranks": plan.shards.num_ranks,
        "layer MiB": nbytes / spec.num_layers / 2**20,
        "copies": report.copies // report.layers,
        "engine": report.engine,
        "wrong bytes": sum(wrong for _, wrong in everybody),
    }
    slowest = {
        way: np.max([seconds[way] for seconds, _ in everybody], axis=0) for way in ("hikv", "gloo")
    }
    for way, seconds in slowest.items():
        low, middle, high = np.percentile(nbytes / seconds / 1e9, (10, 50, 90))
        row |= {f"{way} p10": low, way: middle, f"{way} p90": high}
    ratios = slowest["gloo"] / slowest["hikv"]
    row["ratio"] = float(np.median(ratios))
    return row


def _report(work: Workload, rows: list[dict[str, Any]]) -> Report:
    spec = work.spec
    table = Table(
        "measured on this CPU: host back end beside gloo's all-gather",
        [
            Column("ranks", "ranks"),
            Column("layer MiB", "MiB a layer", ".1f"),
            Column("copies", "copies a layer"),
            *(
                Column(key, title, ".2f", group=f"{way}, GB/s a rank")
                for way in ("hikv", "gloo")
                for key, title in ((f"{way} p10", "p10"), (way, "median"), (f"{way} p90", "p90"))
            ),
            Column("ratio", "hikv / gloo", ".2f"),
            Column("wrong bytes", "wrong bytes"),
        ],
        rows,
        [
            "hikv / gloo: median over rounds of the ratio of the rates; above 1 hikv is faster.",
            "gloo's blocks are packed beforehand and not timed; hikv reads scattered pages.",
        ],
    )
    rows_of = f"rows of {spec.bytes_per_token_layer} B"
    return Report(
        "perf gather",
        "measured on the CPU",
        f"{work.tokens} tokens on scattered pages of {spec.page_size}, {spec.num_layers} layers, "
        f"{rows_of} a token, {work.rounds} rounds each way",
        "GB/s = 10⁹ payload bytes a second that each rank receives, its own shard included and "
        "padding not, until the slowest rank is done",
        device_info(),
        [table],
    )


def _series(rows: list[dict[str, Any]]) -> list[Series]:
    ranks = [row["ranks"] for row in rows]
    return [
        Series(
            f"{way}, GB/s a rank",
            ranks,
            [row[way] for row in rows],
            spread=[(row[f"{way} p10"], row[f"{way} p90"]) for row in rows],
        )
        for way in ("hikv", "gloo")
    ]


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(positive(item) for item in text.split(","))
