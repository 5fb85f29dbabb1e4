"""Strided boxes of the copy engine: which boxes, byte for byte, through the stand-in driver."""

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
    gaps,
    head_specs,
    heads_first,
    latent_specs,
    per_layer,
    wide_specs,
)
from oracle import LATENT_ORDERS, ORDERS
from stub_driver import CONTEXT, DEVICE, STREAM, Stream, balanced

from hikv.buffer import KVBuffer
from hikv.driver import CudaDriver, CudaHostRegistry
from hikv.errors import DriverError, PathUnavailable
from hikv.host_memory import Budget
from hikv.kernels.copy_boxes import boxes, copy_boxes, launch, split_boxes
from hikv.kernels.memcpy import BATCH_3D, SINGLE_3D, BoxCopies, new_boxes
from hikv.pinned import allocate_pinned
from hikv.plan import plan_transfer
from hikv.shapes import MAX_PITCH, no_rows, num_boxes
from hikv.spec import KVSpec
from hikv.transfers import PATHS

module = importlib.import_module("hikv.kernels.copy_boxes")
engine = importlib.import_module("hikv.kernels.copy_engine")

# Drivers with either signature, and one with neither.
VERSIONS = (12080, 13000, 12040)


@pytest.fixture
def stub():
    yield from balanced()


@pytest.fixture
def run(stub):
    """`copy_boxes` through the stub, done on return; every driver in turn."""
    versions = itertools.cycle(VERSIONS)

    def run(src, dst, src_pages, dst_pages, *, layers=None, max_pitch=MAX_PITCH):
        plan, version = plan_transfer(src, dst, src_pages, dst_pages, layers=layers), next(versions)
        driver = stub.driver(version)
        stub.library.stub_max_pitch(max_pitch)
        submitted = launch(plan, stream=Stream(), driver=driver)
        assert submitted.call == (BATCH_3D if version >= 12080 else SINGLE_3D)
        assert submitted.num_copies == len(stub.pending()) == len(boxes(plan, max_pitch))
        assert submitted.num_copies <= plan.num_descriptors
        assert {call.context for call in stub.records()} == {CONTEXT}
        stub.run()
        return plan

    return run


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_rows_with_heads(run, src, dst):
    for seed, spec in enumerate([*head_specs(torch.bfloat16), *wide_specs(torch.uint8)]):
        check_copy(run, spec, dense(src), dense(dst), seed=seed)


@pytest.mark.parametrize(("src_grid", "dst_grid"), [(8, 2), (1, 4)])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_head_grids_that_nest(run, src, dst, src_grid, dst_grid):
    specs = [KVSpec(3, 8, 16, 3, torch.uint8, head_group=grid) for grid in (src_grid, dst_grid)]
    check_copy(run, specs[0], dense(src), dense(dst), dst_spec=specs[1], layers=(1, 3))


@pytest.mark.parametrize(("src", "dst"), LATENT_PAIRS)
def test_latent_rows(run, src, dst):
    for seed, spec in enumerate(latent_specs(torch.uint8)):
        check_copy(run, spec, dense(src), dense(dst), layers=range(1, 3), seed=seed)


@pytest.mark.parametrize("layers", [None, range(1, 3)])
def test_engine_pools(run, layers):
    specs = [*head_specs(torch.float16), *latent_specs(torch.float32), *wide_specs(torch.uint8)]
    for seed, spec in enumerate(specs):
        for form in engine_forms(spec).values():
            for host in map(dense, LATENT_ORDERS if spec.latent else ORDERS):
                check_copy(run, spec, form, host, layers=layers, seed=seed)
                check_copy(run, spec, host, form, layers=layers, seed=seed)
            check_copy(run, spec, form, form, layers=layers, seed=seed)


@pytest.mark.parametrize(("src", "dst"), [*PAIRS, ("gaps", "page_first"), ("page_first", "gaps")])
def test_stretches_of_consecutive_pages(run, src, dst):
    spec = KVSpec(3, 4, 8, 4, torch.uint8, head_group=2)
    pools = {name: dense(name) for name in ORDERS} | {"gaps": gaps}
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 256, (12, 3, 4, 4, 8), dtype=np.uint8) for _ in range(4)]
    source = pools[src](spec, rows[:2], lambda tensor: tensor)
    target = pools[dst](spec, rows[2:], lambda tensor: tensor)
    for ids in ([2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 4], [0, 2, 4, 6]):
        paired = [i + 1 for i in ids]
        want = target.buffer.logical(range(12))
        want[paired] = source.buffer.logical(ids)
        run(source.buffer, target.buffer, ids, paired)
        assert torch.equal(target.buffer.logical(range(12)), want)


