"""`perf gpu-check` on a fake GPU: its sections, their deadlines, and what a failure comes to."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import count
from pathlib import Path

import pytest
import torch
from fake_machine import FakeGpu, flip_a_bit

from hikv.device import device_info
from hikv.errors import GatherError
from hikv.layout import list_layouts
from hikv.spec import KVSpec
from hikv.transfers import PATHS
from perf import compare, gpu_check, gpu_sections
from perf.__main__ import main
from perf.case import Case
from perf.checks import GPU_PATHS, checks
from perf.cta import CEILING
from perf.gpu_check import SECTIONS, report_on, run_sections
from perf.gpu_sections import (
    Deadline,
    Findings,
    comparison,
    copies,
    facts,
    gather,
    sweep,
    table,
)

LONG = Deadline(1e9)
GATHERED = {
    "ranks": 2,
    "layer MiB": 36.0,
    "copies": 500,
    "backend": "p2p",
    "engine": "copy engine",
    "own shard": "in a batch beside it",
    "own shard gbps": {"in the peers' batch": 80.0, "in a batch beside it": 90.0},
    "rival": "nccl",
    "waived": "NCCL takes one GPU a rank",
    "kernels": [],
    "by owner": [[85.0, 86.0], [87.0, 88.0]],
    "hikv": 84.0,
    "hikv p10": 83.0,
    "hikv p90": 85.0,
    "hikv gemm": 1.04,
    "wrong bytes": 0,
}


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    def case(heads, groups, num_pages=4):
        spec = KVSpec(2, heads, 16, 4, torch.bfloat16, head_group=heads // groups)
        return Case(spec, "layer_first", "page_first_direct_group", num_pages)

    monkeypatch.setattr(gpu_sections, "published_case", case)
    monkeypatch.setattr(gpu_sections, "measure_ranks", lambda work, num_ranks: GATHERED)


def after(calls):
    """A deadline that passes after `calls` looks at it."""
    ticks = count()
    return Deadline(calls, now=lambda: next(ticks))


@pytest.mark.skipif(device_info() is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_ends_with_2(capsys):
    assert main(["gpu-check"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("perf gpu-check: no GPU to check: torch")
    assert printed.err.count("\n") == 1


def test_the_budgets_leave_time_within_six_minutes():
    assert sum(seconds for _, seconds in SECTIONS.values()) <= 330


def test_facts_are_the_doctors():
    found = facts(FakeGpu(refused={"tma": "too old"}), LONG)
    text = found.tables[0].terminal()
    assert "GPU       NVIDIA Fake 100, 132 SMs, capability 9.0, 80.0 GiB" in text
    assert "path      tma     no: too old" in text
    assert "path      ce      ready" in text
    assert found.rows[0]["paths"]["tma"] == "too old"


def test_checks_cover_every_path_and_pair_in_both_directions():
    assert set(GPU_PATHS) == PATHS.keys() - {"cpu"}
    found = checks()
    pairs = {(c.path, c.src, c.dst) for c in found if c.group == "all pairs"}
    for path in GPU_PATHS:
        for gpu in list_layouts():
            for host in list_layouts():
                assert (path, ("gpu", gpu), ("host", host)) in pairs
                assert (path, ("host", host), ("gpu", gpu)) in pairs
    latent = {c.dst[1] for c in found if c.group == "latent rows" and c.src[0] == "gpu"}
    assert latent == set(list_layouts(latent=True))
    assert {c.spec.v_head_dim for c in found if c.group == "K wider than V"} == {128}
    assert any(c.src[0] == c.dst[0] == "gpu" for c in found)
    order = [check.group == "all pairs" for check in found]
    assert order == sorted(order)


def test_every_check_is_right_on_a_right_machine():
    found = copies(FakeGpu(), LONG)
    assert (found.wrong, found.remarks) == ([], [])
    assert sum(row["right"] for row in found.rows) == len(checks())
    assert sum(row["wrong"] + row["waived"] for row in found.rows) == 0


def test_a_wrong_byte_is_counted_for_its_path_and_the_rest_still_run():
    machine = FakeGpu(
        fault=lambda plan, path, quota: path == "tma" and flip_a_bit(plan),
        refused={"staged": "no scratch"},
    )
    found = copies(machine, LONG)
    kinds = {path: [0, 0, 0] for path in GPU_PATHS}
    for row in found.rows:
        for i, kind in enumerate(("right", "wrong", "waived")):
            kinds[row["path"]][i] += row[kind]
    each = len(checks()) // len(GPU_PATHS)
    # The check of one layer alone spoils a byte of another layer, which is wrong as well.
    assert kinds == {
        "sm": [each, 0, 0],
        "ce": [each, 0, 0],
        "ce3d": [each, 0, 0],
        "tma": [0, each, 0],
        "staged": [0, 0, each],
    }
    assert len(found.wrong) == each
    assert all(line.startswith("path tma, ") for line in found.wrong)
    assert {row["why"] for row in found.rows if row["path"] == "staged"} == {"no scratch"}


def test_an_exception_of_one_copy_is_that_copys_failure():
    def fault(plan, path, quota):
        if path == "ce":
            raise RuntimeError("launch failed")

    found = copies(FakeGpu(fault=fault), LONG)
    assert len(found.wrong) == len(checks()) // len(GPU_PATHS)
    assert found.wrong[0].endswith("RuntimeError: launch failed")


def test_a_deadline_stops_new_checks_and_says_how_many():
    found = copies(FakeGpu(), after(10))
    assert sum(row["right"] for row in found.rows) == 9
    assert found.remarks == [f"out of time: {len(checks()) - 9} of {len(checks())} not started"]


def test_the_table_section_is_the_cta_table():
    found = table(FakeGpu(lambda path, quota: 55.0 if path == "ce" else 10.0 + quota), LONG)
    assert len(found.rows) == 7 * 2 * 2
    assert (found.wrong, found.remarks) == ([], [])
    short = table(FakeGpu(), after(4))
    assert len(short.rows) == 3 * 2
    assert short.remarks == ["out of time: 6 of 28 rows"]
    assert table(FakeGpu(), after(1)).rows == []


def test_the_sweep_keeps_the_best_configuration_of_every_quota():
    found = sweep(
        FakeGpu(lambda path, quota: {"ce": 60.0, "tma": 3.0}.get(path, 2.0) * (quota or 1)), LONG
    )
    ways = len(gpu_sections.CONFIGS) + 2
    assert len(found.rows) == 2 * len(gpu_sections.QUOTAS) * ways
    (shown,) = found.tables
    assert [row["quota"] for row in shown.rows] == [*gpu_sections.QUOTAS] * 2
    for row in shown.rows:
        assert row["best"] == row["default"] == pytest.approx(2.0 * row["quota"], rel=1e-2)
        assert row["tma"] == pytest.approx(3.0 * row["quota"], rel=1e-2)
    panels = gpu_sections.sweep_panels(found.rows)
    assert {series.label for series in panels["H2D"]} == {row["way"] for row in found.rows}
    without = sweep(FakeGpu(refused={"tma": "too old"}), after(3))
    assert {row["way"] for row in without.rows}.isdisjoint({"tma"})
    assert len(without.remarks) == 2


def test_the_comparison_times_right_copies_alone_and_waives_with_a_reason():
    found = comparison(FakeGpu(refused={"tma": "too old"}), LONG)
    assert found.wrong == []
    names = {row["way"] for row in found.rows}
    assert {"cudaMemcpyAsync per run", "torch index, copy_", "ce", "hikv: sm@2 (default)"} <= names
    assert {row["why"] for row in found.rows if row["way"].startswith("tma")} == {"too old"}
    whole, cut = (
        {row["copies"] for row in found.rows if row["groups"] == groups} for groups in (1, 4)
    )
    assert (whole, cut) == ({2 * 2 * 4}, {2 * 2 * 2 * 4 * 4})


def test_the_baselines_are_verified_like_everything_else(monkeypatch):
    monkeypatch.setattr(compare, "copy_every_run", lambda plans: lambda plan: None)
    found = comparison(FakeGpu(), LONG)
    assert len(found.wrong) == 4
    assert all("cudaMemcpyAsync per run: page" in line for line in found.wrong)


def test_two_ranks_gather_on_the_machines_gpu_within_the_sections_time(monkeypatch):
    asked = []

    def measured(work, num_ranks):
        asked.append((work, num_ranks))
        return GATHERED

    monkeypatch.setattr(gpu_sections, "measure_ranks", measured)
    found = gather(FakeGpu(), Deadline(12.0, now=lambda: 5.0))
    ((work, num_ranks),) = asked
    assert (num_ranks, work.gpus, work.backend, work.seconds) == (2, (0, 0), "p2p", 12.0)
    assert (found.wrong, found.remarks, found.rows) == ([], [], [GATHERED])
    text = "\n".join(shown.terminal() for shown in found.tables)
    assert "by two processes on one GPU" in text
    assert "waived, nccl with 2 ranks: NCCL takes one GPU a rank" in text
    assert "rank 0's own pages go in a batch beside it" in text


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"wrong bytes": 7}, "7 bytes of the gather"),
        ({"kernels": ["a_kernel", "b"]}, "SM kernels ran in the gather: a_kernel, b"),
    ],
)
def test_wrong_bytes_and_kernels_of_the_gather_are_wrong(monkeypatch, found, told):
    monkeypatch.setattr(gpu_sections, "measure_ranks", lambda work, n: GATHERED | found)
    assert gather(FakeGpu(), LONG).wrong == [told]


def test_a_profiler_that_saw_nothing_is_no_proof(monkeypatch):
    monkeypatch.setattr(gpu_sections, "measure_ranks", lambda work, n: GATHERED | {"kernels": None})
    sections = run_sections(FakeGpu(), {"gather": (gather, 40)})
    assert sections[0].status == "cut short"
    text = " ".join(report_on(FakeGpu(), sections, Path("x.json")).terminal().split())
    assert "no proof that no kernel ran" in text
    assert "who knows how many SM kernels" in text


def test_a_gather_that_is_refused_is_skipped_with_the_reason(monkeypatch):
    refused = {"ranks": 2, "refused": "back end 'p2p' cannot serve the group (rank 0: no CUDA IPC)"}
    monkeypatch.setattr(gpu_sections, "measure_ranks", lambda work, n: refused)
    sections = run_sections(FakeGpu(), {"gather": (gather, 40)})
    assert sections[0].error is None
    assert sections[0].findings.remarks == [f"skipped: {refused['refused']}"]
    text = report_on(FakeGpu(), sections, Path("x.json")).terminal()
    assert "no CUDA IPC" in " ".join(text.split())


def test_ranks_that_hang_fail_their_section_alone(monkeypatch):
    def hang(work, num_ranks):
        raise GatherError("the ranks did not end within 40 s", remedy="measure less")

    monkeypatch.setattr(gpu_sections, "measure_ranks", hang)
    first, second = run_sections(FakeGpu(), {"gather": (gather, 40), "facts": (facts, 10)})
    assert first.status == "failed"
    assert "did not end within 40 s" in first.error
    assert second.status == "complete"


def broken(machine, deadline):
    raise RuntimeError("out of shared memory")


def test_a_section_that_raises_is_recorded_and_the_others_run(capsys):
    ran = []
    sections = {
        "first": (broken, 5.0),
        "second": (lambda machine, deadline: ran.append(deadline.passed) or Findings(), 7.0),
    }
    first, second = run_sections(FakeGpu(), sections, now=lambda: 100.0)
    assert first.status == "failed"
    assert "RuntimeError: out of shared memory" in first.error
    assert (second.status, second.error, ran) == ("complete", None, [False])
    assert "second, at most 7 s" in capsys.readouterr().err


def test_a_section_starts_its_own_clock():
    clock = iter([0.0, 0.0, 4.9, 9.0, 9.0, 9.0, 14.0, 20.0])
    looks = []

    def section(machine, deadline):
        looks.append(deadline.passed)
        return Findings()

    done = run_sections(FakeGpu(), {"a": (section, 5.0), "b": (section, 5.0)}, lambda: next(clock))
    assert looks == [False, True]
    assert [section.seconds for section in done] == [9.0, 11.0]


def run_command(monkeypatch, machine, sections, tmp_path):
    monkeypatch.setattr(gpu_check, "probe_failure", lambda: None)
    monkeypatch.setattr(gpu_check.Machine, "of_gpu", lambda: machine)
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.chdir(tmp_path)
    return gpu_check.run(Namespace(json=None, markdown=None, plot=None))


def test_all_right_ends_with_0_one_json_and_a_short_table_last(monkeypatch, tmp_path, capsys):
    def rate(path, quota):
        return 60.0 if path in ("ce", "ce3d") else min(58.0, 8.0 * quota)

    assert run_command(monkeypatch, FakeGpu(rate), SECTIONS, tmp_path) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("nvidia-fake-100-20")
    told = json.loads(file.read_text())
    assert told["facts"].keys() == SECTIONS.keys()
    assert {section["status"] for section in told["facts"].values()} == {"complete"}
    short = capsys.readouterr().out.split("\n\n\n")[-1]
    assert short.startswith("In short")
    assert f"{len(checks())} right, 0 wrong, 0 waived" in short
    assert "H2D @2 CTAs, 8 heads in 8 groups: 16.0 GB/s, 27% of the copy engine" in short
    assert "H2D: 8 CTAs come to 90% of the copy engine (8 × 16: 58.0 GB/s)" in short
    assert "2 ranks on one GPU: 84.0 GB/s a rank, 0 SM kernels, a GEMM beside takes 1.04" in short
    assert told["facts"]["gather"]["rows"] == [GATHERED]
    assert file.name in short


@pytest.mark.parametrize("kind", ["a wrong byte", "an error"])
def test_a_wrong_byte_or_a_failed_section_ends_with_1(kind, monkeypatch, tmp_path, capsys):
    wrong = Findings(wrong=["path ce, somewhere: page 1"])
    sections = {
        "copies": (broken if kind == "an error" else lambda machine, deadline: wrong, 5.0),
        "sweep": (sweep, 1e9),
    }
    assert run_command(monkeypatch, FakeGpu(), sections, tmp_path) == 1
    printed = capsys.readouterr().out
    assert {"a wrong byte": "path ce, somewhere: page 1", "an error": "out of shared memory"}[
        kind
    ] in printed
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["facts"]["sweep"]["status"] == "complete"


def test_no_choice_reaches_the_copy_engine():
    done = run_sections(
        FakeGpu(lambda path, quota: 60.0 if path == "ce" else 1.0), {"sweep": (sweep, 1e9)}
    )
    text = report_on(FakeGpu(), done, Path("x.json")).terminal()
    assert "D2H: no choice comes to 90% of the copy engine" in text
    assert {row["way"] for row in done[0].findings.rows} > {CEILING}


def test_results_go_to_perf_results_in_a_checkout(monkeypatch, tmp_path):
    folder = tmp_path / "perf" / "results"
    folder.mkdir(parents=True)
    assert run_command(monkeypatch, FakeGpu(), {"facts": (facts, 5.0)}, tmp_path) == 0
    assert [file.suffix for file in folder.iterdir()] == [".json"]
