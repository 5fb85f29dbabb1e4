"""The ways to make a copy, from the table of what may be chosen, less what a compiler rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from hikv.boxes import STAGE_BYTES
from hikv.compiled import Report, compile_relayout, compile_relayout_tma
from hikv.device import DeviceInfo
from hikv.errors import HikvError
from hikv.kernels.relayout import Config as RegisterConfig
from hikv.kernels.relayout import default_config
from hikv.kernels.relayout_tma import Config as TmaConfig
from hikv.plan import PartPlan
from hikv.tables import SPACE

QUICK_QUOTAS = (1, 2, 4, 8, 16, 32)

# Registers of an SM (CUDA programming guide, technical specifications), which one CTA must not
# exceed, and shared memory of a CTA; gfx942 has 512 VGPRs of 64 lanes for each of 4 SIMDs.
_SM_REGISTERS = {"sm": 65536, "gfx": 131072}
_SHARED_BYTES = {"sm": 227 << 10, "sm_120": 99 << 10, "gfx": 64 << 10}


class Point(NamedTuple):
    """One way: a path, its CTAs, and fields of the kernel's `Config`, none for the default."""

    path: str
    block_quota: int
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        fields = "".join(f" {name} {value}" for name, value in self.config)
        return self.path + (f" × {self.block_quota}" if self.block_quota else "") + fields


def points(num_sms: int, serves: Callable[[str], bool], *, quick: bool = False) -> list[Point]:
    """Every point of `SPACE` whose path serves, by rising CTAs.

    The kernel's default is one of its configurations. `quick` keeps it and the smallest, which lets
    short copies spread over their CTAs.
    """
    found = []
    for path, fields in SPACE.items():
        if not serves(path):
            continue
        names = [name for name in fields if name != "block_quota"]
        configs: list[tuple[tuple[str, int], ...]] = [()]
        if names:
            values = product(*(fields[name] for name in names))
            configs += [tuple(zip(names, v, strict=True)) for v in values]
        quotas = [q for q in fields["block_quota"] if q <= num_sms]
        if quick:
            configs = configs[:2]
            quotas = [q for q in quotas if q == 0 or q in QUICK_QUOTAS]
        found += [Point(path, quota, config) for quota, config in product(quotas, configs)]
    return sorted(found, key=lambda point: (point.block_quota, point))


def bytes_in_flight(point: Point, vector_bytes: int, warp_size: int = 32) -> int | None:
    """What a CTA has requested before it waits; `None` for paths that do not cross by a kernel.

    A ring that is left to its default aims at 128 KiB.
    """
    config = dict(point.config)
    if point.path == "tma":
        return config.get("buffers", 8) * STAGE_BYTES
    if point.path != "sm":
        return None
    if not config:
        return default_config(vector_bytes, warp_size=warp_size).tile * vector_bytes
    return RegisterConfig(**config, warp_size=warp_size).tile * vector_bytes


def littles_law(
    point: Point, nbytes: int, in_flight: int | None, latency: float, ceiling: float
) -> float | None:
    """GB/s of a kernel at most, bytes in flight ÷ latency or `ceiling`; `None` without `in_flight`.

    Launch and submission are not in it, so short copies stay below.
    """
    if in_flight is None:
        return None
    return min(ceiling, min(point.block_quota * in_flight, nbytes) / latency / 1e9)


def target_of(info: DeviceInfo) -> str:
    """The name of `info`'s architecture, as compilers know it."""
    if info.capability is None:
        return "gfx942"
    return "sm_{}{}".format(*info.capability)


def prune(
    candidates: Iterable[Point],
    parts: Sequence[PartPlan],
    target: str,
    compile_point: Callable[[Point, PartPlan, str], Report | None] | None = None,
) -> list[Point]:
    """`candidates` without those that spill, or whose CTA does not fit an SM of `target`.

    Each configuration is compiled once, ahead of any timing. `compile_point` returns `None` for
    what no compiler decides (the copy engine, a default).
    """
    compile_point = compile_point or compiled
    fits: dict[tuple[str, object], bool] = {}
    kept = []
    for point in candidates:
        kind = (point.path, point.config)
        if kind not in fits:
            fits[kind] = all(_fits(compile_point, point, part, target) for part in parts)
        if fits[kind]:
            kept.append(point)
    return kept


def compiled(point: Point, part: PartPlan, target: str) -> Report | None:
    """The compiler's report on `point` for `part`; `None` where the config is left to the path."""
    config = dict(point.config)
    if not config:
        return None
    if point.path == "tma":
        return compile_relayout_tma(part, target, TmaConfig(**config))
    return compile_relayout(part, target, RegisterConfig(**config, warp_size=_warp(target)))


def _fits(
    compile_point: Callable[[Point, PartPlan, str], Report | None],
    point: Point,
    part: PartPlan,
    target: str,
) -> bool:
    try:
        report = compile_point(point, part, target)
    except HikvError:
        return False  # no descriptor serves, or the target has none
    if report is None:
        return True
    family = "gfx" if _warp(target) == 64 else "sm"
    threads = dict(point.config).get("num_warps", 4) * _warp(target)
    shared = _SHARED_BYTES.get(target, _SHARED_BYTES[family])
    return (
        report.spill_bytes == 0
        and report.registers * threads <= _SM_REGISTERS[family]
        and report.shared_bytes <= shared
    )


def _warp(target: str) -> int:
    return 64 if target.startswith("gfx") else 32
