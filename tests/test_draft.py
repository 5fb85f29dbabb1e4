"""Draft state: where it lies on the host, and what is refused."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import (
    GAP,
    assert_bytes,
    head_specs,
    latent_specs,
    per_layer,
    random_rows,
    stay,
    wide_specs,
)
from draft_cases import BF16, MODES, PACKED, SIDECAR, SPECS, TARGET, U8, gpu_pool
from oracle import LATENT_ORDERS, ORDERS, pack

from hikv.buffer import KVBuffer
from hikv.cache.config import HiCacheConfig
from hikv.cache.draft import Packed, Sidecar, host_buffers
from hikv.cache.pools import HostPool
from hikv.errors import ArgumentError
from hikv.host_memory import Budget
from hikv.kernels.reference import reference
from hikv.pinned import allocate_pinned
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

KINDS = {"heads": head_specs, "latent": latent_specs, "wide": wide_specs}
LAYOUTS = [
    (kind, layout) for kind in KINDS for layout in (LATENT_ORDERS if kind == "latent" else ORDERS)
]


# Where it lies.


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_packed_layers_follow_those_of_the_target_in_one_allocation(kind, layout):
    """The memory is that of one model with the layers of all three, as the oracle packs it."""
    spec = next(KINDS[kind](BF16))
    specs = {"kv": spec} | {
        name: replace(spec, num_layers=count) for name, count in (("draft", 2), ("second", 1))
    }
    drafts = {"draft": Packed(), "second": Packed()}
    buffers = host_buffers(specs, drafts, layout, 5, pinned=False)
    assert list(buffers) == list(specs)
    assert {name: buffer.spec for name, buffer in buffers.items()} == specs
    memory = buffers["kv"].regions[0].anchors[0, 0].fill_(GAP)
    rng = np.random.default_rng(0)
    rows = {name: random_rows(own, 5, rng) for name, own in specs.items()}
    pages = np.array([4, 1, 0, 3, 2])
    for name, own in specs.items():
        reference(per_layer(own, rows[name], stay).buffer, buffers[name], pages, pages)
    stacked = [np.concatenate(arrays, 1) for arrays in zip(*rows.values(), strict=True)]
    assert_bytes(memory.numpy(), pack(layout, stacked, spec.heads_per_group), "host")


def test_a_sidecar_has_memory_and_a_layout_of_its_own():
    pool = HostPool.beside(gpu_pool(), HiCacheConfig(mem_layout="page_unified"), drafts=SIDECAR)
    assert {name: buffer.layout for name, buffer in pool.buffers.items()} == {
        "kv": "page_unified",
        "indexer": "page_unified",
        "draft": "page_first_direct",
        "draft_indexer": "page_first",
    }
    starts = {buffer.regions[0].anchors[0, 0].data_ptr() for buffer in pool.buffers.values()}
    assert len(starts) == 4


@MODES
def test_the_drafts_bytes_count_when_host_pages_are_counted(drafts):
    assert gpu_pool().bytes_per_page == 2 * (5 * 4 * 8 * 2 * 2 + 5 * 12) == 1_400
    budget, config = Budget(10**6, 10**6, "a test"), HiCacheConfig(host_size_gb=14_000e-9)
    pool = HostPool.beside(gpu_pool(), config, budget=budget, drafts=drafts)
    assert pool.num_pages == 10
    assert {buffer.num_pages for buffer in pool.buffers.values()} == {10}
    storages = {
        buffer.regions[0].anchors[0, 0].untyped_storage().data_ptr(): buffer.regions[0]
        for buffer in pool.buffers.values()
    }
    held = sum(r.anchors[0, 0].untyped_storage().nbytes() for r in storages.values())
    assert held == 14_000


def test_packed_views_share_pinned_memory_until_the_last_is_gone(monkeypatch):
    """Page-locked once, with a page of both models as what no registration border may cut."""
    registry = Registry()
    specs = {name: SPECS[name] for name in ("kv", "draft")}
    page_bytes = sum(spec.bytes_per_page for spec in specs.values())
    one_page = partial(
        allocate_pinned,
        register=registry,
        budget=Budget(10**9, 10**9, "a test"),
        chunk_bytes=page_bytes,
    )
    monkeypatch.setattr("hikv.buffer.allocate_pinned", one_page)
    buffers = host_buffers(specs, {"draft": Packed()}, "page_unified", 3, pinned=True)
    assert all(buffer.pinned for buffer in buffers.values())
    assert [nbytes for _, nbytes in registry.held] == [page_bytes] * 3
    del buffers["kv"]
    gc.collect()
    assert len(registry.held) == 3
    assert buffers["draft"].logical([2]).numel()
    del buffers["draft"]
    gc.collect()
    assert registry.held == []


class Registry:
    """What is page-locked at the moment."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        self.held.append((address, nbytes))

    def unregister(self, address: int) -> None:
        self.held = [entry for entry in self.held if entry[0] != address]


