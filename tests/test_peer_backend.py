"""The order in which the `p2p` back end queues its work, on streams that only take notes.

Two ranks in one process, their pools in host memory, a driver that copies at once. What it cannot
show is CUDA IPC itself; `test_gpu_gather.py` does, where there is a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_streams import FakeDriver, FakeEvent, FakeStream, install

from hikv.buffer import KVBuffer
from hikv.cp import peers
from hikv.cp.peers import APART, TOGETHER, PeerBackend
from hikv.cp.plan import Request, plan_gather
from hikv.cp.scratch import make_slot
from hikv.cp.shard_map import ShardMap
from hikv.cp.shared_memory import attach, handle_of, shared_host_memory
from hikv.errors import ArgumentError, GatherError
from hikv.kernels.memcpy import Descriptors
from hikv.measure import Sample
from hikv.spec import KVSpec

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


class Clock:
    """Tells of a run with copies on `num` streams the time that the test has for it."""

    seconds: ClassVar = {1: 1.0, 2: 1.0}
    driver = None

    def __init__(self, device):
        pass

    def time(self, run):
        before = len(self.driver.copied)
        run()
        streams = {stream for stream, _ in self.driver.copied[before:]}
        return Sample(self.seconds[len(streams)], 0.0)


@pytest.fixture
def ranks(monkeypatch):
    """Two connected back ends, their pools, and rank 0's slots."""
    install(monkeypatch)
    # Instead of CUDA IPC, which cannot share host memory.
    monkeypatch.setattr(peers, "_ipc_bytes", handle_of)
    monkeypatch.setattr(peers, "pickle", SimpleNamespace(loads=attach))
    monkeypatch.setattr(peers, "GpuClock", Clock)
    pools = []
    for _ in range(2):
        memory = shared_host_memory(6 * SPEC.bytes_per_page).random_()
        pools.append(KVBuffer.from_tensor(memory, SPEC, "layer_first"))
    pair = [PeerBackend(), PeerBackend()]
    exports = [
        b.export(pool, rank, 2) for rank, (b, pool) in enumerate(zip(pair, pools, strict=True))
    ]
    for backend in pair:
        backend.connect(exports)
    slots = [make_slot(SPEC, 7, pair[0].allocate) for _ in range(2)]
    (choose,) = pair[0].steps(slots, None, None, 1.0)
    Clock.driver = pair[0]._driver
    return SimpleNamespace(pair=pair, pools=pools, slots=slots, exports=exports, choose=choose)


PLAN = plan_gather(ShardMap(2, SPEC.page_size), [Request([8, 2, 9, 3, 4], 20)])
"""Local pages 1, 2, 4 of rank 0, and 1, 4 of rank 1."""


def handles(backend):
    return [event.handle for event in backend._restored]


def arrived(slot, pools, layer):
    """Whether the slot holds `layer` of the pages of `PLAN`, each owner's in its block."""
    for owner, pages in enumerate(PLAN.local_pages):
        expected = pools[owner].logical(pages.tolist())[:, layer].view(torch.int16)
        block = PLAN.block(owner)
        found = torch.stack([slot.k[block], slot.v[block]], 1).view(torch.int16)
        if not torch.equal(found, expected):
            return False
    return True


