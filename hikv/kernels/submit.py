"""What every kernel launcher does around its kernel: reach, stream, and uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from hikv.errors import ArgumentError, PathUnavailable
from hikv.plan import CopyPlan


@dataclass(frozen=True)
class Path:
    """One way to carry out a plan.

    Attributes:
        name: as users give it.
        obstacle: why this path cannot serve a plan on this machine, or `None`.
        launch: queues a checked plan; keywords are `stream`, and those of the flags below.
        block_quota: it runs a kernel and takes the number of CTAs it may occupy.
        config: makes the `config` that it takes, from the fields in a tuned table.
        shares_pages: it takes page ids that `upload_pages` brought to the GPU, as `pages`.
        layerwise: it can move one layer at a time.
        piece_bytes: mean bytes of what a copy engine is handed at a time, where the runs of the
            plan do not tell.
    """

    name: str
    obstacle: Callable[[CopyPlan], str | None]
    launch: Callable[..., Any]
    block_quota: bool = False
    config: Callable[..., Any] | None = None
    shares_pages: bool = False
    layerwise: bool = True
    piece_bytes: Callable[[CopyPlan], int] | None = None


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter, which reaches any CPU tensor."""
    return not isinstance(kernel, triton.JITFunction)


def kernel_obstacle(plan: CopyPlan, kernel: Any) -> str | None:
    """Why `kernel` cannot reach both sides of `plan`, or `None`."""
    if interpreted(kernel):
        here = plan.gpu is None
        return None if here else "TRITON_INTERPRET is set: the interpreter reaches no GPU memory"
    return plan.unreachable()


def require(path: str, obstacle: str | None) -> None:
    """Raise `PathUnavailable` if there is an obstacle."""
    if obstacle is not None:
        remedy = "allocate host buffers with pinned=True, or ask hikv.transfer for another path"
        raise PathUnavailable(path, obstacle, remedy=remedy)


def check_quota(path: str, block_quota: int) -> None:
    """Raise `ArgumentError` unless `block_quota` is a number of CTAs that a kernel may launch."""
    if not isinstance(block_quota, int) or isinstance(block_quota, bool) or block_quota < 1:
        raise ArgumentError(
            "block_quota",
            expected=f"at least 1 CTA for path {path!r}",
            got=repr(block_quota),
            remedy="pass block_quota=0 to hikv.transfer for the copy engine, which uses no SM",
        )


def check_stream(path: str, plan: CopyPlan, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
    """`stream`, or torch's current one on the plan's GPU, as one that may take a copy.

    Raises `ArgumentError` for a stream of another GPU, and `PathUnavailable` for one that is being
    captured: a replay would read page ids from staging memory that has been handed on since.
    """
    stream = torch.cuda.current_stream(plan.gpu) if stream is None else stream
    if stream.device != plan.gpu:
        raise ArgumentError(
            "stream",
            expected=f"a stream of {plan.gpu}, where the buffers are",
            got=f"one of {stream.device}",
            remedy="pass a stream of that GPU, and the other one in after",
        )
    with torch.cuda.stream(stream):
        if torch.cuda.is_current_stream_capturing():
            reason = "the stream is being captured into a graph, and page ids differ by call"
            raise PathUnavailable(path, reason, remedy="copy outside the capture")
    return stream


@contextmanager
def on_stream(
    path: str, plan: CopyPlan, stream: torch.cuda.Stream | None
) -> Iterator[torch.device]:
    """Make the plan's GPU and `stream` current; yields the device to upload to.

    Raises as `check_stream` does.
    """
    if plan.gpu is None:
        yield torch.device("cpu")
        return
    with torch.cuda.stream(check_stream(path, plan, stream)):
        yield plan.gpu


def upload_pages(plan: CopyPlan, device: torch.device) -> torch.Tensor:
    """Page ids as int32 `[2, n]` on `device`, source first, queued on the current stream.

    The staging buffer is fresh: torch's pinned allocator hands it out again only after this
    stream has passed the upload, so a later call cannot overwrite ids that are still to be read.
    """
    ids = torch.from_numpy(np.stack((plan.src_pages, plan.dst_pages)).astype(np.int32))
    return _upload(ids, device)


def upload_table(table: np.ndarray | None, width: int, device: torch.device) -> torch.Tensor | None:
    """A side's table of byte offsets as int64 counts of `width` bytes, or `None` without one."""
    if table is None:
        return None
    return _upload(torch.from_numpy(table // width), device)


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def word_dtype(vector_bytes: int) -> torch.dtype:
    """The integer type of a kernel's pointers; two int64 words make a 16-byte vector."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(vector_bytes, torch.int64)


def warp_size() -> int:
    """Threads of a warp on the GPUs this torch build serves: 64 on CDNA, else 32."""
    return 64 if torch.version.hip else 32
