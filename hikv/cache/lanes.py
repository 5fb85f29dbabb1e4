"""Lanes: one direction of copying each, in which copies run one after another, behind fences.

On a GPU a lane is a stream. On the CPU it is a worker thread, so that the same cache runs, and can
be tested, where there is no GPU. A copy that fails says so as its result and raises only towards
those who wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from hikv.buffer import KVBuffer
from hikv.cache.allocator import PageIds
from hikv.errors import ArgumentError, CopyFailed
from hikv.handle import Transfer
from hikv.spec import KVSpec
from hikv.transfers import queue_behind, transfer, transfer_in_turns

Fence: TypeAlias = "torch.cuda.Stream | torch.cuda.Event | threading.Event"
"""What produced a copy's source and released its destination: GPU lanes take a stream or an event
of the GPU, CPU lanes a `threading.Event`."""
Fences: TypeAlias = "Fence | Sequence[Fence] | None"


def as_fences(fences: Fences) -> Sequence[Fence]:
    """None, one or several fences as a sequence."""
    if fences is None:
        return ()
    return fences if isinstance(fences, Sequence) else (fences,)


_WITHDRAWN_CHECK = 0.05  # seconds: a fence that nobody sets must not keep a copy that is withdrawn


@dataclass(frozen=True)
class CopyRequest:
    """What a lane is asked to do.

    Attributes:
        buffers: `(source, destination)` pairs that share their page ids; the first is the one whose
            layers a forward pass counts.
        src_pages, dst_pages: page ids inside the buffers, in prompt order.
        fences: what must have passed before the copy begins.
        layerwise: whether `Copy.wait_layer` shall return as soon as its layer is in.
    """

    buffers: Sequence[tuple[KVBuffer, KVBuffer]]
    src_pages: PageIds
    dst_pages: PageIds
    fences: Sequence[Fence]
    layerwise: bool

    @property
    def num_layers(self) -> int:
        """Layers that a forward pass counts: those of the first buffer."""
        return self.buffers[0][0].spec.num_layers

    def due(self, layer: int, spec: KVSpec) -> int:
        """How many layers of a buffer of `spec` must be in before `layer` is computed.

        Those that the model numbers no higher (`first_layer` of both specs tells), and before the
        last layer all: what follows the forward pass, as a draft model's, is in with it. Without
        `layerwise` all is due at once.
        """
        if not self.layerwise or layer + 1 >= self.num_layers:
            return spec.num_layers
        passed = self.buffers[0][0].spec.first_layer + layer + 1 - spec.first_layer
        return min(max(passed, 0), spec.num_layers)

    def turns(self) -> Iterator[tuple[int, int]]:
        """Buffer, and the layers it has `due`, in the order to copy: what each layer of the forward
        pass needs comes before what the next one does."""
        for layer in range(self.num_layers):
            for i, (source, _) in enumerate(self.buffers):
                yield i, self.due(layer, source.spec)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return len(self.src_pages) * sum(s.spec.bytes_per_page for s, _ in self.buffers)


class Copy(Protocol):
    """A copy on its lane."""

    def done(self) -> bool:
        """Whether it has ended, in whichever way; never waits."""

    def arrived(self) -> int:
        """Once done: how many leading pages hold the right bytes."""

    def failure(self) -> BaseException | None:
        """Once done: why pages are missing, if any are."""

    def seconds(self) -> float | None:
        """Once done: from the last of its fences to its last byte; `None` where it never began."""

    def withdraw(self) -> None:
        """Stop it if that is still possible. It is done when no byte of it moves any more."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let `stream` (on the CPU: the calling thread) wait for all of it.

        Raises `CopyFailed` where it is known to have failed.
        """

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """The same for what is `due` at one layer, counted from the first buffer's first."""

    def synchronize(self) -> None:
        """Block the calling thread until `done()`; never raises for a failed copy."""


class Lane(Protocol):
    """Runs copies in the order they are submitted."""

    def submit(self, request: CopyRequest) -> Copy:
        """Queue a copy and return at once."""

    def close(self) -> None:
        """Finish what is queued and give the lane's thread back."""


