"""`KVSpec`: byte arithmetic, components and what makes two specs hold the same rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hikv.spec import Component, KVSpec

BF16 = torch.bfloat16
MIB = 2**20


def test_32_layers_of_4096_values_are_256_kib_a_token_and_16k_tokens_4_gib():
    spec = KVSpec(32, 16, 128, 64, BF16)  # 2048 K values and 2048 V values a layer
    assert spec.bytes_per_token == 32 * 4096 * 2 == 262_144
    assert spec.pages_for(16 * 1024) * spec.bytes_per_page == 4 * 2**30


def test_the_bandwidth_case_moves_488_mib_a_direction():
    spec = KVSpec(61, 8, 128, 64, BF16)
    assert spec.pages_for(2048) == 32
    assert spec.pages_for(2048) * spec.bytes_per_page == 488 * MIB
    assert replace(spec, num_kv_heads=16).bytes_per_page * 32 == 976 * MIB


@pytest.mark.parametrize("head_group", [None, 8, 4, 2, 1])
def test_the_head_grid_changes_no_size(head_group):
    spec = KVSpec(61, 8, 128, 64, BF16, head_group=head_group)
    assert spec.heads_per_group * spec.num_groups == 8
    assert spec.bytes_per_page == 61 * 64 * 8 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(torch.float8_e4m3fn, 1), (torch.uint8, 1), (BF16, 2), (torch.float32, 4)]
)
def test_sizes_follow_the_element(dtype, nbytes):
    latent = KVSpec(61, 1, 576, 64, dtype, latent=True)
    assert latent.bytes_per_token_layer == 576 * nbytes
    wide = KVSpec(2, 4, 192, 16, dtype, v_head_dim=128)
    assert wide.bytes_per_token == 2 * 4 * (192 + 128) * nbytes


def test_components_are_apart_only_where_widths_differ():
    even = KVSpec(2, 4, 128, 16, BF16)
    assert even.components == (Component("kv", 2, 128),)
    assert replace(even, v_head_dim=128).components == even.components
    assert replace(even, v_head_dim=64).components == (
        Component("k", 1, 128),
        Component("v", 1, 64),
    )
    assert KVSpec(2, 1, 576, 16, BF16, latent=True).components == (Component("latent", 1, 576),)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_a_partial_page_counts_as_one(tokens, pages):
    assert KVSpec(1, 1, 8, 64, BF16).pages_for(tokens) == pages


@pytest.mark.parametrize(
    "change",
    [{"head_group": 2}, {"v_head_dim": 128}, {"total_layers": 61}, {"total_kv_heads": 32}],
)
def test_grid_and_totals_leave_the_geometry_alone(change):
    spec = KVSpec(2, 8, 128, 64, BF16)
    assert spec.same_geometry(replace(spec, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"page_size": 32},
        {"dtype": torch.float16},
        {"first_layer": 2},
        {"first_head": 8},
    ],
)
def test_everything_that_decides_what_a_row_is_does_not(change):
    spec = KVSpec(2, 8, 128, 64, BF16)
    assert not spec.same_geometry(replace(spec, **change))


def test_a_latent_row_is_not_a_head_of_its_width():
    assert not KVSpec(2, 1, 64, 16, BF16).same_geometry(KVSpec(2, 1, 64, 16, BF16, latent=True))
