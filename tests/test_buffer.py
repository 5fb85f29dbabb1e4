"""Buffers over every form of memory an engine may bring: what they read, and what copies keep."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cases import (
    ID_FORMS,
    assert_bytes,
    check_copy,
    dense,
    engine_forms,
    head_specs,
    latent_specs,
    logical_bytes,
    one_storage,
    packed_heads,
    packed_tokens,
    per_layer,
    random_rows,
    stay,
    strided_tensor,
    transposed,
    wide_specs,
)
from oracle import LATENT_ORDERS, ORDERS

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.kernels.reference import reference
from hikv.layout import list_layouts
from hikv.pages import pages_of_slots
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32
HEADS = next(head_specs(BF16))
LATENT = next(latent_specs(BF16))
WIDE = next(wide_specs(BF16))
SPECS = {"heads": HEADS, "latent": LATENT, "wide": WIDE}
FORM_CASES = [(kind, form) for kind, spec in SPECS.items() for form in engine_forms(spec)]


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(U8), b.contiguous().view(U8))


def layouts(spec):
    return LATENT_ORDERS if spec.latent else ORDERS


# An engine's own pool.


@pytest.mark.parametrize(("kind", "form"), FORM_CASES)
def test_engine_pools_exchange_pages_with_every_layout(kind, form):
    for dtype, ids in product((BF16, U8, F32), ID_FORMS):
        spec = next({"heads": head_specs, "latent": latent_specs, "wide": wide_specs}[kind](dtype))
        engine = engine_forms(spec)[form]
        for layout in layouts(spec):
            check_copy(reference, spec, engine, dense(layout), ids=ids)
            check_copy(reference, spec, dense(layout), engine, ids=ids)


@pytest.mark.parametrize("kind", SPECS)
def test_engine_pools_exchange_pages_with_each_other(kind):
    spec = SPECS[kind]
    for src, dst in product(engine_forms(spec).values(), repeat=2):
        check_copy(reference, spec, src, dst)


@pytest.mark.parametrize(("kind", "form"), FORM_CASES)
@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (2, 3), range(1, 2)])
def test_layer_ranges_leave_other_layers_alone(kind, form, layers):
    spec = SPECS[kind]
    engine = engine_forms(spec)[form]
    for layout in layouts(spec):
        check_copy(reference, spec, engine, dense(layout), layers=layers)
        check_copy(reference, spec, dense(layout), engine, layers=layers)


@pytest.mark.parametrize("kind", SPECS)
def test_separate_allocations_need_a_table_and_views_of_one_storage_do_not(kind):
    spec = SPECS[kind]
    rows = random_rows(spec, 3, np.random.default_rng(0))
    assert all(region.tabled for region in per_layer(spec, rows, stay).buffer.regions)
    assert not any(region.tabled for region in one_storage(spec, rows, stay).buffer.regions)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_layers_of_one_storage_in_another_order_are_read_through_a_table(order):
    plain = one_storage(HEADS, random_rows(HEADS, 3, np.random.default_rng(0)), stay)
    k, v = ([kv[:, layer] for layer in order] for kv in plain.tensors[0])
    buffer = KVBuffer.from_layers(k, v, HEADS)
    assert buffer.regions[0].tabled
    assert same_bytes(buffer.logical([1]), plain.buffer.logical([1])[:, list(order)])


def test_a_view_of_heads_before_tokens_reads_like_a_plain_gather():
    rows = random_rows(HEADS, 5, np.random.default_rng(0))
    pool = transposed(HEADS, rows, stay)
    pages = torch.tensor([4, 0, 3])
    k = torch.stack([layer[pages].transpose(1, 2) for layer in pool.tensors[:3]], 1)
    assert same_bytes(pool.buffer.logical(pages)[:, :, 0], k)


def test_a_latent_pool_of_one_layer_may_be_page_first():
    # The layer axis of size 1 stands where a head axis of size 1 might.
    spec = KVSpec(1, 1, 64, 4, BF16, latent=True)
    for form in (strided_tensor, dense("page_first")):
        check_copy(reference, spec, form, dense("layer_first"))


def test_a_row_of_one_element_is_as_wide_as_that_element():
    # `permute` leaves a stride of 20 elements on the dimension of 1.
    scales = torch.arange(20, dtype=F32).reshape(1, 5, 4).permute(1, 2, 0)
    spec = KVSpec(1, 1, 1, 4, F32, latent=True)
    buffer = KVBuffer.from_layers([scales], None, spec)
    assert buffer.regions[0].row_bytes == 4
    host = KVBuffer.empty(spec, "page_first", 5)
    reference(buffer, host, [3, 1], [0, 4])
    assert host.logical([0, 4]).flatten().tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


# Shapes that fit more than one reading.


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_packed_pools_are_read_as_declared_when_heads_equal_one_two_or_the_page(heads):
    spec = KVSpec(3, heads, 128, 4, BF16)
    for form, layout in product((packed_heads, packed_tokens, transposed), ORDERS):
        check_copy(reference, spec, form, dense(layout))
        check_copy(reference, spec, dense(layout), form)


def test_one_shape_holds_two_packings_and_only_the_declaration_tells_them_apart():
    spec = KVSpec(1, 2, 128, 4, BF16)
    rows = random_rows(spec, 3, np.random.default_rng(0))
    by_head, by_token = packed_heads(spec, rows, stay), packed_tokens(spec, rows, stay)
    assert by_head.tensors[0].numel() == by_token.tensors[0].numel() == 3 * 4 * 2 * 256
    assert not same_bytes(by_head.tensors[0].flatten(), by_token.tensors[0].flatten())
    assert same_bytes(by_head.buffer.logical([2, 0]), by_token.buffer.logical([2, 0]))
    with pytest.raises(TypeError, match="layout"):
        KVBuffer.from_tensor(by_head.tensors[0], spec)


# What a buffer says of itself.


@pytest.mark.parametrize("kind", SPECS)
def test_logical_is_the_oracle_order_whatever_the_form(kind):
    pages = np.array([4, 0, 3])
    for dtype in (BF16, torch.float8_e4m3fn, U8):
        for spec in {"heads": head_specs, "latent": latent_specs, "wide": wide_specs}[kind](dtype):
            rows = random_rows(spec, 5, np.random.default_rng(0))
            want = logical_bytes(rows, pages)
            forms = [dense(layout) for layout in layouts(spec)]
            for form in (*forms, *engine_forms(spec).values()):
                got = form(spec, rows, stay).buffer.logical(torch.from_numpy(pages))
                assert got.shape[:-1] == want.shape[:-1]
                assert_bytes(got.view(U8).numpy().ravel(), want.ravel(), "logical")


@pytest.mark.parametrize("page", [-1, 3])
def test_logical_refuses_a_page_that_is_not_there(page):
    with pytest.raises(IndexError):
        KVBuffer.empty(HEADS, "page_first", 3).logical([page])


@pytest.mark.parametrize("kind", SPECS)
def test_empty_allocates_exactly_the_payload(kind):
    spec = SPECS[kind]
    for layout in list_layouts(latent=spec.latent):
        buffer = KVBuffer.empty(spec, layout, 5)
        (low, high), *more = sorted(buffer.extents)
        assert buffer.nbytes == 5 * spec.bytes_per_page
        assert buffer.regions[0].anchors[0, 0].untyped_storage().nbytes() == buffer.nbytes
        assert max(high, *(end for _, end in more), 0) - low == buffer.nbytes
        assert repr(buffer) == f"KVBuffer({layout}, 5 pages, {buffer.nbytes} B, cpu)"


# Row widths.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, BF16])
def test_a_page_with_wide_k_is_k_bytes_plus_v_bytes(dtype):
    spec = KVSpec(3, 4, 192, 64, dtype, v_head_dim=128)
    assert spec.bytes_per_page == 3 * 64 * 4 * (192 + 128) * dtype.itemsize
    assert [region.row_bytes for region in KVBuffer.empty(spec, "page_first", 1).regions] == [
        192 * dtype.itemsize,
        128 * dtype.itemsize,
    ]


@pytest.mark.parametrize("real", [656, 528])
def test_rows_with_inline_bytes_are_refused_by_a_spec_that_would_cut_them_off(real):
    derived = KVSpec(2, 1, 512 if real == 528 else 576, 4, U8, latent=True)
    layers = [torch.zeros(3, 4, real, dtype=U8) for _ in range(2)]
    for build in (
        lambda: KVBuffer.from_layers(layers, None, derived),
        lambda: KVBuffer.from_tensor(torch.stack(layers), derived, "layer_first"),
    ):
        with pytest.raises(ArgumentError, match=f"{derived.head_dim} B.*{real} B"):
            build()


@pytest.mark.parametrize("layout", LATENT_ORDERS)
def test_inline_scales_survive_a_backup_and_a_load_to_other_pages(layout):
    # 512 bytes of fp8 values, then four fp32 scales.
    spec = KVSpec(2, 1, 528, 4, U8, latent=True)
    layers = [torch.zeros(6, 4, 528, dtype=U8) for _ in range(2)]
    scales = [layer[..., 512:].view(F32) for layer in layers]
    device, host = KVBuffer.from_layers(layers, None, spec), KVBuffer.empty(spec, layout, 3)

    for scale in scales:
        scale[[1, 3]] = 2.0
    reference(device, host, [1, 3], [2, 0])
    for layer, scale in zip(layers, scales, strict=True):
        layer.fill_(0xEE)
        scale.fill_(99.0)
    reference(host, device, [2, 0], [5, 2])
    for layer, scale in zip(layers, scales, strict=True):
        assert (scale[[5, 2]] == 2.0).all()
        assert (layer[[5, 2], :, :512] == 0).all()
        assert (scale[[0, 1, 3, 4]] == 99.0).all()


# Head grids.


def test_head_grids_that_nest_convert_into_each_other():
    grouped = ("page_first_direct_group", "page_unified")
    for src, dst in product(("layer_first", *grouped), grouped):
        for fine, coarse in product((1, 2, 4, 8), repeat=2):
            one, other = (KVSpec(3, 8, 16, 4, BF16, head_group=g) for g in (fine, coarse))
            check_copy(reference, one, dense(src), dense(dst), dst_spec=other)
            check_copy(reference, one, dense(dst), dense(src), dst_spec=other)


def test_head_grids_of_wide_rows_nest_too():
    for fine, coarse in product((1, 2, 4), repeat=2):
        one, other = (KVSpec(2, 4, 24, 4, BF16, head_group=g, v_head_dim=8) for g in (fine, coarse))
        for layout in ("page_first_direct_group", "page_unified"):
            check_copy(reference, one, dense(layout), dense("page_unified"), dst_spec=other)


def test_head_grids_that_do_not_nest_are_refused():
    two, three = (KVSpec(2, 6, 16, 4, BF16, head_group=g) for g in (2, 3))
    src, dst = KVBuffer.empty(two, "page_unified", 2), KVBuffer.empty(three, "page_unified", 2)
    with pytest.raises(ArgumentError, match=r"nest: src has 2 .* dst has 3"):
        reference(src, dst, [0], [0])


# Addresses.


def shifted(nbytes, storage_at=0):
    """A place `nbytes` into a storage that begins `storage_at` bytes past a multiple of 16."""

    def place(tensor):
        size = tensor.numel() * tensor.element_size()
        raw = np.zeros(size + nbytes + 32, dtype=np.uint8)
        start = -raw.ctypes.data % 16 + storage_at
        memory = torch.from_numpy(raw[start : start + nbytes + size])[nbytes:]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return place


@pytest.mark.parametrize(
    ("place", "vector_bytes"),
    [
        (shifted(0), 16),
        (shifted(8), 8),
        (shifted(2), 2),
        (shifted(12, storage_at=4), 4),
        (shifted(4, storage_at=12), 4),
    ],
    ids=["aligned", "byte 8", "bf16 element 1", "aligned in odd storage", "odd storage"],
)
def test_views_at_any_element_are_copied_exactly(place, vector_bytes):
    for layout in ORDERS:
        plan = check_copy(reference, HEADS, dense(layout), per_layer, src_place=place)
        assert plan.vector_bytes == vector_bytes
        plan = check_copy(reference, HEADS, per_layer, dense(layout), src_place=place)
        assert plan.vector_bytes == vector_bytes


@pytest.mark.parametrize(
    ("spec", "layout", "last_safe"),
    [
        (KVSpec(1, 1, 576, 1, U8, latent=True), "page_first", 3_728_270),
        (KVSpec(61, 8, 128, 64, U8), "page_first", 537),
    ],
    ids=["rows of 576", "61 layers, 8 heads"],
)
def test_offsets_beyond_32_bits_are_exact_with_int32_ids(tmp_path, spec, layout, last_safe):
    k_page_bytes = spec.bytes_per_page // sum(c.kv for c in spec.components)
    assert last_safe * k_page_bytes < 2**31 <= (last_safe + 1) * k_page_bytes
    num_pages = last_safe + 3
    # A sparse file takes up no memory but for the pages that are written.
    nbytes = num_pages * spec.bytes_per_page
    memory = torch.from_numpy(np.memmap(tmp_path / "pool", np.uint8, "w+", shape=(nbytes,)))
    large = KVBuffer.from_tensor(memory, spec, layout)
    small, back = (KVBuffer.empty(spec, "layer_first", 4) for _ in range(2))
    written = small.regions[0].anchors[0, 0].random_(1, 256)
    returned = back.regions[0].anchors[0, 0].zero_()

    pages = np.array([0, last_safe, last_safe + 1, num_pages - 1], dtype=np.int32)
    local = np.arange(4, dtype=np.int32)
    reference(small, large, local, pages)
    reference(large, back, pages, local)
    assert torch.equal(returned, written)
    assert not large.logical([1, last_safe - 1]).any()


# Lists of pages.


def test_the_order_of_pairs_does_not_matter():
    rng = np.random.default_rng(0)
    spec, rows = WIDE, random_rows(WIDE, 12, rng)
    src_pages, dst_pages = np.array([9, 2, 7, 0]), np.array([3, 11, 1, 10])
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 3, 2]):
        src = per_layer(spec, rows, stay)
        dst = dense("page_unified")(spec, random_rows(spec, 12, np.random.default_rng(1)), stay)
        reference(src.buffer, dst.buffer, src_pages[order], dst_pages[order])
        results.append(dst.bytes())
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("ids", ID_FORMS)
def test_a_second_pool_moved_by_the_same_unsorted_list_sees_the_same_pages(ids):
    # For instance the draft model's KV, or an indexer's rows, riding along with the main pool.
    pages, places = (ID_FORMS[ids](np.array(p)) for p in ([9, 2, 7], [1, 4, 0]))
    rng = np.random.default_rng(0)
    for spec in (HEADS, LATENT):
        rows = random_rows(spec, 10, rng)
        host = KVBuffer.empty(spec, "page_first", 5)
        reference(per_layer(spec, rows, stay).buffer, host, pages, places)
        want = logical_bytes(rows, np.array([9, 2, 7]))
        assert_bytes(host.logical([1, 4, 0]).view(U8).numpy().ravel(), want.ravel(), "host")


def test_pages_are_addressed_by_id_where_no_id_is_also_a_slot():
    rows = random_rows(LATENT, 1010, np.random.default_rng(0))
    src = per_layer(LATENT, rows, stay).buffer
    dst = KVBuffer.empty(LATENT, "page_first", 1004)
    reference(src, dst, [1009, 1001], [1000, 1003])
    want = logical_bytes(rows, np.array([1009, 1001]))
    assert_bytes(dst.logical([1000, 1003]).view(U8).numpy().ravel(), want.ravel(), "dst")
    with pytest.raises(ArgumentError, match=r"src_pages\[0\].*slot // page_size"):
        reference(src, dst, [1009 * LATENT.page_size], [1000])


@pytest.mark.parametrize("ids", ID_FORMS)
def test_slots_become_page_ids_only_where_a_page_is_whole_and_in_order(ids):
    as_slots = ID_FORMS[ids]
    slots = as_slots(np.array([8, 9, 10, 11, 0, 1, 2, 3]))
    assert pages_of_slots(slots, 4).tolist() == [2, 0]
    for slots, position in (
        ([8, 9, 10, 12], 3),
        ([11, 10, 9, 8], 0),
        ([4, 5, 6, 7, 8, 8, 9, 10], 5),
    ):
        with pytest.raises(ArgumentError) as caught:
            pages_of_slots(as_slots(np.array(slots)), 4)
        assert caught.value.argument == f"slots[{position}]"


def test_an_empty_list_moves_nothing():
    dst = KVBuffer.empty(HEADS, "page_first", 2)
    memory = dst.regions[0].anchors[0, 0].fill_(7)
    plan = reference(KVBuffer.empty(HEADS, "layer_first", 2), dst, [], [])
    assert (plan.num_pages, plan.nbytes, plan.num_descriptors) == (0, 0, 0)
    assert (memory == 7).all()


# Memory that two sides share.


def test_pages_of_one_pool_can_be_moved_to_other_pages_of_it():
    rows = random_rows(HEADS, 6, np.random.default_rng(0))
    for form in (per_layer, dense("page_unified")):
        pool = form(HEADS, rows, stay)
        reference(pool.buffer, pool.buffer, [4, 0], [1, 5])
        want = [array[[0, 4, 2, 3, 4, 0]] for array in rows]
        assert_bytes(pool.bytes(), form(HEADS, want, stay).bytes(), "pool")


def test_a_page_on_both_lists_of_one_pool_is_refused():
    buffer = KVBuffer.empty(HEADS, "page_first", 4)
    with pytest.raises(ArgumentError, match="page 2 on both sides"):
        reference(buffer, buffer, [1, 2], [2, 3])


def test_one_memory_in_two_layouts_is_refused():
    memory = torch.zeros(4 * HEADS.bytes_per_page, dtype=U8)
    src, dst = (KVBuffer.from_tensor(memory, HEADS, name) for name in ("page_first", "page_head"))
    with pytest.raises(ArgumentError, match="overlapping memory"):
        reference(src, dst, [0], [1])


def test_mapped_host_memory_is_the_same_memory_under_another_device():
    host = KVBuffer.empty(HEADS, "page_first", 4)
    mapped = replace(host, device=torch.device("cuda"))
    assert plan_transfer(host, mapped, [0, 1], [2, 3]).direction == "h2d"
    with pytest.raises(ArgumentError, match="page 1 on both sides"):
        plan_transfer(host, mapped, [0, 1], [1, 2])


def test_halves_of_one_tensor_are_apart():
    memory = torch.zeros(4 * HEADS.bytes_per_page, dtype=U8)
    memory[: len(memory) // 2].random_(1, 256)
    first, second = (KVBuffer.from_tensor(half, HEADS, "page_unified") for half in memory.chunk(2))
    reference(first, second, [0, 1], [0, 1])
    assert torch.equal(*memory.chunk(2))


@pytest.mark.parametrize("kind", SPECS)
def test_a_tensor_that_stands_for_two_layers_is_refused(kind):
    spec = SPECS[kind]
    pool = per_layer(spec, random_rows(spec, 3, np.random.default_rng(0)), stay)
    k, v = pool.tensors[:3], pool.tensors[3:] or None
    with pytest.raises(ArgumentError, match=r"k_layers\[0\].*k_layers\[2\] 0 B away"):
        KVBuffer.from_layers([k[0], k[1], k[0]], v, spec)


def test_one_tensor_for_k_and_v_is_refused_and_so_are_views_that_overlap():
    spec = KVSpec(1, 8, 16, 4, BF16)
    packed, tokens = torch.zeros(3, 4, 8, 24, dtype=BF16), torch.zeros(13, 8, 16, dtype=BF16)
    a_token_later = tokens[1:].unflatten(0, (3, 4))
    for k, v in (
        (packed[..., :16], packed[..., :16]),
        (packed[..., :16], packed[..., 8:]),
        (tokens[:-1].unflatten(0, (3, 4)), a_token_later),
    ):
        with pytest.raises(ArgumentError, match=r"k_layers\[0\].*v_layers\[0\]"):
            KVBuffer.from_layers([k], [v], spec)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_buffer_is_not_copied_under_the_addresses_of_another(copied):
    buffer = KVBuffer.empty(KVSpec(1, 1, 8, 1, torch.uint8), "page_first", 1)
    with pytest.raises(ArgumentError, match="build one over the other memory"):
        copied(buffer)


def test_a_pool_is_pinned_only_where_every_layer_is(monkeypatch):
    spec = KVSpec(2, 1, 8, 1, torch.uint8)
    k, v = ([torch.zeros(3, 1, 1, 8, dtype=torch.uint8) for _ in range(2)] for _ in range(2))
    pinned = {tensor.data_ptr() for tensor in (*k, v[0])}
    monkeypatch.setattr("hikv.buffer._is_pinned", lambda tensor: tensor.data_ptr() in pinned)
    assert not KVBuffer.from_layers(k, v, spec).pinned
    pinned.add(v[1].data_ptr())
    assert KVBuffer.from_layers(k, v, spec).pinned