def meta(spec, layout, num_pages=64):
    """A pool of which only addresses are taken."""
    return KVBuffer.empty(spec, layout, num_pages, device="meta")


HEADS = KVSpec(3, 8, 16, 4, torch.bfloat16, head_group=2)
WHOLE = KVSpec(3, 8, 16, 4, torch.bfloat16)
LATENT = KVSpec(3, 1, 576, 4, torch.uint8, latent=True)


@pytest.mark.parametrize(
    ("spec", "src", "dst", "count", "extents"),
    [
        # Tokens are the rows and layers the layers: a box for K and V of each of 4 groups.
        (HEADS, "layer_first", "page_first_direct_group", 8, (3, 4, 64)),
        (HEADS, "page_first_direct_group", "layer_first", 8, (3, 4, 64)),
        # Layers of a page are the rows; K and V the layers.
        (WHOLE, "layer_first", "page_first_direct", 1, (2, 3, 1024)),
        # Tokens by K and V: a layer each, since a layer steps by less than a row of tokens.
        (WHOLE, "layer_first", "page_first", 3, (2, 4, 256)),
        # K and V alternate within a layer, and are apart in the other pool.
        (WHOLE, "layer_first", "page_unified", 2, (1, 3, 1024)),
        # Heads by K and V, a box for each token of each layer.
        (WHOLE, "layer_first", "page_head", 12, (2, 8, 32)),
        (LATENT, "layer_first", "page_first", 3, (1, 4, 576)),
        (LATENT, "layer_first", "page_first_direct", 1, (1, 3, 2304)),
    ],
)
def test_the_fewest_boxes(spec, src, dst, count, extents):
    scattered, others = [1, 7, 30, 4], [9, 3, 60, 11]
    plan = plan_transfer(meta(spec, src), KVBuffer.empty(spec, dst, 64), scattered, others)
    found = boxes(plan).boxes
    assert len(found) == num_boxes(plan) == 4 * count
    assert {(int(b["depth"]), int(b["height"]), int(b["width"])) for b in found} == {extents}
    assert no_rows(plan) is None


@pytest.mark.parametrize(
    ("src", "dst", "count", "extents"),
    [
        ("layer_first", "layer_first", 1, (1, 2 * 3, 5 * 1024)),  # the run goes on
        ("layer_first", "page_first", 3, (2, 5 * 4, 256)),  # tokens go on
        ("page_first_direct", "page_first_direct", 1, (1, 2, 5 * 3 * 1024)),
        ("layer_first", "page_unified", 2 * 3, (1, 5, 1024)),  # pages are the rows
    ],
)
def test_consecutive_pages_share_boxes(src, dst, count, extents):
    host = KVBuffer.empty(WHOLE, dst, 64)
    plan = plan_transfer(meta(WHOLE, src), host, range(2, 7), range(9, 14))
    found = boxes(plan).boxes
    assert len(found) == num_boxes(plan) == count
    assert {(int(b["depth"]), int(b["height"]), int(b["width"])) for b in found} == {extents}


def test_loops_are_joined_only_as_far_as_it_pays():
    """Heads before tokens, in groups of 2 on one side and of 6 on the other."""
    spec, coarse = (
        KVSpec(1, 12, 20, 3, torch.uint8, head_group=group, v_head_dim=16) for group in (2, 6)
    )
    rows = [np.zeros((13, 1, 3, 12, width), np.uint8) for width in (20, 16)]
    pool = heads_first(spec, rows, lambda tensor: tensor).buffer
    plan = plan_transfer(pool, KVBuffer.empty(coarse, "page_unified", 13), [4, 5, 6], [7, 8, 9])
    found = boxes(plan).boxes
    # The heads of a group of 6 are the rows, and for V pages the layers: 1296 B is a multiple of a
    # row of 16 B, not of one of 20 B. Were groups joined to pages too, V would have 18 boxes.
    k, v = (found[found["width"] == width] for width in (20, 16))
    assert {(int(b["depth"]), int(b["height"])) for b in k} == {(1, 6)}
    assert {(int(b["depth"]), int(b["height"])) for b in v} == {(3, 6)}
    assert (len(k), len(v)) == (3 * 2 * 3, 2 * 3)


@pytest.mark.parametrize("host", ORDERS)
def test_host_addresses_ascend_with_the_pages(host):
    spec = KVSpec(3, 4, 8, 2, torch.float16, head_group=2)
    host_pool, gpu_pool = KVBuffer.empty(spec, host, 9), meta(spec, "layer_first", 9)
    ascending, scattered = [0, 2, 4, 8], [7, 1, 0, 4]
    load_back = boxes(plan_transfer(host_pool, gpu_pool, ascending, scattered)).boxes
    backup = boxes(plan_transfer(gpu_pool, host_pool, scattered, ascending)).boxes
    assert (np.diff(load_back["src"]["address"]) > 0).all()
    assert (np.diff(backup["dst"]["address"]) > 0).all()


