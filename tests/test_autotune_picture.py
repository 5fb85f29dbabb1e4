"""The picture of a search: which cases, which figures, and that a file comes of it."""

from __future__ import annotations

import pytest
from fake_machine import GPU

from autotune import __main__ as command
from autotune.cases import full_cases, parse_cases
from autotune.picture import best_by_quota, draw_search, handful, panels
from autotune.session import Options, tune
from autotune.simulate import PRESETS, SimulatedGpu
from autotune.space import Point
from hikv.measure import Sample, Timing

CASES = parse_cases("h2d:1024x4096,h2d:65536x64,d2h:1024x4096")


@pytest.fixture
def outcome(tmp_path):
    gpu = SimulatedGpu(PRESETS["h100"])
    return tune(gpu, tmp_path / "t.json", Options(cases=CASES), date="2026-01-01")


def timing(gbps):
    return Timing(1_000_000, tuple(Sample(1e-3 / rate, 0.0) for rate in gbps))


def test_a_search_keeps_the_timings_of_every_point_that_was_right(outcome):
    assert list(outcome.timings) == CASES
    every = SimulatedGpu(PRESETS["h100"]).points(CASES[0], False)
    assert set(outcome.timings[CASES[0]]) == set(every)


def test_a_panel_has_a_line_a_case_the_ceiling_and_the_choices(outcome):
    found = panels(outcome.table, outcome.timings)
    assert list(found) == ["H2D", "D2H"]
    *lines, ceiling, chosen = found["H2D"]
    assert [line.label for line in lines] == ["4,096 runs of 1,024 B", "64 runs of 65,536 B"]
    for line, case in zip(lines, CASES, strict=False):
        curve = best_by_quota(outcome.timings[case])
        assert (list(line.x), list(line.y)) == ([*curve], [*curve.values()])
    assert (list(ceiling.x), list(ceiling.y)) == ([0, 32], [55.6, 55.6])
    entries = [outcome.table.entries[case.key] for case in CASES[:2]]
    assert list(chosen.x) == [entry.block_quota for entry in entries]
    assert list(chosen.y) == [entry.record["gbps"]["p50"] for entry in entries]
    assert not chosen.line
    assert len(found["D2H"]) == 3


def test_a_curve_is_of_default_kernels_the_best_path_at_each_quota():
    timings = {
        Point("sm", 2): timing([10.0, 11.0, 12.0]),
        Point("tma", 2): timing([14.0, 14.0]),
        Point("sm", 2, (("num_warps", 8), ("loads", 8))): timing([99.0]),
        Point("ce", 0): timing([5.0]),
    }
    assert best_by_quota(timings) == {0: pytest.approx(5.0), 2: pytest.approx(14.0)}


def test_a_handful_is_the_longest_copies_of_lengths_evenly_apart():
    cases = [case for case in full_cases() if case.direction == "h2d" and case.vector_bytes == 16]
    assert [(c.run_bytes, c.num_runs) for c in handful(cases)] == [
        (64, 65536),
        (2048, 65536),
        (65536, 4096),
        (2 << 20, 64),
    ]
    assert handful(cases[:3]) == cases[2:3]


def test_a_file_says_that_it_is_simulated(outcome, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    file = tmp_path / "q.svg"
    draw_search(outcome.table, outcome.timings, file)
    words = file.read_text(encoding="utf-8")
    assert "hikv tune, simulated, not measured: H100 PCIe 5" in words
    measured = {"kind": "measured", "name": GPU.name, "link": "pcie5x16"}
    outcome.table.header.update(measured)
    draw_search(outcome.table, outcome.timings, file)
    assert f"hikv tune, measured: {GPU.name}, pcie5x16" in file.read_text(encoding="utf-8")


def test_the_command_draws_what_it_timed_and_refuses_before_it_does(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    monkeypatch.setenv("HIKV_TUNED_DIR", str(tmp_path / "tuned"))
    arguments = ["--simulate", "h100", "--cases", "h2d:1024x4096", "--plot"]
    file = tmp_path / "q.png"
    assert command.main([*arguments, str(file)]) == 0
    assert f"drawn: {file}" in capsys.readouterr().out
    assert file.stat().st_size > 1000
    nowhere = tmp_path / "nowhere" / "q.png"
    (tmp_path / "tuned").rename(tmp_path / "kept")
    assert command.main([*arguments, str(nowhere)]) == 2
    assert "--plot: expected a file in a folder that exists" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()
    assert (
        command.main([*arguments[:2], "--budget", "1e-9", "--plot", str(tmp_path / "n.png")]) == 0
    )
    assert "nothing drawn: no case was left to time" in capsys.readouterr().out
    assert not (tmp_path / "n.png").exists()
