"""A buffer rebuilt over the same memory, and the scratch that stands for every layer of it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cp.handles import export_buffer, open_buffer
from hikv.cp.scratch import make_slot, scratch_bytes
from hikv.cp.shared_memory import attach, handle_of, shared_host_memory
from hikv.kernels.copy_engine import descriptors
from hikv.kernels.reference import launch
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

MHA = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)
WIDE = KVSpec(3, 2, 8, 4, torch.bfloat16, v_head_dim=4)
MLA = KVSpec(3, 1, 36, 4, torch.uint8, latent=True)
NUM_PAGES = 5


def engine_pool(spec):
    """One tensor per layer, each K and V in memory of its own, as engines allocate them."""
    heads = () if spec.latent else (spec.num_kv_heads,)
    widths = [component.width for component in spec.components for _ in range(component.kv)]
    lists = []
    for width in widths:
        shape = (NUM_PAGES * spec.page_size, *heads, width)
        count = int(np.prod(shape)) * spec.dtype.itemsize
        layers = [shared_host_memory(count).random_() for _ in range(spec.num_layers)]
        lists.append([layer.view(spec.dtype).view(shape) for layer in layers])
    return KVBuffer.from_layers(lists[0], lists[1] if len(lists) > 1 else None, spec)


def one_tensor(spec):
    memory = shared_host_memory(NUM_PAGES * spec.bytes_per_page + 64).random_()
    return KVBuffer.from_tensor(memory[64:], spec, "page_first_direct")


POOLS = [engine_pool, one_tensor]


@pytest.mark.parametrize("make", POOLS)
@pytest.mark.parametrize("spec", [MHA, WIDE, MLA], ids=["mha", "wide", "mla"])
def test_a_buffer_is_the_same_after_the_journey(spec, make):
    pool = make(spec)
    twin = open_buffer(pickle.loads(pickle.dumps(export_buffer(pool, handle_of))), attach)
    assert not {e for e in twin.extents} & {e for e in pool.extents}
    pages = list(range(NUM_PAGES))
    assert torch.equal(bytes_of(twin, pages), bytes_of(pool, pages))
    pool.regions[0].anchors[0, 0].view(torch.uint8)[-64:] = 0x3C
    assert torch.equal(bytes_of(twin, pages), bytes_of(pool, pages)), "one memory"


@pytest.mark.parametrize("make", POOLS)
@pytest.mark.parametrize("spec", [MHA, WIDE, MLA], ids=["mha", "wide", "mla"])
def test_every_layer_lands_in_the_slot(spec, make):
    pool = make(spec)
    sizes = []
    slot = make_slot(
        spec, 4, lambda n: sizes.append(n) or torch.full((n,), 0xA5, dtype=torch.uint8)
    )
    assert 2 * sizes[0] == scratch_bytes(spec, 4)
    pages, places = np.array([3, 4, 0]), np.array([1, 2, 0])
    plan = plan_transfer(pool, slot.window, pages, places)
    for layer in range(spec.num_layers):
        launch(plan.for_layers(layer, layer + 1))
        rows = pool.logical(pages.tolist())[:, layer]
        parts = [slot.k] if slot.v is None else [slot.k, slot.v]
        found = [part[places].reshape(3, spec.page_size, spec.num_kv_heads, -1) for part in parts]
        expected = rows.unbind(1) if rows.shape[1] > 1 else [rows[:, 0]]
        if len(found) > len(expected):
            found = [torch.cat(found, dim=-1)]
        for have, want in zip(found, expected, strict=True):
            assert torch.equal(
                have.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
            )
        assert (slot.k[3].view(torch.uint8) == 0xA5).all(), "no other page was touched"


def test_neighbouring_pages_of_a_layer_are_one_copy():
    pool = engine_pool(MLA)
    slot = make_slot(MLA, 4, lambda n: torch.empty(n, dtype=torch.uint8))
    plan = plan_transfer(pool, slot.window, np.array([1, 2, 4]), np.array([0, 1, 2]))
    page_bytes = MLA.page_size * MLA.bytes_per_token_layer
    assert descriptors(plan.for_layers(1, 2)).nbytes.tolist() == [2 * page_bytes, page_bytes]


def bytes_of(buffer, pages):
    return buffer.logical(pages).contiguous().view(torch.uint8)
