"""The TMA kernel on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import check_copy, dense, engine_forms, head_specs, latent_specs, wide_specs
from oracle import LATENT_ORDERS, ORDERS

from hikv.buffer import KVBuffer
from hikv.errors import PathUnavailable
from hikv.kernels.relayout_tma import Config, obstacle, relayout_tma
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
PLACES = {"h2d": (PIN, CUDA), "d2h": (CUDA, PIN), "d2d": (CUDA, CUDA)}
SPEC = KVSpec(4, 4, 64, 16, torch.bfloat16)
BLOCKED = 200_000_000  # cycles: some 0.1 s, far longer than a launch takes


def run(*arguments, layers=None, **options):
    plan = relayout_tma(*arguments, layers=layers, **options)
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
@pytest.mark.parametrize("host", ORDERS)
def test_rows_with_heads(host, direction):
    src_place, dst_place = PLACES[direction]
    for gpu in ORDERS:
        for spec in (*head_specs(torch.bfloat16), *wide_specs(torch.bfloat16)):
            pair = (host, gpu) if direction == "h2d" else (gpu, host)
            check_copy(run, spec, *map(dense, pair), src_place=src_place, dst_place=dst_place)


@pytest.mark.parametrize("direction", PLACES)
@pytest.mark.parametrize("host", LATENT_ORDERS)
def test_latent_rows(host, direction):
    src_place, dst_place = PLACES[direction]
    for gpu in LATENT_ORDERS:
        for spec in latent_specs(torch.uint8):
            if spec.head_dim % 16 == 0:
                pair = (host, gpu) if direction == "h2d" else (gpu, host)
                places = {"src_place": src_place, "dst_place": dst_place}
                check_copy(run, spec, *map(dense, pair), layers=(1, 3), **places)


@pytest.mark.parametrize("direction", PLACES)
@pytest.mark.parametrize("engine", ["one_storage", "strided_tensor"])
def test_views_of_one_storage(engine, direction):
    """Strides that no dense pool has, and gaps that no store may touch."""
    src_place, dst_place = PLACES[direction]
    spec = KVSpec(3, 4, 16, 5, torch.bfloat16)
    form = engine_forms(spec)[engine]
    for pair in ((form, dense("page_unified")), (dense("page_first"), form)):
        check_copy(run, spec, *pair, src_place=src_place, dst_place=dst_place)


@pytest.mark.parametrize(
    "config", [None, Config(2), Config(3, 32 << 10, num_warps=8), Config(32, 4 << 10)], ids=str
)
@pytest.mark.parametrize("block_quota", [1, 2, 32, 1000])
def test_any_quota_and_ring(block_quota, config):
    """Rings that wrap around many times, and rings that are never full."""
    for num_pages in (1, 64):
        src, dst = filled(num_pages, "layer_first", CUDA), filled(num_pages, "page_head", PIN, 1)
        pages = np.random.default_rng(2).permutation(num_pages)
        want = rows(src, pages.tolist())
        run(src, dst, pages, pages[::-1].copy(), block_quota=block_quota, config=config)
        assert torch.equal(rows(dst, pages[::-1].tolist()), want)


@pytest.mark.parametrize("named", [False, True])
def test_the_copy_waits_for_its_stream_and_the_stream_for_the_copy(named):
    host, gpu = filled(64, "page_unified", PIN), filled(64, "layer_first", CUDA, 1)
    back = filled(64, "page_unified", PIN, 2)
    memory, pages = gpu.regions[0].anchors[0, 0].view(torch.uint8), list(range(64))
    want = ~rows(host, pages)
    stream = torch.cuda.Stream() if named else torch.cuda.default_stream()
    relayout_tma(host, gpu, pages, pages)  # compiled now, so that launches below are quick
    relayout_tma(gpu, back, pages, pages)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
        memory.fill_(7)
    relayout_tma(host, gpu, pages, pages, stream=stream)  # after the fill, or the fill would win
    with torch.cuda.stream(stream):
        memory.bitwise_not_()  # after the copy
    relayout_tma(gpu, back, pages, pages, stream=stream)  # after the inversion
    done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert torch.equal(rows(back, pages), want)


def test_a_page_beyond_2_gib():
    """Coordinates stay small where byte offsets do not."""
    far = 2**32 // SPEC.bytes_per_page
    need = (far + 2) * SPEC.bytes_per_page
    if torch.cuda.mem_get_info()[0] < 2 * need:
        pytest.skip(f"needs {2 * need} B of free GPU memory")
    source, pages = filled(4, "page_first", PIN), [0, far - 1, far, far + 1]
    memory = torch.zeros(need, dtype=torch.uint8, device="cuda").view(SPEC.dtype)
    for layout in ("layer_first", "page_unified"):
        large = KVBuffer.from_tensor(memory, SPEC, layout)
        back = filled(4, "page_first", PIN, 1)
        run(source, large, [2, 0, 3, 1], pages)
        run(large, back, pages, [2, 0, 3, 1])
        assert torch.equal(rows(back, [0, 1, 2, 3]), rows(source, [0, 1, 2, 3]))
        assert torch.equal(rows(large, pages), rows(source, [2, 0, 3, 1]))
        assert not rows(large, [1, far - 2]).any()
        memory.zero_()


def test_a_pool_of_one_tensor_per_layer_is_refused():
    layers = [torch.zeros(4, 16, 4, 64, dtype=SPEC.dtype, device="cuda") for _ in range(8)]
    pool = KVBuffer.from_layers(layers[:4], layers[4:], SPEC)
    with pytest.raises(PathUnavailable, match="table of addresses"):
        relayout_tma(filled(4, "page_first", PIN), pool, [0], [1])
