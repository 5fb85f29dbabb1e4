"""CUDA streams and events that only take notes, and a driver that copies at once.

Ranks are threads, or take turns; their pools lie in host memory.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from hikv.cp import streams


class FakeEvent:
    """Named by its handle; a copy opened elsewhere has the same one."""

    made = 0

    def __init__(self, interprocess=False):
        FakeEvent.made += 1
        self.handle = f"event {FakeEvent.made}" if interprocess else None

    def ipc_handle(self):
        return self.handle

    @classmethod
    def from_ipc_handle(cls, device, handle):
        event = cls()
        event.handle = handle
        return event

    def synchronize(self):
        pass

    def record(self, stream):
        stream.notes.append(("record", self.handle))


class FakeStream:
    """`notes`: what was queued, in order."""

    made = 0

    def __init__(self, device=None):
        FakeStream.made += 1
        self.cuda_stream = FakeStream.made
        self.notes = []

    def wait_event(self, event):
        self.notes.append(("wait", event.handle))

    def wait_stream(self, stream):
        self.notes.append(("wait", stream))

    def record_event(self):
        event = FakeEvent()
        event.handle = f"stream {self.cuda_stream}, point {len(self.notes)}"
        self.notes.append(("record", event.handle))
        return event

    def synchronize(self):
        self.notes.append(("synchronize",))


class FakeDriver:
    """Copies at once. `copied`: the stream's handle and the number of copies of each call."""

    def __init__(self):
        self.copied = []

    def primary_context(self, index):
        return nullcontext()

    def copy(self, work, stream):
        for src, dst, nbytes in zip(*map(np.ndarray.tolist, vars(work).values()), strict=True):
            ctypes.memmove(dst, src, nbytes)
        self.copied.append((stream, len(work)))


def install(monkeypatch):
    """Put the fakes where the back ends find CUDA."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(uuid="GPU-fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda near, far: True)
    monkeypatch.setattr(streams, "memcpy_driver", FakeDriver)


def on_gpu(pool, index):
    """The buffer, which says that it is on GPU `index`."""
    return replace(pool, device=torch.device("cuda", index))


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, size, timeout_s=20.0):
        self.size = size
        self._values = [None] * size
        self._meeting = threading.Barrier(size, timeout=timeout_s)

    def run(self, body):
        """`body(group)` on every rank; what each returned, or the exception that it raised."""
        found = [None] * self.size

        def rank(number):
            try:
                found[number] = body(_Member(self, number))
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def exchange(self, rank, value):
        """Everybody's value."""
        self._values[rank] = value
        self._meeting.wait()
        values = list(self._values)
        self._meeting.wait()
        return values


class _Member:
    """One rank's view of the group."""

    def __init__(self, threads, rank):
        self._threads, self.rank, self.size = threads, rank, threads.size
        self.ranks = list(range(threads.size))

    def exchange(self, value):
        return self._threads.exchange(self.rank, value)
