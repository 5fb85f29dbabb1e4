"""What people write without a copy library, to compare with: each takes a plan and copies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hikv.buffer import KVBuffer
from hikv.kernels.copy_engine import descriptors
from hikv.plan import CopyPlan


def copy_every_run(plans: Sequence[CopyPlan]) -> Callable[[CopyPlan], None]:
    """One `cudaMemcpyAsync` for each contiguous run, through `Tensor.copy_` of slices.

    The slices of all `plans` are made now, so that a copy pays for its copies alone. Dense pools.
    """
    slices = {plan: list(_slices(plan)) for plan in plans}

    def copy(plan: CopyPlan) -> None:
        for source, target in slices[plan]:
            target.copy_(source, non_blocking=True)

    return copy


def _slices(plan: CopyPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    memory = [pool.regions[0].anchors[0, 0] for pool in (plan.src, plan.dst)]
    work = descriptors(plan)
    offsets = (
        (work.src - memory[0].data_ptr()).tolist(),
        (work.dst - memory[1].data_ptr()).tolist(),
    )
    for source, target, nbytes in zip(*offsets, work.nbytes.tolist(), strict=True):
        yield memory[0][source : source + nbytes], memory[1][target : target + nbytes]


def index_and_copy(plans: Sequence[CopyPlan]) -> Callable[[CopyPlan], None]:
    """Gather or scatter on the GPU by torch indexing, and `Tensor.copy_` of every page's K and V.

    Between the two lies a temporary in the host's order. Dense pools on one head grid.
    """
    from_host = plans[0].direction == "h2d"
    host, gpu = (plans[0].src, plans[0].dst) if from_host else (plans[0].dst, plans[0].src)
    host_pages, gpu_ids = {}, {}
    for plan in plans:
        of_src, of_dst = plan.src_pages, plan.dst_pages
        host_pages[plan] = (of_src if from_host else of_dst).tolist()
        gpu_ids[plan] = torch.from_numpy(of_dst if from_host else of_src).to(gpu.device)

    def copy(plan: CopyPlan) -> None:
        ids, pages = gpu_ids[plan], host_pages[plan]
        for there, here in zip(_in_host_order(host, host), _in_host_order(gpu, host), strict=True):
            if from_host:
                packed = torch.empty(
                    (len(ids), *here.shape[1:]), dtype=here.dtype, device=here.device
                )
                for own, page in zip(packed, pages, strict=True):
                    _copy_kv(there[page], own)
                here[ids] = packed
            else:
                for own, page in zip(here[ids].contiguous(), pages, strict=True):
                    _copy_kv(own, there[page])

    return copy


def _in_host_order(pool: KVBuffer, host: KVBuffer) -> Iterator[torch.Tensor]:
    """Views `[page, kv, …]` of `pool`, the other axes in the order in which `host` has them."""
    for own, leading in zip(pool.regions, host.regions, strict=True):
        ((_, _, view),) = own.tensors(pool.spec.dtype)
        ((_, _, order),) = leading.tensors(pool.spec.dtype)
        yield view.permute(0, 2, *sorted((1, 3, 4, 5, 6), key=order.stride, reverse=True))


def _copy_kv(source: torch.Tensor, target: torch.Tensor) -> None:
    for here, there in zip(source, target, strict=True):
        there.copy_(here, non_blocking=True)
