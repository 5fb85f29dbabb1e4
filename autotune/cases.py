"""The cases of a search: which copies, and pools whose pages have exactly those runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.plan import CopyPlan, plan_transfer
from hikv.spec import KVSpec
from hikv.tables import Key
from hikv.tuning import MAX_COPY_BYTES, MAX_RUN_BYTES, MAX_RUNS, MIN_RUN_BYTES, rounded_key

DIRECTIONS = ("h2d", "d2h")
VECTORS = (16, 4)
MAX_NARROW_RUN = 2048  # a longer run holds many rows, and then a wide vector divides it

# Rows as models have them stand for the round sizes next to them: the latent rows of MLA,
# 576 values in fp8 and bf16.
_LATENT_ROWS = {512: 576, 1024: 1152}
_LAYERS, _TOKENS = 4, 16
_LONG_RUN = 4096

Pool = Callable[[str, KVSpec, str, int], KVBuffer]
"""Makes a pool: side (`"gpu"` or `"host"`), spec, layout, pages."""


@dataclass(frozen=True)
class Case:
    """`num_runs` scattered runs of about `run_bytes` in one direction.

    `vector_bytes` is the widest access that the rows allow.
    """

    direction: str
    run_bytes: int
    num_runs: int
    vector_bytes: int = 16

    @property
    def key(self) -> Key:
        """Where the choice for this case is kept, and looked up."""
        return rounded_key(
            self.direction, self.run_bytes, self.num_runs, self.run_bytes, self.vector_bytes
        )

    @property
    def nbytes(self) -> int:
        """Payload of one copy."""
        return self.num_pages * self.spec.bytes_per_page

    @property
    def _long(self) -> bool:
        """Whether a run is a layer's page of many tokens, and not one row."""
        return self.run_bytes >= _LONG_RUN

    @property
    def _layered(self) -> bool:
        """Whether the runs are enough for pages of several layers; else each is a page."""
        return self.num_runs >= 2 * _LAYERS * (1 if self._long else _TOKENS)

    @property
    def latent(self) -> bool:
        """Whether a row stands for all heads, as in MLA, or K and V have rows of their own."""
        return not self._layered or self.vector_bytes < 16 or self.run_bytes in _LATENT_ROWS

    @cached_property
    def spec(self) -> KVSpec:
        """A page of no more runs than there are. Few kinds of pages: each must be compiled."""
        width = _LATENT_ROWS.get(self.run_bytes, self.run_bytes)
        if self._long:
            width //= _TOKENS
        elif self.vector_bytes < 16:
            width = self.run_bytes + self.vector_bytes
        layers = _LAYERS if self._layered else 1
        tokens = _TOKENS if self._layered or self._long else 1
        return KVSpec(layers, 1, width, tokens, torch.uint8, latent=self.latent)

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of each side; the host's keeps as much together as a run is to hold."""
        return {"gpu": "layer_first", "host": "page_first_direct" if self._long else "page_first"}

    @property
    def num_pages(self) -> int:
        """Pages of one copy."""
        rows = 1 if self._long else self.spec.page_size
        return self.num_runs // ((1 if self.latent else 2) * self.spec.num_layers * rows)

    def plans(self, pool: Pool, *, num_pages: int | None = None, turns: int = 1) -> list[CopyPlan]:
        """`turns` copies of `num_pages` random pages (default: the case's), which share none."""
        count = num_pages or self.num_pages
        total = count * turns + count // 8 + 1
        here, there = ("host", "gpu") if self.direction == "h2d" else ("gpu", "host")
        src, dst = (pool(side, self.spec, self.layouts[side], total) for side in (here, there))
        rng = np.random.default_rng(0)
        ids = [rng.permutation(total)[: turns * count].reshape(turns, count) for _ in range(2)]
        return [plan_transfer(src, dst, *pair) for pair in zip(*ids, strict=True)]

    def part_plan(self) -> CopyPlan:
        """How the case is copied, on memory that is never touched: for the compiler."""

        def pool(side: str, spec: KVSpec, layout: str, num_pages: int) -> KVBuffer:
            device = "meta" if side == "gpu" else "cpu"
            return KVBuffer.empty(spec, layout, num_pages, device=device)

        return self.plans(pool, num_pages=min(self.num_pages, 16))[0]

    def __str__(self) -> str:
        width = "" if self.vector_bytes == 16 else f":{self.vector_bytes}"
        return f"{self.direction}:{self.run_bytes}x{self.num_runs}{width}"


def full_cases() -> list[Case]:
    """The whole grid: runs of 64 B to 2 MiB by octaves, 1 to 65,536 of them by fours.

    Copies of more than 256 MiB are left out: their rate has settled, and they find the entry of the
    longest copy of their runs.
    """
    return _grid(coarse=False)


def quick_cases() -> list[Case]:
    """Every second run and number of runs, both ends among them: a look-up reaches the rest."""
    return _grid(coarse=True)


def _grid(coarse: bool) -> list[Case]:
    cases = []
    for direction, vector in product(DIRECTIONS, VECTORS):
        longest = MAX_RUN_BYTES if vector == 16 else MAX_NARROW_RUN
        for run in _powers(MIN_RUN_BYTES, longest, 2, coarse):
            most = min(MAX_RUNS, MAX_COPY_BYTES // run)
            cases += [Case(direction, run, n, vector) for n in _powers(1, most, 4, coarse)]
    return cases


def _powers(low: int, high: int, factor: int, coarse: bool) -> list[int]:
    """`low`, and on by `factor` up to `high`; if `coarse`, every second, and the last."""
    powers = [low]
    while powers[-1] * factor <= high:
        powers.append(powers[-1] * factor)
    return sorted({*powers[::2], powers[-1]}) if coarse else powers


def parse_cases(text: str) -> list[Case]:
    """`"h2d:1024x4096,d2h:64x256:4"`: direction, run bytes, number of runs, vector bytes."""
    return [_parse(item) for item in text.split(",")]


def _parse(item: str) -> Case:
    direction, _, rest = item.partition(":")
    sizes, _, vector = rest.partition(":")
    run, _, count = sizes.partition("x")
    numbers = (run, count, vector or "16")
    if direction in DIRECTIONS and all(n.isdecimal() for n in numbers):
        case = Case(direction, *(int(n) for n in numbers))
        if case in full_cases():
            return case
    raise ArgumentError(
        "--cases",
        expected="DIRECTION:RUNxCOUNT[:VECTOR] of the grid, powers of two, such as h2d:1024x4096",
        got=repr(item),
        remedy=f"runs of {MIN_RUN_BYTES} to {MAX_RUN_BYTES} B, 1 to {MAX_RUNS} of them",
    )
