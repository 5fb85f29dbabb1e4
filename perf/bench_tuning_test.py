"""CPU cost of a tuned look-up: `pytest perf --benchmark-only`. It should stay below 2 µs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo
from hikv.plan import plan_transfer
from hikv.spec import KVSpec
from hikv.tables import Entry, Key, Table
from hikv.tuning import Tuned, key_of, tuned

RUNS = [1 << shift for shift in range(6, 22)]
COUNTS = [1 << shift for shift in range(0, 17, 2)]
INFO = DeviceInfo(0, "NVIDIA Bench", "GPU-0", "nvidia", (9, 0), 132, 80 << 30)


def full_table() -> Tuned:
    """A table of every size."""
    keys = [Key(d, run, n, run, 16) for d in ("h2d", "d2h") for run in RUNS for n in COUNTS]
    return Tuned([(Path("t"), Table({}, {key: Entry(key, "sm", 4, {}) for key in keys}))])


def test_look_up(benchmark):
    """A key that was asked for before, as every copy of a serving engine is."""
    found, key = full_table(), Key("d2h", 4096, 2048, 4096, 16)
    entry, _ = benchmark(found.find, key)
    assert entry.key.run_bytes == 4096


def test_look_up_of_a_device(benchmark):
    """The tables of a GPU, once they are read."""
    found = benchmark(tuned, INFO)
    assert found is tuned(INFO)


def test_first_look_up(benchmark):
    """A new key: the nearest of all entries."""
    key = Key("d2h", 4096, 2048, 4096, 16)
    entry, _ = benchmark(lambda found: found._search(key), full_table())
    assert entry.key.run_bytes == 4096


def test_key(benchmark):
    """A plan's key, which counts what the plan submits: 1000 pages."""
    spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.bfloat16)
    src = KVBuffer.empty(spec, "layer_first", 1000, device="meta")
    dst = KVBuffer.empty(spec, "page_first_direct", 1000)
    plan = plan_transfer(src, dst, np.random.default_rng(0).permutation(1000), range(1000))
    assert benchmark(key_of, plan).direction == "d2h"