def test_whole_pages_of_packed_models_are_a_copy_each():
    """From a scratch in the host's layout, three pages in a row; alone they would be one copy."""
    for layout, copies in (("page_first_direct", 3), ("page_unified", 3), ("page_first", 12)):
        spec = KVSpec(6, 1, 16, 4, BF16, latent=True)
        specs = {"kv": spec, "draft": replace(spec, num_layers=2)}
        for drafts, wanted in (({}, 1), ({"draft": Packed()}, copies)):
            host = host_buffers(specs, drafts, layout, 8, pinned=False)
            for name, own in specs.items():
                scratch = KVBuffer.empty(own, layout, 8)
                plan = plan_transfer(scratch, host[name], [0, 1, 2], [3, 4, 5])
                assert plan.num_descriptors == wanted
                from_layers = plan_transfer(
                    KVBuffer.empty(own, "layer_first", 8), host[name], [0, 1, 2], [3, 4, 5]
                )
                per_page = own.num_layers * (4 if layout == "page_first" else 1)
                assert from_layers.num_descriptors == 3 * per_page


def test_rows_do_not_move_between_two_models_in_one_memory():
    """A copy that would is a mistake, and refused as overlapping memory is."""
    spec = KVSpec(2, 1, 16, 4, U8)
    specs = {"kv": spec, "draft": spec}
    host = host_buffers(specs, {"draft": Packed()}, "page_first", 4, pinned=False)
    with pytest.raises(ArgumentError, match="overlapping memory"):
        plan_transfer(host["kv"], host["draft"], [0], [1])


# What is refused.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"head_dim": 16}, "rows 2 × kv of 8 as in 'kv'.*got rows 2 × kv of 16"),
        ({"v_head_dim": 4}, "1 × v of 4"),
        ({"num_kv_heads": 2}, "num_kv_heads 4 as in 'kv'"),
        ({"dtype": torch.float16}, "dtype torch.bfloat16 as in 'kv'"),
        ({"page_size": 4}, "page_size 2 as in 'kv'"),
        ({"head_group": 4}, "head_group 2 as in 'kv'"),
        ({"latent": True, "num_kv_heads": 1, "head_group": None}, "1 × latent of 8"),
    ],
)
def test_rows_unlike_the_targets_are_not_packed(change, told):
    draft = replace(SPECS["draft"], **change)
    with pytest.raises(ArgumentError, match=told) as error:
        host_buffers({**SPECS, "draft": draft}, PACKED, "page_first", 4, pinned=False)
    assert error.value.argument == "draft buffer 'draft'"
    assert "Sidecar('kv')" in error.value.remedy


def test_heads_of_another_place_in_the_model_can_be_packed():
    """A draft that every tensor rank holds whole, beside a target of which it holds a part."""
    target = replace(TARGET, first_head=4, total_kv_heads=8)
    specs = {"kv": target, "draft": SPECS["draft"]}
    host = host_buffers(specs, {"draft": Packed()}, "page_first", 2, pinned=False)
    assert {name: buffer.spec for name, buffer in host.items()} == specs


@pytest.mark.parametrize(
    ("drafts", "told"),
    [
        ({"drafts": Packed()}, "one of the GPU pool's buffers, kv, indexer, draft"),
        ({"draft": "packed"}, "Packed or Sidecar"),
        ({"draft": Packed("window")}, "a buffer of the target.*kv, indexer.*got 'window'"),
        ({"draft": Sidecar("window")}, "a buffer of the target.*kv, indexer.*got 'window'"),
        ({"draft": Packed("draft")}, "got 'draft'"),
        ({**PACKED, "draft": Sidecar("draft_indexer")}, "got 'draft_indexer'"),
        ({"draft_indexer": Sidecar("indexer", layout="page_head")}, "a layout for latent rows"),
        ({"draft": Sidecar("kv", layout="")}, "layout: expected one of"),
    ],
)
def test_a_draft_that_follows_nothing_is_refused_before_memory_is_taken(drafts, told, monkeypatch):
    device = gpu_pool()
    monkeypatch.setattr(KVBuffer, "empty", None)
    with pytest.raises(ArgumentError, match=told):
        HostPool.beside(device, drafts=drafts)


def test_pages_of_another_size_have_other_ids():
    with pytest.raises(ArgumentError, match="slots in pages of any size"):
        gpu_pool(draft=replace(SPECS["draft"], page_size=4))
