"""Plans: the numbers they report, and that both sides decode to the same row at every vector."""

from __future__ import annotations

import ctypes
import gc
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cases import dense, engine_forms, head_specs, latent_specs, random_rows, stay, wide_specs
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import LATENT_ORDERS, ORDERS

import hikv
from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.plan import PATH_OBSTACLES, CopyPlan, PartPlan, Side, page_runs, plan_transfer
from hikv.spec import KVSpec

BF16, U8 = torch.bfloat16, torch.uint8


def plan_between(src, dst, spec, pages=2, dst_spec=None):
    ids = list(range(pages))
    return plan_transfer(
        KVBuffer.empty(spec, src, pages), KVBuffer.empty(dst_spec or spec, dst, pages), ids, ids
    )


# Runs.


@pytest.mark.parametrize(
    ("heads", "groups", "row_run", "merged_run"),
    [
        (8, 1, 2048, 131_072),
        (8, 2, 1024, 1024),
        (8, 4, 512, 512),
        (8, 8, 256, 256),
        (16, 1, 4096, 262_144),
        (16, 8, 512, 512),
        (16, 16, 256, 256),
    ],
)
def test_runs_between_layer_first_and_grouped_pages(heads, groups, row_run, merged_run):
    spec = KVSpec(61, heads, 128, 64, BF16, head_group=heads // groups)
    for pair in (
        ("layer_first", "page_first_direct_group"),
        ("page_first_direct_group", "layer_first"),
    ):
        plan = plan_between(*pair, spec)
        assert (plan.row_run, plan.run_bytes) == (row_run, merged_run)


def test_equal_layouts_move_the_longest_stretch_each_has():
    spec = KVSpec(61, 8, 128, 64, BF16)
    layer, page = spec.bytes_per_page // (2 * 61), spec.bytes_per_page
    runs = {layout: plan_between(layout, layout, spec).run_bytes for layout in ORDERS}
    assert runs == {"layer_first": layer, "page_unified": page} | dict.fromkeys(
        ("page_head", "page_first", "page_first_direct", "page_first_direct_group"), page // 2
    )


def test_k_and_v_of_different_width_are_two_parts():
    spec = KVSpec(2, 4, 192, 16, BF16, v_head_dim=128)
    plan = plan_between("layer_first", "page_first", spec)
    assert [(part.name, part.row_run) for part in plan.parts] == [("k", 1536), ("v", 1024)]
    assert (plan.row_run, plan.nbytes) == (1024, 2 * spec.bytes_per_page)


# Descriptors.


def test_descriptors_are_runs_joined_over_consecutive_pages():
    spec = KVSpec(3, 8, 16, 4, BF16)
    src, dst = (KVBuffer.empty(spec, "layer_first", 10) for _ in range(2))
    scattered = plan_transfer(src, dst, [0, 2, 4], [5, 3, 1])
    consecutive = plan_transfer(src, dst, [4, 5, 6], [1, 2, 3])
    broken = plan_transfer(src, dst, [4, 5, 6], [1, 2, 4])
    assert scattered.num_descriptors == 3 * 2 * 3
    assert consecutive.num_descriptors == 2 * 3
    assert broken.num_descriptors == 2 * 2 * 3


def test_runs_shorter_than_the_page_never_join():
    spec = KVSpec(3, 8, 16, 4, BF16)
    plan = plan_between("layer_first", "page_first", spec, pages=4)
    assert plan.num_descriptors == 4 * spec.bytes_per_page // plan.run_bytes == 4 * 2 * 3 * 4


def test_the_copy_engine_is_handed_few_copies_where_the_grid_cuts_layers_and_many_where_heads():
    whole, cut = (KVSpec(61, 8, 128, 64, BF16, head_group=g) for g in (None, 1))
    assert plan_between("layer_first", "page_first_direct", whole, 32).num_descriptors == 32 * 122
    grouped = plan_between("layer_first", "page_first_direct_group", cut, 32)
    assert grouped.num_descriptors == 32 * 122 * 64 * 8


@pytest.mark.parametrize(
    ("src", "dst", "starts", "lengths"),
    [
        ([], [], [], []),
        ([7], [0], [0], [1]),
        ([1, 2, 3], [5, 6, 7], [0], [3]),
        ([1, 2, 3], [7, 6, 5], [0, 1, 2], [1, 1, 1]),
        ([1, 2, 4, 5, 6], [0, 1, 2, 3, 9], [0, 2, 4], [2, 2, 1]),
    ],
)
def test_page_runs(src, dst, starts, lengths):
    got = page_runs(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64))
    assert [part.tolist() for part in got] == [starts, lengths]


