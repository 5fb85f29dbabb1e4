"""`KVBuffer`: memory (one tensor, or one tensor per layer) + layout + spec.

Whatever the memory's form, a buffer ends as one `Region` per component: base addresses and the real
byte stride of every axis. Nothing above this file asks how the memory came about, and nothing
here guesses: a layout is declared, strides are read, and a mismatch is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch

from hikv.console import quantity
from hikv.errors import ArgumentError, check_type
from hikv.layout import get_layout
from hikv.pinned import allocate_pinned
from hikv.region import (
    Region,
    as_grid,
    check_width,
    dense_region,
    layer_region,
    read_layers,
    read_tensor,
)
from hikv.spec import KVSpec


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Pages of KV in memory: a pool of ours, or an engine's own tensors seen without a copy.

    Build one with `empty`, `from_tensor` or `from_layers`.

    Attributes:
        spec: geometry of a page.
        num_pages: pages the memory holds.
        layout: name of the layout, or `"layers"` for a pool of one tensor per layer.
        device: where the memory is.
        pinned: host memory that kernels and the copy engine can reach.
        regions: one `Region` per component of the spec.
    """

    spec: KVSpec
    num_pages: int
    layout: str
    device: torch.device
    pinned: bool
    regions: tuple[Region, ...]

    @classmethod
    def empty(
        cls,
        spec: KVSpec,
        layout: str,
        num_pages: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> KVBuffer:
        """Allocate an uninitialised dense pool of exactly `num_pages · spec.bytes_per_page` bytes.

        With `pinned`, host memory that is page-locked, near the GPU and freed with the buffer.

        Raises:
            ArgumentError: unknown layout, `num_pages` not whole or below 1, `pinned` on a device.
            CapacityError: pinned memory beyond the budget; both numbers are in the message.
        """
        check_type("spec", spec, KVSpec, remedy="describe a page by a KVSpec")
        get_layout(layout).order(spec)
        whole = isinstance(num_pages, int | np.integer) and not isinstance(num_pages, bool)
        if not whole or num_pages < 1:
            raise ArgumentError(
                "num_pages",
                expected="a whole number, at least 1",
                got=repr(num_pages),
                remedy="ask for a page or more",
            )
        num_pages = int(num_pages)  # numpy's would end among the strides
        device = torch.device(device)
        nbytes = num_pages * spec.bytes_per_page
        if not pinned:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        elif device.type == "cpu":
            page_bytes = spec.bytes_per_page
            memory = allocate_pinned(nbytes, page_bytes=page_bytes).tensor
        else:
            raise ArgumentError(
                "pinned",
                expected="False on a device, which has no pageable memory",
                got=f"True on {device}",
                remedy="drop pinned, or pass device='cpu'",
            )
        return cls._dense(memory, spec, layout, num_pages, pinned)

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, spec: KVSpec, layout: str, *, pinned: bool | None = None
    ) -> KVBuffer:
        """See one tensor that already holds pages in `layout`; nothing is copied.

        Args:
            tensor: either of `spec.dtype` with one dimension per axis of the layout (`page` and
                `token` may be one dimension of slots where they are neighbours), with any strides
                whose rows are contiguous; or one-dimensional, dense, of `spec.dtype` or uint8.
            pinned: whether kernels may reach it; `None` asks torch.

        Raises `ArgumentError` on another dtype or shape, on strides that overlap, and on bytes cut
        out in the middle of an element.
        """
        check_type("tensor", tensor, torch.Tensor, remedy="for a list of layers: from_layers")
        pinned = _is_pinned(tensor) if pinned is None else pinned
        if tensor.ndim == 1:
            num_pages = _flat_pages(tensor, spec)
            return cls._dense(tensor.view(torch.uint8), spec, layout, num_pages, pinned)
        if len(spec.components) > 1:
            raise ArgumentError(
                "tensor",
                expected="a flat tensor, since K and V differ in width",
                got=f"shape {tuple(tensor.shape)}",
                remedy="pass tensor.view(-1), or one tensor per layer with from_layers",
            )
        component = spec.components[0]
        sizes, strides = read_tensor("tensor", tensor, get_layout(layout).order(spec), spec)
        check_width("tensor", sizes["dim"], component.width, spec)
        address = np.array([[tensor.data_ptr()]], dtype=np.int64)
        region = Region(component, as_grid([[tensor]]), address, sizes, strides)
        return cls(spec, sizes["page"], layout, tensor.device, pinned, (region,))

    @classmethod
    def from_layers(
        cls,
        k_layers: Sequence[torch.Tensor],
        v_layers: Sequence[torch.Tensor] | None,
        spec: KVSpec,
        *,
        axes: str | None = None,
        pinned: bool | None = None,
    ) -> KVBuffer:
        """See an engine's pool of one K and one V tensor per layer; nothing is copied.

        Args:
            k_layers, v_layers: `spec.num_layers` tensors each of `spec.dtype`; `v_layers` is
                `None` for latent rows. All K tensors share shape and strides, and so do all V.
                Views with gaps are fine as long as a row is contiguous.
            axes: order of the dimensions; default `"page token head dim"` (latent: `"page token
                dim"`). A pool with heads before tokens says `"page head token dim"`. `page` and
                `token` may be one dimension of slots where they are neighbours.
            pinned: whether kernels may reach all of it; `None` asks torch.

        Raises `ArgumentError` on a wrong count, dtype, device, shape, row width or axis, and on
        memory that two rows would share.
        """
        order = _layer_axes(axes, spec)
        if (v_layers is None) != spec.latent:
            raise ArgumentError(
                "v_layers",
                expected="None for latent rows" if spec.latent else "one V tensor per layer",
                got="None" if v_layers is None else f"{len(v_layers)} tensors",
                remedy="pass K and V, or KVSpec(latent=True) for single rows",
            )
        lists = [list(k_layers)] if v_layers is None else [list(k_layers), list(v_layers)]
        read = _read_lists(lists, order, spec)
        if len(spec.components) < len(lists):
            regions = [layer_region(spec.components[0], lists, *read[0])]
        else:
            regions = [
                layer_region(component, [tensors], *own)
                for component, tensors, own in zip(spec.components, lists, read, strict=True)
            ]
        first, num_pages = lists[0][0], read[0][0]["page"]
        if pinned is None:
            pinned = all(_is_pinned(tensor) for tensors in lists for tensor in tensors)
        return cls(spec, num_pages, "layers", first.device, pinned, tuple(regions))

    @classmethod
    def _dense(
        cls, memory: torch.Tensor, spec: KVSpec, layout: str, num_pages: int, pinned: bool
    ) -> KVBuffer:
        regions = []
        for placement in get_layout(layout).place(spec, num_pages):
            sizes = {
                "page": num_pages,
                "layer": spec.num_layers,
                "group": spec.num_groups,
                "token": spec.page_size,
                "head": spec.heads_per_group,
                "dim": placement.component.width,
            }
            regions.append(dense_region(placement, memory, sizes))
        return cls(spec, num_pages, layout, memory.device, pinned, tuple(regions))

    @property
    def nbytes(self) -> int:
        """Payload bytes of all pages; gaps between rows are not counted."""
        return self.num_pages * self.spec.bytes_per_page

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Address ranges `[low, high)` that this buffer may touch, sorted."""
        return tuple(sorted(e for region in self.regions for e in region.extents()))

    def layer_range(self, start: int, stop: int) -> KVBuffer:
        """Layers `start` to `stop`, counted from this buffer's first, as a buffer of their own.

        A view: it holds the same pages, and keeps the memory alive as this buffer does. Raises
        `ArgumentError` for layers that are not here.
        """
        whole = all(isinstance(end, int | np.integer) for end in (start, stop))
        if not whole or not 0 <= start < stop <= self.spec.num_layers:
            raise ArgumentError(
                "start, stop",
                expected=f"at least one layer within 0..{self.spec.num_layers}",
                got=f"{start}, {stop}",
                remedy="count layers from the buffer's first layer",
            )
        start, stop = int(start), int(stop)  # numpy's would end among the strides
        first = self.spec.first_layer + start
        spec = replace(self.spec, num_layers=stop - start, first_layer=first)
        regions = tuple(region.for_layers(start, stop) for region in self.regions)
        return replace(self, spec=spec, regions=regions)

    def logical(self, pages: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """A copy of `pages` in canonical order, whatever the layout; for tests and tools.

        Returns `[len(pages), layer, kv, token, head, dim]` of the spec's dtype on the buffer's
        device. Where K and V differ in width, `kv` is 1 and `dim` holds K then V. Raises
        `IndexError` for a page that the buffer does not hold.
        """
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        spec = self.spec
        parts = []
        for region in self.regions:
            kv, width = region.component.kv, region.component.width
            shape = (len(index), spec.num_layers, kv, spec.page_size, spec.num_kv_heads, width)
            out = torch.empty(shape, dtype=spec.dtype, device=self.device)
            for layers, kvs, view in region.tensors(spec.dtype):
                # [page, layer, kv, group, token, head, dim] → heads of all groups together.
                # index_select, unlike indexing, refuses a negative id.
                rows = view.index_select(0, index).permute(0, 1, 2, 4, 3, 5, 6)
                out[:, layers, kvs] = rows.reshape(*rows.shape[:4], spec.num_kv_heads, width)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def __reduce__(self) -> NoReturn:
        # A copy's addresses would still name the memory that this one sees.
        raise ArgumentError(
            "buffer",
            expected="to stay with the memory that it sees",
            got="a copy or a pickle of it",
            remedy="build one over the other memory, with from_tensor or from_layers",
        )

    def __repr__(self) -> str:
        kind = "pinned" if self.pinned else str(self.device)
        pages = quantity(self.num_pages, "page")
        return f"KVBuffer({self.layout}, {pages}, {self.nbytes} B, {kind})"


def _layer_axes(axes: str | None, spec: KVSpec) -> list[str]:
    """The declared or default order of a per-layer tensor's dimensions."""
    required = "page token dim" if spec.latent else "page token head dim"
    optional = "head" if spec.latent else "group"
    order = (axes or required).split()
    complete = {*order, optional} == {*required.split(), optional}
    if not complete or len(order) > len({*order}):
        raise ArgumentError(
            "axes",
            expected=f"each of {', '.join(required.split())} once",
            got=repr(axes),
            remedy="name every dimension of one layer's tensor, outer to inner",
        )
    return order


