"""Boxes of tensor descriptors: what they move, word for word, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import (
    LATENT_PAIRS,
    PAIRS,
    engine_forms,
    head_specs,
    latent_specs,
    random_rows,
    stay,
    wide_specs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hikv.boxes import STAGE_BYTES, WORD_BYTES, obstacle, plan_boxes
from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo
from hikv.errors import PathUnavailable
from hikv.kernels.relayout_tma import _clipping_obstacle
from hikv.kernels.relayout_tma import obstacle as kernel_obstacle
from hikv.plan import CopyPlan, plan_transfer
from hikv.spec import KVSpec


def parts(spec, src, dst, layers=None, dst_spec=None, src_pages=3):
    """The parts of a copy between two layouts; no memory of the source exists."""
    source = KVBuffer.empty(spec, src, src_pages, device="meta")
    target = KVBuffer.empty(dst_spec or spec, dst, 3, device="cpu")
    return plan_transfer(source, target, [1], [2], layers=layers).parts


def published(head_group=None):
    """61 layers, 8 heads of 128, pages of 64 tokens."""
    return KVSpec(61, 8, 128, 64, torch.bfloat16, head_group=head_group)


def latent(row_bytes, page_size=64):
    return KVSpec(61, 1, row_bytes, page_size, torch.uint8, latent=True)


def moved(boxes, page):
    """Source and destination byte of every word that the boxes of `page` move, sorted."""
    digits = np.unravel_index(np.arange(boxes.per_page), boxes.counts)
    within = np.indices(boxes.box).reshape(len(boxes.box), 1, -1)
    offsets, inside = [], []
    for side in (boxes.src, boxes.dst):
        first = np.zeros((len(boxes.box), boxes.per_page, 1), dtype=np.int64)
        first[0] = page
        for digit, dim, step in zip(digits, boxes.dims, side.steps, strict=True):
            first[dim, :, 0] += digit * step
        assert first.max() < 2**31
        at = first + within
        sizes, strides = (page + 1, *side.sizes), (*side.strides, WORD_BYTES)
        offsets.append(sum(x * stride for x, stride in zip(at, strides, strict=True)))
        inside.append(np.all([x < size for x, size in zip(at, sizes, strict=True)], axis=0))
    # What one side cuts off, the other does too: no zero is stored, nothing loaded is lost.
    assert np.array_equal(*inside)
    return by_destination(side[inside[0]] for side in offsets)


def wanted(part, page):
    """The same by the part's own loops."""
    offsets = []
    for side, strides in (
        (part.src, [loop.src_stride for loop in part.loops]),
        (part.dst, [loop.dst_stride for loop in part.loops]),
    ):
        offset = np.array(page * side.page_stride)
        for loop, stride in zip(part.loops, strides, strict=True):
            offset = offset[..., None] + np.arange(loop.size) * stride
        offsets.append((offset[..., None] + np.arange(0, part.run_bytes, WORD_BYTES)).ravel())
    return by_destination(offsets)


def by_destination(offsets):
    src, dst = offsets
    order = np.argsort(dst, kind="stable")
    return np.stack((src[order], dst[order]))


def check_moves(part, stage_bytes=STAGE_BYTES, page=1):
    boxes = plan_boxes(part, stage_bytes)
    assert np.array_equal(moved(boxes, page), wanted(part, page))
    assert boxes.stage_bytes <= stage_bytes
    assert boxes.payload_share == part.page_bytes / (boxes.per_page * boxes.stage_bytes) <= 1
    check_limits(boxes)
    return boxes


def check_limits(boxes):
    """What a descriptor can hold."""
    assert len(boxes.box) <= 5
    assert all(size <= 256 and size.bit_count() == 1 for size in boxes.box)
    for side in (boxes.src, boxes.dst):
        assert len(side.sizes) == len(side.strides) == len(boxes.box) - 1
        assert all(stride % 16 == 0 and stride < 2**40 for stride in side.strides)
        assert all(0 < size < 2**31 for size in side.sizes)
        # Stores cut off in chunks of 16 bytes, so a row that ends elsewhere would run over.
        assert side.sizes[-1] * WORD_BYTES % 16 == 0


