"""Figures that others measured, to stand beside ours and never to be mixed with them."""

from __future__ import annotations

import torch

from hikv.spec import KVSpec

from .case import Case

SOURCE = "sgl-project/sglang#33651, one B200, PCIe 5 x16"
"""The table of speeds in the pull request "Unified Full KV Cache Layout in L3"."""

# (heads, groups): GB/s by (direction, CTAs).
_B200 = {
    (8, 1): {("h2d", 2): 13.6, ("d2h", 2): 34.2, ("h2d", 32): 49.9, ("d2h", 32): 52.4},
    (8, 2): {("h2d", 2): 13.6, ("d2h", 2): 33.4, ("h2d", 32): 49.7, ("d2h", 32): 52.4},
    (8, 4): {("h2d", 2): 13.4, ("d2h", 2): 31.6, ("h2d", 32): 49.5, ("d2h", 32): 52.5},
    (8, 8): {("h2d", 2): 12.8, ("d2h", 2): 29.4, ("h2d", 32): 49.8, ("d2h", 32): 52.4},
    (16, 1): {("h2d", 2): 13.9, ("d2h", 2): 35.2, ("h2d", 32): 50.6, ("d2h", 32): 52.5},
    (16, 8): {("h2d", 2): 13.4, ("d2h", 2): 31.7, ("h2d", 32): 50.4, ("d2h", 32): 52.5},
    (16, 16): {("h2d", 2): 12.8, ("d2h", 2): 29.8, ("h2d", 32): 50.5, ("d2h", 32): 52.5},
}


def published_case(heads: int, groups: int, num_pages: int = 32) -> Case:
    """A row of that table: 2048 tokens in 32 pages of 64."""
    spec = KVSpec(61, heads, 128, 64, torch.bfloat16, head_group=heads // groups)
    return Case(spec, "layer_first", "page_first_direct_group", num_pages)


def published(case: Case, direction: str, block_quota: int) -> float | None:
    """GB/s as `SOURCE` gives them for exactly this case, or `None`."""
    row = (case.spec.num_kv_heads, case.spec.num_groups)
    if row not in _B200 or case != published_case(*row):
        return None
    return _B200[row].get((direction, block_quota))
