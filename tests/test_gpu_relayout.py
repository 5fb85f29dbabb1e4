"""The register kernel on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from cases import (
    LATENT_PAIRS,
    PAIRS,
    check_copy,
    dense,
    engine_forms,
    head_specs,
    latent_specs,
    per_layer,
    wide_specs,
)

from hikv.buffer import KVBuffer
from hikv.errors import PathUnavailable
from hikv.kernels.relayout import Config, obstacle, relayout
from hikv.plan import plan_transfer
from hikv.spec import KVSpec


def unable():
    """Why the kernel cannot run on this machine, or `None`."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    spec = KVSpec(1, 1, 16, 1, torch.uint8, latent=True)
    pools = [KVBuffer.empty(spec, "layer_first", 1, device="cuda") for _ in range(2)]
    return obstacle(plan_transfer(*pools, [0], [0]))


reason = unable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]

CUDA, PIN = torch.Tensor.cuda, torch.Tensor.pin_memory
PLACES = {
    direction: {"src_place": src, "dst_place": dst}
    for direction, src, dst in (("h2d", PIN, CUDA), ("d2h", CUDA, PIN), ("d2d", CUDA, CUDA))
}
SPEC = KVSpec(4, 4, 64, 16, torch.bfloat16)
BLOCKED = 200_000_000  # cycles: some 0.1 s, far longer than a launch takes


def run(*arguments, layers=None, **options):
    plan = relayout(*arguments, layers=layers, **options)
    torch.cuda.synchronize()
    return plan


