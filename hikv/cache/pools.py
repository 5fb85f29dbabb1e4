"""The two pools of pages: L1 on the GPU, an engine's tensors or our own, and L2 in host memory.

A pool is one or several buffers that share their page ids (KV, and what rides along with it: an
indexer's rows, scales, a draft model's) and one allocator. So one page costs the sum of all
buffers' bytes per page, and the host pool holds as many pages as that sum fits into its budget.

All buffers are copied as one: a page has arrived when all of it has. The first buffer is the one
whose layers a forward pass counts when it waits for a load-back layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy.typing as npt
import torch

from hikv.buffer import KVBuffer
from hikv.cache.allocator import PageIds, RotatingAllocator
from hikv.cache.config import HiCacheConfig
from hikv.cache.draft import DraftMode, host_buffers
from hikv.errors import ArgumentError, CapacityError, check_type
from hikv.host_memory import Budget
from hikv.pinned import pinned_budget
from hikv.spec import KVSpec


class PagePool:
    """Buffers that share page ids, and which of these are free.

    Under context parallelism the ids are logical: page `q` is page `q // num_owners` of the buffers
    on owner `q mod num_owners`, and every owner keeps the same books.
    """

    def __init__(
        self,
        buffers: KVBuffer | Mapping[str, KVBuffer],
        *,
        num_owners: int = 1,
        owner: int = 0,
        reserved: int = 0,
    ) -> None:
        """Keep the books of `buffers`.

        Args:
            buffers: one buffer, called "kv", or several by name; each of `num_pages` pages of
                equally many tokens, all on one device.
            num_owners, owner: ranks that the pages are sharded over, and which of them this is.
            reserved: so many pages of each owner, from page 0 on, are never handed out, so nothing
                is copied there: 1 where an engine pads with page 0. A host pool needs none.

        Raises `ArgumentError`.
        """
        named = dict(buffers) if isinstance(buffers, Mapping) else {"kv": buffers}
        for name, buffer in named.items():
            check_type(f"buffer {name!r}", buffer, KVBuffer, remedy="see it by KVBuffer.from_…")
        facts = {(b.num_pages, b.spec.page_size, b.device) for b in named.values()}
        if len(facts) != 1:
            raise ArgumentError(
                "buffers",
                expected="at least one, all of as many pages of as many tokens on one device",
                got=", ".join(f"{name}: {buffer}" for name, buffer in named.items()) or "none",
                remedy="give riding buffers the page count and page size of the main one; "
                "KVBuffer.from_layers sees slots in pages of any size",
            )
        local_pages, self.page_size, self.device = facts.pop()
        if not 0 <= owner < num_owners or not 0 <= reserved < local_pages:
            raise ArgumentError(
                "num_owners, owner, reserved",
                expected=f"owner below num_owners, and reserved in 0 … {local_pages - 1}",
                got=f"{num_owners}, {owner}, {reserved}",
                remedy="pass this rank's place, and leave pages to hand out",
            )
        self.buffers: Mapping[str, KVBuffer] = MappingProxyType(named)
        self.num_owners, self.owner = num_owners, owner
        self.allocator = RotatingAllocator(
            (local_pages - reserved) * num_owners, num_owners, reserved * num_owners
        )

    @property
    def num_pages(self) -> int:
        """Logical pages that can be handed out."""
        return self.allocator.num_pages

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all buffers."""
        return sum(buffer.spec.bytes_per_page for buffer in self.buffers.values())

    def mine(self, pages: PageIds) -> npt.NDArray:
        """Which of the logical `pages` lie in these buffers, bool `[n]`."""
        return pages % self.num_owners == self.owner

    def local(self, pages: PageIds) -> PageIds:
        """The page ids inside the buffers of logical `pages`, all of them this owner's."""
        return pages // self.num_owners

    def __repr__(self) -> str:
        names = ", ".join(self.buffers)
        return (
            f"{type(self).__name__}({names}: {self.num_pages} pages of {self.page_size} tokens, "
            f"{self.bytes_per_page} B each, on {self.device})"
        )


class DevicePool(PagePool):
    """L1. `KVBuffer.from_layers` or `from_tensor` sees an engine's own pool; `empty` makes one.

    Where the engine pads with page or slot 0: `DevicePool(buffer, reserved=1)`.
    """

    @classmethod
    def empty(
        cls,
        specs: KVSpec | Mapping[str, KVSpec],
        layout: str,
        num_pages: int,
        *,
        device: torch.device | str = "cpu",
        reserved: int = 0,
    ) -> DevicePool:
        """Allocate one buffer of `layout` for each spec, of `num_pages` pages each, of which the
        first `reserved` are never handed out."""
        named = {"kv": specs} if isinstance(specs, KVSpec) else specs
        buffers = {
            name: KVBuffer.empty(spec, layout, num_pages, device=device)
            for name, spec in named.items()
        }
        return cls(buffers, reserved=reserved)


class HostPool(PagePool):
    """L2: pinned memory beside a GPU; plain memory beside a device pool that is on the CPU.

    `beside` makes one. Its page ids are its own: none is reserved for what the GPU pads with.
    """

    @classmethod
    def beside(
        cls,
        device_pool: DevicePool,
        config: HiCacheConfig | None = None,
        *,
        num_pages: int | None = None,
        budget: Budget | None = None,
        drafts: Mapping[str, DraftMode] | None = None,
    ) -> HostPool:
        """Allocate what holds the pages of `device_pool`: its geometry, read off its buffers.

        Args:
            config: how large the pool is, and its layout.
            num_pages: local pages, instead of the size that `config` asks for. Ranks whose pages
                differ in bytes get different counts from one size; all must then use the least.
            budget: what it must fit into; default `pinned_budget()`, which knows the host's free
                memory, the cgroup's limit and `HIKV_PINNED_BUDGET`.
            drafts: which of the buffers hold a draft model's state, `Packed` behind the target's
                layers or `Sidecar`. Whatever is not named has a host buffer of its own.

        Raises `CapacityError` with required and available bytes when it does not fit, or is less
        than one page, and `ArgumentError` for a draft that cannot be kept as declared. Nothing is
        allocated then.
        """
        check_type("device_pool", device_pool, DevicePool, remedy="make one of its buffers")
        config = (config or HiCacheConfig()).normalized()
        page_bytes, owners = device_pool.bytes_per_page, device_pool.num_owners
        available = (pinned_budget() if budget is None else budget).available_bytes
        if num_pages is None:
            num_pages = config.host_pages(device_pool.num_pages // owners, page_bytes, available)
        elif not 1 <= num_pages * page_bytes <= available:
            raise CapacityError(
                "host pool",
                required=max(num_pages, 1) * page_bytes,
                available=available if num_pages > 0 else num_pages * page_bytes,
                remedy="choose num_pages of at least 1 that fits",
            )
        assert config.mem_layout is not None
        pinned = device_pool.device.type != "cpu"
        specs = {name: buffer.spec for name, buffer in device_pool.buffers.items()}
        buffers = host_buffers(specs, drafts or {}, config.mem_layout, num_pages, pinned=pinned)
        return cls(buffers, num_owners=owners, owner=device_pool.owner)


def check_tiers(device: object, host: object, owner: str = "") -> None:
    """Raise `ArgumentError` unless they are a pool of each tier; `owner` says whose."""
    for name, pool, kind, remedy in (
        ("device", device, DevicePool, "see an engine's tensors as DevicePool(KVBuffer.from_…)"),
        ("host", host, HostPool, "make it with HostPool.beside(device)"),
    ):
        check_type(owner + name, pool, kind, remedy=remedy)
