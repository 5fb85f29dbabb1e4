"""Every refusal of the geometry floors, once: what it names, and that none is left out.

A message names the argument, what was expected, what came, and the remedy. The last test reads the
sources for `raise` and fails for a refusal that no row of the table triggers.
"""

from __future__ import annotations

import ast
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hikv import buffer, env, layout, pages, plan, region, spec
from hikv.buffer import KVBuffer
from hikv.env import read_env
from hikv.errors import ArgumentError
from hikv.layout import get_layout
from hikv.pages import check_pages, pages_of_slots
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

BF16, U8 = torch.bfloat16, torch.uint8
SPEC = KVSpec(2, 4, 8, 4, BF16)
WIDE = replace(SPEC, v_head_dim=16)
LATENT = KVSpec(2, 1, 8, 4, BF16, latent=True)


def kv_layers(*shape, dtype=BF16, count=2):
    return [torch.zeros(*shape or (3, 4, 4, 8), dtype=dtype) for _ in range(count)]


def pool(spec=SPEC, num_pages=4, name="page_first"):
    return KVBuffer.empty(spec, name, num_pages)


def from_layers(k=None, v=None, spec=SPEC, **kw):
    return KVBuffer.from_layers(k or kv_layers(), v or kv_layers(), spec, **kw)


def copy(src_pages=(0,), dst_pages=(0,), src=None, dst=None, **kw):
    return plan_transfer(src or pool(), dst or pool(), list(src_pages), list(dst_pages), **kw)


@dataclass(frozen=True)
class Refusal:
    """`call` is refused over `argument`; the message holds `expected` and `got` in their parts."""

    argument: str
    expected: str
    got: str
    call: Callable[[], object]


META_IDS = torch.zeros(1, dtype=torch.int64, device="meta")
shared = pool()
overlapping = torch.zeros(3, 4, 4, 8, dtype=BF16)