def filled(num_pages, layout, place, seed=0):
    """A pool of random bytes, as a buffer."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, num_pages * SPEC.bytes_per_page, dtype=np.uint8)
    return KVBuffer.from_tensor(place(torch.from_numpy(memory).view(SPEC.dtype)), SPEC, layout)


def rows(buffer, pages):
    """What `pages` hold, whatever the layout, as bytes on the CPU."""
    return buffer.logical(pages).cpu().view(torch.uint8)


@pytest.mark.parametrize("direction", PLACES)
@pytest.mark.parametrize("pair", PAIRS)
def test_rows_with_heads(pair, direction):
    for spec in (*head_specs(torch.bfloat16), *wide_specs(torch.bfloat16)):
        check_copy(run, spec, *map(dense, pair), **PLACES[direction])


@pytest.mark.parametrize("direction", PLACES)
@pytest.mark.parametrize("pair", LATENT_PAIRS)
def test_latent_rows(pair, direction):
    for spec in latent_specs(torch.uint8):
        check_copy(run, spec, *map(dense, pair), layers=(1, 3), **PLACES[direction])


@pytest.mark.parametrize("direction", PLACES)
def test_engine_pools(direction):
    """Tables of addresses, gaps that no store may touch, packed and transposed views."""
    for spec in (*head_specs(torch.float16), *latent_specs(torch.uint8)):
        for engine in engine_forms(spec).values():
            for pair in ((engine, dense("page_first")), (dense("page_unified"), engine)):
                check_copy(run, spec, *pair, **PLACES[direction])
        check_copy(run, spec, per_layer, per_layer, layers=(1, 3), **PLACES[direction])


@pytest.mark.parametrize("nbytes", [2, 8])
def test_a_view_that_begins_within_a_vector(nbytes):
    """After the aligned base, on which a kernel compiled for 16-byte accesses would rely."""
    spec = KVSpec(2, 2, 16, 4, torch.bfloat16)

    def shifted(tensor):
        size = tensor.numel() * tensor.element_size()
        memory = torch.empty(size + 16, dtype=torch.uint8, device="cuda")[nbytes : nbytes + size]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    for form in (dense("layer_first"), per_layer):
        pair = form, dense("page_first")
        assert check_copy(run, spec, *pair, **PLACES["d2h"]).vector_bytes == 16
        there = check_copy(run, spec, *pair, src_place=shifted, dst_place=PIN)
        back = check_copy(run, spec, *pair[::-1], src_place=PIN, dst_place=shifted)
        assert (there.vector_bytes, back.vector_bytes) == (nbytes, nbytes)


@pytest.fixture
def grids(monkeypatch):
    """The grids of all launches from now on."""
    seen, launcher = [], triton.JITFunction.__getitem__

    def launch(kernel, grid):
        seen.append(grid)
        return launcher(kernel, grid)

    monkeypatch.setattr(triton.JITFunction, "__getitem__", launch)
    return seen


@pytest.mark.parametrize("config", [None, Config(8, 8), Config(32, 8), Config(4, 32)], ids=str)
@pytest.mark.parametrize("block_quota", [1, 2, 5, 32, 1000])
def test_any_quota_and_tile(grids, block_quota, config):
    for num_pages in (1, 64):
        src, dst = filled(num_pages, "layer_first", CUDA), filled(num_pages, "page_head", PIN, 1)
        pages = np.random.default_rng(2).permutation(num_pages)
        want = rows(src, pages.tolist())
        plan = run(src, dst, pages, pages[::-1].copy(), block_quota=block_quota, config=config)
        assert torch.equal(rows(dst, pages[::-1].tolist()), want)
        vectors = num_pages * plan.parts[0].page_vectors
        tile = (config or Config(16, 16)).tile
        assert grids.pop() == (min(block_quota, -(-vectors // tile)),)
        assert not grids


@pytest.mark.parametrize("named", [False, True])
def test_the_copy_waits_for_its_stream_and_the_stream_for_the_copy(named):
    host, gpu = filled(64, "page_unified", PIN), filled(64, "layer_first", CUDA, 1)
    back = filled(64, "page_unified", PIN, 2)
    memory, pages = gpu.regions[0].anchors[0, 0].view(torch.uint8), list(range(64))
    want = ~rows(host, pages)
    stream = torch.cuda.Stream() if named else torch.cuda.default_stream()
    relayout(host, gpu, pages, pages)  # compiled now, so that launches below are quick
    relayout(gpu, back, pages, pages)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
        memory.fill_(7)
    relayout(host, gpu, pages, pages, stream=stream)  # after the fill, or the fill would win
    with torch.cuda.stream(stream):
        memory.bitwise_not_()  # after the copy
    relayout(gpu, back, pages, pages, stream=stream)  # after the inversion
    done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert torch.equal(rows(back, pages), want)


def test_the_copy_waits_for_a_long_kernel_on_another_stream():
    gpu, host = filled(4, "layer_first", CUDA), filled(4, "page_first_direct", PIN, 1)
    memory = gpu.regions[0].anchors[0, 0].view(torch.uint8)
    relayout(gpu, host, [3], [1])
    torch.cuda.synchronize()
    compute, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(compute):
        torch.cuda._sleep(BLOCKED)
        memory.fill_(7)
        written = compute.record_event()
    side.wait_event(written)
    relayout(gpu, host, [3], [1], stream=side)
    assert not written.query()
    side.synchronize()
    assert (rows(host, [1]) == 7).all()


@pytest.mark.parametrize("form", ["dense", "per_layer"])
def test_calls_behind_a_blocked_stream_keep_their_own_lists(form):
    """Page ids and tables are uploaded from staging that no later call may reuse too early."""
    gpu, host = filled(64, "page_first", CUDA), filled(64, "page_head", PIN, 1)
    if form == "per_layer":
        layers = [torch.zeros(64, 16, 4, 64, dtype=SPEC.dtype, device="cuda") for _ in range(8)]
        pool = KVBuffer.from_layers(layers[:4], layers[4:], SPEC)
        relayout(gpu, pool, range(64), range(64))
    else:
        pool = gpu
    relayout(pool, host, [0], [0])
    src_pages, dst_pages = (np.random.default_rng(seed).permutation(64) for seed in (2, 3))
    want = rows(pool, src_pages.tolist())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
    for first in range(0, 64, 4):
        lists = [pages[first : first + 4].copy() for pages in (src_pages, dst_pages)]
        relayout(pool, host, *lists, stream=stream)
        lists[0][:], lists[1][:] = 0, 0
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(rows(host, dst_pages.tolist()), want)


def test_another_number_of_pages_makes_no_other_compilation(monkeypatch):
    src, dst = filled(64, "layer_first", CUDA), filled(64, "page_first", PIN, 1)
    compilations = []

    def keep(**told):
        compilations.append(told["repr"])

    run(src, dst, [0], [0])
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", keep)
    for num_pages in (1, 2, 3, 16, 64):
        run(src, dst, range(num_pages), range(num_pages))
    assert compilations == []


@pytest.mark.parametrize(
    ("last_safe", "begin"),
    # A row of 576 bytes in 16-byte vectors and in bytes; then more than 2³¹ vectors of 16 bytes.
    [(3_728_270, 0), (3_728_270, 1), (59_652_323, 0)],
)
def test_pools_beyond_32_bit_offsets(last_safe, begin):
    spec = KVSpec(1, 1, 576, 1, torch.uint8, latent=True)
    near, far = [3, 1, 0, 2], [0, last_safe, last_safe + 1, last_safe + 3]
    size = begin + 576 * (far[-1] + 1)
    if torch.cuda.mem_get_info()[0] < size + (1 << 30):
        pytest.skip(f"needs {size} B of free GPU memory")
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")[begin:]
    large = KVBuffer.from_tensor(memory, spec, "page_first")
    source, back = (
        KVBuffer.from_tensor(torch.randint(1, 256, (4 * 576,), dtype=torch.uint8).pin_memory(),
                             spec, "page_first")
        for _ in range(2)
    )  # fmt: skip
    assert run(source, large, near, far).vector_bytes == (begin or 16)
    run(large, back, far, near)
    assert torch.equal(rows(large, far), rows(source, near))
    assert torch.equal(rows(back, near), rows(source, near))
    assert not rows(large, [1, last_safe - 1, last_safe + 2]).any()


def test_pageable_memory_is_refused():
    pageable = KVBuffer.empty(SPEC, "page_first", 2)
    pool = filled(2, "layer_first", CUDA)
    for pair in ((pageable, pool), (pool, pageable)):
        with pytest.raises(PathUnavailable, match="pageable host memory"):
            relayout(*pair, [0], [1])