class ThreadLane:
    """Between host buffers: a worker thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, request: CopyRequest) -> ThreadCopy:
        """Queue a copy and return at once."""
        copy = ThreadCopy(request)
        copy.start(self._pool)
        return copy

    def close(self) -> None:
        """Finish what is queued and give the thread back."""
        self._pool.shutdown()


class ThreadCopy:
    """A copy on a worker thread; its layers are published after their bytes."""

    def __init__(self, request: CopyRequest) -> None:
        self._request = request
        self._layers = 0
        self._seconds: float | None = None
        self._withdrawn = False
        self._changed = threading.Condition()
        self._future: Future[None]

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Queue it on `pool`."""
        self._future = pool.submit(self._run)
        self._future.add_done_callback(lambda _: self._publish())

    def done(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self._future.done()

    def arrived(self) -> int:
        """All pages or none: a page is whole only when its last layer is."""
        return 0 if self.failure() else len(self._request.src_pages)

    def failure(self) -> BaseException | None:
        """Why it failed, or `None`."""
        if self._future.cancelled():
            return CopyFailed("the copy was withdrawn")
        return self._future.exception()

    def seconds(self) -> float | None:
        """By the clock of the thread."""
        return self._seconds

    def withdraw(self) -> None:
        """Take it off the queue; one that runs stops before its next layer."""
        self._withdrawn = True
        self._future.cancel()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for all of it, or raise `CopyFailed`."""
        self.synchronize()
        if reason := self.failure():
            raise CopyFailed("the pages are not there") from reason

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Wait until `layer` is in, or raise `CopyFailed`."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers > layer or self._future.done())
        if self._layers <= layer:
            self.wait()

    def synchronize(self) -> None:
        """Wait until it has ended."""
        with self._changed:
            self._changed.wait_for(self._future.done)

    def _publish(self, layers: int = 0) -> None:
        with self._changed:
            self._layers = max(self._layers, layers)
            self._changed.notify_all()

    def _run(self) -> None:
        request = self._request
        for fence in request.fences:
            if not isinstance(fence, threading.Event):
                raise ArgumentError(
                    "after",
                    expected="threading.Event between host buffers",
                    got=repr(fence),
                    remedy="set one when the pages are free to be copied, or pass after=None",
                )
            while not (fence.wait(_WITHDRAWN_CHECK) or self._withdrawn):
                pass
        began = time.perf_counter()
        try:
            self._copy()
        finally:
            self._seconds = time.perf_counter() - began

    def _copy(self) -> None:
        request = self._request
        last = request.num_layers - 1
        moved = [0] * len(request.buffers)
        for layer in range(request.num_layers) if request.layerwise else [last]:
            if self._withdrawn:
                raise CopyFailed("the copy was withdrawn")
            for i, (source, target) in enumerate(request.buffers):
                span = (moved[i], request.due(layer, source.spec))
                if span[0] < span[1]:
                    pages = request.src_pages, request.dst_pages
                    transfer(source, target, *pages, after=None, layers=span)
                    moved[i] = span[1]
            self._publish(layer + 1)


class StreamLane:
    """Between a GPU and pinned host memory: a stream of its own."""

    def __init__(
        self, device: torch.device, *, path: str | None = None, block_quota: int | None = None
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        self._path, self._block_quota = path, block_quota

    def submit(self, request: CopyRequest) -> StreamCopy:
        """Queue a copy on the stream, behind its fences."""
        transfers: list[Transfer] = []
        failure: Exception | None = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            queue_behind(request.fences, self._stream)  # type: ignore[arg-type]
            start.record(self._stream)
            transfers = transfer_in_turns(
                request.buffers,
                request.src_pages,
                request.dst_pages,
                after=start,
                turns=request.turns() if request.layerwise else None,
                path=self._path,
                block_quota=self._block_quota,
                stream=self._stream,
            )
        except Exception as error:  # is the copy's result; what was queued before still runs
            failure = error
        except BaseException:
            self._stream.synchronize()  # nobody is left to wait before the pages are used again
            raise
        end.record(self._stream)
        return StreamCopy(request, transfers, failure, (start, end))

    def close(self) -> None:
        """Wait for what is queued."""
        self._stream.synchronize()


class StreamCopy:
    """A copy on a stream: once queued it runs to its end."""

    def __init__(
        self,
        request: CopyRequest,
        transfers: list[Transfer],
        failure: Exception | None,
        ends: tuple[torch.cuda.Event, torch.cuda.Event],
    ) -> None:
        self._request, self._transfers = request, transfers
        self._failure = failure
        self._start, self._end = ends

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self._end.query()

    def arrived(self) -> int:
        """All pages or none."""
        return 0 if self._failure else len(self._request.src_pages)

    def failure(self) -> BaseException | None:
        """Why it could not be queued, or `None`."""
        return self._failure

    def seconds(self) -> float | None:
        """Between two events of the GPU."""
        return None if self._failure else self._start.elapsed_time(self._end) / 1000

    def withdraw(self) -> None:
        """Nothing to do: a stream does not give back what is queued."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` wait for all of it; raises `CopyFailed` if it was never queued whole."""
        self._refuse()
        for moved in self._transfers:
            moved.wait(stream)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` wait until `layer` is in; raises as `wait` does."""
        self._refuse()
        for (source, _), moved in zip(self._request.buffers, self._transfers, strict=True):
            if count := self._request.due(layer, source.spec):
                moved.wait_layer(count - 1, stream)

    def synchronize(self) -> None:
        """Block until the stream has passed it."""
        self._end.synchronize()

    def _refuse(self) -> None:
        if self._failure is not None:
            raise CopyFailed("the pages are not there") from self._failure
