"""Two buffers + page lists → `CopyPlan`. Pure: no GPU, nothing moves.

A conversion between any two layouts is the same small piece of arithmetic. List the axes in the
order of the side whose accesses must be sequential (the host; between two devices, the
destination), take the stretch that is contiguous on both sides as the run, and let each side merge
its own neighbours among what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.console import quantity
from hikv.errors import ArgumentError, check_type
from hikv.pages import check_disjoint, check_pages
from hikv.region import Region

MAX_VECTOR_BYTES = 16

TILE_BYTES = 128 << 10
"""What a CTA of the register kernel has in flight where vectors are 16 bytes."""

PATH_OBSTACLES: dict[str, Callable[[CopyPlan], str | None]] = {}
"""Per path, why it cannot serve a plan here, or `None`: `hikv.transfers` fills it."""

PATH_PIECES: dict[str, Callable[[CopyPlan], int]] = {}
"""Per path whose copies are not the plan's descriptors, their mean size in bytes; filled too."""

PATH_CHOICE: list[Callable[[CopyPlan], str]] = []
"""What `transfer()` takes for a plan if all is left to it, in words: filled too."""


@dataclass(frozen=True)
class Loop:
    """One axis of a page that is not part of the run: size, and byte stride on each side.

    A stride is `None` on a side that reaches this axis through its table of addresses.
    """

    axis: str
    size: int
    src_stride: int | None
    dst_stride: int | None


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a part: how a flat vector index within a page becomes an address there.

    Attributes:
        address: base address.
        page_stride: bytes from page to page.
        sizes, strides: this side's own merged loops, outer → inner, strides in bytes. The last is
            the contiguous stretch, counted in vectors.
        table: byte offsets from `address` per entry, int64, or `None`.
        table_strides: entries per step of each loop; 0 for loops that do not index the table.
    """

    address: int
    page_stride: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    table: np.ndarray | None
    table_strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PartPlan:
    """How one component of a page is copied.

    Attributes:
        name: the component's name.
        loops: axes outside the run, in the order of the sequential side, outer → inner.
        row_run: bytes of one token's heads that stay together on both sides.
        run_bytes: the longest stretch contiguous on both sides (the merged run).
        vector_bytes: widest access, a power of two up to 16, to which every run, stride and
            address is aligned.
        page_vectors: vectors of one page.
        src, dst: the two sides.
    """

    name: str
    loops: tuple[Loop, ...]
    row_run: int
    run_bytes: int
    vector_bytes: int
    page_vectors: int
    src: Side
    dst: Side

    @property
    def page_bytes(self) -> int:
        """Payload bytes of one page in this part."""
        return self.page_vectors * self.vector_bytes

    @property
    def runs_per_page(self) -> int:
        """Runs of one page, before runs of consecutive pages are joined."""
        return self.page_bytes // self.run_bytes

    @property
    def pages_join(self) -> bool:
        """Whether every run of a page continues in the next page on both sides."""
        strides = {self.src.page_stride, self.dst.page_stride}
        return strides == {self.run_bytes}


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What a transfer will do, decided before anything moves.

    Attributes:
        src, dst: the buffers.
        src_pages, dst_pages: page ids, int64, `[n]` each; pair i moves page `src_pages[i]`.
        layers: first and last + 1 of the layers to move.
        parts: one `PartPlan` per component.
    """

    src: KVBuffer
    dst: KVBuffer
    src_pages: np.ndarray
    dst_pages: np.ndarray
    layers: tuple[int, int]
    parts: tuple[PartPlan, ...]

    @property
    def num_pages(self) -> int:
        """Pages to move."""
        return len(self.src_pages)

    @property
    def nbytes(self) -> int:
        """Payload bytes, each counted once."""
        return self.num_pages * sum(part.page_bytes for part in self.parts)

    @property
    def direction(self) -> str:
        """`"h2d"`, `"d2h"`, `"d2d"` or `"h2h"`."""
        letter = {True: "h", False: "d"}
        return f"{letter[self.src.device.type == 'cpu']}2{letter[self.dst.device.type == 'cpu']}"

    @property
    def row_run(self) -> int:
        """Bytes of one token's heads that stay together on both sides; the least of all parts."""
        return min(part.row_run for part in self.parts)

    @property
    def run_bytes(self) -> int:
        """The longest stretch contiguous on both sides; the least of all parts."""
        return min(part.run_bytes for part in self.parts)

    @property
    def vector_bytes(self) -> int:
        """Widest access of the kernels; the least of all parts."""
        return min(part.vector_bytes for part in self.parts)

    @cached_property
    def num_descriptors(self) -> int:
        """Copies that the copy engine would be handed, runs of consecutive pages joined."""
        joined = len(page_runs(self.src_pages, self.dst_pages)[0])
        return sum(
            part.runs_per_page * (joined if part.pages_join else self.num_pages)
            for part in self.parts
        )

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that a path would run on; `None` between host buffers."""
        return next((b.device for b in (self.src, self.dst) if b.device.type != "cpu"), None)

    def for_layers(self, start: int, stop: int) -> CopyPlan:
        """The same pages, layers `start` to `stop` alone, counted from the buffers' first layer."""
        return replace(self, layers=(start, stop), parts=_parts(self.src, self.dst, (start, stop)))

    def unreachable(self) -> str | None:
        """Why no kernel or copy engine of one GPU can reach both sides, or `None`."""
        gpus = {b.device for b in (self.src, self.dst) if b.device.type != "cpu"}
        if not gpus:
            return "neither side is on a GPU"
        if len(gpus) > 1:
            return f"the sides are on two devices, {' and '.join(sorted(map(str, gpus)))}"
        for name, buffer in (("src", self.src), ("dst", self.dst)):
            if buffer.device.type == "cpu" and not buffer.pinned:
                return f"{name} is pageable host memory"
        return None

    def describe(self) -> str:
        """Loops, runs, vectors, tiles, descriptors, paths, and the way that `transfer()` takes if
        all is left to it, for people, several lines.

        Paths and choice are told once `hikv.transfer` or `hikv.plan_transfer` has been used.
        """
        start, stop = self.layers
        lines = [
            f"{self.direction}  {self.src!r} → {self.dst!r}",
            f"{quantity(self.num_pages, 'page')}, {self.nbytes} B, layers {start}..{stop}; "
            f"{quantity(self.num_descriptors, 'descriptor')} for a copy engine, neighbours joined",
        ]
        for part in self.parts:
            loops = " · ".join(f"{loop.axis} {loop.size}" for loop in part.loops) or "none"
            tiles = -(-self.num_pages * part.page_bytes // TILE_BYTES)
            lines += [
                f"  {part.name}: loops {loops}; {part.vector_bytes}-byte vectors, "
                f"{part.page_vectors} a page; {quantity(tiles, 'tile')} of {TILE_BYTES >> 10} KiB, "
                "what a CTA has in flight",
                f"    row run {part.row_run} B, what stays together of a token; merged run "
                f"{part.run_bytes} B, the longest stretch on both sides",
            ]
            for side, name in ((part.src, "src"), (part.dst, "dst")):
                *outer, inner = side.sizes
                pieces = " × ".join(map(str, outer or [1]))
                table = f", by {side.table.size} addresses" if side.table is not None else ""
                lines.append(
                    f"    {name}: a page is {pieces} × {inner * part.vector_bytes} B{table}, "
                    f"pages are {side.page_stride} B apart"
                )
        for name, obstacle in PATH_OBSTACLES.items():
            serves = "serves"
            if name in PATH_PIECES:
                serves += f", in pieces of {PATH_PIECES[name](self)} B"
            lines.append(f"  path {name}: {obstacle(self) or serves}")
        return "\n".join([*lines, *(f"  {choice(self)}" for choice in PATH_CHOICE)])


def plan_transfer(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    layers: tuple[int, int] | range | None = None,
) -> CopyPlan:
    """Plan the copy of `src_pages[i]` of `src` to `dst_pages[i]` of `dst`.

    Args:
        src, dst: buffers of equal geometry; layout and head grid may differ, grids must nest.
        src_pages, dst_pages: equally long int32 or int64 page ids, on the CPU or the GPU. Ids on
            the GPU are read back, which waits for the stream that produced them.
        layers: `(start, stop)` or a range of step 1, counted from the buffers' first layer; `None`
            is all.

    Raises:
        ArgumentError: no buffer, different geometry, head grids that do not nest, layers out of
            range, page ids of another dtype, out of range, of unequal length, or twice in the
            destination, or memory that source and destination share.
    """
    for name, buffer in (("src", src), ("dst", dst)):
        check_type(name, buffer, KVBuffer, remedy="see the memory through a KVBuffer")
    _check_geometry(src, dst)
    span = _check_layers(layers, src.spec.num_layers)
    src_ids = check_pages("src_pages", src_pages, src.num_pages)
    dst_ids = check_pages("dst_pages", dst_pages, dst.num_pages, unique=True)
    if len(src_ids) != len(dst_ids):
        raise ArgumentError(
            "dst_pages",
            expected=f"as many ids as src_pages, {len(src_ids)}",
            got=len(dst_ids),
            remedy="pair every source page with one destination page",
        )
    check_disjoint(src, dst, src_ids, dst_ids)
    return CopyPlan(src, dst, src_ids, dst_ids, span, _parts(src, dst, span))


def page_runs(src_pages: np.ndarray, dst_pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of pairs whose ids rise by one on both sides: start positions and lengths."""
    if not len(src_pages):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    breaks = (np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return starts, np.diff(np.append(starts, len(src_pages)))


_PARTS: WeakKeyDictionary[KVBuffer, WeakKeyDictionary[KVBuffer, dict]] = WeakKeyDictionary()


def _parts(src: KVBuffer, dst: KVBuffer, span: tuple[int, int]) -> tuple[PartPlan, ...]:
    """The parts of a pair of buffers, remembered: they hold addresses, never the buffers."""
    by_span = _PARTS.setdefault(src, WeakKeyDictionary()).setdefault(dst, {})
    if span not in by_span:
        dst_leads = dst.device.type == "cpu" or src.device.type != "cpu"
        by_span[span] = tuple(
            _plan_part(s.for_layers(*span), d.for_layers(*span), dst_leads)
            for s, d in zip(src.regions, dst.regions, strict=True)
        )
    return by_span[span]


def _plan_part(src: Region, dst: Region, dst_leads: bool) -> PartPlan:
    loops = _loops(src, dst)
    row_run, _ = _absorb(src.row_bytes, [lp for lp in loops if lp.axis in _HEAD_AXES])
    run, rest = _absorb(src.row_bytes, loops)
    rest.sort(key=lambda loop: outerness(loop, dst_leads))
    vector = _vector_bytes(src, dst, run, rest)
    page_vectors = run * math.prod(loop.size for loop in rest) // vector
    src_side = _side(src, [(lp.axis, lp.size, lp.src_stride) for lp in rest], run, vector)
    dst_side = _side(dst, [(lp.axis, lp.size, lp.dst_stride) for lp in rest], run, vector)
    return PartPlan(
        src.component.name, tuple(rest), row_run, run, vector, page_vectors, src_side, dst_side
    )


_HEAD_AXES = ("head", "subgroup", "group")


def _loops(src: Region, dst: Region) -> list[Loop]:
    """Every axis of a page but `dim`, sizes above 1, split where the two head grids differ."""
    coarse = max(src.sizes["head"], dst.sizes["head"])
    fine = min(src.sizes["head"], dst.sizes["head"])
    sizes = {
        "kv": src.sizes["kv"],
        "layer": src.sizes["layer"],
        "group": src.sizes["group"] * src.sizes["head"] // coarse,
        "subgroup": coarse // fine,
        "token": src.sizes["token"],
        "head": fine,
    }
    src_strides, dst_strides = _strides(src, coarse, fine), _strides(dst, coarse, fine)
    return [
        Loop(axis, size, src_strides[axis], dst_strides[axis])
        for axis, size in sizes.items()
        if size > 1
    ]


def _strides(region: Region, coarse: int, fine: int) -> dict[str, int | None]:
    """Byte strides of the refined axes; `subgroup` steps by `fine` heads within `coarse` heads."""
    strides: dict[str, int | None] = dict(region.strides)
    own_group, own_head = region.strides["group"], region.strides["head"]
    if region.sizes["head"] == coarse:
        strides["subgroup"] = fine * own_head
    else:
        strides["group"], strides["subgroup"] = coarse // fine * own_group, own_group
    if region.tabled:
        strides["kv"] = strides["layer"] = None
    return strides


def _absorb(run: int, loops: Sequence[Loop]) -> tuple[int, list[Loop]]:
    """Grow `run` by every loop that continues it on both sides; returns it and the other loops."""
    rest = list(loops)
    while True:
        follower = next((lp for lp in rest if lp.src_stride == run == lp.dst_stride), None)
        if follower is None:
            return run, rest
        run *= follower.size
        rest.remove(follower)


def outerness(loop: Loop, dst_leads: bool) -> float:
    """Sort key, outermost first. Tables lie outside every stride."""
    stride = loop.dst_stride if dst_leads else loop.src_stride
    return -math.inf if stride is None else -stride


def _vector_bytes(src: Region, dst: Region, run: int, loops: Sequence[Loop]) -> int:
    numbers = [MAX_VECTOR_BYTES, run]
    for region in (src, dst):
        numbers += [region.strides["page"], region.alignment]
    for loop in loops:
        numbers += [stride for stride in (loop.src_stride, loop.dst_stride) if stride is not None]
    return math.gcd(*numbers)


def _side(
    region: Region, loops: Sequence[tuple[str, int, int | None]], run: int, vector: int
) -> Side:
    """Merge this side's own neighbours, inner → outer."""
    entries = {"kv": region.addresses.shape[1], "layer": 1} if region.tabled else {}
    # (size, stride, table stride) of each merged loop, innermost first; the run counts in vectors.
    merged = [(run // vector, vector, 0)]
    for axis, size, stride in reversed(loops):
        inner_size, inner_stride, inner_entries = merged[-1]
        entry = entries.get(axis, 0)
        strided = not entry and not inner_entries and stride == inner_size * inner_stride
        if strided or (entry and entry == inner_size * inner_entries):
            merged[-1] = (inner_size * size, inner_stride, inner_entries)
        else:
            merged.append((size, stride or 0, entry))
    sizes, strides, table_strides = zip(*reversed(merged), strict=True)
    address = int(region.addresses[0, 0])
    table = region.addresses.ravel() - address if region.tabled else None
    return Side(address, region.strides["page"], sizes, strides, table, table_strides)


def _check_geometry(src: KVBuffer, dst: KVBuffer) -> None:
    here, there = src.spec.geometry, dst.spec.geometry
    if here != there:
        differing = [name for name in here if here[name] != there[name]]
        raise ArgumentError(
            "dst",
            expected=", ".join(f"{name} {here[name]}" for name in differing) + " as in src",
            got=", ".join(f"{name} {there[name]}" for name in differing),
            remedy="build both buffers from one spec; only layout and head_group may differ",
        )
    coarse, fine = sorted((src.spec.heads_per_group, dst.spec.heads_per_group), reverse=True)
    if coarse % fine:
        raise ArgumentError(
            "head_group",
            expected=f"grids that nest: src has {src.spec.heads_per_group} heads a group",
            got=f"dst has {dst.spec.heads_per_group}",
            remedy="choose head groups of which one divides the other",
        )


def _check_layers(layers: tuple[int, int] | range | None, num_layers: int) -> tuple[int, int]:
    if layers is None:
        return 0, num_layers
    if isinstance(layers, range):
        ends: tuple[int, ...] = (layers.start, layers.stop) if layers.step == 1 else ()
    else:
        ends = tuple(layers) if isinstance(layers, Sequence) else ()
    whole = all(isinstance(end, int | np.integer) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not whole or not 0 <= ends[0] < ends[1] <= num_layers:
        raise ArgumentError(
            "layers",
            expected=f"(start, stop) or range within 0..{num_layers}, not empty, step 1",
            got=layers,
            remedy="count layers from the buffer's first layer",
        )
    return int(ends[0]), int(ends[1])  # numpy's would end among the kernels' constants
