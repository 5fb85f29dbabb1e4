"""The register kernel in Triton's interpreter: every pair of layouts, byte for byte."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import (
    ID_FORMS,
    LATENT_PAIRS,
    PAIRS,
    Place,
    assert_bytes,
    check_copy,
    dense,
    engine_forms,
    head_specs,
    latent_specs,
    logical_bytes,
    per_layer,
    random_rows,
    stay,
    wide_specs,
)
from oracle import LATENT_ORDERS, ORDERS

from hikv.buffer import KVBuffer
from hikv.compiled import ast_source
from hikv.errors import ArgumentError
from hikv.kernels.relayout import Config, _place, relayout, relayout_kernel
from hikv.kernels.submit import interpreted, kernel_obstacle
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(
        not interpreted(relayout_kernel), reason="needs TRITON_INTERPRET=1, in a process of its own"
    ),
]

# The interpreter is paid per operation, whatever its size: two loads hold most cases in one tile.
run = partial(relayout, block_quota=2, config=Config(64, 2))
SMALL = KVSpec(2, 2, 32, 3, torch.bfloat16)
WIDE = (*wide_specs(torch.float8_e4m3fn), *wide_specs(torch.bfloat16, num_layers=2))


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_rows_with_heads(src, dst):
    for seed, spec in enumerate(head_specs(torch.bfloat16)):
        check_copy(run, spec, dense(src), dense(dst), seed=seed)


@pytest.mark.parametrize(("src", "dst"), LATENT_PAIRS)
def test_latent_rows(src, dst):
    for seed, spec in enumerate(latent_specs(torch.uint8, num_layers=2)):
        check_copy(run, spec, dense(src), dense(dst), seed=seed)


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_k_and_v_of_different_width(index):
    check_copy(run, WIDE[index % len(WIDE)], *map(dense, PAIRS[index]))


@pytest.mark.parametrize("groups", [*permutations((8, 4, 2, 1), 2)])
def test_head_grids_that_differ(groups):
    src, dst = (KVSpec(2, 8, 16, 3, torch.bfloat16, head_group=group) for group in groups)
    for pair in (("page_first_direct_group", "page_unified"), ("page_unified", "layer_first")):
        check_copy(run, src, *map(dense, pair), dst_spec=dst)


ENGINES = [
    pytest.param(spec, name, id=f"{name}-{spec.head_dim}")
    for spec in (
        KVSpec(3, 4, 16, 4, torch.bfloat16, head_group=2),
        KVSpec(3, 1, 576, 5, torch.uint8, latent=True),
        KVSpec(3, 2, 192, 4, torch.float8_e4m3fn, v_head_dim=128),
    )
    for name in engine_forms(spec)
]


@pytest.mark.parametrize(("spec", "name"), ENGINES)
def test_engine_pools(spec, name):
    """Tables of addresses, gaps, packed and transposed views, on either side."""
    engine = engine_forms(spec)[name]
    for host in map(dense, LATENT_ORDERS if spec.latent else ORDERS):
        check_copy(run, spec, engine, host)
        check_copy(run, spec, host, engine, layers=(1, 3))


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_a_table_on_both_sides(layers):
    for spec in (
        KVSpec(3, 2, 32, 3, torch.bfloat16),
        KVSpec(3, 1, 132, 4, torch.uint8, latent=True),
    ):
        check_copy(run, spec, per_layer, per_layer, layers=layers)


@pytest.mark.parametrize("layers", [(0, 1), (2, 4), range(1, 4), range(3, 4)], ids=str)
def test_ranges_of_layers(layers):
    spec = KVSpec(4, 4, 16, 3, torch.bfloat16, head_group=2)
    for host in ORDERS:
        check_copy(run, spec, dense("layer_first"), dense(host), layers=layers)
        check_copy(run, spec, dense(host), dense("page_unified"), layers=layers)


@pytest.mark.parametrize("ids", ID_FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_dtypes_and_ids(dtype, ids):
    spec = KVSpec(2, 2, 48, 3, dtype)
    check_copy(run, spec, dense("page_first"), dense("page_head"), ids=ids)


@pytest.mark.parametrize(
    ("row_bytes", "vector_bytes"), [(132, 4), (136, 8), (66, 2), (33, 1), (80, 16), (656, 16)]
)
def test_the_widest_vector_that_divides_a_row(row_bytes, vector_bytes):
    spec = KVSpec(3, 1, row_bytes, 3, torch.uint8, latent=True)
    plan = check_copy(run, spec, dense("layer_first"), dense("page_first"))
    assert plan.vector_bytes == vector_bytes


def shifted(nbytes: int) -> Place:
    """A place whose tensors begin `nbytes` behind a multiple of 16."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.empty(size + 16, dtype=torch.uint8)[nbytes : nbytes + size]
        assert memory.data_ptr() % 16 == nbytes
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return place


