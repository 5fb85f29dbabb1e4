"""Copies that any machine must get right: every path over layouts, rows and forms of pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from hikv.buffer import KVBuffer
from hikv.layout import list_layouts
from hikv.measure import fill_random, wrong_bytes
from hikv.plan import plan_transfer
from hikv.spec import KVSpec
from hikv.transfers import PATHS

from .machine import Machine

GPU_PATHS = sorted(PATHS.keys() - {"cpu"}, key=lambda name: (PATHS[name].block_quota, name))
"""Those without a kernel first: they have nothing to compile."""

PER_LAYER = "per layer"
"""In the place of a layout: an engine's pool of one K and one V tensor a layer."""

_HEADS = KVSpec(3, 8, 128, 16, torch.bfloat16, head_group=2)
_WIDE = KVSpec(3, 4, 192, 16, torch.bfloat16, head_group=2, v_head_dim=128)
_LATENT = tuple(KVSpec(3, 1, width, 16, torch.uint8, latent=True) for width in (132, 576, 656))


class Verdict(NamedTuple):
    """`kind` is `"right"`, `"wrong"` or `"waived"`; `why` belongs to the last two."""

    kind: str
    why: str | None = None


@dataclass(frozen=True)
class Check:
    """One copy by one path: 5 of 9 pages, scattered, between (side, layout) `src` and `dst`."""

    group: str
    spec: KVSpec
    src: tuple[str, str]
    dst: tuple[str, str]
    path: str
    layers: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """What is copied, for a message."""
        ends = " → ".join(f"{side} {layout}" for side, layout in (self.src, self.dst))
        return f"path {self.path}, {ends}, rows of {self.spec.head_dim} {self.spec.dtype}"

    def verify(self, machine: Machine) -> Verdict:
        """Make the copy on a poisoned destination and compare every byte."""
        src, dst = (self._pool(machine, *end) for end in (self.src, self.dst))
        plan = plan_transfer(src, dst, [7, 0, 4, 5, 2], [1, 8, 3, 4, 6], layers=self.layers)
        if reason := machine.obstacle(self.path, plan):
            return Verdict("waived", reason)
        fill_random(src)
        fill_random(dst, seed=1)
        # An odd number of CTAs leaves a rest for some of them.
        copy = partial(machine.copy, plan, self.path, 3 if PATHS[self.path].block_quota else 0)
        try:
            wrong = wrong_bytes(plan, copy, machine.synchronize)
        except Exception as error:
            # One pair that does not compile or run must not hide what the others do.
            return Verdict("wrong", f"{type(error).__name__}: {error}")
        return Verdict("wrong", wrong) if wrong else Verdict("right")

    def _pool(self, machine: Machine, side: str, layout: str) -> KVBuffer:
        if layout == PER_LAYER:
            return machine.layered_pool(self.spec, 9)
        return machine.new_pool(side, self.spec, layout, 9)


def checks() -> list[Check]:
    """The small groups first; all pairs last, path after path, so that time runs out on few."""
    found = [
        Check(group, spec, src, dst, path, layers)
        for (group, spec, src, dst, layers), path in product(_copies(), GPU_PATHS)
    ]
    return sorted(found, key=lambda c: GPU_PATHS.index(c.path) if c.group == "all pairs" else -1)


_Copy = tuple[str, KVSpec, tuple[str, str], tuple[str, str], tuple[int, int] | None]


def _copies() -> Iterator[_Copy]:
    yield from _both_ways("one layer", _HEADS, "layer_first", "page_unified", layers=(1, 2))
    for spec, host in product(_LATENT, list_layouts(latent=True)):
        yield from _both_ways("latent rows", spec, "layer_first", host)
    for layout in list_layouts():
        yield from _both_ways("pools per layer", _HEADS, PER_LAYER, layout)
        yield from _both_ways("K wider than V", _WIDE, "layer_first", layout)
        yield "on the GPU", _HEADS, ("gpu", "layer_first"), ("gpu", layout), None
    for gpu, host in product(list_layouts(), repeat=2):
        yield from _both_ways("all pairs", _HEADS, gpu, host)


def _both_ways(
    group: str, spec: KVSpec, gpu: str, host: str, layers: tuple[int, int] | None = None
) -> Iterator[_Copy]:
    yield group, spec, ("host", host), ("gpu", gpu), layers
    yield group, spec, ("gpu", gpu), ("host", host), layers
