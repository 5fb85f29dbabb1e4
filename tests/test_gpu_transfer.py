"""`hikv.transfer` on a GPU: every path, its fences, and what the handle reports."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import assert_bytes, check_copy, dense, head_specs, latent_specs, per_layer

import hikv
from hikv import KVBuffer, KVSpec
from hikv.transfers import PATHS, obstacle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
SPEC = KVSpec(4, 8, 64, 16, torch.bfloat16)
GPU_PATHS = [name for name in PATHS if name != "cpu"]
LONG = 200_000_000  # cycles that a blocked stream spins, a tenth of a second


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


def mover(path: str | None, **options):
    def run(src, dst, src_pages, dst_pages, *, layers):
        plan = hikv.plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
        if path is not None and (reason := obstacle(path, plan)):
            pytest.skip(reason)
        handle = hikv.transfer(
            src,
            dst,
            src_pages,
            dst_pages,
            layers=layers,
            path=path,
            after=torch.cuda.current_stream(),
            **options,
        )
        handle.synchronize()
        assert handle.done()
        assert path in (None, handle.path)
        return handle

    return run


@pytest.mark.parametrize("path", [None, *GPU_PATHS])
@pytest.mark.parametrize(("src_place", "dst_place"), [(to_gpu, to_pinned), (to_pinned, to_gpu)])
@pytest.mark.parametrize("host", ["page_first", "page_first_direct", "page_first_direct_group"])
def test_every_path_moves_the_same_bytes(path, src_place, dst_place, host):
    for spec in head_specs(torch.bfloat16):
        layouts = ("layer_first", host) if src_place is to_gpu else (host, "layer_first")
        src, dst = map(dense, layouts)
        check_copy(mover(path), spec, src, dst, src_place=src_place, dst_place=dst_place)


@pytest.mark.parametrize("path", ["sm", "ce", "staged"])
def test_an_engines_own_pool_and_latent_rows(path):
    for spec in itertools.chain(latent_specs(torch.bfloat16), [SPEC]):
        run = mover(path)
        host = dense("page_first")
        check_copy(run, spec, per_layer, host, src_place=to_gpu, dst_place=to_pinned)
        check_copy(run, spec, host, per_layer, src_place=to_pinned, dst_place=to_gpu)


@pytest.mark.parametrize("path", GPU_PATHS)
@pytest.mark.parametrize("as_event", [False, True])
def test_a_copy_waits_for_the_kernel_that_writes_the_page(path, as_event):
    gpu = KVBuffer.empty(SPEC, "layer_first", 4, device="cuda")
    host = KVBuffer.empty(SPEC, "page_first_direct", 4, pinned=True)
    memory, mirror = (b.regions[0].anchors[0, 0] for b in (gpu, host))
    memory.fill_(1)
    mirror.fill_(0)
    torch.cuda.synchronize()
    if reason := obstacle(path, hikv.plan_transfer(gpu, host, [3], [1])):
        pytest.skip(reason)
    compute, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(LONG)
        memory.fill_(7)
    fence = compute.record_event() if as_event else compute
    handle = hikv.transfer(gpu, host, [3], [1], path=path, after=fence, stream=side)
    handle.synchronize()
    got = host.logical([1]).view(torch.uint8).numpy()
    assert_bytes(got.ravel(), (got * 0 + 7).ravel(), f"page copied by {path}")


@pytest.mark.parametrize("path", ["sm", "ce"])
def test_a_load_waits_for_the_last_user_of_the_page(path):
    gpu = KVBuffer.empty(SPEC, "layer_first", 4, device="cuda")
    host = KVBuffer.empty(SPEC, "page_first_direct", 4, pinned=True)
    memory, mirror = (b.regions[0].anchors[0, 0] for b in (gpu, host))
    mirror.fill_(5)
    torch.cuda.synchronize()
    compute, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(LONG)
        memory.fill_(7)  # a launched step still writes the page that was freed
    handle = hikv.transfer(host, gpu, [0], [3], path=path, after=compute, stream=side)
    handle.synchronize()
    got = gpu.logical([3]).view(torch.uint8).cpu().numpy()
    assert_bytes(got.ravel(), (got * 0 + 5).ravel(), "page loaded back")


def test_layers_arrive_one_by_one():
    pool = KVBuffer.empty(SPEC, "layer_first", 4, device="cuda")
    host = KVBuffer.empty(SPEC, "page_first", 4, pinned=True)
    host.regions[0].anchors[0, 0].fill_(3)
    pool.regions[0].anchors[0, 0].fill_(0)
    torch.cuda.synchronize()
    side, compute = torch.cuda.Stream(), torch.cuda.Stream()
    handle = hikv.transfer(
        host, pool, [0, 1], [2, 3], path="sm", layerwise=True, after=None, stream=side
    )
    sums = []
    with torch.cuda.stream(compute):
        for layer in range(SPEC.num_layers):
            handle.wait_layer(layer)
            sums.append(pool.logical([2, 3])[:, layer].view(torch.uint8).min())
    handle.synchronize()
    torch.cuda.synchronize()
    assert [int(value) for value in sums] == [3] * SPEC.num_layers


def test_buffers_outlive_a_copy_whose_owner_dropped_them():
    spec = KVSpec(16, 8, 128, 64, torch.bfloat16)
    expected = torch.empty(0)
    for _ in range(3):
        host = KVBuffer.empty(spec, "page_first_direct", 4, pinned=True)
        host.regions[0].anchors[0, 0].random_(0, 256)
        pool = KVBuffer.empty(spec, "layer_first", 4, device="cuda")
        expected = host.logical([0])
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
        handle = hikv.transfer(host, pool, [0], [0], path="ce", after=None, stream=side)
        del host
        handle.synchronize()
        assert torch.equal(pool.logical([0]).cpu().view(torch.uint8), expected.view(torch.uint8))


def test_the_default_on_this_gpu_is_reported():
    gpu = KVBuffer.empty(SPEC, "layer_first", 4, device="cuda")
    host = KVBuffer.empty(SPEC, "page_first", 4, pinned=True)
    handle = hikv.transfer(gpu, host, [0], [0], after=torch.cuda.current_stream())
    assert handle.path in GPU_PATHS
    assert handle.config_source == "default"
    handle.wait()
    zero = hikv.transfer(gpu, host, [0], [0], after=torch.cuda.current_stream(), block_quota=0)
    assert (zero.path, zero.block_quota) == ("ce", 0)
    zero.synchronize()