@pytest.mark.parametrize(("nbytes", "vector_bytes"), [(2, 2), (8, 8)])
@pytest.mark.parametrize("form", [dense("layer_first"), per_layer], ids=["dense", "per_layer"])
def test_a_view_that_begins_within_a_vector(form, nbytes, vector_bytes):
    """The aligned base comes first, so that nothing learnt from it may be kept for the views."""
    spec, host = KVSpec(2, 2, 16, 4, torch.bfloat16), dense("page_first")
    assert check_copy(run, spec, form, host).vector_bytes == 16
    for places in ({"src_place": shifted(nbytes)}, {"dst_place": shifted(nbytes)}):
        for pair in ((form, host), (host, form)):
            assert check_copy(run, spec, *pair, **places).vector_bytes == vector_bytes


# Pages of 96 and 240 vectors, so tiles of 32 to 1024 vectors end within pages, and pages within
# tiles; the latent ones have an odd number of chunks.
@pytest.mark.parametrize(
    "config",
    [
        Config(1, 1),
        Config(1, 4, streaming=1),
        Config(2, 2),
        Config(2, 16),
        Config(4, 8, warp_size=16),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("block_quota", [1, 2, 5])
def test_tiles_cross_pages_and_pages_cross_tiles(config, block_quota):
    copy = partial(relayout, block_quota=block_quota, config=config)
    check_copy(copy, KVSpec(2, 4, 32, 3, torch.bfloat16), dense("page_head"), dense("layer_first"))
    latent = KVSpec(3, 1, 80, 5, torch.uint8, latent=True)
    check_copy(copy, latent, per_layer, dense("page_first"))


class Launches:
    """Stands in for the kernel and keeps the grids that it was launched with."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch):
    spy = Launches(relayout_kernel)
    monkeypatch.setattr(import_module("hikv.kernels.relayout"), "relayout_kernel", spy)
    return spy


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().ravel()


@pytest.mark.parametrize(("block_quota", "grid"), [(1, 1), (3, 3), (26, 26), (64, 26), (None, 2)])
def test_the_grid_is_the_quota_unless_there_is_less_to_do(launches, block_quota, grid):
    """32 pages of 25 vectors, so of 13 chunks of 2, in tiles of 16 chunks."""
    spec = KVSpec(1, 1, 80, 5, torch.uint8, latent=True)
    rows = random_rows(spec, 32, np.random.default_rng(0))
    src, dst = (dense("page_first")(spec, rows, stay).buffer for _ in range(2))
    pages = np.random.default_rng(1).permutation(32)
    relayout(src, dst, pages, pages[::-1], block_quota=block_quota, config=Config(1, 1))
    assert launches.grids == [(grid,)]
    assert_bytes(raw(dst.logical(pages[::-1].copy())), raw(src.logical(pages)), "destination")


def test_no_pages(launches):
    src, dst = (KVBuffer.empty(SMALL, "page_first", 3) for _ in range(2))
    before = dst.logical([0, 1, 2])
    plan = relayout(src, dst, [], [])
    assert (plan.num_pages, plan.nbytes, launches.grids) == (0, 0, [])
    assert_bytes(raw(dst.logical([0, 1, 2])), raw(before), "destination")


@pytest.mark.parametrize("block_quota", [0, -1, 2.0, True, "2"])
def test_a_quota_that_is_no_number_of_ctas(block_quota):
    src, dst = (KVBuffer.empty(SMALL, "page_first", 3) for _ in range(2))
    before = dst.logical([0, 1, 2])
    with pytest.raises(ArgumentError, match="block_quota: expected at least 1 CTA") as caught:
        relayout(src, dst, [0], [1], block_quota=block_quota)
    assert caught.value.got == repr(block_quota)
    assert "block_quota=0 to hikv.transfer" in caught.value.remedy
    assert_bytes(raw(dst.logical([0, 1, 2])), raw(before), "destination")


@pytest.mark.parametrize("field", ["num_warps", "loads", "warp_size"])
@pytest.mark.parametrize("value", [0, -4, 6, 4.0, None])
def test_a_config_of_other_than_powers_of_two(field, value):
    fields: dict[str, Any] = {"num_warps": 4, "loads": 8, "warp_size": 32, field: value}
    with pytest.raises(ArgumentError, match=f"{field}: expected a power of two") as caught:
        Config(**fields)
    assert caught.value.got == repr(value)


def test_a_hint_that_is_no_hint():
    with pytest.raises(ArgumentError, match="streaming: expected 0 or 1") as caught:
        Config(4, 8, streaming=2)
    assert caught.value.got == "2"


def sparse(nbytes: int) -> torch.Tensor:
    """Zeros of any size, with no memory behind them until they are written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for a pool of {nbytes} bytes: {error}")
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def far_pools() -> Iterator[object]:
    """Pools with offsets that 32 bits cannot hold: spec, layout, pages, begin within a vector.

    The pages are the first, the last one that 32 bits would reach, the next one and another. A pool
    that begins within a vector is addressed in narrower ones, so that numbers of vectors are above
    2³¹, not numbers of bytes alone.
    """
    slot, row = (KVSpec(1, 1, size, 1, torch.uint8, latent=True) for size in (576, 256))
    page = KVSpec(61, 8, 128, 64, torch.bfloat16)
    layer = KVSpec(3, 1, 576, 1, torch.uint8, latent=True)
    for name, spec, layout, last_safe, begin in (
        ("bytes of slots", slot, "page_first", 3_728_270, 0),
        ("byte vectors of slots", slot, "page_first", 3_728_270, 1),
        ("16-byte vectors of slots", slot, "page_first", 59_652_323, 0),
        ("elements of pages", page, "page_first", 537, 0),
        ("element vectors of pages", page, "page_first", 537, 2),
        ("more than 2²³ pages of one token", row, "page_first", 8_388_607, 0),
        # A stride that 32 bits hold, twice.
        ("byte vectors of layers", layer, "layer_first", 3_728_266, 1),
    ):
        pages = [0, last_safe, last_safe + 1, last_safe + 3]
        yield pytest.param(spec, layout, np.array(pages), begin, id=name)


@pytest.mark.parametrize("ids", ["int32 array", "int64 array"])
@pytest.mark.parametrize(("spec", "layout", "far", "begin"), [*far_pools()])
def test_pools_beyond_32_bit_offsets(spec, layout, far, begin, ids):
    near, as_ids = np.array([3, 1, 0, 2]), ID_FORMS[ids]
    layers = slice(60, 61) if spec.num_layers == 61 else slice(0, spec.num_layers)
    copy = partial(
        relayout, layers=(layers.start, layers.stop), block_quota=2, config=Config(512, 2)
    )
    memory = sparse(begin + (far[-1] + 1) * spec.bytes_per_page)[begin:]
    large = KVBuffer.from_tensor(memory, spec, layout)
    rows, other = (random_rows(spec, 4, np.random.default_rng(seed)) for seed in (0, 1))
    source, back = (dense("page_first_direct")(spec, r, stay).buffer for r in (rows, other))

    plan = copy(source, large, as_ids(near), as_ids(far))
    assert plan.vector_bytes == (begin or 16)
    copy(large, back, as_ids(far), as_ids(near))
    want = logical_bytes(rows, near)[:, layers].ravel()
    assert_bytes(raw(large.logical(far)[:, layers]), want, "far pages")
    assert_bytes(raw(back.logical(near)[:, layers]), want, "round trip")
    assert not large.logical([1, far[1] - 1, far[2] + 1]).view(torch.uint8).any()


@triton.jit
def _places(pairs, vectors, tile, slice_, PER_PAGE: tl.constexpr, SHAPE: tl.constexpr):
    pair, vector = _place(tile, slice_, PER_PAGE, SHAPE)
    thread = tl.arange(0, SHAPE[2] * SHAPE[3])
    tl.store(pairs + thread, pair)
    tl.store(vectors + thread, vector)


@pytest.mark.parametrize("tile", [0, 262_143, 262_144, 600_000])
def test_a_tile_whose_number_times_its_size_is_above_32_bits(tile):
    """A tile of 2¹³ chunks: the one of number 2¹⁸ begins at chunk 2³¹."""
    slices, depth, rows, lanes, per_page = 16, 2, 512, 1, 7_808
    pairs, vectors = (torch.empty(rows * lanes, dtype=torch.int32) for _ in range(2))
    _places[(1,)](pairs, vectors, tile, 3, PER_PAGE=per_page, SHAPE=(slices, depth, rows, lanes))
    chunks = (tile * slices + 3) * rows + np.arange(rows)
    np.testing.assert_array_equal(pairs.numpy(), chunks // per_page)
    np.testing.assert_array_equal(vectors.numpy(), chunks % per_page * depth * lanes)


def test_kernels_of_an_interpreting_process_do_not_compile():
    with pytest.raises(ArgumentError, match=r"TRITON_INTERPRET.*unset it"):
        ast_source(relayout_kernel, {}, {})


def test_the_interpreter_serves_no_gpu():
    spec = KVSpec(1, 1, 16, 1, torch.uint8, latent=True)
    src, dst = (KVBuffer.empty(spec, "page_first", 1, device=device) for device in ("meta", "cpu"))
    for buffers in ((src, dst), (dst, src)):
        reason = kernel_obstacle(plan_transfer(*buffers, [0], [0]), relayout_kernel)
        assert reason == "TRITON_INTERPRET is set: the interpreter reaches no GPU memory"
