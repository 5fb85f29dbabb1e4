"""Every pair of layouts × every kind of rows × every dtype × both widths of page ids, on the CPU.

The judge is `oracle.py`, which states each layout in numpy and shares no code with hikv.
"""

from __future__ import annotations

import pytest
from cases import (
    DTYPES,
    LATENT_PAIRS,
    PAIRS,
    REFUSED_LATENT_PAIRS,
    check_copy,
    dense,
    head_specs,
    latent_specs,
    wide_specs,
)
from oracle import LATENT_ORDERS, ORDERS

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.kernels.reference import reference
from hikv.layout import list_layouts

IDS = ("int32 array", "int64 tensor")


def test_oracle_states_every_layout():
    assert set(ORDERS) == set(list_layouts())
    assert set(LATENT_ORDERS) == set(list_layouts(latent=True))
    assert (len(PAIRS), len(LATENT_PAIRS), len(REFUSED_LATENT_PAIRS)) == (36, 16, 20)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_rows_with_heads(src, dst):
    for dtype in DTYPES:
        for seed, spec in enumerate(head_specs(dtype)):
            for ids in IDS:
                check_copy(reference, spec, dense(src), dense(dst), ids=ids, seed=seed)


@pytest.mark.parametrize(("src", "dst"), LATENT_PAIRS)
def test_latent_rows(src, dst):
    for dtype in DTYPES:
        for seed, spec in enumerate(latent_specs(dtype)):
            for ids in IDS:
                check_copy(reference, spec, dense(src), dense(dst), ids=ids, seed=seed)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_k_and_v_of_different_width(src, dst):
    for dtype in DTYPES:
        for seed, spec in enumerate(wide_specs(dtype)):
            check_copy(reference, spec, dense(src), dense(dst), seed=seed)


@pytest.mark.parametrize(("src", "dst"), REFUSED_LATENT_PAIRS)
def test_latent_rows_are_refused_by_layouts_that_order_heads(src, dst):
    spec = next(latent_specs(DTYPES[0]))
    refused = [layout for layout in (src, dst) if layout not in LATENT_ORDERS]
    assert refused
    for layout in refused:
        with pytest.raises(ArgumentError) as caught:
            KVBuffer.empty(spec, layout, 4)
        assert caught.value.argument == "layout"
        assert caught.value.got == repr(layout)
        assert all(name in caught.value.expected for name in LATENT_ORDERS)
        assert "head" in caught.value.remedy
