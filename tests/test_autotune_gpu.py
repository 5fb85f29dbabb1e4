"""The bench of a real GPU, its parts stood in for: what it verifies, touches, times and refuses."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from fake_machine import GPU, flip_a_bit

from autotune import gpu as module
from autotune import link
from autotune.cases import Case
from autotune.gpu import GpuBench
from autotune.search import search
from autotune.space import Point
from hikv import KVBuffer, Unavailable
from hikv.kernels.reference import launch
from hikv.measure import HostClock, fill_random

CASE = Case("h2d", 1024, 64)
LINK = {"h2d": 50.0, "d2h": 50.0, "both": 90.0, "latency": 1e-6}


class Stand:
    """A bench whose copies are torch's; `fault(plan, point)` may spoil one."""

    def __init__(self, fault=lambda plan, point: None) -> None:
        self.copied, self.fault = [], fault
        self.bench = GpuBench(
            torch.device("cpu"),
            GPU,
            HostClock(),
            copy_plan=self.copy,
            serves=lambda path, plan: path in ("sm", "ce"),
            compile_point=lambda point, part, target: None,
        )
        self.bench._link = LINK

    def copy(self, plan, point) -> None:
        launch(plan)
        self.fault(plan, point)
        self.copied.append((point, plan))


def test_every_point_is_verified_on_poison_before_it_is_timed():
    stand = Stand()
    points = [Point("ce", 0), Point("sm", 2)]
    results = stand.bench.measure(CASE, points, 4, 0)
    assert [result.wrong for result in results] == [None, None]
    assert [len(result.timing.samples) for result in results] == [4, 4]
    assert [result.timing.nbytes for result in results] == [CASE.nbytes] * 2
    assert [point for point, _ in stand.copied[:2]] == points
    timed = len(stand.copied)
    stand.bench.measure(CASE, points, 4, 1)
    assert len(stand.copied) - timed == timed - 2  # once is enough


def test_wrong_bytes_are_found_and_not_timed():
    def fault(plan, point):
        if point.path == "ce":
            flip_a_bit(plan)

    stand = Stand(fault)
    wrong, right = stand.bench.measure(CASE, [Point("ce", 0), Point("sm", 1)], 3, 0)
    assert "is not page" in wrong.wrong
    assert wrong.timing is None
    assert right.wrong is None
    assert [point.path for point, _ in stand.copied].count("ce") == 1
    found = search(CASE, stand.bench, target=0.9, quick=True, interference=False)
    assert found.entry.path == "sm"
    assert list(found.wrong) == [Point("ce", 0)]


def test_copies_take_turns_and_live_pools_are_never_touched():
    live = KVBuffer.empty(CASE.spec, "layer_first", 64)
    fill_random(live)
    before = live.regions[0].anchors[0, 0].clone()
    stand = Stand()
    stand.bench.measure(CASE, [Point("sm", 1)], 8, 0)
    assert torch.equal(live.regions[0].anchors[0, 0], before)
    timed = [plan for _, plan in stand.copied[1:]]
    assert len({tuple(plan.dst_pages.tolist()) for plan in timed}) == len(timed)
    (start, stop), *_ = live.extents
    for _, plan in stand.copied:
        for buffer in (plan.src, plan.dst):
            assert all(high <= start or low >= stop for low, high in buffer.extents)


def test_the_space_is_what_serves_and_fits_compiled_once_per_kind():
    compiled = []
    stand = Stand()
    stand.bench._compile = lambda point, part, target: compiled.append((point.config, target))
    points = stand.bench.points(CASE, False)
    assert {point.path for point in points} == {"sm", "ce"}
    assert {target for _, target in compiled} == {"sm_90"}
    assert len(compiled) == len({(p.path, p.config) for p in points})
    assert stand.bench.points(CASE, False) is points


def test_the_prediction_is_littles_law_with_the_measured_link():
    bench = Stand().bench
    point = Point("sm", 2, (("num_warps", 8), ("loads", 8)))
    case = Case("h2d", 1 << 20, 64)
    assert bench.predicted(case, point) == pytest.approx(min(50.0, 2 * 32768 / 1e-6 / 1e9))
    assert bench.predicted(Case("d2h", 1 << 20, 64), point) is None
    assert bench.predicted(case, Point("ce", 0)) is None


def test_nothing_is_timed_without_a_gpu_or_inside_a_capture(monkeypatch):
    monkeypatch.setattr(module, "device_info", lambda: None)
    with pytest.raises(Unavailable, match=r"^a GPU is unavailable: .* or --simulate one"):
        GpuBench.of_gpu()
    monkeypatch.setattr(module, "device_info", lambda: GPU)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(Unavailable, match="captured into a graph"):
        GpuBench.of_gpu()


def test_disturbances_are_those_of_its_own_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "disturbances", lambda index: asked.append(index) or ("hot",))
    assert Stand().bench.disturbances() == ("hot",)
    assert asked == [GPU.index]


@pytest.mark.interpret
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1, in a process of its own",
)
def test_the_chase_follows_the_chain():
    links = link.chain(1024, 32, np.random.default_rng(0))
    at = torch.zeros(1, dtype=torch.int64)
    place = 0
    for _ in range(3):
        link.chase_kernel[(1,)](torch.from_numpy(links), at, 5)
        for _ in range(5):
            place = int(links[place])
        assert int(at) == place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_search_on_a_gpu_finds_a_verified_choice():
    bench = GpuBench.of_gpu()
    figures = bench.link()
    assert figures["h2d"] > 1
    assert 1e-7 < figures["latency"] < 1e-4
    found = search(Case("h2d", 4096, 1024), bench, target=0.9, quick=True, interference=True)
    assert found.wrong == {}
    assert found.entry.record["gbps"]["p50"] > 0
    assert found.entry.record["gemm_slowdown"] > 0.5