def test_a_batch_waits_for_its_layer_on_every_rank_and_for_its_slot(ranks):
    mine, peer = ranks.pair
    compute = FakeStream()
    mine.begin(PLAN)
    mine.release(0, compute)
    freed = compute.notes[-1][1]
    moved = mine.copy(2, 0)
    mine.acquire(0, compute)
    restored = [("wait", handles(mine)[2]), ("wait", handles(peer)[2])]
    assert mine._stream.notes[:-1] == [*restored, ("wait", freed)]
    assert mine._stream.notes[-1] == ("record", compute.notes[-1][1])
    assert compute.notes[-1][0] == "wait"
    # Pages 1 and 2 of rank 0 lie side by side in the pool and in the block; K and V apart.
    assert moved == (8, 5 * SPEC.bytes_per_page // SPEC.num_layers)
    assert mine._driver.copied == [(mine._stream.cuda_stream, 8)]
    assert arrived(ranks.slots[0], ranks.pools, 2)


def test_a_fresh_slot_waits_for_no_reader(ranks):
    mine = ranks.pair[0]
    mine.begin(PLAN)
    mine.copy(0, 1)
    assert [note[0] for note in mine._stream.notes] == ["wait", "wait", "record"]


@pytest.mark.parametrize(
    ("together", "apart", "way"), [(2.0, 1.0, APART), (1.0, 2.0, TOGETHER), (1.0, 1.0, TOGETHER)]
)
def test_the_own_pages_take_the_way_that_was_faster(ranks, monkeypatch, together, apart, way):
    monkeypatch.setattr(Clock, "seconds", {1: together, 2: apart})
    mine = ranks.pair[0]
    assert mine.own_shard is None
    ranks.choose()
    # The scratch holds blocks of 3 pages, the pools as many that are no neighbours.
    nbytes = 2 * 3 * SPEC.bytes_per_page / SPEC.num_layers
    rates = {TOGETHER: nbytes / together / 1e9, APART: nbytes / apart / 1e9}
    assert mine.own_shard == (way, pytest.approx(rates))
    mine.begin(PLAN)
    mine._driver.copied.clear()
    mine._stream.notes.clear()
    mine._beside.notes.clear()
    moved = mine.copy(1, 1)
    assert moved == (8, 5 * SPEC.bytes_per_page // SPEC.num_layers)
    assert arrived(ranks.slots[1], ranks.pools, 1)
    main, beside = mine._stream.cuda_stream, mine._beside.cuda_stream
    if way == TOGETHER:
        assert mine._driver.copied == [(main, 8)]
        assert mine._beside.notes == []
    else:
        assert mine._driver.copied == [(beside, 4), (main, 4)]
        restored, (_, end) = mine._beside.notes
        assert restored == ("wait", handles(mine)[1])
        assert mine._stream.notes[0] == ("wait", handles(ranks.pair[1])[1])
        assert mine._stream.notes[1] == ("wait", end), "the slot is ready when both are through"


def test_wrong_bytes_end_the_choice(ranks, monkeypatch):
    copy = FakeDriver.copy

    def lossy(driver, work, stream):
        copy(driver, Descriptors(work.src[1:], work.dst[1:], work.nbytes[1:]), stream)

    monkeypatch.setattr(FakeDriver, "copy", lossy)
    with pytest.raises(GatherError, match="in the peers' batch: what arrived is not what rank 0"):
        ranks.choose()


def test_there_is_nothing_to_choose_without_peers_or_room(monkeypatch):
    install(monkeypatch)
    memory = torch.zeros(6 * SPEC.bytes_per_page, dtype=torch.uint8)
    for num_ranks, pages in ((1, 8), (2, 1)):
        alone = PeerBackend()
        pool = KVBuffer.from_tensor(memory, SPEC, "layer_first")
        monkeypatch.setattr(peers, "_ipc_bytes", lambda storage: None)
        alone.export(pool, 0, num_ranks)
        alone._pools = [pool] * num_ranks
        (choose,) = alone.steps([make_slot(SPEC, pages, alone.allocate)] * 2, None, None, 1.0)
        choose()
        assert alone.own_shard is None
        assert alone._driver.copied == []


def test_the_fence_of_a_layer_lies_behind_what_restored_it(ranks):
    mine = ranks.pair[0]
    load, event = FakeStream(), FakeEvent(interprocess=True)
    transfer = SimpleNamespace(
        synchronize=None, wait_layer=lambda layer, stream: stream.wait_stream(("part", layer))
    )
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
    far = ranks.exports[1]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda near, far: False)
    with pytest.raises(GatherError, match=r"GPU None cannot reach the memory of GPU 5 \(rank 1\)"):
        ranks.pair[0].connect([far, (5, *far[1:])])


def test_ranks_that_number_processes_apart_are_in_two_places(ranks, monkeypatch):
    """The board is reached by process id, which in another namespace is another process."""
    here = ranks.pair[0].place()
    assert ranks.pair[1].place() == here
    monkeypatch.setattr("os.readlink", lambda link: "pid:[1]")
    assert ranks.pair[1].place() != here


def test_host_memory_is_no_pool_of_a_gpu(ranks):
    assert "not on a GPU" in PeerBackend().obstacle(ranks.pools[0])
