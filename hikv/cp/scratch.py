"""The scratch that a layer is gathered into: an ordinary paged pool of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hikv.buffer import KVBuffer
from hikv.spec import KVSpec

NUM_SLOTS = 2
"""One slot is read by attention while the next layer arrives in the other."""

POISON = 0xA5
"""What a slot is filled with before a trial, so that bytes which do not arrive are seen."""


def scratch_bytes(spec: KVSpec, max_pages: int, staging_pages: int = 0) -> int:
    """Bytes of both slots for batches of up to `max_pages` scratch pages, for memory budgets.

    `staging_pages`: those that a back end packs into; `nccl` takes `max_pages // num_ranks`.
    """
    pages = NUM_SLOTS * max_pages + staging_pages
    return pages * spec.page_size * spec.bytes_per_token_layer


@dataclass(frozen=True, eq=False)
class Slot:
    """One slot.

    Attributes:
        k, v: `[page, token, head, dim]`; latent rows are `[page, token, dim]`, and `v` is `None`.
        memory: all of it, flat, uint8: K, and V behind it.
        window: the same memory as a buffer of the pool's geometry, in which every layer lies in
            this one place, so that the plan of a copy from the pool serves any layer.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    memory: torch.Tensor
    window: KVBuffer


def make_slot(spec: KVSpec, max_pages: int, allocate: Callable[[int], torch.Tensor]) -> Slot:
    """A slot of `max_pages` pages in memory of `allocate(nbytes)`, a flat uint8 tensor."""
    memory = allocate(scratch_bytes(spec, 0, max_pages))
    rows = memory.view(spec.dtype)
    widths = [component.width for component in spec.components for _ in range(component.kv)]
    heads = () if spec.latent else (spec.num_kv_heads,)
    tensors, at = [], 0
    for width in widths:
        shape = (max_pages, spec.page_size, *heads, width)
        count = max_pages * spec.page_size * spec.num_kv_heads * width
        tensors.append(rows[at : at + count].view(shape))
        at += count
    k, v = tensors[0], (tensors[1] if len(tensors) > 1 else None)
    one_layer = KVBuffer.from_layers(
        [k], None if v is None else [v], replace(spec, num_layers=1), pinned=False
    )
    regions = tuple(
        replace(
            region,
            sizes={**region.sizes, "layer": spec.num_layers},
            strides={**region.strides, "layer": 0},
        )
        for region in one_layer.regions
    )
    return Slot(k, v, memory, replace(one_layer, spec=spec, regions=regions))
