"""Several copies as one: what moves by other page ids than the full KV, ahead of it on its lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hikv.cache.lanes import Copy, CopyRequest, Lane


class Convoy:
    """Copies that were queued one after another. The last is the one whose layers and pages count;
    all others are short, and needed as a whole before the first layer is computed."""

    def __init__(self, ahead: Sequence[Copy], last: Copy) -> None:
        self._ahead, self._last = ahead, last

    def done(self) -> bool:
        """Whether all have ended, in whichever way."""
        return self._last.done() and all(copy.done() for copy in self._ahead)

    def arrived(self) -> int:
        """Once done: how many leading pages of the last hold the right bytes."""
        return self._last.arrived()

    def failure(self) -> BaseException | None:
        """Once done: why pages are missing in any of them."""
        reasons = (copy.failure() for copy in (*self._ahead, self._last))
        return next((reason for reason in reasons if reason is not None), None)

    def seconds(self) -> float | None:
        """Once done: how long they took together; `None` where one never began."""
        parts = [copy.seconds() for copy in (*self._ahead, self._last)]
        known = [seconds for seconds in parts if seconds is not None]
        return sum(known) if len(known) == len(parts) else None

    def withdraw(self) -> None:
        """Stop each of them if that is still possible."""
        for copy in (*self._ahead, self._last):
            copy.withdraw()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for all of them; raises `CopyFailed`."""
        for copy in (*self._ahead, self._last):
            copy.wait(stream)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for all that goes ahead, and for `layer` of the last."""
        for copy in self._ahead:
            copy.wait(stream)
        self._last.wait_layer(layer, stream)

    def synchronize(self) -> None:
        """Block until all have ended."""
        for copy in (*self._ahead, self._last):
            copy.synchronize()


def submit_all(lane: Lane, requests: Sequence[CopyRequest]) -> Copy:
    """Queue `requests` in order, as one copy.

    Whatever the lane raises passes on, once nothing of the others moves any more.
    """
    copies: list[Copy] = []
    try:
        for request in requests:
            copies.append(lane.submit(request))
    except BaseException:
        for copy in copies:
            copy.withdraw()
            copy.synchronize()
        raise
    return Convoy(copies[:-1], copies[-1]) if len(copies) > 1 else copies[0]
