"""The public verb `transfer()`: validate, choose the path, launch, return a `Transfer` handle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.console import quantity
from hikv.device import device_info
from hikv.errors import ArgumentError, PathUnavailable, check_type
from hikv.handle import Transfer, keep
from hikv.kernels.copy_boxes import PATH as BOXES
from hikv.kernels.copy_engine import PATH as COPY_ENGINE
from hikv.kernels.reference import PATH as CPU
from hikv.kernels.relayout import PATH as REGISTERS
from hikv.kernels.relayout_tma import PATH as TMA
from hikv.kernels.staged import PATH as STAGED
from hikv.kernels.submit import Path, check_stream, on_stream, upload_pages
from hikv.plan import PATH_CHOICE, PATH_OBSTACLES, PATH_PIECES, CopyPlan, plan_transfer
from hikv.tuning import Choice, choose, tuned

PATHS: dict[str, Path] = {p.name: p for p in (REGISTERS, TMA, STAGED, COPY_ENGINE, BOXES, CPU)}
"""Every path by name."""
PATH_OBSTACLES.update({name: path.obstacle for name, path in PATHS.items()})
PATH_PIECES.update({name: path.piece_bytes for name, path in PATHS.items() if path.piece_bytes})

__all__ = [
    "PATHS",
    "Transfer",
    "obstacle",
    "plan_transfer",
    "queue_behind",
    "transfer",
    "transfer_in_turns",
]

_UNKNOWN_LINK_GBPS = 63.0  # PCIe 5 x16, where the link cannot be read

Fence: TypeAlias = "torch.cuda.Stream | torch.cuda.Event"


def transfer(
    src: KVBuffer,
    dst: KVBuffer,
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    after: Fence | Iterable[Fence] | None,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = None,
    path: str | None = None,
    stream: torch.cuda.Stream | None = None,
    layerwise: bool = False,
) -> Transfer:
    """Copy page `src_pages[i]` of `src` to page `dst_pages[i]` of `dst`, in whatever layouts.

    Args:
        src, dst: buffers of equal geometry; layout and head grid may differ.
        src_pages, dst_pages: equally long int32 or int64 page ids, on the CPU or the GPU; each
            destination once. Ids on the GPU are read back to be checked, which waits for the
            current stream there.
        after: the stream or event (or several) that produced the source and released the
            destination; `None` says that both are already synchronised with the calling thread.
            There is no default: a missing fence is how caches get corrupted.
        layers: `(start, stop)` counted from the buffers' first layer; `None` is all.
        block_quota: most CTAs a kernel may occupy; `None` is tuned, or 2 without a table; `0` is
            the copy engine alone, no SM. Paths without a kernel keep within any quota.
        path: `None` chooses; or a name of `PATHS`: `"sm"` (registers), `"tma"` (tensor
            descriptors), `"staged"` (relayout on the GPU, then whole pages by the copy engine),
            `"ce"` (copy engine, run by run), `"ce3d"` (copy engine, by strided boxes), `"cpu"`
            (torch, between host buffers).
        stream: where to queue, on the buffers' GPU; `None` is torch's current stream there.
        layerwise: queue layer by layer, so that `wait_layer` returns as soon as that layer is in.

    A thread that calls this while another captures a graph may break that capture, unless it was
    begun with `capture_error_mode="thread_local"`.

    Returns:
        A handle. GPU paths are asynchronous, ordered on `stream`; the CPU path waits for
        `after` in the calling thread, and is done on return.
        The buffers are kept alive until the copy has passed: at least until a handle is asked, by
        `done()` or `synchronize()`, or another copy is queued.

    Raises:
        ArgumentError: anything `plan_transfer` refuses, a fence that is neither stream nor event,
            an unknown path, a quota that contradicts the path, or a stream of another GPU. Nothing
            has moved.
        PathUnavailable: the named path cannot serve this copy here, or the stream is being captured
            into a graph; the reason is in the message. Nothing has moved.
        DriverError: the driver refused in the middle; the destination pages are undefined.
    """
    (handle,) = transfer_in_turns(
        [(src, dst)],
        src_pages,
        dst_pages,
        after=after,
        turns=() if layerwise else None,
        layers=layers,
        block_quota=block_quota,
        path=path,
        stream=stream,
    )
    return handle


def transfer_in_turns(
    pairs: Sequence[tuple[KVBuffer, KVBuffer]],
    src_pages: Sequence[int] | np.ndarray | torch.Tensor,
    dst_pages: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    after: Fence | Iterable[Fence] | None,
    turns: Iterable[tuple[int, int]] | None = None,
    layers: tuple[int, int] | range | None = None,
    block_quota: int | None = None,
    path: str | None = None,
    stream: torch.cuda.Stream | None = None,
) -> list[Transfer]:
    """`transfer()` for buffers that share page ids, as KV and an indexer: a handle for each pair.

    Args:
        pairs: `(source, destination)`, all on one GPU, or all in host memory.
        turns: `(pair, layer)` in the order to queue: what that pair has left before `layer`, a
            layer at a time. What no turn names comes last. `None` queues each pair as a whole.

    The other arguments, and what is raised, are as for `transfer`. Nothing moves unless every pair
    can be served; after a failure in the middle the pages of all pairs are undefined.
    """
    fences = _check_fences(after)
    _check_quota(path, block_quota)
    if stream is not None:
        check_type("stream", stream, torch.cuda.Stream, remedy="pass one, or None")
    copies = []
    for src, dst in pairs:
        plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
        choice = _choose(plan, path, block_quota, layerwise=turns is not None)
        _require(choice.path, plan, layerwise=turns is not None)
        copies.append((Transfer(plan, choice.path, choice.block_quota, choice.source), choice))
    handles = [handle for handle, _ in copies]
    gpus = {handle.plan.gpu for handle in handles}
    if len(gpus) > 1:
        raise ArgumentError(
            "pairs", expected="one GPU", got=str(gpus), remedy="copy them by calls of their own"
        )
    if None in gpus:
        for fence in fences:  # the calling thread copies, so it is the one to wait
            fence.synchronize()
        for handle, choice in copies:
            _launch_on_host(choice, handle.plan)
    elif handles and handles[0].plan.num_pages:
        stream = check_stream(handles[0].path, handles[0].plan, stream)
        _launch_on_gpu(copies, fences, stream, turns)
    return handles


def _require(path: str, plan: CopyPlan, layerwise: bool) -> None:
    """Raise `PathUnavailable` where `path` cannot serve `plan`."""
    reason = obstacle(path, plan)
    if layerwise and not PATHS[path].layerwise:
        reason = reason or "it moves whole pages, not layer by layer"
    if reason is not None:
        remedy = f"choose another of {', '.join(PATHS)}, or path=None"
        raise PathUnavailable(path, reason, remedy=remedy)


def obstacle(path: str, plan: CopyPlan) -> str | None:
    """Why `path` cannot serve `plan` on this machine, or `None` where it can."""
    return PATHS[path].obstacle(plan)


def piece_bytes(path: str, plan: CopyPlan) -> int | None:
    """Mean bytes of what a copy engine is handed by `path`; `None` where the plan's runs tell."""
    return PATH_PIECES[path](plan) if path in PATH_PIECES else None


