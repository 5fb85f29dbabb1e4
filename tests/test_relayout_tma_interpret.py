"""The TMA kernel in Triton's interpreter: every pair of layouts, byte for byte."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import (
    LATENT_PAIRS,
    PAIRS,
    assert_bytes,
    check_copy,
    dense,
    engine_forms,
    head_specs,
    latent_specs,
    logical_bytes,
    random_rows,
    stay,
    wide_specs,
)
from triton.runtime.errors import InterpreterError

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError, PathUnavailable
from hikv.kernels.relayout_tma import Config, launch, obstacle, relayout_tma
from hikv.plan import plan_transfer
from hikv.spec import KVSpec


@triton.jit
def _count_to(number):
    for _ in tl.range(0, number):
        pass


def unable():
    """Why kernels with a loop cannot be interpreted in this process, or `None`."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1, in a process of its own"
    try:
        _count_to[(1,)](1)
    except InterpreterError:
        return f"the interpreter of Triton {triton.__version__} cannot run tl.range with this numpy"
    return None


reason = unable()
pytestmark = [pytest.mark.interpret, pytest.mark.skipif(reason is not None, reason=str(reason))]

ROTATION = (*head_specs(torch.bfloat16), *wide_specs(torch.float8_e4m3fn))
run = partial(relayout_tma, block_quota=3)


def pools(spec, src="layer_first", dst="page_first"):
    rng = np.random.default_rng(0)
    return [dense(name)(spec, random_rows(spec, 4, rng), stay) for name in (src, dst)]


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_rows_with_heads(index):
    """Every pair of layouts, two kinds of rows each, so that every kind meets every layout."""
    for spec in (ROTATION[index % 7], ROTATION[(index // 6 + index) % 7]):
        check_copy(run, spec, *map(dense, PAIRS[index]))


@pytest.mark.parametrize("pair", LATENT_PAIRS)
def test_latent_rows(pair):
    for spec in latent_specs(torch.uint8, num_layers=2):
        if spec.head_dim % 16 == 0:
            check_copy(run, spec, *map(dense, pair))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("ids", ["int32 array", "int64 tensor"])
def test_dtypes_and_ids(dtype, ids):
    spec = KVSpec(2, 2, 32, 4, dtype)
    check_copy(run, spec, dense("layer_first"), dense("page_unified"), ids=ids)


@pytest.mark.parametrize("engine", ["one_storage", "strided_tensor"])
def test_views_of_one_storage(engine):
    spec = KVSpec(3, 4, 16, 5, torch.bfloat16)
    form = engine_forms(spec)[engine]
    for host in ("page_first", "page_unified"):
        check_copy(run, spec, form, dense(host), layers=(1, 3))
        check_copy(run, spec, dense(host), form)


def test_head_grids_that_differ():
    specs = [KVSpec(2, 8, 16, 3, torch.bfloat16, head_group=group) for group in (4, 2)]
    for src, dst in (specs, specs[::-1]):
        pair = dense("page_first_direct_group"), dense("page_unified")
        check_copy(run, src, *pair, dst_spec=dst, layers=range(1, 2))


@pytest.mark.parametrize("block_quota", [1, 2, 7, 1000])
@pytest.mark.parametrize("config", [None, Config(2, 1024), Config(1, 1024, num_warps=8)])
def test_any_quota_and_ring(block_quota, config):
    spec = KVSpec(3, 4, 96, 5, torch.bfloat16)
    ring = partial(relayout_tma, block_quota=block_quota, config=config)
    check_copy(ring, spec, dense("layer_first"), dense("page_head"))


@pytest.mark.parametrize(
    ("spec", "last_safe"),
    # The page stride times the next id is above 2³¹.
    [
        (KVSpec(1, 1, 576, 1, torch.uint8, latent=True), 3_728_270),
        (KVSpec(61, 8, 128, 64, torch.uint8), 537),
    ],
    ids=["slots", "pages"],
)
def test_pools_beyond_32_bit_offsets(spec, last_safe, tmp_path):
    near, far = [3, 1, 0, 2], [0, last_safe, last_safe + 1, last_safe + 2]
    layers = slice(spec.num_layers - 1, spec.num_layers)
    copy = partial(run, layers=(layers.start, layers.stop))
    nbytes = (last_safe + 3) * spec.bytes_per_page
    with open(tmp_path / "pool", "wb") as file:
        file.truncate(nbytes)  # zeros, and no blocks behind them until they are written
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=nbytes, dtype=torch.uint8)
    large = KVBuffer.from_tensor(memory, spec, "page_first")
    rows, other = (random_rows(spec, 4, np.random.default_rng(seed)) for seed in (0, 1))
    source, back = (dense("layer_first")(spec, r, stay).buffer for r in (rows, other))

    copy(source, large, near, far)
    copy(large, back, far, near)
    want = logical_bytes(rows, np.array(near))[:, layers].ravel()
    assert_bytes(large.logical(far)[:, layers].numpy().ravel(), want, "far pages")
    assert_bytes(back.logical(near)[:, layers].numpy().ravel(), want, "round trip")
    assert not large.logical([1, last_safe - 1]).any()


def test_no_pages():
    source, target = pools(KVSpec(2, 2, 16, 4, torch.bfloat16))
    before = target.bytes()
    assert relayout_tma(source.buffer, target.buffer, [], []).num_pages == 0
    assert_bytes(target.bytes(), before, "destination")


def test_rows_of_132_bytes_are_refused_and_nothing_moves():
    source, target = pools(KVSpec(2, 1, 132, 4, torch.uint8, latent=True))
    before = target.bytes()
    with pytest.raises(PathUnavailable, match="multiples of 16 bytes, and these share 4"):
        relayout_tma(source.buffer, target.buffer, [0], [1])
    assert_bytes(target.bytes(), before, "destination")


def test_a_pool_of_one_tensor_per_layer_is_refused():
    spec = KVSpec(2, 2, 16, 4, torch.bfloat16)
    rows = random_rows(spec, 4, np.random.default_rng(0))
    tabled = engine_forms(spec)["per_layer"](spec, rows, stay).buffer
    plan = plan_transfer(tabled, pools(spec)[1].buffer, [0], [1])
    assert obstacle(plan) == "src has no uniform layer stride, but a table of addresses"
    with pytest.raises(PathUnavailable, match="table of addresses"):
        launch(plan, block_quota=2)


@pytest.mark.parametrize("block_quota", [0, -1, 2.0, True])
def test_a_quota_that_is_no_number_of_ctas(block_quota):
    source, target = pools(KVSpec(2, 2, 16, 4, torch.bfloat16))
    with pytest.raises(ArgumentError, match="block_quota: expected at least 1 CTA"):
        relayout_tma(source.buffer, target.buffer, [0], [1], block_quota=block_quota)