def test_rows_no_further_apart_than_the_driver_takes(run):
    spec = WHOLE
    row, pages = 256, 7
    limits = {
        # Bytes from layer to layer of this pool, and one less: then tokens are the rows.
        pages * 4 * row: (3, 1024),
        pages * 4 * row - 1: (1, 1024),
    }
    for limit, (height, width) in limits.items():
        plan = check_copy(
            lambda *a, limit=limit, **k: run(*a, max_pitch=limit, **k),
            spec,
            dense("layer_first"),
            dense("page_first_direct"),
        )
        found = boxes(plan, limit).boxes
        assert {(int(b["height"]), int(b["width"])) for b in found} == {(height, width)}


def test_a_run_over_pages_is_no_wider_than_the_driver_takes():
    host = KVBuffer.empty(WHOLE, "page_unified", 8)
    plan = plan_transfer(meta(WHOLE, "page_unified", 8), host, range(6), range(6))
    page = WHOLE.bytes_per_page
    whole, limited = boxes(plan).boxes, boxes(plan, 5 * page).boxes
    assert whole["width"].tolist() == [6 * page]
    assert (limited["height"].tolist(), limited["width"].tolist()) == ([6], [page])


def random_boxes(count, rng):
    found = new_boxes((count,))
    found["width"], found["height"], found["depth"] = rng.integers(1, 9, (3, count))
    for side, base in (("src", 1000), ("dst", 500_000)):
        found[side]["row_length"] = found["width"] + rng.integers(0, 9, count)
        found[side]["layer_height"] = found["height"] + rng.integers(0, 4, count)
        found[side]["address"] = base + 2000 * np.arange(count) + rng.integers(0, 9, count)
    return found


def byte_pairs(found):
    """Every byte's source and destination, sorted."""
    pairs = []
    for box in found:
        z, y, x = np.indices((box["depth"], box["height"], box["width"]))
        ends = []
        for side in (box["src"], box["dst"]):
            rows = z * side["layer_height"] + y
            ends.append((side["address"] + rows * side["row_length"] + x).ravel())
        pairs.append(np.stack(ends, 1))
    joined = np.concatenate(pairs)
    return joined[np.lexsort(joined.T)]


def test_no_box_crosses_a_border():
    rng = np.random.default_rng(1)
    found = random_boxes(60, rng)
    borders = np.unique(rng.integers(1000, 120_000, 200))
    split = split_boxes(BoxCopies(found), borders).boxes
    assert len(split) > 60
    assert np.array_equal(byte_pairs(split), byte_pairs(found))
    for box in split:
        for side in (box["src"], box["dst"]):
            rows = (box["depth"] - 1) * side["layer_height"] + box["height"] - 1
            end = side["address"] + rows * side["row_length"] + box["width"]
            assert not ((borders > side["address"]) & (borders < end)).any()
    apart = split_boxes(BoxCopies(found), np.array([0, 900_000])).boxes
    assert np.array_equal(apart, found)


@pytest.mark.parametrize("version", VERSIONS)
def test_boxes_are_split_at_registration_borders(stub, version, monkeypatch):
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
    host = KVBuffer.from_tensor(memory.tensor, spec, "layer_first", pinned=True)
    content = torch.from_numpy(
        np.random.default_rng(2).integers(0, 256, pages * page, dtype=np.uint8)
    )
    gpu, kept = KVBuffer.from_tensor(content, spec, "page_first"), content.clone()
    order = np.random.default_rng(4).permutation(pages)
    backup = plan_transfer(gpu, host, range(pages), order)
    submitted = launch(backup, stream=Stream(), driver=driver)
    stub.run()
    assert num_boxes(backup) < submitted.num_copies
    assert torch.equal(host.logical(order.tolist()), gpu.logical(range(pages)))

    returned = KVBuffer.from_tensor(~content, spec, "page_first")
    load_back = plan_transfer(host, returned, order, range(pages))
    launch(load_back, stream=Stream(), driver=driver)
    stub.run()
    assert torch.equal(returned.logical(range(pages)), gpu.logical(range(pages)))
    assert torch.equal(content, kept)

    monkeypatch.setattr(engine, "_borders", lambda plan: np.empty(0, np.int64))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(load_back, stream=Stream(), driver=driver)


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


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_to_copy_is_no_call(stub, version):
    pools = [KVBuffer.empty(WHOLE, layout, 2) for layout in ("layer_first", "page_first")]
    plan = plan_transfer(*pools, [], [])
    assert launch(plan, stream=Stream(), driver=stub.driver(version)).num_copies == 0
    assert stub.records() == []


