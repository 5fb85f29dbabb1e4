"""Other systems' ways to make the same copy, where they are installed.

Each is called as its own engine would call it: one set-up per list of pages, then the copy alone. A
peer that is missing, that has no kernel for a pair of layouts, or that fails or writes other bytes
as it is called here, is waived with the reason; it is never given a figure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.kernels.copy_engine import descriptors
from hikv.measure import Candidate, fill_random
from hikv.plan import CopyPlan, plan_transfer
from hikv.region import Region

from .machine import Machine, Workload

Copy = Callable[[CopyPlan], object]


class Waived(Exception):
    """Why a peer has no figure, in one sentence."""


@dataclass(frozen=True)
class Job:
    """What a peer is to do, and where."""

    machine: Machine
    work: Workload
    direction: str

    @property
    def from_host(self) -> bool:
        """Whether the source is the host's side."""
        return self.direction == "h2d"

    @property
    def ends(self) -> tuple[KVBuffer, KVBuffer]:
        """The pools of GPU and host."""
        plan = self.work.plans[0]
        return (plan.dst, plan.src) if self.from_host else (plan.src, plan.dst)


@dataclass(frozen=True)
class Peer:
    """`prepare(module, job)` returns the peer's copy, and the copies it is to make.

    It raises `Waived` for a pair of layouts that it has no kernel for.
    """

    name: str
    module: str
    prepare: Callable[[ModuleType, Job], tuple[Copy, Workload]]

    def candidate(self, machine: Machine, work: Workload, direction: str) -> Candidate:
        """The peer as a verified candidate of `hikv.measure`; raises `Waived`."""
        try:
            module = import_module(self.module)
        except ImportError as error:
            raise Waived(f"{self.module} is not installed: {error}") from error
        try:
            copy, own = self.prepare(module, Job(machine, work, direction))
            candidate = own.candidate(self.name, copy, machine)
            wrong = candidate.check()
        except Waived:
            raise
        except Exception as error:  # foreign code of any version: whatever it raises is the reason
            told = " ".join(str(error).split())
            raise Waived(f"as called here it raises {type(error).__name__}: {told}") from error
        if wrong is not None:
            raise Waived(f"as called here it copies other bytes: {wrong}")
        return candidate


def _require_layer_first(pool: KVBuffer) -> None:
    if pool.layout != "layer_first" or len(pool.regions) > 1:
        raise Waived(f"it copies pools in layer_first, not in {pool.layout}")


def _plane(pool: KVBuffer, kv: int, layer: int) -> torch.Tensor:
    """The pool's bytes from the first row of `layer` on."""
    region = pool.regions[0]
    memory = region.anchors[0, 0].view(torch.uint8)
    offset = int(region.addresses[0, 0]) - memory.data_ptr()
    return memory[offset + kv * region.strides["kv"] + layer * region.strides["layer"] :]


def _planes(pool: KVBuffer) -> list[list[torch.Tensor]]:
    """`_plane` by kv and layer."""
    region = pool.regions[0]
    layers = range(pool.spec.num_layers)
    return [[_plane(pool, kv, layer) for layer in layers] for kv in range(region.component.kv)]


def _row(region: Region) -> int:
    """Bytes of one token's heads, which lie together in the layouts used here."""
    return region.row_bytes * region.sizes["head"] * region.sizes["group"]


def _slots(pages: Any, page_size: int, device: torch.device) -> torch.Tensor:
    """The slots of `pages` in order, int64 on `device`."""
    first = torch.as_tensor(pages)[:, None] * page_size
    return (first + torch.arange(page_size)).flatten().to(device)


def _sgl_kernel(module: ModuleType, job: Job, *, block_quota: int) -> tuple[Copy, Workload]:
    """SGLang's copies by slot: all layers at once, but layer by layer out of `page_first`."""
    (gpu, host), device = job.ends, job.machine.device
    _require_layer_first(gpu)
    if host.layout not in ("layer_first", "page_first") or len(host.regions) > 1:
        raise Waived(f"it has no kernel for {host.layout} on the host")
    mla = "_mla" if gpu.spec.latent else ""
    row, page_size, layers = _row(gpu.regions[0]), gpu.spec.page_size, gpu.spec.num_layers
    slots = {
        p: [_slots(ids, page_size, device) for ids in (p.src_pages, p.dst_pages)]
        for p in job.work.plans
    }
    tables = {pool: [_table(planes, device) for planes in _planes(pool)] for pool in job.ends}
    bases = [_plane(host, kv, 0) for kv in range(host.regions[0].component.kv)]
    whole, options = host.regions[0].strides["token"], {"block_quota": block_quota}

    def flat(copied: CopyPlan) -> None:
        call = getattr(module, f"transfer_kv_all_layer{mla}")
        pairs = _paired(tables[copied.src], tables[copied.dst])
        call(*pairs, *slots[copied], item_size=row, num_layers=layers, **options)

    def to_page_first(copied: CopyPlan) -> None:
        call = getattr(module, f"transfer_kv_all_layer{mla}_lf_pf")
        sizes = {"item_size": row, "dst_layout_dim": whole, "num_layers": layers}
        call(*_paired(tables[gpu], bases), *slots[copied], **sizes, **options)

    def from_page_first(copied: CopyPlan) -> None:
        call = getattr(module, f"transfer_kv_per_layer{mla}_pf_lf")
        for layer in range(layers):
            pairs = _paired(bases, [_plane(gpu, kv, layer) for kv in range(len(bases))])
            sizes = {"layer_id": layer, "item_size": row, "src_layout_dim": whole}
            call(*pairs, *slots[copied], **sizes, **options)

    if host.layout == "layer_first":
        return flat, job.work
    return (from_page_first if job.from_host else to_page_first), job.work


