"""What a gather refuses, on a group of one: every refusal leaves it as good as new."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cp.gather import ZeroSMGather
from hikv.cp.plan import Request, plan_gather
from hikv.cp.shard_map import ShardMap
from hikv.cp.shared_memory import shared_host_memory
from hikv.errors import ArgumentError, GatherError
from hikv.spec import KVSpec

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)
LOCAL_PAGES = 40


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def exchange(self, value):
        return [value]


@pytest.fixture
def gather():
    memory = shared_host_memory(LOCAL_PAGES * SPEC.bytes_per_page)
    pool = KVBuffer.from_tensor(memory, SPEC, "layer_first")
    gather = ZeroSMGather(pool, ShardMap(1, 4), Alone(), max_pages=2, backend="host")
    yield gather
    gather.close()


@pytest.fixture
def plan(gather):
    return plan_gather(gather.shards, [Request([1, 2], 8)])


def test_a_call_out_of_turn_is_refused(gather, plan):
    for call in (lambda: gather.wait(0), gather.restored, gather.end):
        with pytest.raises(ArgumentError, match=r"expected begin\(\) first"):
            call()
    with pytest.raises(ArgumentError, match="expected a plan for ShardMap"):
        gather.begin(plan_gather(ShardMap(2, 4), [Request([1, 2], 8)]))
    assert gather.fits(plan)
    assert not gather.fits(plan_gather(gather.shards, [Request([1, 2], 8, 1)]))
    gather.begin(plan)
    gather.restored()
    for layer in (-1, 3):
        with pytest.raises(ArgumentError, match=f"a layer in 0..2, got {layer}"):
            gather.restored(layer)
    with pytest.raises(ArgumentError, match="got a second one"):
        gather.begin(plan)
    with pytest.raises(ArgumentError, match="expected layer 0, got 1"):
        gather.wait(1)
    with pytest.raises(ArgumentError, match="expected layer 0, got 3"):
        gather.end()
    for layer in range(3):
        gather.wait(layer)
    for layer in (2, 3):
        with pytest.raises(ArgumentError, match=rf"expected end\(\), got {layer}"):
            gather.wait(layer)
    gather.end()
    gather.close()
    with pytest.raises(ArgumentError, match=r"got one after close\(\)"):
        gather.begin(plan)


def test_a_mistake_of_the_caller_leaves_the_gather_good(gather, plan):
    for mask in (np.ones(2, bool), np.ones(LOCAL_PAGES, int), [True] * LOCAL_PAGES):
        with pytest.raises(ArgumentError, match="a bool array of this rank's 40 pages, or None"):
            gather.begin(plan, resident=mask)
    gather.begin(plan, resident=np.ones(LOCAL_PAGES, bool))
    assert gather._board.begun[0] == 1, "a refused batch is not counted"
    with pytest.raises(ArgumentError, match="a Transfer, several of them, or None, got 5"):
        gather.restored(after=5)
    gather.restored()
    for layer in range(3):
        gather.wait(layer)
    gather.end()
    assert gather.report().batches == 1


def test_copies_that_cannot_be_waited_for_fail_the_group_and_free_it_all_the_same(
    gather, plan, monkeypatch
):
    def lost():
        raise RuntimeError("the device is lost")

    gather.begin(plan)
    gather.restored()
    for layer in range(3):
        gather.wait(layer)
    with monkeypatch.context() as patch:
        patch.setattr(gather._backend, "drain", lost)
        with pytest.raises(GatherError, match="rank 0: the device is lost; end the batch"):
            gather.end()
        with pytest.raises(RuntimeError, match="the device is lost"):
            gather.close()
    assert gather._board._fd == -1, "peers find this rank gone"
    assert gather._backend._pools == []
