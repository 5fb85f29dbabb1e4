"""The public verb `transfer()`: validate, choose the path, launch, return a `Transfer` handle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.device import device_info
from hikv.errors import ArgumentError, PathUnavailable, check_type
from hikv.kernels.copy_boxes import PATH as BOXES
from hikv.kernels.copy_engine import PATH as COPY_ENGINE
from hikv.kernels.reference import PATH as CPU
from hikv.kernels.relayout import PATH as REGISTERS
from hikv.kernels.relayout_tma import PATH as TMA
from hikv.kernels.staged import PATH as STAGED
from hikv.kernels.submit import Path, check_stream, on_stream, upload_pages
from hikv.plan import PATH_OBSTACLES, CopyPlan, plan_transfer
from hikv.tuning import Choice, choose, tuned

PATHS: dict[str, Path] = {p.name: p for p in (REGISTERS, TMA, STAGED, COPY_ENGINE, BOXES, CPU)}
"""Every path by name."""
PATH_OBSTACLES.update({name: path.obstacle for name, path in PATHS.items()})

__all__ = ["PATHS", "Transfer", "obstacle", "plan_transfer", "transfer"]

_UNKNOWN_LINK_GBPS = 63.0  # PCIe 5 x16, where the link cannot be read

Fence: TypeAlias = "torch.cuda.Stream | torch.cuda.Event"


@dataclass(eq=False)
class Transfer:
    """A queued copy, and what ran.

    Attributes:
        plan: the plan that is being carried out.
        path: name of the path that runs it.
        block_quota: CTAs it may occupy; 0 on paths without a kernel.
        nbytes: payload bytes, each counted once.
        config_source: who chose path and quota: `"caller"`, `"default"` or a tuned table's name.
    """

    plan: CopyPlan = field(repr=False)
    path: str
    block_quota: int
    config_source: str
    _layer_events: dict[int, torch.cuda.Event] = field(default_factory=dict, repr=False)
    _finished: torch.cuda.Event | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Payload bytes, each counted once."""
        return self.plan.nbytes

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (default: torch's current one) wait for the whole copy, not the CPU."""
        if self._finished is not None:
            (stream or torch.cuda.current_stream(self.plan.gpu)).wait_event(self._finished)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` wait until `layer` is there; without `layerwise`, for the whole copy.

        `layer` counts from the buffers' first layer. Raises `ArgumentError` for a layer that the
        copy does not move.
        """
        start, stop = self.plan.layers
        if not start <= layer < stop:
            raise ArgumentError(
                "layer",
                expected=f"a layer of this transfer, {start}..{stop - 1}",
                got=layer,
                remedy="wait for layers that were asked for",
            )
        event = self._layer_events.get(layer, self._finished)
        if event is not None:
            (stream or torch.cuda.current_stream(self.plan.gpu)).wait_event(event)

    def done(self) -> bool:
        """Whether every byte has arrived; never waits."""
        passed = self._passed()
        if passed:
            _let_go()
        return passed

    def _passed(self) -> bool:
        return self._finished is None or self._finished.query()

    def synchronize(self) -> None:
        """Block the calling thread until every byte has arrived."""
        if self._finished is not None:
            self._finished.synchronize()
            _let_go()


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
    fences = _check_fences(after)
    _check_quota(path, block_quota)
    if stream is not None:
        check_type("stream", stream, torch.cuda.Stream, remedy="pass one, or None")
    plan = plan_transfer(src, dst, src_pages, dst_pages, layers=layers)
    choice = _choose(plan, path, block_quota, layerwise)
    reason = obstacle(choice.path, plan)
    if layerwise and not PATHS[choice.path].layerwise:
        reason = reason or "it moves whole pages, not layer by layer"
    if reason is not None:
        remedy = f"choose another of {', '.join(PATHS)}, or path=None"
        raise PathUnavailable(choice.path, reason, remedy=remedy)

    handle = Transfer(plan, choice.path, choice.block_quota, choice.source)
    if plan.gpu is None:
        for fence in fences:  # the calling thread copies, so it is the one to wait
            fence.synchronize()
        _launch_on_host(choice, plan)
    elif plan.num_pages:
        stream = check_stream(choice.path, plan, stream)
        _launch_on_gpu(choice, handle, fences, stream, layerwise)
    return handle


def obstacle(path: str, plan: CopyPlan) -> str | None:
    """Why `path` cannot serve `plan` on this machine, or `None` where it can."""
    return PATHS[path].obstacle(plan)


def _choose(plan: CopyPlan, path: str | None, block_quota: int | None, layerwise: bool) -> Choice:
    if path is not None and not PATHS[path].block_quota:
        return Choice(path, 0, "caller")
    info = device_info(plan.gpu.index) if plan.gpu is not None else None
    return choose(
        plan,
        block_quota=block_quota,
        link_gbps=(info.link_gbps if info else None) or _UNKNOWN_LINK_GBPS,
        serves=lambda name: (
            obstacle(name, plan) is None and (PATHS[name].layerwise or not layerwise)
        ),
        path=path,
        table=tuned(info) if info else None,
    )


def _launch_on_host(choice: Choice, plan: CopyPlan) -> None:
    """Between host buffers: torch, or a kernel in Triton's interpreter."""
    path = PATHS[choice.path]
    path.launch(plan, **({"block_quota": choice.block_quota} if path.block_quota else {}))


# Copies in flight, oldest first: their buffers must not be freed under the GPU's hands.
_IN_FLIGHT: deque[Transfer] = deque()
_IN_FLIGHT_LOCK = Lock()


def _launch_on_gpu(
    choice: Choice,
    handle: Transfer,
    fences: list[Fence],
    stream: torch.cuda.Stream,
    layerwise: bool,
) -> None:
    plan, path = handle.plan, PATHS[choice.path]
    try:
        for fence in fences:
            if isinstance(fence, torch.cuda.Event):
                stream.wait_event(fence)
            else:
                stream.wait_stream(fence)
        options: dict[str, object] = {"stream": stream}
        if path.block_quota:
            options["block_quota"] = choice.block_quota
        if choice.config is not None and path.config is not None:
            options["config"] = path.config(**choice.config)
        if path.shares_pages:
            with on_stream(path.name, plan, stream) as device:
                options["pages"] = upload_pages(plan, device)
        if layerwise:
            for layer in range(*plan.layers):
                path.launch(plan.for_layers(layer, layer + 1), **options)
                handle._layer_events[layer] = stream.record_event()
        else:
            path.launch(plan, **options)
    except BaseException:
        # What was queued before still runs. A GPU that is lost says so once more; the first says
        # why.
        with suppress(RuntimeError):
            _keep(handle, stream)
        raise
    _keep(handle, stream)


def _keep(handle: Transfer, stream: torch.cuda.Stream) -> None:
    """Mark the end of what is queued for `handle`, and hold its buffers until then."""
    handle._finished = stream.record_event()
    with _IN_FLIGHT_LOCK:
        _IN_FLIGHT.append(handle)
    _let_go()


def _let_go() -> None:
    """Drop the hold on the buffers of copies that have passed."""
    passed = []  # freed on return, since unpinning memory is too slow for under the lock
    with _IN_FLIGHT_LOCK:
        while _IN_FLIGHT and _IN_FLIGHT[0]._passed():
            passed.append(_IN_FLIGHT.popleft())


def _check_fences(after: Fence | Iterable[Fence] | None) -> list[Fence]:
    if after is None:
        return []
    fences = [after] if isinstance(after, (torch.cuda.Stream, torch.cuda.Event)) else after
    listed = list(fences) if isinstance(fences, Iterable) else [fences]
    for fence in listed:
        if not isinstance(fence, (torch.cuda.Stream, torch.cuda.Event)):
            raise ArgumentError(
                "after",
                expected="a torch.cuda.Stream or Event, several of them, or None",
                got=repr(fence),
                remedy="pass what the source's producer and the destination's last user ran on",
            )
        # torch makes the GPU's event when it is recorded; waiting for one before waits for nothing.
        if isinstance(fence, torch.cuda.Event) and not fence.cuda_event:
            raise ArgumentError(
                "after",
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