def _choose(plan: CopyPlan, path: str | None, block_quota: int | None, layerwise: bool) -> Choice:
    """How `plan` runs: by the copies that are submitted together, those of one layer with turns."""
    if path is not None and not PATHS[path].block_quota:
        return Choice(path, 0, "caller")
    info = device_info(plan.gpu.index) if plan.gpu is not None else None
    first, _ = plan.layers
    submitted = plan.for_layers(first, first + 1) if layerwise else plan
    return choose(
        submitted,
        block_quota=block_quota,
        link_gbps=(info.link_gbps if info else None) or _UNKNOWN_LINK_GBPS,
        serves=lambda name: (
            obstacle(name, plan) is None and (PATHS[name].layerwise or not layerwise)
        ),
        path=path,
        table=tuned(info) if info else None,
        piece_bytes=lambda name: piece_bytes(name, submitted),
    )


def _told_choice(plan: CopyPlan) -> str:
    """The way that `transfer()` takes for `plan`, or refuses it, with path and CTAs left open."""
    choice = _choose(plan, None, None, layerwise=False)
    if reason := obstacle(choice.path, plan):
        return f"transfer() refuses it: {reason}"
    ctas = f", {quantity(choice.block_quota, 'CTA')}" if PATHS[choice.path].block_quota else ""
    return f"transfer() takes {choice.path}{ctas} ({choice.source})"


PATH_CHOICE.append(_told_choice)


def _launch_on_host(choice: Choice, plan: CopyPlan) -> None:
    """Between host buffers: torch, or a kernel in Triton's interpreter."""
    path = PATHS[choice.path]
    path.launch(plan, **({"block_quota": choice.block_quota} if path.block_quota else {}))