REFUSALS = [
    # spec.py
    Refusal("num_layers", "positive int", "0", lambda: replace(SPEC, num_layers=0)),
    Refusal("num_kv_heads", "positive int", "-1", lambda: replace(SPEC, num_kv_heads=-1)),
    Refusal("head_dim", "positive int", "8.0", lambda: replace(SPEC, head_dim=8.0)),
    Refusal("page_size", "positive int", "True", lambda: replace(SPEC, page_size=True)),
    Refusal("head_group", "positive int", "0", lambda: replace(SPEC, head_group=0)),
    Refusal("v_head_dim", "positive int", "0", lambda: replace(SPEC, v_head_dim=0)),
    Refusal("dtype", "torch.dtype", "'bf16'", lambda: replace(SPEC, dtype="bf16")),
    Refusal("dtype", "torch.dtype", "float16", lambda: replace(SPEC, dtype=np.dtype("float16"))),
    Refusal("head_group", "divisor of num_kv_heads=4", "3", lambda: replace(SPEC, head_group=3)),
    Refusal("num_kv_heads", "1 for latent", "4", lambda: replace(SPEC, latent=True)),
    Refusal("head_group", "None for latent", "1", lambda: replace(LATENT, head_group=1)),
    Refusal("v_head_dim", "None for latent", "8", lambda: replace(LATENT, v_head_dim=8)),
    Refusal("first_layer", "total of 3", "2", lambda: replace(SPEC, first_layer=2, total_layers=3)),
    Refusal("first_layer", "total of 0", "0", lambda: replace(SPEC, total_layers=0)),
    Refusal("first_head", "int >= 0", "-4", lambda: replace(SPEC, first_head=-4)),
    Refusal("first_head", "int >= 0", "'0'", lambda: replace(SPEC, first_head="0")),
    # layout.py
    Refusal("layout", "layer_first, page_head", "'page-first'", lambda: get_layout("page-first")),
    Refusal("layout", "layer_first, page_head", "['page']", lambda: get_layout(["page"])),
    Refusal("layout", "for latent rows", "'page_head'", lambda: pool(LATENT, name="page_head")),
    # buffer.py: a pool of ours
    Refusal("num_pages", "at least 1", "0", lambda: pool(num_pages=0)),
    Refusal(
        "pinned",
        "False on a device",
        "True on meta",
        lambda: KVBuffer.empty(SPEC, "page_first", 1, device="meta", pinned=True),
    ),
    # buffer.py and region.py: one tensor
    Refusal(
        "tensor",
        "flat tensor",
        "(2, 3, 4, 2, 4, 8)",
        lambda: KVBuffer.from_tensor(torch.zeros(2, 3, 4, 2, 4, 8), WIDE, "page_first"),
    ),
    Refusal(
        "tensor",
        "torch.bfloat16 or torch.uint8",
        "torch.float16",
        lambda: KVBuffer.from_tensor(torch.zeros(1024, dtype=torch.float16), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "dense memory",
        "strides (2,)",
        lambda: KVBuffer.from_tensor(torch.zeros(2048, dtype=BF16)[::2], SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "whole torch.bfloat16",
        "byte 1",
        lambda: KVBuffer.from_tensor(torch.zeros(1025, dtype=U8)[1:], SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "whole number of pages of 1024 B",
        "1026 B",
        lambda: KVBuffer.from_tensor(torch.zeros(513, dtype=BF16), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "pages of 1024 B",
        "0 B",
        lambda: KVBuffer.from_tensor(torch.zeros(0, dtype=BF16), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "dtype torch.bfloat16",
        "torch.float32",
        lambda: KVBuffer.from_tensor(torch.zeros(2, 3, 4, 2, 4, 8), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "(kv, page, token, layer, head, dim)",
        "shape (3, 8)",
        lambda: KVBuffer.from_tensor(torch.zeros(3, 8, dtype=BF16), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "kv of 2",
        "3, shape (3, 3, 4, 2, 4, 8)",
        lambda: KVBuffer.from_tensor(
            *[torch.zeros(3, 3, 4, 2, 4, 8, dtype=BF16)], SPEC, "page_first"
        ),
    ),
    Refusal(
        "tensor",
        "need page and token as neighbours",
        "shape (2, 3, 2, 4, 8)",
        lambda: KVBuffer.from_tensor(
            torch.zeros(2, 3, 2, 4, 8, dtype=BF16), SPEC, "page_first_direct"
        ),
    ),
    Refusal(
        "tensor",
        "whole pages of 4",
        "6",
        lambda: KVBuffer.from_tensor(torch.zeros(2, 6, 2, 4, 8, dtype=BF16), SPEC, "page_first"),
    ),
    Refusal(
        "tensor",
        "page of at least 1",
        "0, shape (2, 0, 4, 2, 4, 8)",
        lambda: KVBuffer.from_tensor(torch.zeros(2, 0, 4, 2, 4, 8, dtype=BF16), SPEC, "page_first"),
    ),
    # buffer.py and region.py: one tensor per layer
    Refusal(
        "v_layers", "one V tensor", "None", lambda: KVBuffer.from_layers(kv_layers(), None, SPEC)
    ),
    Refusal("v_layers", "None for latent", "2 tensors", lambda: from_layers(spec=LATENT)),
    Refusal(
        "axes",
        "page, token, head, dim once",
        "'page head tokens dim'",
        lambda: from_layers(axes="page head tokens dim"),
    ),
    Refusal(
        "axes",
        "once",
        "'page token head dim dim'",
        lambda: from_layers(axes="page token head dim dim"),
    ),
    Refusal("k_layers", "2 tensors", "3", lambda: from_layers(kv_layers(count=3))),
    Refusal("v_layers", "2 tensors", "1", lambda: from_layers(v=kv_layers(count=1))),
    Refusal(
        "k_layers[1]",
        "(3, 4, 4, 8)",
        "(5, 4, 4, 8)",
        lambda: from_layers([*kv_layers(count=1), *kv_layers(5, 4, 4, 8, count=1)]),
    ),
    Refusal(
        "v_layers[0]",
        "head of 4",
        "2, shape (3, 4, 2, 8)",
        lambda: from_layers(v=kv_layers(3, 4, 2, 8)),
    ),
    Refusal("k_layers[0]", "8 elements (16 B)", "9", lambda: from_layers(kv_layers(3, 4, 4, 9))),
    Refusal(
        "v_layers[0]", "16 elements (32 B)", "8 elements (16 B)", lambda: from_layers(spec=WIDE)
    ),
    Refusal(
        "v_layers",
        "3 pages on cpu",
        "5 pages on cpu",
        lambda: from_layers(v=kv_layers(5, 4, 4, 8)),
    ),
    Refusal(
        "v_layers",
        "on cpu",
        "on meta",
        lambda: from_layers(v=[layer.to("meta") for layer in kv_layers()]),
    ),
    Refusal(
        "v_layers",
        "'token': 64",
        "'token': 72",
        lambda: from_layers(v=[layer[:, :, :, :8] for layer in kv_layers(3, 4, 4, 9)]),
    ),
    Refusal(
        "k_layers[0]",
        "contiguous rows",
        "stride 4",
        lambda: from_layers([layer.transpose(2, 3) for layer in kv_layers(3, 4, 8, 4)]),
    ),
    Refusal(
        "k_layers[0]",
        "strides without overlap (head at least 8 elements)",
        "4",
        lambda: from_layers([t.as_strided((3, 4, 4, 8), (128, 32, 4, 1)) for t in kv_layers()]),
    ),
    Refusal(
        "k_layers[0]",
        "memory apart",
        "v_layers[1] 0 B away",
        lambda: from_layers([overlapping, *kv_layers(count=1)], [*kv_layers(count=1), overlapping]),
    ),
    Refusal("start, stop", "within 0..2", "1, 3", lambda: pool().layer_range(1, 3)),
    Refusal("spec", "a KVSpec", "NoneType", lambda: KVBuffer.empty(None, "page_first", 4)),
    Refusal("tensor", "a Tensor", "list", lambda: KVBuffer.from_tensor([], SPEC, "page_first")),
    Refusal(
        "k_layers[1]",
        "a Tensor",
        "ndarray",
        lambda: from_layers([*kv_layers(count=1), np.zeros((3, 4, 4, 8))]),
    ),
    # pages.py
    Refusal("p", "int32 or int64 page ids", "float64", lambda: check_pages("p", [0.5], 4)),
    Refusal("p", "int32 or int64", "bool", lambda: check_pages("p", np.ones(4, dtype=bool), 4)),
    Refusal("p", "int32 or int64", "int16", lambda: check_pages("p", torch.zeros(1).short(), 4)),
    Refusal(
        "p", "int32 or int64", "BFloat16", lambda: check_pages("p", torch.zeros(1, dtype=BF16), 4)
    ),
    Refusal("p", "one-dimensional", "(1, 2)", lambda: check_pages("p", [[0, 1]], 4)),
    Refusal("p", "one-dimensional", "inhomogeneous", lambda: check_pages("p", [[0], [1, 2]], 4)),
    Refusal("p", "one-dimensional", "shape ()", lambda: check_pages("p", None, 4)),
    Refusal("p", "int32 or int64", "bool", lambda: check_pages("p", [True, 1], 4)),
    Refusal("p", "int32 or int64", "meta", lambda: check_pages("p", META_IDS, 4)),
    Refusal("p[2]", "0..3", "4", lambda: check_pages("p", [0, 3, 4, 9], 4)),
    Refusal("p[1]", "0..3", "-1", lambda: check_pages("p", [0, -1], 4)),
    Refusal("p[3]", "once", "page 2 again", lambda: check_pages("p", [2, 0, 1, 2], 4, unique=True)),
    Refusal("s", "whole pages of 4", "3 slots", lambda: pages_of_slots([0, 1, 2], 4, name="s")),
    Refusal("page_size", "1 or more", "0", lambda: pages_of_slots([0], 0)),
    Refusal("s", "int64 slots", "float64", lambda: pages_of_slots([0.0] * 4, 4, name="s")),
    Refusal("s[3]", "slot 11", "12", lambda: pages_of_slots([8, 9, 10, 12], 4, name="s")),
    Refusal("s[0]", "slot 8", "11", lambda: pages_of_slots([11, 10, 9, 8], 4, name="s")),
    Refusal("s[4]", "slot 4", "5", lambda: pages_of_slots([0, 1, 2, 3, 5, 6, 7, 8], 4, name="s")),
    # plan.py
    Refusal("src", "a KVBuffer", "Tensor", lambda: plan_transfer(META_IDS, pool(), [0], [0])),
    Refusal("dst", "a KVBuffer", "NoneType", lambda: plan_transfer(pool(), None, [0], [0])),
    Refusal(
        "dst",
        "num_kv_heads 4, rows 2 × kv of 8 as in src",
        "num_kv_heads 1, rows 1 × latent of 8",
        lambda: copy(dst=pool(LATENT)),
    ),
    Refusal(
        "dst",
        "page_size 4 as in src",
        "page_size 8",
        lambda: copy(dst=pool(replace(SPEC, page_size=8))),
    ),
    Refusal(
        "head_group",
        "nest: src has 3",
        "dst has 2",
        lambda: copy(
            src=pool(KVSpec(2, 6, 8, 4, BF16, head_group=3)),
            dst=pool(KVSpec(2, 6, 8, 4, BF16, head_group=2)),
        ),
    ),
    Refusal("layers", "within 0..2", "(1, 3)", lambda: copy(layers=(1, 3))),
    Refusal("layers", "not empty", "(1, 1)", lambda: copy(layers=(1, 1))),
    Refusal("layers", "step 1", "range(0, 2, 2)", lambda: copy(layers=range(0, 2, 2))),
    Refusal("layers", "(start, stop)", "1", lambda: copy(layers=1)),
    Refusal("src_pages[1]", "0..3", "4", lambda: copy([0, 4], [0, 1])),
    Refusal("dst_pages[1]", "0..1", "2", lambda: copy([0, 3], [0, 2], dst=pool(num_pages=2))),
    Refusal("dst_pages[1]", "once", "page 0 again", lambda: copy([1, 2], [0, 0])),
    Refusal("dst_pages", "as many ids as src_pages, 2", "1", lambda: copy([0, 1], [0])),
    Refusal("dst_pages", "same pool", "page 1", lambda: copy([0, 1], [1, 2], shared, shared)),
    Refusal(
        "dst",
        "memory apart from src",
        "other strides",
        lambda: copy(
            src=shared,
            dst=KVBuffer.from_tensor(shared.regions[0].anchors[0, 0], SPEC, "layer_first"),
        ),
    ),
    Refusal("buffer", "stay with the memory", "a pickle", lambda: pickle.dumps(pool())),
    # env.py
    Refusal(
        "HIKV_TUNDED_DIR",
        "HIKV_TUNED_DIR",
        "HIKV_TUNDED_DIR",
        lambda: read_env({"HIKV_TUNDED_DIR": "/"}),
    ),
    Refusal(
        "HIKV_PINNED_BUDGET",
        "positive whole",
        "'1e9'",
        lambda: read_env({"HIKV_PINNED_BUDGET": "1e9"}),
    ),
    Refusal(
        "HIKV_TUNED_DIR",
        "absolute path",
        "'~nobody-has-this-name/x'",
        lambda: read_env({"HIKV_TUNED_DIR": "~nobody-has-this-name/x"}),
    ),
]


def refused(refusal):
    with pytest.raises(ArgumentError) as caught:
        refusal.call()
    return caught


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: f"{r.argument}-{r.got}")
def test_a_refusal_names_argument_expected_got_and_remedy(refusal):
    error = refused(refusal).value
    assert error.argument == refusal.argument
    assert refusal.expected in error.expected
    assert refusal.got in error.got
    assert len(error.remedy.split()) > 2, "a remedy says how"
    for part in (error.argument, error.expected, error.got, error.remedy):
        assert part in str(error)


def test_a_stacked_pool_without_v_is_told_both_ways_out():
    with pytest.raises(ArgumentError) as caught:
        KVBuffer.from_layers(torch.zeros(2, 12, 4, 8, dtype=BF16), None, SPEC)
    assert caught.value.remedy == "pass K and V, or KVSpec(latent=True) for single rows"


@pytest.mark.parametrize("module", [spec, layout, region, buffer, pages, plan, env])
def test_every_refusal_of_a_file_is_triggered_above(module):
    tree = ast.parse(inspect.getsource(module))
    sites = {(n.lineno, n.end_lineno) for n in ast.walk(tree) if isinstance(n, ast.Raise)}
    assert sites
    for refusal in REFUSALS:
        place = refused(refusal).traceback[-1]
        if str(place.path) == module.__file__:
            line = place.lineno + 1
            sites -= {(first, last) for first, last in sites if first <= line <= last}
    assert not sites, f"{module.__name__}: no test triggers the refusals at lines {sorted(sites)}"
