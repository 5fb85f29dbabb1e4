"""The copy-engine path: plans as descriptors, byte for byte, through the stand-in driver."""

from __future__ import annotations

import ctypes
import importlib
import itertools

import numpy as np
import pytest
import torch
from cases import (
    LATENT_PAIRS,
    PAIRS,
    check_copy,
    dense,
    engine_forms,
    head_specs,
    latent_specs,
    wide_specs,
)
from oracle import LATENT_ORDERS, ORDERS
from stub_driver import CONTEXT, STREAM, Stream, balanced

from hikv.buffer import KVBuffer
from hikv.driver import CudaDriver, CudaHostRegistry
from hikv.errors import DriverError, PathUnavailable, Unavailable
from hikv.host_memory import Budget
from hikv.kernels.copy_engine import copy_engine, descriptors, launch, split_at_borders, unavailable
from hikv.kernels.memcpy import BATCH, Descriptors
from hikv.pinned import allocate_pinned
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

module = importlib.import_module("hikv.kernels.copy_engine")


@pytest.fixture
def stub():
    yield from balanced()


@pytest.fixture
def run(stub):
    """`copy_engine` through the stub, done on return."""

    def run(src, dst, src_pages, dst_pages, *, layers=None, version=13000):
        plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
        submitted = launch(plan, stream=Stream(), driver=stub.driver(version))
        assert submitted.call == BATCH
        assert submitted.num_copies == plan.num_descriptors
        assert [(call.count, call.context) for call in stub.records()] == [
            (plan.num_descriptors, CONTEXT)
        ]
        stub.run()
        return plan

    return run


def copies(work):
    return list(zip(work.src.tolist(), work.dst.tolist(), work.nbytes.tolist(), strict=True))


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_rows_with_heads(run, src, dst):
    for seed, spec in enumerate([*head_specs(torch.bfloat16), *wide_specs(torch.uint8)]):
        check_copy(run, spec, dense(src), dense(dst), seed=seed)


@pytest.mark.parametrize(("src_grid", "dst_grid"), [(8, 2), (1, 4)])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_head_grids_that_nest(run, src, dst, src_grid, dst_grid):
    specs = [KVSpec(2, 8, 16, 3, torch.uint8, head_group=grid) for grid in (src_grid, dst_grid)]
    check_copy(run, specs[0], dense(src), dense(dst), dst_spec=specs[1], layers=(1, 2))


@pytest.mark.parametrize(("src", "dst"), LATENT_PAIRS)
def test_latent_rows(run, src, dst):
    for seed, spec in enumerate(latent_specs(torch.uint8)):
        check_copy(run, spec, dense(src), dense(dst), layers=range(1, 3), seed=seed)


@pytest.mark.parametrize("layers", [None, (1, 2), range(1, 3)])
def test_engine_pools(run, layers):
    specs = [*head_specs(torch.float16), *latent_specs(torch.float32), *wide_specs(torch.uint8)]
    for seed, spec in enumerate(specs):
        for engine in engine_forms(spec).values():
            for host in map(dense, LATENT_ORDERS if spec.latent else ORDERS):
                check_copy(run, spec, engine, host, layers=layers, seed=seed)
                check_copy(run, spec, host, engine, layers=layers, seed=seed)
            check_copy(run, spec, engine, engine, layers=layers, seed=seed)


def test_a_hundred_thousand_copies(run):
    spec = KVSpec(2, 2, 8, 5, torch.uint8)
    rng = np.random.default_rng(0)
    memory = torch.from_numpy(rng.integers(0, 256, 5003 * spec.bytes_per_page, dtype=np.uint8))
    src = KVBuffer.from_tensor(memory, spec, "layer_first")
    dst = KVBuffer.from_tensor(~memory, spec, "page_first")
    src_pages, dst_pages = rng.permutation(5003)[:5000], rng.permutation(5003)[:5000]
    kept = np.setdiff1d(np.arange(5003), dst_pages).tolist()
    before, want = dst.logical(kept), src.logical(src_pages.tolist())
    for version in (12080, 13000):
        plan = run(src, dst, src_pages, dst_pages, version=version)
        assert plan.num_descriptors == 100_000
        assert torch.equal(dst.logical(dst_pages.tolist()), want)
        assert torch.equal(dst.logical(kept), before)
        dst_pages = np.roll(dst_pages, 1)