# Vectors.

ROW_BYTES = (64, 80, 128, 192, 256, 512, 528, 576, 640, 656, 1024, 1152)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_every_row_of_whole_16_bytes_gets_16_byte_vectors_both_ways(row_bytes):
    latent = KVSpec(3, 1, row_bytes // 2, 4, BF16, latent=True)
    heads = KVSpec(3, 4, row_bytes // 2, 4, BF16, head_group=2)
    for spec, orders in ((latent, LATENT_ORDERS), (heads, ORDERS)):
        for pair in product(orders, repeat=2):
            there, back = plan_between(*pair, spec), plan_between(*pair[::-1], spec)
            assert there.vector_bytes == back.vector_bytes == 16


def test_one_predicate_serves_both_directions():
    for specs in (head_specs, latent_specs, wide_specs):
        for spec in specs(U8):
            for src, dst in product(LATENT_ORDERS if spec.latent else ORDERS, repeat=2):
                there, back = plan_between(src, dst, spec), plan_between(dst, src, spec)
                for name in ("row_run", "run_bytes", "vector_bytes", "num_descriptors", "nbytes"):
                    assert getattr(there, name) == getattr(back, name)


@pytest.mark.parametrize(
    ("row_bytes", "vector_bytes"), [(132, 4), (130, 2), (131, 1), (136, 8), (16, 16)]
)
def test_other_rows_get_the_widest_word_that_divides_them(row_bytes, vector_bytes):
    spec = KVSpec(3, 1, row_bytes, 3, U8, latent=True)
    assert plan_between("layer_first", "page_first", spec).vector_bytes == vector_bytes


@pytest.mark.parametrize(("first_byte", "vector_bytes"), [(0, 16), (8, 8), (2, 2), (32, 16)])
def test_a_view_that_begins_off_16_bytes_narrows_the_vector(first_byte, vector_bytes):
    spec = KVSpec(3, 1, 64, 4, BF16, latent=True)
    memory = torch.empty(2 * spec.bytes_per_page + 64, dtype=U8)
    view = memory[first_byte : first_byte + 2 * spec.bytes_per_page].view(BF16)
    odd, even = (
        KVBuffer.from_tensor(view, spec, "layer_first"),
        KVBuffer.empty(spec, "page_first", 2),
    )
    assert plan_transfer(odd, even, [0], [0]).vector_bytes == vector_bytes
    assert plan_transfer(even, odd, [0], [0]).vector_bytes == vector_bytes


@pytest.mark.parametrize("axis", ["page", "token", "head"])
@pytest.mark.parametrize(("gap_bytes", "vector_bytes"), [(32, 16), (8, 8), (2, 2)])
def test_a_gap_behind_any_axis_narrows_the_vector(axis, gap_bytes, vector_bytes):
    spec = KVSpec(1, 4, 64, 4, BF16)
    strides, inner = {}, 64
    for name, count in (("head", 4), ("token", 4), ("page", 3)):
        strides[name] = inner + (gap_bytes // 2 if name == axis else 0)
        inner = strides[name] * count
    k, v = (
        torch.empty(inner, dtype=BF16).as_strided((3, 4, 4, 64), (*list(strides.values())[::-1], 1))
        for _ in range(2)
    )
    odd, even = KVBuffer.from_layers([k], [v], spec), KVBuffer.empty(spec, "page_first", 3)
    assert plan_transfer(odd, even, [0], [0]).vector_bytes == vector_bytes
    assert plan_transfer(even, odd, [0], [0]).vector_bytes == vector_bytes


# What is remembered.


def test_a_pair_of_buffers_is_planned_once_for_every_range_of_layers():
    spec = next(head_specs(BF16))
    src, dst = KVBuffer.empty(spec, "layer_first", 3), KVBuffer.empty(spec, "page_first", 3)
    everything = plan_transfer(src, dst, [0], [1])
    part = plan_transfer(src, dst, [0], [1], layers=(1, 2))
    assert part.nbytes * 3 == everything.nbytes
    assert plan_transfer(src, dst, [2], [0]).parts is everything.parts
    assert plan_transfer(src, dst, [2], [0], layers=range(1, 2)).parts is part.parts
    assert plan_transfer(dst, src, [0], [1]).parts is not everything.parts


def test_what_is_remembered_keeps_no_buffer_alive():
    spec = next(head_specs(BF16))
    src, dst = KVBuffer.empty(spec, "layer_first", 3), KVBuffer.empty(spec, "page_first", 3)
    plan_transfer(src, dst, [0], [1])
    gone = [weakref.ref(buffer) for buffer in (src, dst)]
    del src, dst
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# What it prints.


def test_describe_prints_loops_runs_vectors_tiles_and_descriptors():
    spec = KVSpec(61, 8, 128, 64, BF16, head_group=2)
    text = plan_between("page_first_direct_group", "layer_first", spec).describe()
    assert text.splitlines()[:6] == [
        "h2h  KVBuffer(page_first_direct_group, 2 pages, 31981568 B, cpu) → "
        "KVBuffer(layer_first, 2 pages, 31981568 B, cpu)",
        "2 pages, 31981568 B, layers 0..61; 62464 descriptors for a copy engine, neighbours joined",
        "  kv: loops kv 2 · layer 61 · token 64 · group 4; 16-byte vectors, 999424 a page; "
        "244 tiles of 128 KiB, what a CTA has in flight",
        "    row run 512 B, what stays together of a token; merged run 512 B, the longest stretch "
        "on both sides",
        "    src: a page is 2 × 3904 × 4 × 512 B, pages are 7995392 B apart",
        "    dst: a page is 122 × 131072 B, pages are 131072 B apart",
    ]


def test_describe_says_which_paths_serve_and_why_the_others_cannot():
    spec = next(head_specs(BF16))
    src, dst = KVBuffer.empty(spec, "layer_first", 2), KVBuffer.empty(spec, "page_first", 2)
    lines = hikv.plan_transfer(src, dst, [0], [1]).describe().splitlines()
    assert lines[-7:] == [
        "  path sm: neither side is on a GPU",
        "  path tma: neither side is on a GPU",
        "  path staged: it crosses between host and GPU, and this copy is h2h",
        "  path ce: neither side is on a GPU",
        "  path ce3d: neither side is on a GPU",
        "  path cpu: serves",
        "  transfer() takes cpu (default)",
    ]


def test_describe_says_what_transfer_takes_or_why_it_refuses():
    spec = KVSpec(2, 4, 16, 8, BF16)
    gpu = KVBuffer.empty(spec, "layer_first", 4, device="meta")
    memory = torch.empty(spec.bytes_per_page, dtype=torch.uint8)

    def last(layout: str, pinned: bool) -> str:
        host = KVBuffer.from_tensor(memory, spec, layout, pinned=pinned)
        return hikv.plan_transfer(host, gpu, [0], [3]).describe().splitlines()[-1]

    assert last("page_first", True) == "  transfer() takes sm, 2 CTAs (default)"
    assert last("page_first", False) == "  transfer() refuses it: src is pageable host memory"


def test_describe_says_how_large_the_pieces_of_a_path_are(monkeypatch):
    monkeypatch.setitem(PATH_OBSTACLES, "ce3d", lambda plan: None)
    spec = KVSpec(2, 4, 16, 8, BF16)
    src, dst = KVBuffer.empty(spec, "layer_first", 4), KVBuffer.empty(spec, "page_first", 4)
    plan = hikv.plan_transfer(src, dst, [0, 2], [1, 0])
    assert plan.num_descriptors == 2 * 2 * 2 * 8
    # 8 rows of 128 B of K and of V, a layer at a time.
    assert "  path ce3d: serves, in pieces of 2048 B" in plan.describe().splitlines()


def test_describe_counts_the_entries_of_a_table_and_the_layers_moved():
    spec = next(head_specs(BF16))
    engine = engine_forms(spec)["per_layer"](
        spec, random_rows(spec, 2, np.random.default_rng(0)), stay
    )
    plan = plan_transfer(
        engine.buffer, KVBuffer.empty(spec, "page_first", 2), [0], [1], layers=(1, 3)
    )
    lines = plan.describe().splitlines()
    assert lines[1].startswith("1 page, ")
    assert "layers 1..3" in lines[1]
    assert "B, by 4 addresses, pages are" in lines[4]


# Decoding. A kernel knows a side only as radix, strides and table; here that is all there is too.


def decode(side: Side, pages: np.ndarray) -> np.ndarray:
    """The address of every vector of `pages`, int64 `[page, vector]`."""
    digits = np.unravel_index(np.arange(np.prod(side.sizes)), side.sizes)
    offsets = sum(d * stride for d, stride in zip(digits, side.strides, strict=True))
    if side.table is not None:
        entries = sum(d * step for d, step in zip(digits, side.table_strides, strict=True))
        offsets = offsets + side.table[entries]
    return side.address + pages[:, None] * side.page_stride + offsets


def peek(addresses: np.ndarray, nbytes: int) -> np.ndarray:
    """The int32 numbers that lie in memory at `addresses`, `[address, nbytes / 4]`."""
    raw = b"".join(ctypes.string_at(int(address), nbytes) for address in addresses.ravel())
    return np.frombuffer(raw, np.int32).reshape(-1, nbytes // 4)


def numbered_rows(spec: KVSpec, num_pages: int) -> list[np.ndarray]:
    """Rows of int32 elements, no number twice."""
    rows = random_rows(spec, num_pages, np.random.default_rng(0))
    numbers = np.arange(sum(array.size for array in rows) // 4, dtype=np.int32)
    ends = np.cumsum([array.size // 4 for array in rows])
    return [
        part.view(np.uint8).reshape(array.shape)
        for part, array in zip(np.split(numbers, ends[:-1]), rows, strict=True)
    ]


@st.composite
def conversions(draw):
    """Two specs that differ in the head grid alone, a form for each, and a range of layers."""
    layers, page, width = draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)))
    latent = draw(st.booleans())
    heads = 1 if latent else draw(st.sampled_from((1, 2, 4, 6, 8)))
    v_width = None if latent else draw(st.sampled_from((None, width, width + 3)))
    spec = KVSpec(layers, heads, width, page, torch.int32, latent=latent, v_head_dim=v_width)
    specs = [spec, spec]
    if not latent:
        coarse = draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
        fine = draw(st.sampled_from([g for g in range(1, coarse + 1) if coarse % g == 0]))
        specs = [replace(spec, head_group=g) for g in draw(st.permutations((coarse, fine)))]
    forms = engine_forms(spec) | {n: dense(n) for n in (LATENT_ORDERS if latent else ORDERS)}
    names = draw(st.tuples(*[st.sampled_from(sorted(forms))] * 2))
    start = draw(st.integers(0, layers - 1))
    return specs, [forms[name] for name in names], (start, draw(st.integers(start + 1, layers)))


@settings(max_examples=300, deadline=None)
@given(conversions(), st.permutations(range(4)), st.permutations(range(3)), st.booleans())
def test_both_sides_decode_to_the_same_row_at_every_vector(case, src_order, dst_order, to_device):
    (src_spec, dst_spec), forms, layers = case
    src_pages, dst_pages = np.array(src_order[:3]), np.array(dst_order)
    rows = numbered_rows(src_spec, 4)
    moved = [array[src_pages[np.argsort(dst_pages)]] for array in rows]
    # Pools stay alive while their memory is read by address.
    src, dst = forms[0](src_spec, rows, stay), forms[1](dst_spec, moved, stay)
    target = replace(dst.buffer, device=torch.device("meta")) if to_device else dst.buffer
    plan = plan_transfer(src.buffer, target, src_pages, dst_pages, layers=layers)

    for part, array in zip(plan.parts, split_by_part(plan, rows), strict=True):
        from_src = peek(decode(part.src, plan.src_pages), part.vector_bytes)
        from_dst = peek(decode(part.dst, plan.dst_pages), part.vector_bytes)
        assert np.array_equal(from_src, from_dst)
        wanted = array[:, src_pages, layers[0] : layers[1]].copy().view(np.int32)
        assert np.array_equal(np.sort(from_src, axis=None), np.sort(wanted, axis=None))
        assert_in_order(part, leads="src" if to_device else "dst")


def split_by_part(plan: CopyPlan, rows: list[np.ndarray]) -> list[np.ndarray]:
    """`[kv, page, …]` of every part: K and V together, or each alone."""
    return [np.stack(rows)] if len(plan.parts) == 1 else [array[None] for array in rows]


def assert_in_order(part: PartPlan, leads: str) -> None:
    """The host's loops run outer → inner, so that consecutive vectors lie close together there."""
    strides = [getattr(loop, f"{leads}_stride") for loop in part.loops]
    known = [stride for stride in strides if stride is not None]
    assert 0 not in known  # a table's axes have no stride at all
    assert strides == [None] * (len(strides) - len(known)) + sorted(known, reverse=True)


@pytest.mark.parametrize("layout", ORDERS)
def test_addresses_beyond_32_bits(layout):
    # 700,000 pages of 7.6 MiB: page ids are int32, the last page lies 5 TB from the first.
    spec = KVSpec(61, 8, 128, 64, U8, head_group=2)
    large = KVBuffer.empty(spec, layout, 700_000, device="meta")
    small = KVBuffer.empty(spec, "layer_first", 1)
    plan = plan_transfer(large, small, np.array([699_999], dtype=np.int32), [0])
    (part,) = plan.parts
    addresses = decode(part.src, plan.src_pages)
    assert large.nbytes == 700_000 * spec.bytes_per_page > 2**42
    assert addresses.dtype == np.int64
    assert addresses.max() + part.vector_bytes == large.nbytes


def test_a_table_reaches_allocations_more_than_32_bits_apart():
    spec = KVSpec(2, 1, 16, 4, U8, latent=True)
    layers = [torch.zeros(2, 4, 16, dtype=U8) for _ in range(2)]
    engine = KVBuffer.from_layers(layers, None, spec)
    region = engine.regions[0]
    far = replace(region, addresses=np.array([[0, 2**40]], dtype=np.int64))
    plan = plan_transfer(
        replace(engine, regions=(far,)), KVBuffer.empty(spec, "page_first", 2), [1], [0]
    )
    side = plan.parts[0].src
    assert side.table is not None
    assert side.table.dtype == np.int64
    assert side.table.tolist() == [0, 2**40]
    assert decode(side, plan.src_pages).max() == 2**40 + 2 * 64 - 16


@pytest.mark.parametrize("layers", [(0.0, 1), (False, 1), (0, None), "01"])
def test_layers_that_are_not_whole_numbers_are_refused(layers):
    spec = KVSpec(2, 2, 8, 2, torch.bfloat16)
    src, dst = (KVBuffer.empty(spec, "page_first", 2) for _ in range(2))
    with pytest.raises(ArgumentError, match="layers: expected"):
        plan_transfer(src, dst, [0], [0], layers=layers)


def test_numbers_of_numpy_do_not_stay_in_a_plan():
    spec = KVSpec(2, 2, 8, 2, torch.bfloat16)
    src, dst = (KVBuffer.empty(spec, name, np.int64(2)) for name in ("page_first", "page_head"))
    plan = plan_transfer(src, dst, [0], [0], layers=(np.int64(0), np.int64(2)))
    (part,) = plan.parts
    numbers = [*plan.layers, part.run_bytes, part.page_vectors, plan.nbytes, src.num_pages]
    for side in (part.src, part.dst):
        numbers += [side.page_stride, *side.sizes, *side.strides, *side.table_strides]
    assert {type(number) for number in numbers} == {int}
