"""The table of layouts: name → order of axes → strides. The only place that knows a layout's name.

A layout is data. It orders the axes of a page pool from outer to inner, and everything else (sizes,
strides, where K ends and V begins) follows from that order and the spec. A new layout is one row
of `_TABLE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hikv.errors import ArgumentError
from hikv.spec import Component, KVSpec

AXES = ("page", "layer", "kv", "group", "token", "head", "dim")
"""Every axis of a page pool in canonical order. `head` counts within a `group`."""


@dataclass(frozen=True)
class Placement:
    """Where a dense layout puts one component: byte offset and byte stride of every axis."""

    component: Component
    offset: int
    strides: Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """The order of axes, outer to inner, of a dense page pool.

    Attributes:
        name: the name users give.
        axes: order for K/V rows with heads. Without `group`, `head` runs over all heads.
        latent_axes: order for latent rows; `None` where the layout needs a head axis.
    """

    name: str
    axes: tuple[str, ...]
    latent_axes: tuple[str, ...] | None

    def order(self, spec: KVSpec) -> tuple[str, ...]:
        """Axes of this layout for `spec`, outer → inner.

        Raises `ArgumentError` where the layout has no form for latent rows.
        """
        if not spec.latent:
            return self.axes
        if self.latent_axes is None:
            served = [name for name, layout in _TABLE.items() if layout.latent_axes]
            raise ArgumentError(
                "layout",
                expected=f"a layout for latent rows, one of {', '.join(served)}",
                got=repr(self.name),
                remedy="latent rows have no head axis to order or group by",
            )
        return self.latent_axes

    def sizes(self, spec: KVSpec, num_pages: int, width: int) -> dict[str, int]:
        """Size of every axis of `order(spec)` except `kv`, for rows of `width` elements."""
        grouped = "group" in self.order(spec)
        return {
            "page": num_pages,
            "layer": spec.num_layers,
            "group": spec.num_groups if grouped else 1,
            "token": spec.page_size,
            "head": spec.heads_per_group if grouped else spec.num_kv_heads,
            "dim": width,
        }

    def place(self, spec: KVSpec, num_pages: int) -> tuple[Placement, ...]:
        """Byte offsets and strides of a dense pool of `num_pages` pages, one per component.

        The `kv` axis is a concatenation: what lies outside it strides over K and V together, what
        lies inside strides over the own rows alone, so K and V may differ in width.
        """
        order = self.order(spec)
        split = order.index("kv") if "kv" in order else 0
        inner: list[tuple[dict[str, int], int]] = []
        for component in spec.components:
            sizes = self.sizes(spec, num_pages, component.width)
            strides, span = _dense(order[split:], sizes, spec.dtype.itemsize)
            strides["kv"] = span
            inner.append((strides, span * component.kv))
        shared, _ = _dense(order[:split], self.sizes(spec, num_pages, 0), sum(s for _, s in inner))

        placements, offset = [], 0
        for component, (strides, span) in zip(spec.components, inner, strict=True):
            strides.update(shared)
            strides.setdefault("head", strides["dim"] * component.width)
            strides.setdefault("group", strides["head"] * spec.heads_per_group)
            ordered = {axis: strides[axis] for axis in AXES}
            placements.append(Placement(component, offset, ordered))
            offset += span
        return tuple(placements)


def _dense(
    axes: tuple[str, ...], sizes: Mapping[str, int], span: int
) -> tuple[dict[str, int], int]:
    """Byte strides of `axes` packed around an element of `span` bytes, and bytes in all."""
    strides: dict[str, int] = {}
    for axis in reversed(axes):
        if axis != "kv":
            strides[axis] = span
            span *= sizes[axis]
    return strides, span


def _row(name: str, axes: str, latent_axes: str | None) -> Layout:
    return Layout(name, tuple(axes.split()), tuple(latent_axes.split()) if latent_axes else None)


_TABLE = {
    layout.name: layout
    for layout in (
        _row("layer_first", "kv layer page token head dim", "layer page token dim"),
        _row("page_head", "kv page head token layer dim", None),
        _row("page_first", "kv page token layer head dim", "page token layer dim"),
        _row("page_first_direct", "kv page layer token head dim", "page layer token dim"),
        _row("page_first_direct_group", "kv page group layer token head dim", None),
        _row("page_unified", "page group layer kv token head dim", "page layer token dim"),
    )
}


def list_layouts(*, latent: bool = False) -> tuple[str, ...]:
    """Names of all layouts; with `latent`, of those that hold latent rows."""
    return tuple(name for name, layout in _TABLE.items() if layout.latent_axes or not latent)


def get_layout(name: str) -> Layout:
    """The layout called `name`; raises `ArgumentError` naming the choices."""
    if not isinstance(name, str) or name not in _TABLE:
        raise ArgumentError(
            "layout",
            expected=f"one of {', '.join(_TABLE)}",
            got=repr(name),
            remedy="pass a name from hikv.list_layouts()",
        )
    return _TABLE[name]
