"""The order of a gather on one GPU: restore of a layer, its copies, its readers. Events alone."""

from __future__ import annotations

from typing import Any

import torch

from hikv.cp.backends import fences, this_host
from hikv.kernels.memcpy import MemcpyDriver, memcpy_driver


class StreamOrder:
    """What the back ends on GPUs share: a stream of copies, an event for each layer and slot."""

    def place(self) -> str:
        """One host, one namespace of process ids, and the GPUs in one order."""
        gpus = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        return f"{this_host()} {' '.join(gpus)}"

    def _order_on(self, device: torch.device, num_layers: int, *, interprocess: bool) -> None:
        """Make the streams and events; `interprocess` for events that peers wait for."""
        self._device = device
        with torch.cuda.device(device):
            self._restored = [
                torch.cuda.Event(interprocess=interprocess) for _ in range(num_layers)
            ]
            self._stream = torch.cuda.Stream()
            self._fence_stream = torch.cuda.Stream()
        self._free: dict[int, torch.cuda.Event] = {}
        self._ready: dict[int, torch.cuda.Event] = {}
        self._driver: MemcpyDriver = memcpy_driver()

    def restored(self, layer: int, after: Any) -> None:
        """Record the layer's event behind `after`: a stream, an event, a `Transfer`, several."""
        for fence in fences(after):
            if isinstance(fence, torch.cuda.Stream):
                self._fence_stream.wait_stream(fence)
            elif isinstance(fence, torch.cuda.Event):
                self._fence_stream.wait_event(fence)
            else:
                fence.wait_layer(layer, self._fence_stream)
        self._restored[layer].record(self._fence_stream)

    def release(self, slot: int, stream: torch.cuda.Stream | None) -> None:
        """Remember the point on `stream` up to which the slot is read."""
        self._free[slot] = (stream or torch.cuda.current_stream(self._device)).record_event()

    def acquire(self, slot: int, stream: torch.cuda.Stream | None) -> None:
        """Order `stream` behind the copies."""
        (stream or torch.cuda.current_stream(self._device)).wait_event(self._ready[slot])

    def drain(self) -> None:
        """Block until the gather's stream is idle."""
        self._stream.synchronize()
