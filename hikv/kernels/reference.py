"""The torch oracle and the CPU path: same pairs, same pages, no kernel.

It indexes strided views by the axes' meaning and shares none of the plan's merging, so it can judge
the kernels, which live by that merging.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.kernels.submit import Path
from hikv.plan import CopyPlan, plan_transfer
from hikv.region import Region

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def reference(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
) -> CopyPlan:
    """Copy pages with torch indexing; returns the plan that ran.

    Both buffers on one device. On the CPU the copy is done on return; on a GPU it is queued on
    torch's current stream. Raises `ArgumentError` as `plan_transfer` does.
    """
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    launch(plan)
    return plan


def obstacle(plan: CopyPlan) -> str | None:
    """Why the CPU path cannot serve `plan`, or `None`."""
    return None if plan.gpu is None else "a side is on a GPU"


def launch(plan: CopyPlan) -> None:
    """Run `plan` on buffers of one device."""
    for part, src, dst in zip(plan.parts, plan.src.regions, plan.dst.regions, strict=True):
        # A vector may span rows that lie together; a view keeps each row apart.
        word = _WORDS[math.gcd(8, part.vector_bytes, src.row_bytes)]
        heads = sorted((src.sizes["head"], dst.sizes["head"]))
        pairs = _matching_views(src.for_layers(*plan.layers), dst.for_layers(*plan.layers), word)
        for src_view, dst_view in pairs:
            source, target = _refine(src_view, *heads), _refine(dst_view, *heads)
            # Page by page: a copy of strided views streams, while one index over all pages would
            # first gather them into a temporary of the whole payload.
            for i, j in zip(plan.src_pages.tolist(), plan.dst_pages.tolist(), strict=True):
                target[j].copy_(source[i])


def _matching_views(
    src: Region, dst: Region, word: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views over the same layers and kv: one pair, or one per entry of a table."""
    sources, targets = list(src.tensors(word)), list(dst.tensors(word))
    if len(sources) == len(targets):
        for (_, _, source), (_, _, target) in zip(sources, targets, strict=True):
            yield source, target
    elif src.tabled:
        for layers, kv, source in sources:
            yield source, targets[0][2][:, layers, kv]
    else:
        for layers, kv, target in targets:
            yield sources[0][2][:, layers, kv], target


def _refine(view: torch.Tensor, fine: int, coarse: int) -> torch.Tensor:
    """View `[page, layer, kv, group, token, head, dim]` on the common grid of two head grids.

    Returns `[page, layer, kv, coarse group, fine group in it, token, head, dim]`.
    """
    groups = view.shape[3] * view.shape[5] // coarse
    view = view.unflatten(3, (groups, -1)).unflatten(6, (-1, fine))
    # One of the two split axes has size 1, so joining them is a view.
    return view.movedim(6, 5).flatten(4, 5)


PATH = Path("cpu", obstacle, launch)
