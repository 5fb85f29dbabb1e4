"""`Transfer`: the handle of a queued copy, and the hold on its buffers until it has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch

from hikv.errors import ArgumentError
from hikv.plan import CopyPlan


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


# Copies in flight, oldest first: their buffers must not be freed under the GPU's hands.
_IN_FLIGHT: deque[Transfer] = deque()
_IN_FLIGHT_LOCK = Lock()


def keep(handles: Sequence[Transfer], stream: torch.cuda.Stream) -> None:
    """Mark the end of what is queued for `handles`, and hold their buffers until then."""
    finished = stream.record_event()
    for handle in handles:
        handle._finished = finished
    with _IN_FLIGHT_LOCK:
        _IN_FLIGHT.extend(handles)
    _let_go()


def _let_go() -> None:
    """Drop the hold on the buffers of copies that have passed."""
    passed = []  # freed on return, since unpinning memory is too slow for under the lock
    with _IN_FLIGHT_LOCK:
        while _IN_FLIGHT and _IN_FLIGHT[0]._passed():
            passed.append(_IN_FLIGHT.popleft())