def _launch_on_gpu(
    copies: Sequence[tuple[Transfer, Choice]],
    fences: list[Fence],
    stream: torch.cuda.Stream,
    turns: Iterable[tuple[int, int]] | None,
) -> None:
    handles = [handle for handle, _ in copies]
    try:
        _wait_for(fences, stream)
        pages = _upload_pages(copies, stream)
        launches = [_launcher(choice, stream, pages) for _, choice in copies]
        if turns is None:
            for handle, launch in zip(handles, launches, strict=True):
                launch(handle.plan)
        else:
            _queue_in_turns(handles, launches, stream, turns)
    except BaseException:
        # What was queued before still runs. A GPU that is lost says so once more; the first says
        # why.
        with suppress(RuntimeError):
            keep(handles, stream)
        raise
    keep(handles, stream)


def queue_behind(after: Fence | Iterable[Fence] | None, stream: torch.cuda.Stream) -> None:
    """Let `stream` wait for the fences that `transfer` takes as `after`, which it checks alike."""
    _wait_for(_check_fences(after), stream)


def _wait_for(fences: Iterable[Fence], stream: torch.cuda.Stream) -> None:
    for fence in fences:
        if isinstance(fence, torch.cuda.Event):
            stream.wait_event(fence)
        else:
            stream.wait_stream(fence)


def _upload_pages(
    copies: Sequence[tuple[Transfer, Choice]], stream: torch.cuda.Stream
) -> torch.Tensor | None:
    """The page ids that all `copies` share, on their way to the GPU for those that read them."""
    readers = [choice.path for _, choice in copies if PATHS[choice.path].shares_pages]
    if not readers:
        return None
    plan = copies[0][0].plan
    with on_stream(readers[0], plan, stream) as device:
        return upload_pages(plan, device)


def _launcher(
    choice: Choice, stream: torch.cuda.Stream, pages: torch.Tensor | None
) -> Callable[[CopyPlan], Any]:
    """What queues a plan, or some of its layers, as chosen."""
    path = PATHS[choice.path]
    options: dict[str, Any] = {"stream": stream}
    if path.block_quota:
        options["block_quota"] = choice.block_quota
    if choice.config is not None and path.config is not None:
        options["config"] = path.config(**choice.config)
    if path.shares_pages:
        options["pages"] = pages
    return partial(path.launch, **options)


def _queue_in_turns(
    handles: Sequence[Transfer],
    launches: Sequence[Callable[[CopyPlan], Any]],
    stream: torch.cuda.Stream,
    turns: Iterable[tuple[int, int]],
) -> None:
    spans = [handle.plan.layers for handle in handles]
    queued = [start for start, _ in spans]
    for i, layer in chain(turns, enumerate(stop for _, stop in spans)):
        while queued[i] < min(layer, spans[i][1]):
            at = queued[i]
            launches[i](handles[i].plan.for_layers(at, at + 1))
            handles[i]._layer_events[at] = stream.record_event()
            queued[i] += 1


def _check_fences(after: Fence | Iterable[Fence] | None) -> list[Fence]:
    if after is None:
        return []
    fences = [after] if isinstance(after, (torch.cuda.Stream, torch.cuda.Event)) else after
    listed = list(fences) if isinstance(fences, Iterable) else [fences]
    for i, fence in enumerate(listed):
        name = "after" if fence is after else f"after[{i}]"
        if not isinstance(fence, (torch.cuda.Stream, torch.cuda.Event)):
            several = ", several of them, or None" if fence is after else ""
            raise ArgumentError(
                name,
                expected=f"a torch.cuda.Stream or Event{several}",
                got=repr(fence),
                remedy="pass what the source's producer and the destination's last user ran on",
            )
        # torch makes the GPU's event when it is recorded; waiting for one before waits for nothing.
        if isinstance(fence, torch.cuda.Event) and not fence.cuda_event:
            raise ArgumentError(
                name,
                expected="an event that was recorded",
                got="one that no stream has recorded yet",
                remedy="call event.record(stream) after the work it stands for, then transfer()",
            )
    return listed


def _check_quota(path: str | None, block_quota: int | None) -> None:
    if path is not None and (not isinstance(path, str) or path not in PATHS):
        raise ArgumentError(
            "path",
            expected=f"None or one of {', '.join(PATHS)}",
            got=repr(path),
            remedy="let path=None choose",
        )
    if block_quota is None:
        return
    if not isinstance(block_quota, int) or isinstance(block_quota, bool) or block_quota < 0:
        raise ArgumentError(
            "block_quota",
            expected="None, 0 for the copy engine alone, or a number of CTAs",
            got=repr(block_quota),
            remedy="pass a whole number",
        )
    if block_quota == 0 and path is not None and PATHS[path].block_quota:
        raise ArgumentError(
            "block_quota",
            expected=f"at least 1 for path {path!r}, which runs a kernel",
            got=0,
            remedy="drop the path, or pass path='ce'",
        )
