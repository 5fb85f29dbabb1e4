"""What each rank of `perf gather` does: the same on this CPU and on GPUs.

Every layer is compared with what its owners have before anything is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hikv.cp.gather import GatheredLayer, ZeroSMGather
from hikv.cp.group import TorchGroup
from hikv.cp.plan import GatherPlan, Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError, GatherError
from hikv.spec import KVSpec

from .gather_places import Gpu, Host, Place, Run, Work, filled_pool, pattern, slab_of

HIKV = "hikv"
BY_OWNER_ROUNDS = 3
GEMM_SECONDS = 0.05
GEMM_ROUNDS = 5
COVER = 1.25

Row = dict[str, Any]


class Bench:
    """A gather, its rival, and batches to run."""

    def __init__(self, work: Work, place: Place, group: TorchGroup) -> None:
        spec = work.spec
        self.work, self.place, self.group = work, place, group
        self.shards = ShardMap(group.size, spec.page_size)
        num_pages = spec.pages_for(work.tokens)
        own_pages = self.shards.local_pages(num_pages + group.size, 0) * 2
        pages = np.random.default_rng(0).permutation(group.size * own_pages)[:num_pages]
        self.plan = self._plan(pages)
        owners = self.shards.page_owner(pages)
        self.plans_by_owner = [self._plan(pages[owners == r]) for r in range(group.size)]
        self.gather = ZeroSMGather(
            filled_pool(spec, own_pages, group.rank, place),
            self.shards,
            group,
            max_pages=max(p.num_pages for p in (self.plan, *self.plans_by_owner)),
            backend=work.backend,
            timeout_s=work.seconds,
        )

    def _plan(self, pages: np.ndarray) -> GatherPlan:
        tokens = len(pages) * self.work.spec.page_size
        return plan_gather(self.shards, [Request(pages, tokens)])

    def run(
        self, plan: GatherPlan, look: Callable[[int, GatheredLayer], object] | None = None
    ) -> None:
        """One batch; `look` at every layer."""
        self.gather.begin(plan)
        self.gather.restored()
        for layer in range(self.work.spec.num_layers):
            gathered = self.gather.wait(layer)
            if look is not None:
                look(layer, gathered)
        self.gather.end()

    def wrong_bytes(self) -> int:
        """Bytes of a batch that are not their owners'."""
        wrong = 0

        def compare(layer: int, gathered: GatheredLayer) -> None:
            nonlocal wrong
            _, slab = slab_of(self.work.spec)
            for owner, pages in enumerate(self.plan.local_pages):
                places = torch.from_numpy(self.plan.block(owner)).to(self.place.device)
                for kv, tensor in enumerate((gathered.k, gathered.v)):
                    if tensor is not None:
                        found = tensor[places].view(torch.uint8).view(len(places), slab)
                        held = pattern(owner, pages, layer, kv, slab, self.place.device)
                        wrong += int((found != held).sum())

        self.run(self.plan, compare)
        return wrong

    def rival(self) -> Run:
        """The same batch by the rival, of blocks packed beforehand at no cost."""
        spec, rank = self.work.spec, self.group.rank
        kinds, slab = slab_of(spec)
        pages, length = self.plan.local_pages[rank], self.plan.block_pages
        device = self.place.device
        block = torch.zeros(kinds * length, slab, dtype=torch.uint8, device=device)
        for kv in range(kinds):
            rows = pattern(rank, pages, 0, kv, slab, device)
            block[kv * length : kv * length + len(pages)] = rows
        gathered = block.new_empty(self.group.size * len(block), slab)

        def batch() -> None:
            for _ in range(spec.num_layers):
                self.place.all_gather(gathered, block)

        return batch

    def time(self, run: Run) -> float:
        """Seconds from the moment at which all ranks begin until this rank has its bytes."""
        self.place.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        self.place.synchronize()
        return time.perf_counter() - start


