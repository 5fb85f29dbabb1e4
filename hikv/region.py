"""`Region`: the memory of one component, as base addresses and the byte stride of every axis.

The functions below read regions off tensors. Nothing is inferred from a shape: the order of axes is
declared, sizes and strides are checked against the spec, and what does not fit is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hikv.errors import ArgumentError, check_type
from hikv.layout import AXES, Placement
from hikv.spec import Component, KVSpec

_REMEDY = "pass the real tensor's geometry in the spec, or the tensor that the spec describes"


@dataclass(frozen=True, eq=False)
class Region:
    """The memory of one component.

    Attributes:
        component: which rows lie here.
        anchors: the tensors whose storages hold the rows: `[1, 1]` for one storage, else
            `[kv, layer]`. They keep the memory alive.
        addresses: int64 array of the same shape: where page 0, token 0 of each begins.
        sizes, strides: elements and bytes per axis of `AXES`; `dim` is in elements of the dtype.
            Where `addresses` is a table, the strides of `kv` and `layer` are 0.
    """

    component: Component
    anchors: np.ndarray
    addresses: np.ndarray
    sizes: Mapping[str, int]
    strides: Mapping[str, int]

    @property
    def tabled(self) -> bool:
        """Whether `kv` and `layer` go through a table of addresses instead of strides."""
        return self.addresses.size > 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's row."""
        return self.sizes["dim"] * self.strides["dim"]

    @property
    def alignment(self) -> int:
        """Bytes that divide every address and the start of its storage, from which torch counts."""
        starts = (anchor.untyped_storage().data_ptr() for anchor in self.anchors.flat)
        return math.gcd(*map(int, self.addresses.flat), *starts)

    def extents(self) -> list[tuple[int, int]]:
        """Address ranges `[low, high)` that the rows may touch, gaps included."""
        reach = sum((self.sizes[a] - 1) * self.strides[a] for a in AXES) + self.strides["dim"]
        return [(int(a), int(a) + reach) for a in self.addresses.flat]

    def for_layers(self, start: int, stop: int) -> Region:
        """The same rows, layers `start` to `stop` alone."""
        sizes = {**self.sizes, "layer": stop - start}
        if self.tabled:
            anchors, addresses = self.anchors[:, start:stop], self.addresses[:, start:stop]
        else:
            anchors, addresses = self.anchors, self.addresses + start * self.strides["layer"]
        return replace(self, anchors=anchors, addresses=addresses, sizes=sizes)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Strided views `[page, layer, kv, group, token, head, dim]` of the live memory.

        Yields `(layer slice, kv slice, view)`; one view in all, or one per entry of the table.
        `dtype` is what the view reads rows as; its width must divide the row, every stride and
        every address.
        """
        width = dtype.itemsize
        sizes = {**self.sizes, "dim": self.row_bytes // width}
        strides = {**self.strides, "dim": width}
        if self.tabled:
            sizes |= {"kv": 1, "layer": 1}
        for (kv, layer), address in np.ndenumerate(self.addresses):
            view = _typed_view(
                self.anchors[kv, layer],
                int(address),
                dtype,
                [sizes[a] for a in AXES],
                [strides[a] // width for a in AXES],
            )
            place = (
                (slice(layer, layer + 1), slice(kv, kv + 1)) if self.tabled else (slice(None),) * 2
            )
            yield *place, view

    def anchor(self, dtype: torch.dtype) -> torch.Tensor:
        """A one-element view of `dtype` at the first address: a kernel's base pointer."""
        return _typed_view(self.anchors[0, 0], int(self.addresses[0, 0]), dtype, [1], [1])


def dense_region(placement: Placement, memory: torch.Tensor, sizes: Mapping[str, int]) -> Region:
    """The region that a layout's `placement` puts into `memory`, a flat dense tensor."""
    strides = dict(placement.strides)
    address = np.array([[memory.data_ptr() + placement.offset]], dtype=np.int64)
    full = {axis: sizes[axis] for axis in AXES if axis != "kv"} | {"kv": placement.component.kv}
    return Region(placement.component, as_grid([[memory]]), address, full, strides)


