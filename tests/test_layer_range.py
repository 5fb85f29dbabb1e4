"""A range of a pool's layers as a buffer of its own: a view, and no byte beside it is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import (
    GAP,
    Form,
    Place,
    Pool,
    Rows,
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
from hikv.errors import ArgumentError
from hikv.kernels.reference import reference
from hikv.spec import KVSpec

BF16, U8 = torch.bfloat16, torch.uint8
KINDS = {"heads": head_specs, "latent": latent_specs, "wide": wide_specs}
LAYOUTS = [
    (kind, layout) for kind in KINDS for layout in (LATENT_ORDERS if kind == "latent" else ORDERS)
]


def layers_within(layout: str) -> Form:
    """A dense pool with two layers before those of the spec and one behind; a view of these."""

    def build(spec: KVSpec, rows: Rows, place: Place) -> Pool:
        ends = [(0, 0), (2, 1), (0, 0), (0, 0), (0, 0)]
        padded = [np.pad(array, ends, constant_values=GAP) for array in rows]
        whole = dense(layout)(replace(spec, num_layers=spec.num_layers + 3), padded, place)
        view = whole.buffer.layer_range(2, 2 + spec.num_layers)
        assert view.spec == replace(spec, first_layer=2)
        return Pool(replace(view, spec=spec), whole.tensors)

    return build


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_copies_of_some_layers_of_a_pool_leave_the_others_alone(kind, layout):
    for dtype in (BF16, U8):
        for seed, spec in enumerate(KINDS[kind](dtype)):
            check_copy(reference, spec, per_layer, layers_within(layout), seed=seed)
            check_copy(reference, spec, layers_within(layout), per_layer, seed=seed)
            check_copy(reference, spec, layers_within(layout), dense(layout), layers=(1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_layers_reads_like_a_slice_whatever_the_form(kind):
    spec, pages = next(KINDS[kind](BF16)), np.array([4, 0, 3])
    rows = random_rows(spec, 5, np.random.default_rng(0))
    for form in (dense("page_first"), *engine_forms(spec).values()):
        buffer = form(spec, rows, stay).buffer
        for start, stop in ((0, 1), (1, 3), (2, 3), (0, 3)):
            view = buffer.layer_range(start, stop)
            assert (view.spec.first_layer, view.spec.num_layers) == (start, stop - start)
            got = view.logical(torch.from_numpy(pages)).view(U8).numpy()
            want = np.ascontiguousarray(logical_bytes(rows, pages)[:, start:stop])
            assert_bytes(got.ravel(), want.ravel(), "view")


def test_layers_may_be_counted_by_numpy():
    buffer = KVBuffer.empty(KVSpec(3, 1, 4, 2, U8), "page_first", 2)
    first, last = buffer.layer_range(1, 3), buffer.layer_range(np.int64(1), np.int32(3))
    assert first.spec == last.spec
    assert type(last.spec.first_layer) is int
    assert first.extents == last.extents


@pytest.mark.parametrize(
    "span", [(0, 0), (2, 1), (-1, 2), (0, 4), (0.0, 2.0), ("0", "2"), (0, None)]
)
def test_layers_that_are_not_there_are_refused(span):
    with pytest.raises(ArgumentError, match=r"within 0\.\.3"):
        KVBuffer.empty(KVSpec(3, 1, 4, 2, U8), "page_first", 2).layer_range(*span)