def _read_lists(
    lists: Sequence[Sequence[torch.Tensor]], order: Sequence[str], spec: KVSpec
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Sizes and byte strides of the K list and of the V list, which must belong to one pool."""
    widths = [c.width for c in spec.components for _ in range(c.kv)]
    read, facts = [], []
    for name, tensors, width in zip(("k_layers", "v_layers"), lists, widths, strict=False):
        sizes, strides = read_layers(name, tensors, order, spec)
        check_width(f"{name}[0]", sizes["dim"], width, spec)
        read.append((sizes, strides))
        fact = f"{sizes['page']} pages on {tensors[0].device}"
        # K and V of one width are one component, which has one set of strides.
        facts.append(f"{fact}, byte strides {strides}" if len(spec.components) == 1 else fact)
    if facts[0] != facts[-1]:
        raise ArgumentError(
            "v_layers",
            expected=f"{facts[0]} like k_layers",
            got=facts[-1],
            remedy="pass the K and V tensors of one pool, both in the same order of axes",
        )
    return read


def _flat_pages(tensor: torch.Tensor, spec: KVSpec) -> int:
    """Pages in a flat dense tensor of `spec.dtype` or bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.dtype not in (spec.dtype, torch.uint8) or not tensor.is_contiguous():
        raise ArgumentError(
            "tensor",
            expected=f"dense memory of {spec.dtype} or torch.uint8",
            got=f"{tensor.dtype}, strides {tensor.stride()}",
            remedy="pass the pool itself, not a strided slice of it",
        )
    start = tensor.storage_offset() * tensor.element_size()
    if start % spec.dtype.itemsize:
        raise ArgumentError(
            "tensor",
            expected=f"memory that begins at a whole {spec.dtype} of its storage",
            got=f"byte {start}",
            remedy=f"cut the pool out at a multiple of {spec.dtype.itemsize} B",
        )
    if nbytes == 0 or nbytes % spec.bytes_per_page:
        raise ArgumentError(
            "tensor",
            expected=f"a whole number of pages of {spec.bytes_per_page} B",
            got=f"{nbytes} B",
            remedy="cut the tensor to whole pages, or correct the spec",
        )
    return nbytes // spec.bytes_per_page


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()