@pytest.mark.parametrize("stage_bytes", [1024, 4096, 16384])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_word_of_rows_with_heads_moves_once_and_to_its_place(src, dst, stage_bytes):
    for spec in (*head_specs(torch.bfloat16), *wide_specs(torch.float32)):
        for part in parts(spec, src, dst):
            check_moves(part, stage_bytes)


@pytest.mark.parametrize("stage_bytes", [1024, 4096, 16384])
@pytest.mark.parametrize(("src", "dst"), LATENT_PAIRS)
def test_every_word_of_latent_rows_moves_once_and_to_its_place(src, dst, stage_bytes):
    for spec in latent_specs(torch.uint8):
        if spec.head_dim % 16 == 0:
            for part in parts(spec, src, dst):
                check_moves(part, stage_bytes)


@given(
    pair=st.sampled_from(PAIRS),
    layers=st.integers(1, 9),
    heads=st.sampled_from([(8, 4, 2), (8, 2, 8), (6, 3, 1), (4, 1, 1), (5, 5, 5)]),
    page_size=st.integers(1, 20),
    units=st.integers(1, 20),
    stage_bytes=st.sampled_from([1024, 2048, 16384]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_geometry(pair, layers, heads, page_size, units, stage_bytes, data):
    count, here, there = heads
    source, target = (
        KVSpec(layers, count, 16 * units, page_size, torch.uint8, head_group=group)
        for group in (here, there)
    )
    start = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(start + 1, layers))
    for part in parts(source, *pair, layers=(start, stop), dst_spec=target):
        check_moves(part, stage_bytes)


@pytest.mark.parametrize("form", ["one_storage", "strided_tensor"])
@pytest.mark.parametrize("dst", ["layer_first", "page_head", "page_unified"])
def test_views_with_gaps_and_layers_inside_pages(form, dst):
    spec = KVSpec(3, 4, 16, 5, torch.bfloat16)
    rows = random_rows(spec, 3, np.random.default_rng(0))
    source = engine_forms(spec)[form](spec, rows, stay).buffer
    target = KVBuffer.empty(spec, dst, 3, device="cpu")
    for part in plan_transfer(source, target, [1], [2]).parts:
        check_moves(part)


@pytest.mark.parametrize("head_group", [8, 4, 2, 1])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_boxes_of_the_published_case_are_full_and_carry_nothing_but_payload(src, dst, head_group):
    (part,) = parts(published(head_group), src, dst)
    boxes = plan_boxes(part)
    assert (boxes.stage_bytes, boxes.payload_share) == (16384, 1.0)
    check_limits(boxes)


@pytest.mark.parametrize(
    ("row_bytes", "merged", "apart"),
    # Where tokens of a layer stay together on both sides, and where each row stands alone.
    [
        (528, 61 / 64, 528 / 640 * 61 / 62),
        (576, 61 / 64, 576 / 640 * 61 / 62),
        (656, 61 / 64, 656 / 768),
        (1152, 61 / 62, 61 / 62),
    ],
)
def test_payload_share_of_latent_rows(row_bytes, merged, apart):
    for pair, share in (
        (("layer_first", "page_first_direct"), merged),
        (("layer_first", "page_first"), apart),
    ):
        (part,) = parts(latent(row_bytes), *pair)
        assert plan_boxes(part).payload_share == pytest.approx(share, rel=1e-12)


def test_a_run_across_tokens_is_cut_flat_into_rows_of_128_bytes():
    (part,) = parts(latent(576), "page_first_direct", "page_unified")
    boxes = plan_boxes(part)
    assert part.run_bytes == 61 * 64 * 576
    assert (boxes.box, boxes.counts) == ((1, 128, 32), (-(-61 * 64 * 576 // 16384), 1))


def test_the_fewest_boxes_win_though_some_overhang():
    (part,) = parts(latent(576), "layer_first", "page_first")
    boxes = plan_boxes(part)
    # 64 tokens × 2 layers × 128 bytes: 31 pairs of layers, 5 stretches of a row.
    assert sorted(boxes.box) == [1, 2, 32, 64]
    assert boxes.per_page == 31 * 5


def test_pools_beyond_32_bit_offsets():
    """A page far out: what overflows 32 bits is the hardware's 64-bit sum, no coordinate."""
    spec = published(2)
    (part,) = parts(spec, "page_head", "layer_first", src_pages=40_000)
    assert 39_999 * part.src.page_stride > 2**38
    check_moves(part, page=39_999)


def test_a_pool_too_large_for_the_best_boxes_gets_others():
    spec = published()
    (small,) = parts(spec, "page_head", "layer_first")
    (large,) = parts(spec, "page_head", "layer_first", src_pages=80_000)
    (kv,) = (loop for loop in large.loops if loop.axis == "kv")
    assert kv.src_stride > 2**31 * 256  # too far for a coordinate that counts rows
    assert check_moves(large).box != plan_boxes(small).box


def refused(part):
    reason = obstacle(part)
    assert reason is not None
    with pytest.raises(PathUnavailable) as caught:
        plan_boxes(part)
    assert caught.value.path == "tma"
    assert caught.value.reason == reason
    return reason


def test_rows_of_132_bytes_are_refused():
    (part,) = parts(latent(132), "layer_first", "page_first")
    assert "multiples of 16 bytes, and these share 4" in refused(part)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_table_of_addresses_is_refused(side):
    spec = KVSpec(3, 2, 64, 4, torch.bfloat16)
    rows = random_rows(spec, 3, np.random.default_rng(0))
    tabled = engine_forms(spec)["per_layer"](spec, rows, stay).buffer
    buffers = [tabled, KVBuffer.empty(spec, "page_first", 3, device="cpu")]
    pair = buffers if side == "src" else buffers[::-1]
    (part,) = plan_transfer(*pair, [0], [1]).parts
    assert f"{side} has no uniform layer stride" in refused(part)


def test_a_page_stride_of_a_terabyte_is_refused():
    (part,) = parts(published(), "layer_first", "page_first")
    far = replace(part, dst=replace(part.dst, page_stride=2**40))
    assert "below 2⁴⁰ bytes" in refused(far)
    assert obstacle(replace(part, dst=replace(part.dst, page_stride=2**40 - 16))) is None


def test_an_obstacle_is_none_where_boxes_exist():
    (part,) = parts(published(), "layer_first", "page_first")
    assert obstacle(part) is None


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((8, 9), None, "tensor descriptors need compute capability 9.0, cuda:0 has 8.9"),
        ((9, 0), None, None),
        ((9, 4), "7.0", "tensor descriptors need an NVIDIA GPU"),
    ],
)
def test_a_gpu_without_tensor_copies_is_refused(capability, hip, reason, monkeypatch):
    monkeypatch.setattr(CopyPlan, "gpu", torch.device("cuda", 0))
    monkeypatch.setattr(CopyPlan, "unreachable", lambda plan: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    buffers = [KVBuffer.empty(latent(64, 4), "page_first", 2, device="cpu") for _ in range(2)]
    assert kernel_obstacle(plan_transfer(*buffers, [0], [1])) == reason


def cuda_driver(version: int) -> DeviceInfo:
    return DeviceInfo(0, "a GPU", "", "nvidia", (10, 0), 148, 0, cuda_driver_version=version)


@pytest.mark.parametrize(
    ("row_bytes", "capability", "driver", "refused"),
    [
        (576, 100, 13010, True),
        (576, 120, 12080, True),
        (576, 100, None, True),
        (576, 100, 13020, False),
        (576, 90, 12080, False),
        (1024, 100, 13010, False),  # full boxes: nothing to clip
    ],
)
def test_overhanging_boxes_need_a_driver_that_clips_them(row_bytes, capability, driver, refused):
    spec = KVSpec(3, 1, row_bytes, 64, torch.uint8, latent=True)
    src, dst = KVBuffer.empty(spec, "page_first", 2), KVBuffer.empty(spec, "layer_first", 2)
    plan = plan_transfer(src, dst, [0], [1])
    info = None if driver is None else cuda_driver(driver)
    reason = _clipping_obstacle(plan, capability, info)
    assert ("clip" in reason) if refused else reason is None
