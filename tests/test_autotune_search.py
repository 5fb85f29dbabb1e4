"""The search against simulated GPUs, whose truth is known: what it chooses, how far it is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.cases import Case, full_cases
from autotune.search import FULL, rank, search
from autotune.session import Options, tune
from autotune.simulate import PRESETS, SimulatedGpu
from autotune.space import Point
from hikv.tables import SPACE, Table
from hikv.tuning import Tuned

TARGET, NOISE = 0.9, 0.05
GPUS = ("a100", "h100", "b200", "gb300", "mi300x")


def true_rates(gpu: SimulatedGpu, case: Case) -> dict[Point, float]:
    """What every point of the space reaches, without noise."""
    points = (*gpu.points(case, False), *gpu.points(case, True))
    return {point: case.nbytes / gpu.seconds(case, point) / 1e9 for point in points}


def required(gpu: SimulatedGpu, case: Case, rates: dict[Point, float]) -> float:
    return TARGET * min(gpu.link()[case.direction], max(rates.values()))


def compared(gpu: SimulatedGpu, table: Table) -> Iterator[tuple[Case, float, int, int]]:
    """Per case of the grid: by how much the looked-up choice misses the rate that exhaustive search
    without noise asks for; its CTAs beyond those of exhaustive search; and beyond those of one that
    asks for a twentieth more."""
    found = Tuned([(Path("t"), table)])
    for case in full_cases():
        rates = true_rates(gpu, case)
        need = required(gpu, case, rates)
        entry, _ = found.find(case.key)
        choice = Point(entry.path, entry.block_quota, tuple(entry.config.items()))
        best, safe = (rank(rates, need * margin)[0].block_quota for margin in (1.0, 1.05))
        regret = max(0.0, 1 - rates[choice] / need)
        yield case, regret, choice.block_quota - best, choice.block_quota - safe


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("mode", "bound"), [("full", 0.05), ("quick", 0.10)])
def test_a_search_comes_near_the_truth_over_the_whole_grid(name, mode, bound, tmp_path, capsys):
    gpu = SimulatedGpu(PRESETS[name], noise=NOISE)
    outcome = tune(
        gpu, tmp_path / "t.json", Options(TARGET, quick=mode == "quick"), date="2026-01-01"
    )
    off = list(compared(gpu, outcome.table))
    regrets, extra = [regret for _, regret, _, _ in off], [ctas for _, _, ctas, _ in off]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{PRESETS[name].name} (simulated), {mode}: {outcome.searched} of {len(off)} cases "
            f"timed; below the required rate by {max(regrets):.1%} at worst, "
            f"{sum(regrets) / len(off):.2%} on average; {sum(extra) / len(off):+.2f} CTAs"
        )
    assert len(off) == len(full_cases())
    assert max(regrets) <= bound
    if mode == "full":
        assert outcome.searched == len(off)
        wasteful = [(str(case), ctas) for case, _, _, ctas in off if ctas > 0]
        assert len(wasteful) <= len(off) // 100, wasteful
    else:
        assert outcome.searched < len(off)
        assert sum(extra) / len(off) < 1


def test_no_trial_of_noise_decides():
    # One CTA falls a tenth short of what is required: half of all single trials would call it
    # enough once in a dozen, many times over the whole space.
    gpu = SimulatedGpu(PRESETS["h100"], noise=0.08)
    case = Case("h2d", 4096, 16384)
    rates = true_rates(gpu, case)
    need = required(gpu, case, rates)
    for seed in range(20):
        noisy = SimulatedGpu(PRESETS["h100"], noise=0.08, seed=seed)
        entry = search(case, noisy, target=TARGET, quick=False, interference=False).entry
        choice = Point(entry.path, entry.block_quota, tuple(entry.config.items()))
        assert rates[choice] >= 0.95 * need


def test_rank_prefers_enough_then_small_then_fast():
    rates = {
        Point("sm", 1): 40.0,
        Point("sm", 2, (("num_warps", 8), ("loads", 8))): 46.0,
        Point("sm", 2, (("num_warps", 16), ("loads", 16))): 46.5,
        Point("tma", 2): 49.0,
        Point("sm", 8): 50.0,
    }
    order = rank(rates, 45.0)
    assert order[0] == Point("tma", 2)  # 2 CTAs suffice; of those the fastest by more than 2 %
    assert order[-1] == Point("sm", 1)
    rates.pop(Point("tma", 2))
    assert dict(rank(rates, 45.0)[0].config)["num_warps"] == 8  # as fast, and the smaller tile
    assert rank(rates, 60.0)[0] == Point("sm", 8)  # none is enough: the fastest


def test_a_record_holds_spread_runner_up_prediction_and_slowdown():
    gpu = SimulatedGpu(PRESETS["h100"], noise=NOISE)
    record = search(
        Case("h2d", 1024, 16384), gpu, target=TARGET, quick=False, interference=True
    ).entry.record
    rates = record["gbps"]
    assert rates["p20"] < rates["p50"] < rates["p80"]
    assert rates["p50"] >= record["required"] > 0
    assert record["runner_up"]["path"] in SPACE
    assert record["predicted"] > 0
    assert record["rounds"] >= 2 * FULL.batch
    assert record["gemm_slowdown"] > 1
    without = search(
        Case("h2d", 1024, 16384), gpu, target=TARGET, quick=True, interference=False
    ).entry.record
    assert without["gemm_slowdown"] is None
    assert record["piece_bytes"] is None  # of a kernel that crosses the link the runs tell
    # K and V of 4 layers of a page in one box.
    boxes = search(Case("h2d", 4096, 16384), gpu, target=TARGET, quick=True, interference=False)
    assert (boxes.entry.path, boxes.entry.record["piece_bytes"]) == ("ce3d", 2 * 4 * 4096)


def test_what_copies_wrong_bytes_is_never_chosen():
    gpu = SimulatedGpu(PRESETS["h100"], spoiled=("ce",))
    case = Case("h2d", 2 << 20, 128)
    found = search(case, gpu, target=TARGET, quick=False, interference=False)
    assert found.entry.path != "ce"
    assert list(found.wrong) == [Point("ce", 0)]
    whole = SimulatedGpu(PRESETS["h100"])
    assert search(case, whole, target=TARGET, quick=False, interference=False).entry.path == "ce"
    hopeless = SimulatedGpu(PRESETS["h100"], spoiled=tuple(SPACE))
    nothing = search(case, hopeless, target=TARGET, quick=True, interference=False)
    assert nothing.entry is None
    assert {point.path for point in nothing.wrong} == set(SPACE)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_its_figures_come_from(name):
    preset = PRESETS[name]
    assert "assumed" in preset.source or "#" in preset.source
    assert preset.source in SimulatedGpu(preset).kind
    assert SimulatedGpu(preset).info.name.startswith("simulated ")