def read_tensor(
    name: str, tensor: torch.Tensor, order: Sequence[str], spec: KVSpec
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and byte strides per axis of `tensor`, whose dimensions are `order`, outer → inner.

    `page` and `token` may be one dimension of slots where they are neighbours; `head` runs over all
    heads where `order` has no `group`, and a latent tensor may carry it as a dimension of 1. `dim`
    is left out of the check: its size is what the rows really have.

    Raises `ArgumentError` on another dtype, rank or size, on no page at all, on rows that are not
    contiguous, and on strides by which two elements would share memory.
    """
    if tensor.dtype != spec.dtype:
        raise ArgumentError(name, expected=f"dtype {spec.dtype}", got=tensor.dtype, remedy=_REMEDY)
    wanted = {
        "kv": 2,
        "layer": spec.num_layers,
        "group": spec.num_groups,
        "token": spec.page_size,
        "head": spec.heads_per_group if "group" in order else spec.num_kv_heads,
    }
    tensor = _declared_dimensions(name, tensor, order, spec, wanted)
    shape = dict(zip(order, tensor.shape, strict=True))
    for axis, size in shape.items():
        if size != wanted.get(axis, max(size, 1)):
            raise ArgumentError(
                name,
                expected=f"{axis} of {wanted.get(axis, 'at least 1')} in ({', '.join(order)})",
                got=f"{size}, shape {tuple(tensor.shape)}",
                remedy=_REMEDY,
            )
    width = spec.dtype.itemsize
    stride = {a: s * width for a, s in zip(order, tensor.stride(), strict=True)}
    _check_injective(name, shape, stride, width)
    stride["dim"] = width  # torch lets the stride of a dimension of 1 be anything
    stride.setdefault("head", stride["dim"] * shape["dim"])
    stride.setdefault("group", stride["head"] * spec.heads_per_group)
    shape |= {"group": spec.num_groups, "head": spec.heads_per_group}
    sizes = {axis: shape.get(axis, 1) for axis in AXES}
    return sizes, {axis: stride.get(axis, 0) for axis in AXES}


def _declared_dimensions(
    name: str,
    tensor: torch.Tensor,
    order: Sequence[str],
    spec: KVSpec,
    wanted: Mapping[str, int],
) -> torch.Tensor:
    """A view of `tensor` with one dimension per axis of `order`."""
    if spec.latent and "head" not in order and tensor.ndim > 2 and tensor.shape[-2] == 1:
        # A dimension of 1 before the rows is the head axis, unless the declared axis has size 1.
        is_head = tensor.ndim == len(order) + 1 or wanted.get(order[-2], 1) != 1
        tensor = tensor.squeeze(-2) if is_head else tensor
    if tensor.ndim == len(order) - 1:
        tensor = _split_slots(name, tensor, list(order), spec)
    if tensor.ndim != len(order):
        raise ArgumentError(
            name,
            expected=f"dimensions ({', '.join(order)})",
            got=f"shape {tuple(tensor.shape)}",
            remedy="pass the axes in the declared order, outer to inner",
        )
    return tensor


def check_width(name: str, width: int, expected: int, spec: KVSpec) -> None:
    """Refuse rows whose real width is not the spec's: inline scales would be cut off."""
    if width != expected:
        item = spec.dtype.itemsize
        raise ArgumentError(
            name,
            expected=f"rows of {expected} elements ({expected * item} B)",
            got=f"{width} elements ({width * item} B)",
            remedy=_REMEDY,
        )


def read_layers(
    name: str, tensors: Sequence[torch.Tensor], order: Sequence[str], spec: KVSpec
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and strides that all of an engine's per-layer `tensors` share.

    Raises `ArgumentError` where the count is not `spec.num_layers` or a tensor differs.
    """
    if len(tensors) != spec.num_layers:
        raise ArgumentError(
            name,
            expected=f"{spec.num_layers} tensors, one per layer of the spec",
            got=len(tensors),
            remedy="pass this rank's layers only",
        )
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        check_type(f"{name}[{i}]", tensor, torch.Tensor, remedy="pass the engine's own tensors")
        same = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if same != (first.shape, first.stride(), first.dtype, first.device):
            raise ArgumentError(
                f"{name}[{i}]",
                expected=f"shape {tuple(first.shape)}, strides {first.stride()}, {first.dtype} "
                f"on {first.device} like {name}[0]",
                got=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} "
                f"on {tensor.device}",
                remedy="layers of different geometry are different buffers",
            )
    return read_tensor(f"{name}[0]", first, order, spec)


def layer_region(
    component: Component,
    tensors: Sequence[Sequence[torch.Tensor]],
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
) -> Region:
    """The region of one tensor per `[kv][layer]`: strides where the addresses allow, else a table.

    Views of one storage at equal distances need no table; separate allocations keep theirs, however
    their addresses happen to lie. Raises `ArgumentError` where two of the tensors share a row.
    """
    anchors = as_grid(tensors)
    addresses = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    _check_apart(component, addresses, sizes, strides)
    sizes = {**sizes, "kv": len(tensors), "layer": len(tensors[0])}
    storages = {t.untyped_storage().data_ptr() for row in tensors for t in row}
    steps = _uniform_steps(addresses)
    if len(storages) == 1 and steps is not None:
        strides = {**strides, "kv": steps[0], "layer": steps[1]}
        anchors, addresses = anchors[:1, :1], addresses[:1, :1]
    return Region(component, anchors, addresses, sizes, strides)


def _check_apart(
    component: Component,
    addresses: np.ndarray,
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
) -> None:
    """Refuse tensors of one geometry that share bytes, as when a layer stands twice in a list.

    Views may interleave: two of them are apart if their distance fits between two loops of the one
    geometry, above the reach of the inner and below the stride of the outer.
    """
    flat = addresses.ravel()
    first, second = np.triu_indices(len(flat), 1)
    distances = np.abs(flat[first] - flat[second])
    reach = sizes["dim"] * strides["dim"]
    loops = sorted((strides[a], sizes[a]) for a in AXES if a != "dim" and sizes[a] > 1)
    apart = np.zeros(len(distances), dtype=bool)
    for stride, size in [*loops, (np.iinfo(np.int64).max, 1)]:
        apart |= (distances >= reach) & (distances <= stride - reach)
        reach += stride * (size - 1)
    if not apart.all():
        at = int(np.argmin(apart))
        letters = component.name if component.name in ("kv", "v") else "k"
        a, b = (divmod(int(ends[at]), addresses.shape[1]) for ends in (first, second))
        raise ArgumentError(
            f"{letters[a[0]]}_layers[{a[1]}]",
            expected="memory apart from every other layer's",
            got=f"{letters[b[0]]}_layers[{b[1]}] {int(distances[at])} B away",
            remedy="pass every layer's own memory once",
        )


def _uniform_steps(addresses: np.ndarray) -> tuple[int, int] | None:
    """Non-negative byte steps along `[kv, layer]` if one pair of them explains every address."""
    kv = int(addresses[-1, 0] - addresses[0, 0])
    layer = int(addresses[0, 1] - addresses[0, 0]) if addresses.shape[1] > 1 else 0
    rows, columns = np.indices(addresses.shape)
    uniform = addresses == addresses[0, 0] + rows * kv + columns * layer
    return (kv, layer) if kv >= 0 and layer >= 0 and bool(uniform.all()) else None


def _split_slots(
    name: str, tensor: torch.Tensor, order: Sequence[str], spec: KVSpec
) -> torch.Tensor:
    """Turn a dimension of slots into `page, token`, a view."""
    at = order.index("page")
    if order[at : at + 2] != ["page", "token"]:
        raise ArgumentError(
            name,
            expected=f"dimensions ({', '.join(order)}); slots need page and token as neighbours",
            got=f"shape {tuple(tensor.shape)}",
            remedy="pass a tensor with a page and a token dimension",
        )
    slots = tensor.shape[at]
    if slots % spec.page_size:
        raise ArgumentError(
            name,
            expected=f"slots in whole pages of {spec.page_size}",
            got=slots,
            remedy="cut the tensor to whole pages",
        )
    return tensor.unflatten(at, (slots // spec.page_size, spec.page_size))


def _check_injective(
    name: str, shape: Mapping[str, int], stride: Mapping[str, int], width: int
) -> None:
    if shape["dim"] > 1 and stride["dim"] != width:
        raise ArgumentError(
            name,
            expected="contiguous rows (stride 1 along dim)",
            got=f"stride {stride['dim'] // width}",
            remedy="declare the axes so that dim is the contiguous one",
        )
    reach = width
    for axis in sorted((a for a in shape if shape[a] > 1), key=lambda a: stride[a]):
        if stride[axis] < reach:
            raise ArgumentError(
                name,
                expected=f"strides without overlap ({axis} at least {reach // width} elements)",
                got=f"{stride[axis] // width}",
                remedy="pass memory in which every element has a place of its own",
            )
        reach = stride[axis] * (shape[axis] - 1) + reach


def as_grid(tensors: Sequence[Sequence[torch.Tensor]]) -> np.ndarray:
    """An object array `[kv, layer]`; numpy would read the tensors' elements if given the lists."""
    grid = np.empty((len(tensors), len(tensors[0])), dtype=object)
    for kv, row in enumerate(tensors):
        for layer, tensor in enumerate(row):
            grid[kv, layer] = tensor
    return grid


def _typed_view(
    anchor: torch.Tensor, address: int, dtype: torch.dtype, size: list[int], stride: list[int]
) -> torch.Tensor:
    storage = anchor.untyped_storage()
    offset = (address - storage.data_ptr()) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=anchor.device)
    return view.set_(storage, offset, size, stride)