def test_page_lists_may_be_overwritten_on_return(stub):
    spec = KVSpec(2, 2, 8, 2, torch.uint8)
    memory = torch.arange(9 * spec.bytes_per_page, dtype=torch.int32).to(torch.uint8)
    src = KVBuffer.from_tensor(memory, spec, "layer_first")
    dst = KVBuffer.from_tensor(~memory, spec, "page_first")
    src_pages, dst_pages = np.array([8, 3, 5]), torch.tensor([0, 7, 2], dtype=torch.int32)
    plan = plan_transfer(src, dst, src_pages, dst_pages)
    want = src.logical([8, 3, 5])
    launch(plan, stream=Stream(), driver=stub.driver())
    src_pages[:], dst_pages[:] = 1, 1
    stub.run()
    assert torch.equal(dst.logical([0, 7, 2]), want)


def test_consecutive_pages_join():
    spec = KVSpec(3, 2, 8, 4, torch.float16)
    pools = [KVBuffer.empty(spec, "page_unified", 8) for _ in range(2)]
    page = spec.bytes_per_page
    src, dst = (int(pool.regions[0].addresses[0, 0]) for pool in pools)
    plan = plan_transfer(*pools, [1, 2, 3, 6, 0, 7], [4, 5, 6, 7, 2, 3])
    # 3 → 6 and 6 → 7 go on at the destination alone, and so do 0 → 2 and 7 → 3.
    assert copies(descriptors(plan)) == [
        (src + 1 * page, dst + 4 * page, 3 * page),
        (src + 6 * page, dst + 7 * page, page),
        (src + 0 * page, dst + 2 * page, page),
        (src + 7 * page, dst + 3 * page, page),
    ]
    assert plan.num_descriptors == 4


@pytest.mark.parametrize("host", ORDERS)
@pytest.mark.parametrize("gpu", ["layer_first", "page_unified"])
def test_host_addresses_ascend_with_the_pages(host, gpu):
    spec = KVSpec(3, 4, 8, 2, torch.float16, head_group=2)
    host_pool = KVBuffer.empty(spec, host, 9)
    gpu_pool = KVBuffer.empty(spec, gpu, 9, device="meta")
    ascending, scattered = [0, 2, 3, 8], [7, 1, 0, 4]
    load_back = descriptors(plan_transfer(host_pool, gpu_pool, ascending, scattered))
    backup = descriptors(plan_transfer(gpu_pool, host_pool, scattered, ascending))
    assert (np.diff(load_back.src) > 0).all()
    assert (np.diff(backup.dst) > 0).all()
    # The two directions are the same copies turned round.
    swapped = Descriptors(backup.dst, backup.src, backup.nbytes)
    assert sorted(copies(load_back)) == sorted(copies(swapped))


def test_no_piece_crosses_a_border():
    rng = np.random.default_rng(1)
    src = np.sort(rng.integers(0, 5000, 50))
    work = Descriptors(src, 10_000 + src[::-1], rng.integers(1, 400, 50))
    # At random, and where copies begin and end: there is nothing to cut there.
    touching = [src[:5], src[5:10] + work.nbytes[5:10]]
    borders = np.unique(np.concatenate([rng.integers(0, 16_000, 60), *touching]))
    want = []
    for s, d, n in copies(work):
        inside = {0, n} | {b - at for at in (s, d) for b in borders.tolist() if at < b < at + n}
        want += [(s + lo, d + lo, hi - lo) for lo, hi in itertools.pairwise(sorted(inside))]
    assert len(want) > 60
    assert copies(split_at_borders(work, borders)) == want
    assert copies(split_at_borders(work, np.array([0, 20_000]))) == copies(work)