def rank_row(rank: int, num_ranks: int, work: Work) -> Row:
    """One row of the table, of all ranks; `refused` says why there are no figures."""
    place: Place = Gpu(rank, work) if work.gpus else Host()
    group = TorchGroup()
    try:
        bench = Bench(work, place, group)
    except (ArgumentError, GatherError) as error:  # the same on every rank
        return {"ranks": num_ranks, "refused": str(error)}
    reasons = group.exchange(place.obstacle())
    waived = next((reason for reason in reasons if reason), None)
    if waived is None:
        place.open_rival()
    mine = measured(bench, None if waived else bench.rival())
    report = bench.gather.report()
    bench.gather.close()
    everybody = group.exchange(mine)
    spec, plan = work.spec, bench.plan
    nbytes = plan.gathered_pages * spec.bytes_per_page
    row = {
        "ranks": num_ranks,
        "layer MiB": nbytes / spec.num_layers / 2**20,
        "backend": report.backend,
        "engine": report.engine,
        "own shard": report.own_shard,
        "own shard gbps": report.own_shard_gbps,
        "copies": everybody[0]["copies"],
        "rival": place.rival,
        "waived": waived,
    }
    return row | summary(everybody, nbytes, place.rival, bench.plans_by_owner, spec)


def measured(bench: Bench, rival: Run | None) -> Row:
    """What one rank finds."""
    work, place, group = bench.work, bench.place, bench.group
    mine: Row = {"wrong": bench.wrong_bytes()}
    report = bench.gather.report()
    mine["copies"] = report.copies // report.layers
    batch = partial(bench.run, bench.plan)
    mine["kernels"] = place.kernels(batch)
    ways: dict[str, Run] = {HIKV: batch}
    if rival is not None:
        ways[place.rival] = rival
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(work.rounds):
        for name in list(ways) if turn % 2 else reversed(ways):
            seconds[name].append(bench.time(ways[name]))
    mine["seconds"] = seconds
    mine["by owner"] = [
        float(np.median([bench.time(partial(bench.run, plan)) for _ in range(BY_OWNER_ROUNDS)]))
        for plan in bench.plans_by_owner
    ]
    if work.gemm:
        middle = {name: float(np.median(found)) for name, found in seconds.items()}
        mine["gemm"] = beside(place, group, ways, middle)
    return mine


def beside(
    place: Place, group: TorchGroup, ways: Mapping[str, Run], seconds: Mapping[str, float]
) -> dict[str, float]:
    """How many times as long GEMMs take beside each way; all ranks make equally many batches.

    `seconds`: of a batch of each way with nothing beside it.
    """
    place.compute(3, None)
    once = place.compute(10, None) / 10
    repeats = max(1, math.ceil(GEMM_SECONDS / once))
    needed = {name: math.ceil(COVER * repeats * once / seconds[name]) + 1 for name in ways}
    batches = {name: max(told[name] for told in group.exchange(needed)) for name in ways}

    def many(name: str) -> Run:
        def batch() -> None:
            for _ in range(batches[name]):
                ways[name]()

        return batch

    runs: dict[str | None, Run | None] = {None: None} | {name: many(name) for name in ways}
    found: dict[str | None, list[float]] = {name: [] for name in runs}
    for _ in range(GEMM_ROUNDS):
        for name, run in runs.items():
            group.exchange(None)
            found[name].append(place.compute(repeats, run))
    alone = float(np.median(found[None]))
    return {name: float(np.median(found[name])) / alone for name in ways}


def summary(
    everybody: list[Row],
    nbytes: int,
    rival: str,
    by_owner: list[GatherPlan],
    spec: KVSpec,
) -> Row:
    """What all ranks found, as figures. A round lasts until its slowest rank is done."""
    row: Row = {"wrong bytes": sum(mine["wrong"] for mine in everybody)}
    seen = [mine["kernels"] for mine in everybody]
    row["kernels"] = None if None in seen else sorted({name for names in seen for name in names})
    slowest = {
        way: np.max([mine["seconds"][way] for mine in everybody], axis=0)
        for way in everybody[0]["seconds"]
    }
    for way, seconds in slowest.items():
        low, middle, high = np.percentile(nbytes / seconds / 1e9, (10, 50, 90)).tolist()
        row |= {f"{way} p10": low, way: middle, f"{way} p90": high}
    if rival in slowest:
        row["ratio"] = float(np.median(slowest[rival] / slowest[HIKV]))
    sizes = [plan.gathered_pages * spec.bytes_per_page for plan in by_owner]
    row["by owner"] = [
        [size / seconds / 1e9 for size, seconds in zip(sizes, mine["by owner"], strict=True)]
        for mine in everybody
    ]
    if "gemm" in everybody[0]:
        for way in everybody[0]["gemm"]:
            row[f"{way} gemm"] = float(np.max([mine["gemm"][way] for mine in everybody]))
    return row
