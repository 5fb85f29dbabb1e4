"""Slots translated by the kernel, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError
from hikv.kernels.shard_slots import BLOCK, own_rows, own_rows_kernel
from hikv.kernels.submit import interpreted

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(
        not interpreted(own_rows_kernel),
        reason="needs TRITON_INTERPRET=1, in a process of its own",
    ),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_ranks", "page_size"), [(1, 1), (2, 64), (3, 16), (8, 5)])
def test_the_kernel_agrees_with_the_map(num_ranks, page_size, dtype):
    shards = ShardMap(num_ranks, page_size)
    slots = torch.randperm(BLOCK + 37).to(dtype)  # no whole number of blocks
    for rank in range(num_ranks):
        own = shards.owner(slots) == rank
        expected = torch.where(own, shards.local(slots), torch.tensor(-1, dtype=dtype))
        rows = own_rows(shards, slots, rank)
        assert rows.dtype == dtype
        assert torch.equal(rows, expected)


def test_padding_lies_nowhere_and_slots_may_pass_32_bits():
    shards = ShardMap(2, 64)
    slots = np.array([-1, -64, 2**40 + 64, 2**40])
    assert own_rows(shards, torch.from_numpy(slots), 1).tolist() == [-1, -1, 2**39, -1]
    assert own_rows(shards, torch.empty(0, dtype=torch.int64), 1).shape == (0,)


@pytest.mark.parametrize(
    "slots", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4).long()[::2]]
)
def test_what_is_no_flat_slot_mapping_is_refused(slots):
    with pytest.raises(ArgumentError, match="one contiguous dimension"):
        own_rows(ShardMap(2, 4), slots, 0)