@pytest.mark.parametrize("version", [12080, 13000])
def test_copies_are_cut_at_registration_borders(stub, version, monkeypatch):
    spec, pages = KVSpec(5, 2, 64, 8, torch.uint8), 11
    page = spec.bytes_per_page
    driver = stub.driver(version)
    memory = allocate_pinned(
        pages * page,
        page_bytes=page,
        chunk_bytes=3 * page,
        register=CudaHostRegistry(CudaDriver(ctypes.CDLL(stub.path)), 0),
        numa_node=0,
        budget=Budget(1 << 30, 1 << 30, "test"),
    )
    # Layer by layer, every layer's pages in one run: a border falls wherever it likes.
    host = KVBuffer.from_tensor(memory.tensor, spec, "layer_first", pinned=True)
    content = torch.from_numpy(
        np.random.default_rng(2).integers(0, 256, pages * page, dtype=np.uint8)
    )
    device, kept = KVBuffer.from_tensor(content, spec, "layer_first"), content.clone()
    backup = plan_transfer(device, host, range(pages), range(pages))
    submitted = launch(backup, stream=Stream(), driver=driver)
    stub.run()
    assert len(memory.borders) > 3
    assert backup.num_descriptors == 10
    assert submitted.num_copies > 10
    assert torch.equal(memory.tensor, kept)

    returned = ~content
    back = KVBuffer.from_tensor(returned, spec, "layer_first")
    load_back = plan_transfer(host, back, range(pages), range(pages))
    launch(load_back, stream=Stream(), driver=driver)
    stub.run()
    assert torch.equal(returned, kept)

    monkeypatch.setattr(module, "_borders", lambda plan: np.empty(0, np.int64))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(load_back, stream=Stream(), driver=driver)


def test_graph_capture_is_refused(stub):
    spec = KVSpec(1, 1, 8, 1, torch.uint8, latent=True)
    src, dst = (KVBuffer.empty(spec, "page_first", 2) for _ in range(2))
    driver = stub.driver()
    stub.library.stub_capture(1)
    with pytest.raises(PathUnavailable, match="captured into a graph"):
        launch(plan_transfer(src, dst, [1], [0]), stream=Stream(), driver=driver)
    assert stub.records() == []


def test_public_launcher(stub, monkeypatch):
    driver = stub.driver()
    monkeypatch.setattr(module, "obstacle", lambda plan: None)
    monkeypatch.setattr(module, "memcpy_driver", lambda: driver)

    def run(*arguments, layers):
        plan = copy_engine(*arguments, layers=layers, block_quota=2, stream=Stream())
        stub.run()
        return plan

    spec = KVSpec(2, 2, 8, 2, torch.uint8)
    plan = check_copy(run, spec, dense("layer_first"), dense("page_first"), layers=(1, 2))
    assert plan.layers == (1, 2)
    assert [call.stream for call in stub.records()] == [STREAM]


def test_unreachable_memory_is_named(monkeypatch):
    spec = KVSpec(2, 2, 8, 2, torch.uint8)
    gpu = KVBuffer.empty(spec, "layer_first", 2, device="meta")
    pageable = KVBuffer.empty(spec, "page_first", 2)
    memory = torch.empty(2 * spec.bytes_per_page, dtype=torch.uint8)
    pinned = KVBuffer.from_tensor(memory, spec, "page_first", pinned=True)
    with pytest.raises(PathUnavailable, match="dst is pageable host memory"):
        copy_engine(gpu, pageable, [0], [1])
    with pytest.raises(PathUnavailable, match="src is pageable host memory"):
        copy_engine(pageable, gpu, [0], [1])
    with pytest.raises(PathUnavailable, match="neither side is on a GPU"):
        copy_engine(pinned, pageable, [0], [1])
    monkeypatch.setattr(module, "unavailable", lambda: "no driver today")
    with pytest.raises(PathUnavailable, match=r"'ce' is unavailable: no driver today"):
        copy_engine(gpu, pinned, [0], [1])


def test_a_machine_without_the_driver_says_why(monkeypatch):
    def missing():
        raise Unavailable("CUDA", "libcuda.so.1: not found", remedy="install the driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unavailable() == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "memcpy_driver", missing)
    assert "libcuda.so.1: not found" in str(unavailable())
    monkeypatch.setattr(module, "memcpy_driver", lambda: None)
    assert unavailable() is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert unavailable() == "ROCm has no CUDA driver"
