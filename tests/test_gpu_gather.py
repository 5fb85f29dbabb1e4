"""The `p2p` back end on a real driver: two processes on one GPU, or one GPU each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks

from hikv.buffer import KVBuffer
from hikv.cp.gather import ZeroSMGather
from hikv.cp.group import TorchGroup
from hikv.cp.plan import Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.kernels.copy_engine import unavailable
from hikv.spec import KVSpec
from hikv.transfers import transfer

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
    kernels: set[str] = set()
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
            activities = [torch.profiler.ProfilerActivity.CUDA]
            gather.begin(plan)
            restore = transfer(
                host, pool, pages, pages, after=compute, path="ce", stream=load, layerwise=True
            )
            with torch.profiler.profile(activities=activities) as profile:
                gather.restored(after=restore)
                layers = []
                for layer in range(spec.num_layers):
                    kv = gather.wait(layer, compute)
                    with torch.cuda.stream(compute):
                        layers.append([t.cpu() for t in (kv.k, kv.v) if t is not None])
                gather.end(compute)
            kernels |= {
                event.name
                for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
                and not event.name.startswith(("Memcpy", "Memset"))
            }
            for layer, tensors in enumerate(layers):
                for i, place in enumerate(plan.table(0).tolist()):
                    owner = shards.page_owner(int(logical[i]))
                    local = shards.local_page(int(logical[i]))
                    rows = pools[owner].logical([local])[0, layer]
                    found = torch.stack([t[place].reshape(rows[0].shape) for t in tensors])
                    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
        assert gather.report().engine == "copy engine"
        gather.close()
    return sorted(kernels)


def test_two_processes_on_one_gpu(tmp_path):
    kernels = run_ranks(gather_on_gpus, 2, tmp_path / "store", [0, 0], [MHA, MLA])
    assert kernels == [[], []], "no kernel ran beside the copies"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_for_each_process(tmp_path):
    gpus = list(range(min(torch.cuda.device_count(), 8)))
    kernels = run_ranks(gather_on_gpus, len(gpus), tmp_path / "store", gpus, [MHA, MLA])
    assert all(seen == [] for seen in kernels)
