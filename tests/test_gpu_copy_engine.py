"""The copy-engine paths on a real driver: runs one by one, and strided boxes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from cases import check_copy, dense, engine_forms, head_specs, latent_specs, wide_specs
from oracle import LATENT_ORDERS, ORDERS

from hikv.buffer import KVBuffer
from hikv.cp.witness import device_work, kernels
from hikv.errors import PathUnavailable
from hikv.kernels.copy_boxes import launch as launch_boxes
from hikv.kernels.copy_engine import copy_engine, launch, unavailable
from hikv.kernels.memcpy import BATCH, BATCH_3D, SINGLE, SINGLE_3D, memcpy_driver
from hikv.pinned import allocate_pinned
from hikv.plan import plan_transfer
from hikv.shapes import num_boxes
from hikv.spec import KVSpec

reason = unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]

SPEC = KVSpec(2, 2, 64, 4, torch.uint8)
CUDA, PIN = torch.Tensor.cuda, torch.Tensor.pin_memory
PLACES = {
    "h2d": (PIN, CUDA),
    "d2h": (CUDA, PIN),
    "d2d": (CUDA, CUDA),
}
BLOCKED = 200_000_000  # cycles: some 0.1 s, far longer than a launch takes


def run(*arguments, layers=None):
    plan = copy_engine(*arguments, layers=layers)
    torch.cuda.synchronize()
    return plan


def run_boxes(*arguments, layers=None):
    plan = plan_transfer(*arguments, layers=layers)
    launch_boxes(plan)
    torch.cuda.synchronize()
    return plan


WAYS = [*((run, direction) for direction in PLACES), (run_boxes, "h2d"), (run_boxes, "d2h")]


def filled(num_pages, layout, place, seed=0):
    """A pool of random bytes, as a buffer."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, num_pages * SPEC.bytes_per_page, dtype=np.uint8)
    return KVBuffer.from_tensor(place(torch.from_numpy(memory)), SPEC, layout)


def rows(buffer, pages):
    """What `pages` hold, whatever the layout, on the CPU."""
    return buffer.logical(pages).cpu()


@pytest.mark.parametrize(("copy", "direction"), WAYS)
@pytest.mark.parametrize("host", ORDERS)
def test_rows_with_heads(host, copy, direction):
    src_place, dst_place = PLACES[direction]
    for gpu in ("layer_first", "page_unified", "page_head"):
        for spec in (*head_specs(torch.bfloat16), *wide_specs(torch.bfloat16)):
            pair = (host, gpu) if direction == "h2d" else (gpu, host)
            forms = map(dense, pair)
            check_copy(copy, spec, *forms, src_place=src_place, dst_place=dst_place)


@pytest.mark.parametrize(("copy", "direction"), WAYS)
def test_engine_pools(copy, direction):
    src_place, dst_place = PLACES[direction]
    for spec in (*head_specs(torch.float16), *latent_specs(torch.uint8)):
        for engine in engine_forms(spec).values():
            for host in map(dense, LATENT_ORDERS):
                pair = (host, engine) if direction == "h2d" else (engine, host)
                places = {"src_place": src_place, "dst_place": dst_place}
                check_copy(copy, spec, *pair, layers=(1, 3), **places)


def test_the_call_that_the_driver_has():
    src, dst = filled(8, "layer_first", CUDA), filled(8, "page_first", PIN, 1)
    plan, want = plan_transfer(src, dst, [1, 7], [2, 0]), rows(src, [1, 7])
    submitted = launch(plan)
    torch.cuda.synchronize()
    assert submitted.call == (BATCH if BATCH in memcpy_driver().batches else SINGLE)
    assert submitted.num_copies == plan.num_descriptors
    assert torch.equal(rows(dst, [2, 0]), want)