def _table(planes: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Addresses on the GPU, as its kernels take them."""
    addresses = [plane.data_ptr() for plane in planes]
    return torch.tensor(addresses, dtype=torch.uint64, device=device)


def _paired(src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Source and destination of K, then of V."""
    return [tensor for pair in zip(src, dst, strict=True) for tensor in pair]


def _swap_blocks(module: ModuleType, job: Job) -> tuple[Copy, Workload]:
    """vLLM's `swap_blocks`: one call a layer for K and for V, one copy a page within it."""
    first = job.work.plans[0]
    for pool in job.ends:
        _require_layer_first(pool)
    block = _row(first.src.regions[0]) * first.src.spec.page_size
    # Since the size of a block is an argument, tensors may be any view that starts at block 0.
    size = (block,) if len(inspect.signature(module.swap_blocks).parameters) > 3 else ()
    mappings = {
        plan: torch.tensor([plan.src_pages.tolist(), plan.dst_pages.tolist()]).T.contiguous()
        for plan in job.work.plans
    }
    sides = [
        [plane[: pool.num_pages * block].view(-1, block) for kv in _planes(pool) for plane in kv]
        for pool in (first.src, first.dst)
    ]

    def copy(plan: CopyPlan) -> None:
        for source, target in zip(*sides, strict=True):
            module.swap_blocks(source, target, *size, mappings[plan])

    return copy, job.work


def _swap_blocks_batch(module: ModuleType, job: Job) -> tuple[Copy, Workload]:
    """vLLM's `swap_blocks_batch`, on our descriptors."""
    columns = {}
    for plan in job.work.plans:
        found = descriptors(plan)
        columns[plan] = [torch.from_numpy(c) for c in (found.src, found.dst, found.nbytes)]
    return lambda plan: module.swap_blocks_batch(*columns[plan]), job.work


_CHUNKS = 4  # sets of host memory for a peer that wants its own


def _lmcache(module: ModuleType, job: Job) -> tuple[Copy, Workload]:
    """LMCache's paged copies, between scattered pages and a chunk of host memory in their order."""
    gpu, device = job.ends[0], job.machine.device
    _require_layer_first(gpu)
    spec = gpu.spec
    formats = getattr(module, "EngineKVFormat", None) or getattr(module, "GPUKVFormat", None)
    kind = "NL_X_NBBS_ONE_HS" if spec.latent else "TWO_X_NL_X_NBBS_NH_HS"
    if not hasattr(formats, kind):
        raise Waived(f"this version has no format {kind}")
    chunks = {}
    for plan in job.work.plans[:_CHUNKS]:
        chunk = job.machine.new_pool("host", spec, "layer_first", plan.num_pages)
        fill_random(chunk)
        order = np.arange(plan.num_pages)
        if job.from_host:
            pages, own = plan.dst_pages, plan_transfer(chunk, gpu, order, plan.dst_pages)
        else:
            pages, own = plan.src_pages, plan_transfer(gpu, chunk, plan.src_pages, order)
        memory = chunk.regions[0].anchors[0, 0].view(spec.dtype)
        shape = (chunk.regions[0].component.kv, spec.num_layers, len(pages) * spec.page_size, -1)
        chunks[own] = memory.view(shape), _slots(pages, spec.page_size, device)
    addresses = [plane.data_ptr() for planes in _planes(gpu) for plane in planes]
    pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
    way = module.TransferDirection.H2D if job.from_host else module.TransferDirection.D2H
    fixed = (device, gpu.num_pages * spec.page_size, way, getattr(formats, kind))

    def copy(plan: CopyPlan) -> None:
        memory, slots = chunks[plan]
        sizes = {"block_size": spec.page_size, "head_size": spec.head_dim}
        module.multi_layer_kv_transfer(memory, pointers, slots, *fixed, **sizes)

    return copy, Workload(tuple(chunks))


PEERS = (
    *(
        Peer(
            f"sgl_kernel, {quota} CTAs",
            "sgl_kernel.kvcacheio",
            partial(_sgl_kernel, block_quota=quota),
        )
        for quota in (2, 32)
    ),
    Peer("vLLM swap_blocks", "vllm._custom_ops", _swap_blocks),
    Peer("vLLM swap_blocks_batch", "vllm._custom_ops", _swap_blocks_batch),
    Peer("LMCache, own chunk", "lmcache.c_ops", _lmcache),
)
