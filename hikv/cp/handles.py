"""A `KVBuffer` as another process may rebuild it over the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.region import Region
from hikv.spec import Component, KVSpec


@dataclass(frozen=True, eq=False)
class RegionHandle:
    """One region: `storage` and byte `offset`, int64 `[kv, layer]` or `[1, 1]`, stand for anchors
    and addresses."""

    component: Component
    storage: np.ndarray
    offset: np.ndarray
    sizes: Mapping[str, int]
    strides: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class BufferHandle:
    """A buffer without its memory: picklable. `storages` is whatever reaches each storage."""

    spec: KVSpec
    num_pages: int
    layout: str
    pinned: bool
    storages: tuple[Any, ...]
    regions: tuple[RegionHandle, ...]


def export_buffer(buffer: KVBuffer, share: Callable[[torch.Tensor], Any]) -> BufferHandle:
    """The handle of `buffer`; `share` turns a whole storage, seen as uint8, into a picklable."""
    index: dict[int, int] = {}
    storages: list[Any] = []
    regions = []
    for region in buffer.regions:
        number, offset = (np.empty(region.addresses.shape, np.int64) for _ in range(2))
        for at, anchor in np.ndenumerate(region.anchors):
            storage = anchor.untyped_storage()
            if storage.data_ptr() not in index:
                index[storage.data_ptr()] = len(storages)
                whole = torch.empty(0, dtype=torch.uint8, device=anchor.device).set_(storage)
                storages.append(share(whole))
            number[at] = index[storage.data_ptr()]
            offset[at] = int(region.addresses[at]) - storage.data_ptr()
        regions.append(RegionHandle(region.component, number, offset, region.sizes, region.strides))
    return BufferHandle(
        buffer.spec,
        buffer.num_pages,
        buffer.layout,
        buffer.pinned,
        tuple(storages),
        tuple(regions),
    )


def open_buffer(handle: BufferHandle, attach: Callable[[Any], torch.Tensor]) -> KVBuffer:
    """The buffer of `handle` in this process; `attach` maps what `share` returned, as uint8."""
    memory = [attach(storage) for storage in handle.storages]
    regions = []
    for part in handle.regions:
        anchors = np.empty(part.storage.shape, object)
        addresses = np.empty(part.storage.shape, np.int64)
        for at, number in np.ndenumerate(part.storage):
            anchors[at] = memory[number]
            base = memory[number].untyped_storage().data_ptr()
            addresses[at] = base + int(part.offset[at])
        regions.append(Region(part.component, anchors, addresses, part.sizes, part.strides))
    device = memory[0].device
    return KVBuffer(
        handle.spec, handle.num_pages, handle.layout, device, handle.pinned, tuple(regions)
    )
