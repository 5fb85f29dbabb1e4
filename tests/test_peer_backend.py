"""The order in which the `p2p` back end queues its work, on streams that only take notes.

Two ranks in one process, their pools in host memory, a driver that copies at once. What it cannot
show is CUDA IPC itself; `test_gpu_gather.py` does, where there is a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cp import backends
from hikv.cp.backends import PeerBackend
from hikv.cp.scratch import make_slot
from hikv.cp.shared_memory import attach, handle_of, shared_host_memory
from hikv.errors import ArgumentError, GatherError
from hikv.kernels.copy_engine import descriptors
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


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

    def record(self, stream):
        stream.notes.append(("record", self.handle))


class FakeStream:
    """`notes`: what was queued, in order."""

    cuda_stream = 77

    def __init__(self):
        self.notes = []

    def wait_event(self, event):
        self.notes.append(("wait", event.handle))

    def wait_stream(self, stream):
        self.notes.append(("wait", stream))

    def record_event(self):
        event = FakeEvent()
        event.handle = f"point {len(self.notes)}"
        self.notes.append(("record", event.handle))
        return event

    def synchronize(self):
        self.notes.append(("synchronize",))


class FakeDriver:
    """Copies at once, and notes that it did on the stream of the back end."""

    def __init__(self):
        self.backend = None

    def primary_context(self, index):
        return nullcontext()

    def copy(self, work, stream):
        assert stream == FakeStream.cuda_stream
        for src, dst, nbytes in zip(*map(np.ndarray.tolist, vars(work).values()), strict=True):
            ctypes.memmove(dst, src, nbytes)
        self.backend._stream.notes.append(("copy", len(work)))


@pytest.fixture
def ranks(monkeypatch):
    """Two connected back ends, their pools, and the pools as rank 0 sees them."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(backends, "memcpy_driver", FakeDriver)
    # Instead of CUDA IPC, which cannot share host memory.
    monkeypatch.setattr(backends, "_ipc_bytes", handle_of)
    monkeypatch.setattr(backends, "pickle", SimpleNamespace(loads=attach))
    pools = []
    for _ in range(2):
        memory = shared_host_memory(6 * SPEC.bytes_per_page).random_()
        pools.append(KVBuffer.from_tensor(memory, SPEC, "layer_first"))
    pair = [PeerBackend(), PeerBackend()]
    exports = [
        b.export(pool, rank, 2) for rank, (b, pool) in enumerate(zip(pair, pools, strict=True))
    ]
    seen = [backend.connect(exports, rank) for rank, backend in enumerate(pair)]
    for backend in pair:
        backend._driver.backend = backend
    return SimpleNamespace(pair=pair, pools=pools, seen=seen[0])


def handles(backend):
    return [event.handle for event in backend._restored]


def test_a_batch_waits_for_its_layer_on_every_rank_and_for_its_slot(ranks):
    mine, peer = ranks.pair
    compute = FakeStream()
    slot = make_slot(SPEC, 6, mine.allocate)
    plans = [
        plan_transfer(pool, slot.window, np.array([4, 1]), owner * 3 + np.arange(2))
        for owner, pool in enumerate(ranks.seen)
    ]
    work = descriptors(plans[1].for_layers(2, 3))
    mine.release(0, compute)
    freed = compute.notes[-1][1]
    mine.copy(2, 0, work)
    mine.acquire(0, compute)
    restored = [("wait", handles(mine)[2]), ("wait", handles(peer)[2])]
    assert mine._stream.notes[:-1] == [*restored, ("wait", freed), ("copy", len(work))]
    assert mine._stream.notes[-1] == ("record", compute.notes[-1][1])
    assert compute.notes[-1][0] == "wait"
    expected = ranks.pools[1].logical([4, 1])[:, 2]
    found = torch.stack([slot.k[3:5], slot.v[3:5]], 1)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_a_fresh_slot_waits_for_no_reader(ranks):
    mine = ranks.pair[0]
    slot = make_slot(SPEC, 6, mine.allocate)
    plan = plan_transfer(ranks.seen[0], slot.window, np.array([1]), np.array([0]))
    mine.copy(0, 1, descriptors(plan.for_layers(0, 1)))
    assert [note[0] for note in mine._stream.notes] == ["wait", "wait", "copy", "record"]


def test_the_fence_of_a_layer_lies_behind_what_restored_it(ranks):
    mine = ranks.pair[0]
    load, event = FakeStream(), FakeEvent(interprocess=True)
    transfer = SimpleNamespace(wait_layer=lambda layer, stream: stream.wait_stream(("part", layer)))
    mine.restored(1, [load, event, transfer])
    assert mine._fence_stream.notes == [
        ("wait", load),
        ("wait", event.handle),
        ("wait", ("part", 1)),
        ("record", handles(mine)[1]),
    ]
    with pytest.raises(ArgumentError, match="a stream, an event, a Transfer"):
        mine.restored(1, 5)


def test_gpus_that_cannot_reach_each_other_are_named(ranks, monkeypatch):
    far = ranks.pair[1].export(ranks.pools[1], 1, 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda near, far: False)
    with pytest.raises(GatherError, match=r"GPU None cannot reach the memory of GPU 5 \(rank 1\)"):
        ranks.pair[0].connect([far, (5, *far[1:])], 0)


def test_host_memory_is_no_pool_of_a_gpu(ranks):
    assert "not on a GPU" in PeerBackend().obstacle(ranks.pools[0])