def test_graph_capture_is_refused(stub):
    pools = [KVBuffer.empty(WHOLE, layout, 2) for layout in ("layer_first", "page_first")]
    driver = stub.driver()
    stub.library.stub_capture(1)
    with pytest.raises(PathUnavailable, match=r"'ce3d'.*captured into a graph"):
        launch(plan_transfer(*pools, [1], [0]), stream=Stream(), driver=driver)
    assert stub.records() == []


def test_public_launcher(stub, monkeypatch):
    driver = stub.driver()
    monkeypatch.setattr(module, "_unreachable", lambda plan: None)
    monkeypatch.setattr(module, "memcpy_driver", lambda: driver)

    def run(*arguments, layers):
        plan = copy_boxes(*arguments, layers=layers, block_quota=2, stream=Stream())
        stub.run()
        return plan

    plan = check_copy(run, WHOLE, dense("layer_first"), dense("page_first"), layers=(1, 3))
    assert plan.layers == (1, 3)
    assert [call.stream for call in stub.records()] == [STREAM]


def test_layouts_without_rows_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(module, "_unreachable", lambda plan: None)
    rows = [np.zeros((4, 3, 4, 8, 32), np.uint8)] * 2
    pool = per_layer(WHOLE, rows, lambda tensor: tensor).buffer
    host = KVBuffer.empty(WHOLE, "page_first_direct", 4)
    with pytest.raises(PathUnavailable, match="no box can step through a table"):
        copy_boxes(pool, host, [0], [1])
    assert no_rows(plan_transfer(pool, KVBuffer.empty(WHOLE, "page_first", 4), [0], [1])) is None
    pair = meta(WHOLE, "page_unified", 4), KVBuffer.empty(WHOLE, "page_unified", 4)
    with pytest.raises(PathUnavailable, match="path 'ce' makes the same copies"):
        copy_boxes(*pair, range(4), range(4))  # consecutive pages or not
    # A single layer of layouts that have rows may have none: it is launched all the same.
    host = KVBuffer.empty(LATENT, "page_first_direct", 4)
    plan = plan_transfer(meta(LATENT, "layer_first", 4), host, [0], [1])
    assert no_rows(plan) is None
    assert no_rows(plan.for_layers(1, 2)) is not None


def test_a_layer_of_its_own_is_copied(stub):
    pools = [KVBuffer.empty(LATENT, layout, 4) for layout in ("layer_first", "page_first_direct")]
    source = pools[0].regions[0].anchors[0, 0]
    source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
    plan = plan_transfer(*pools, [0, 3, 2], [1, 0, 3])
    driver = stub.driver()
    for layer in range(3):
        launch(plan.for_layers(layer, layer + 1), stream=Stream(), driver=driver)
        stub.run()
    assert torch.equal(pools[0].logical([0, 3, 2]), pools[1].logical([1, 0, 3]))


def test_unreachable_memory_is_named(monkeypatch):
    gpu = meta(WHOLE, "layer_first", 4)
    pageable = KVBuffer.empty(WHOLE, "page_first", 4)
    with pytest.raises(PathUnavailable, match="distances between rows"):
        copy_boxes(gpu, gpu, [0], [1])
    with pytest.raises(PathUnavailable, match="dst is pageable host memory"):
        copy_boxes(gpu, pageable, [0], [1])
    memory = torch.empty(4 * WHOLE.bytes_per_page, dtype=torch.uint8)
    pinned = KVBuffer.from_tensor(memory, WHOLE, "page_first", pinned=True)
    monkeypatch.setattr(engine, "unavailable", lambda: "no driver today")
    with pytest.raises(PathUnavailable, match=r"'ce3d' is unavailable: no driver today"):
        copy_boxes(gpu, pinned, [0], [1])
    assert PATHS["ce3d"].obstacle(plan_transfer(gpu, pinned, [0], [1])) == "no driver today"


def test_the_device_that_is_asked_is_the_streams(stub, monkeypatch):
    driver, asked = stub.driver(), []
    limit = driver.max_pitch
    monkeypatch.setattr(driver, "max_pitch", lambda device: asked.append(device) or limit(device))
    pools = [KVBuffer.empty(WHOLE, layout, 2) for layout in ("layer_first", "page_first")]
    launch(plan_transfer(*pools, [1], [0]), stream=Stream(), driver=driver)
    assert asked == [DEVICE.index]
