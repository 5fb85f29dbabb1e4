"""The `p2p` back end on a real driver: two processes on one GPU, or one GPU each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hikv.buffer import KVBuffer
from hikv.cp.gather import ZeroSMGather
from hikv.cp.group import TorchGroup
from hikv.cp.plan import Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.cp.witness import device_work, kernels
from hikv.kernels.copy_engine import unavailable
from hikv.spec import KVSpec
from hikv.transfers import transfer
from perf.gather import measure_ranks
from perf.gather_places import Work

reason = unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]

MHA = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
MLA = KVSpec(
    num_layers=4, num_kv_heads=1, head_dim=576, page_size=16, dtype=torch.uint8, latent=True
)
LOCAL_PAGES = 64


def content(spec, owner):
    rng = np.random.default_rng([owner, spec.head_dim])
    nbytes = LOCAL_PAGES * spec.bytes_per_page
    memory = torch.from_numpy(rng.integers(0, 255, nbytes, np.uint8))
    return KVBuffer.from_tensor(memory, spec, "page_first_direct")


def gather_on_gpus(rank, num_ranks, gpus, specs):
    """Restore from pinned memory, gather, and read; kernels that ran, by name."""
    torch.cuda.set_device(gpus[rank])
    device = torch.device("cuda", gpus[rank])
    seen: set[str] = set()
    for spec in specs:
        shards = ShardMap(num_ranks, spec.page_size)
        pools = [content(spec, owner) for owner in range(num_ranks)]
        host = KVBuffer.empty(spec, "page_first_direct", LOCAL_PAGES, pinned=True)
        pages = np.arange(LOCAL_PAGES)
        transfer(pools[rank], host, pages, pages, after=None, path="cpu")
        pool = KVBuffer.empty(spec, "layer_first", LOCAL_PAGES, device=device)
        gather = ZeroSMGather(pool, shards, TorchGroup(), max_pages=128, backend="p2p")
        logical = np.random.default_rng(1).permutation(num_ranks * LOCAL_PAGES)[:40]
        plan = plan_gather(shards, [Request(logical, 40 * spec.page_size)])
        compute, load = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(3):
            gather.begin(plan)
            restore = transfer(
                host, pool, pages, pages, after=compute, path="ce", stream=load, layerwise=True
            )
            layers = []

            def read(gather=gather, restore=restore, layers=layers, compute=compute):
                gather.restored(after=restore)
                for layer in range(gather.spec.num_layers):
                    kv = gather.wait(layer, compute)
                    with torch.cuda.stream(compute):
                        layers.append([t.cpu() for t in (kv.k, kv.v) if t is not None])
                gather.end(compute)

            seen |= set(kernels(device_work(read, device)))
            for layer, tensors in enumerate(layers):
                for i, place in enumerate(plan.table(0).tolist()):
                    owner = shards.page_owner(int(logical[i]))
                    local = shards.local_page(int(logical[i]))
                    rows = pools[owner].logical([local])[0, layer]
                    found = torch.stack([t[place].reshape(rows[0].shape) for t in tensors])
                    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
        report = gather.report()
        assert report.engine == "copy engine"
        assert report.own_shard in report.own_shard_gbps
        gather.close()
    return sorted(seen)


def test_two_processes_on_one_gpu(tmp_path):
    seen = run_ranks(gather_on_gpus, 2, tmp_path / "store", [0, 0], [MHA, MLA])
    assert seen == [[], []], "no kernel ran beside the copies"


def test_the_benchmark_of_two_processes_on_one_gpu():
    work = Work(MLA, tokens=1000, rounds=2, backend="p2p", gpus=(0, 0), gemm=512, seconds=120.0)
    row = measure_ranks(work, 2)
    assert (row["wrong bytes"], row["kernels"]) == (0, [])
    assert row["waived"] == "NCCL takes one GPU a rank"
    assert row["hikv"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_for_each_process(tmp_path):
    gpus = list(range(min(torch.cuda.device_count(), 8)))
    seen = run_ranks(gather_on_gpus, len(gpus), tmp_path / "store", gpus, [MHA, MLA])
    assert seen == [[]] * len(gpus)


def gather_by_nccl(rank, num_ranks):
    """Both slots over three batches; the engine that the set-up found, and the bytes moved."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    shards = ShardMap(num_ranks, MHA.page_size)
    pools = [content(MHA, owner) for owner in range(num_ranks)]
    pool = KVBuffer.empty(MHA, "layer_first", LOCAL_PAGES, device=device)
    pages = np.arange(LOCAL_PAGES)
    host = KVBuffer.empty(MHA, "page_first_direct", LOCAL_PAGES, pinned=True)
    transfer(pools[rank], host, pages, pages, after=None, path="cpu")
    transfer(host, pool, pages, pages, after=None, path="ce").synchronize()
    gather = ZeroSMGather(pool, shards, TorchGroup(), max_pages=128, backend="nccl", allow_sm=True)
    logical = np.random.default_rng(1).permutation(num_ranks * len(pages))[:41]
    plan = plan_gather(shards, [Request(logical, 41 * MHA.page_size)])
    for _ in range(3):
        gather.begin(plan)
        gather.restored(after=torch.cuda.current_stream())
        for layer in range(MHA.num_layers):
            kv = gather.wait(layer)
            for place, page in zip(plan.table(0).tolist(), logical.tolist(), strict=True):
                rows = pools[shards.page_owner(page)].logical([shards.local_page(page)])[0, layer]
                found = torch.stack([t[place].cpu() for t in (kv.k, kv.v)])
                assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
        gather.end()
    engine = gather.report().engine
    gather.close()
    return engine


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_nccl_gathers_and_says_by_what(tmp_path):
    num_ranks = min(torch.cuda.device_count(), 8)
    engines = run_ranks(gather_by_nccl, num_ranks, tmp_path / "store")
    assert len(set(engines)) == 1
    assert engines[0] in ("copy engine", "sm")