@pytest.mark.parametrize("batched", [True, False])
def test_the_call_for_boxes_that_the_driver_has(batched, monkeypatch):
    driver = memcpy_driver()
    if not batched:
        monkeypatch.setattr(driver, "batches", {})
    gpu, host = filled(64, "layer_first", CUDA), filled(64, "page_first", PIN, 1)
    src_pages, dst_pages = np.random.default_rng(2).permutation(64), list(range(64))
    plan, want = plan_transfer(gpu, host, src_pages, dst_pages), rows(gpu, src_pages.tolist())
    submitted = launch_boxes(plan)
    torch.cuda.synchronize()
    assert submitted.call == (BATCH_3D if BATCH_3D in driver.batches else SINGLE_3D)
    assert submitted.num_copies == num_boxes(plan) < plan.num_descriptors
    assert torch.equal(rows(host, dst_pages), want)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("row_bytes", [2, 132, 1152, 65536])
def test_boxes_launch_no_kernel(row_bytes, direction):
    """However narrow the rows: the profiler sees copies alone."""
    spec = KVSpec(4, 1, row_bytes, 16, torch.uint8, latent=True)
    pools = []
    for layout, place in zip(("layer_first", "page_first"), PLACES[direction], strict=True):
        memory = torch.zeros(64 * spec.bytes_per_page, dtype=torch.uint8)
        pools.append(KVBuffer.from_tensor(place(memory), spec, layout))
    rng = np.random.default_rng(3)
    plan = plan_transfer(*pools, rng.permutation(64)[:32], rng.permutation(64)[:32])
    names = device_work(lambda: launch_boxes(plan), torch.device("cuda"))
    assert names
    assert kernels(names) == []


@pytest.mark.parametrize("num_pages", [1, 128, 4096])
def test_page_lists_may_be_overwritten_on_return(num_pages):
    src, dst = filled(num_pages, "layer_first", CUDA), filled(num_pages, "page_first", PIN, 1)
    rng = np.random.default_rng(2)
    src_pages, dst_pages = rng.permutation(num_pages), rng.permutation(num_pages)
    kept, want = dst_pages.tolist(), rows(src, src_pages.tolist())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
    copy_engine(src, dst, src_pages, dst_pages, stream=stream)
    src_pages[:], dst_pages[:] = 0, 0
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(rows(dst, kept), want)


@pytest.mark.parametrize("named", [False, True])
def test_the_copy_waits_for_its_stream_and_the_stream_for_the_copy(named):
    """On a stream of its own, and on torch's default one, which the batch itself refuses."""
    host, gpu = filled(64, "page_unified", PIN), filled(64, "layer_first", CUDA, 1)
    back = filled(64, "page_unified", PIN, 2)
    memory, pages = gpu.regions[0].anchors[0, 0], list(range(64))
    want = ~rows(host, pages)
    stream = torch.cuda.Stream() if named else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
        memory.fill_(7)
        copy_engine(host, gpu, pages, pages)  # after the fill, or the fill would win
        memory.bitwise_not_()  # after the copy
        copy_engine(gpu, back, pages, pages)  # after the inversion
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    done.synchronize()
    assert torch.equal(rows(back, pages), want)


def test_a_thread_without_a_context():
    src, dst = filled(4, "layer_first", CUDA), filled(4, "page_first", PIN, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    want, errors = rows(src, [0, 3]), []

    def work():
        try:
            copy_engine(src, dst, [0, 3], [1, 2], stream=stream)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stream.synchronize()
    assert errors == []
    assert torch.equal(rows(dst, [1, 2]), want)


def test_pool_of_several_registrations():
    pages = 33
    nbytes, page = pages * SPEC.bytes_per_page, SPEC.bytes_per_page
    memory = allocate_pinned(nbytes, page_bytes=page, chunk_bytes=3 * page)
    host = KVBuffer.from_tensor(memory.tensor, SPEC, "layer_first", pinned=True)
    gpu, back = (filled(pages, "layer_first", CUDA, seed) for seed in range(2))
    everything = list(range(pages))
    plan, want = plan_transfer(gpu, host, everything, everything), rows(gpu, everything)
    assert launch(plan).num_copies > plan.num_descriptors
    copy_engine(host, back, everything, everything)
    torch.cuda.synchronize()
    assert torch.equal(rows(host, everything), want)
    assert torch.equal(rows(back, everything), want)


def test_graph_capture_is_refused():
    src, dst = filled(4, "layer_first", CUDA), filled(4, "page_first", PIN, 1)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PathUnavailable, match="captured into a graph"), torch.cuda.graph(graph):
        copy_engine(src, dst, [0], [1])
    torch.cuda.synchronize()
