"""Pools of a target and of its draft, for the tests of draft state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hikv.cache.draft import Packed, Sidecar
from hikv.cache.pools import DevicePool
from hikv.spec import KVSpec

BF16, U8 = torch.bfloat16, torch.uint8
PROMPT = [1, 2, 3, 4, 5, 6]

TARGET = KVSpec(4, 4, 8, 2, BF16, head_group=2)
INDEXER = KVSpec(4, 1, 12, 2, U8, latent=True)
SPECS = {
    "kv": TARGET,
    "indexer": INDEXER,
    "draft": replace(TARGET, num_layers=1, first_layer=4),
    "draft_indexer": replace(INDEXER, num_layers=1, first_layer=4),
}
PACKED = {"draft": Packed("kv"), "draft_indexer": Packed("indexer")}
SIDECAR = {
    "draft": Sidecar("kv", layout="page_first_direct"),
    "draft_indexer": Sidecar("indexer", layout="page_first"),
}
MODES = pytest.mark.parametrize("drafts", [PACKED, SIDECAR], ids=["packed", "sidecar"])


def gpu_pool(num_pages: int = 12, **specs: KVSpec) -> DevicePool:
    return DevicePool.empty({**SPECS, **specs}, "layer_first", num_pages)
