"""Which path and how many CTAs a plan gets. Read-only and quick: nothing here times anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hikv.plan import CopyPlan

DEFAULT_BLOCK_QUOTA = 2
"""CTAs of a copy kernel where nothing is tuned: little contention with the forward pass."""

_SECONDS_PER_DESCRIPTOR = 0.5e-6
"""CPU time to submit one copy of a batch, as published for H100 (vLLM #48434)."""


@dataclass(frozen=True)
class Choice:
    """How a plan will run, and who said so.

    Attributes:
        path: a name of `hikv.transfers.PATHS`.
        block_quota: CTAs at most; 0 for paths without a kernel.
        source: `"caller"`, or `"default"` where no tuned table spoke.
    """

    path: str
    block_quota: int
    source: str


def choose(
    plan: CopyPlan, *, block_quota: int | None, link_gbps: float, serves: Callable[[str], bool]
) -> Choice:
    """The path for `plan` where the caller named none.

    Between host buffers torch copies. Otherwise the copy engine takes it if `block_quota` is 0, or
    if its copies, joined over consecutive pages, are so large that the link needs longer for one
    than the CPU for submitting the next; a kernel takes the rest, and all copies within one
    GPU, where the copy engine is far slower than the SMs.

    Args:
        link_gbps: decimal GB/s between host and GPU.
        serves: whether this machine can run a path for this plan.
    """
    if plan.gpu is None:
        return Choice("cpu", 0, "default")
    if block_quota == 0:
        return Choice("ce", 0, "caller")
    mean_copy = plan.nbytes / max(plan.num_descriptors, 1)
    keeps_link_busy = mean_copy >= _SECONDS_PER_DESCRIPTOR * link_gbps * 1e9
    if plan.direction != "d2d" and keeps_link_busy and serves("ce"):
        return Choice("ce", 0, "default")
    return Choice("sm", DEFAULT_BLOCK_QUOTA if block_quota is None else block_quota, "default")
