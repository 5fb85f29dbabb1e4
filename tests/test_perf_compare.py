"""`perf compare` and `perf crossover` on a fake GPU, and what is predicted without one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_machine import GPU, FakeGpu, flip_a_bit

from hikv.device import device_info
from hikv.measure import Candidate
from hikv.spec import KVSpec
from perf import compare, crossover
from perf.__main__ import main
from perf.case import DIRECTIONS, Case
from perf.model import C2C, PCIE5
from perf.output import WIDTH
from perf.peers import Waived
from perf.ways import Way, parse_ways

SMALL = ["--layers", "2", "--heads", "4:2", "--head-dim", "16", "--page", "4", "--tokens", "12"]
RATES = {"sm": 20.0, "tma": 40.0, "staged": 30.0, "ce": 50.0, "ce3d": 45.0}

without_gpu = pytest.mark.skipif(device_info() is not None, reason="this machine has a GPU")


@pytest.fixture
def gpu(monkeypatch):
    """Let the commands find a fake GPU; the test chooses which."""

    def install(machine):
        monkeypatch.setattr(crossover, "device_info", lambda: GPU)
        for module in (compare, crossover):
            monkeypatch.setattr(module.Machine, "of_gpu", lambda: machine)
        return machine

    return install


def widest(text):
    return max(map(len, text.splitlines()))


def test_a_way_is_a_path_and_its_ctas():
    assert parse_ways("sm@2,ce,sm@2,staged@8") == (Way("sm", 2), Way("ce"), Way("staged", 8))
    assert [str(way) for way in parse_ways("tma@4,ce")] == ["tma@4", "ce"]


@pytest.mark.parametrize("text", ["sm", "sm@0", "sm@x", "ce@2", "cpu", "dma@1", ""])
def test_anything_else_is_refused_with_what_is_known(text, capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--ways", text])
    assert "expected sm@CTAS, tma@CTAS, staged@CTAS, ce" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "heads", "tokens"),
    [("cta", "8:1,8:2,8:4,8:8,16:1,16:8,16:16", 2048), ("compare", "8:4", 128)],
)
def test_help_names_each_commands_own_defaults(command, heads, tokens, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"(KVSpec.head_group is heads per group), default {heads}" in words
    assert f"rounded up to whole pages, default {tokens} " in words


@without_gpu
def test_without_a_gpu_it_is_refused_in_one_line(capsys):
    assert main(["compare"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m perf compare: a GPU is unavailable: torch")
    assert printed.err.count("\n") == 1


def test_hikvs_choice_stands_first_and_every_ratio_is_its_rate_over_the_others(gpu, capsys):
    machine = gpu(FakeGpu(lambda path, quota: RATES[path], refused={"tma": "too old"}))
    machine.choice, machine.submit_seconds = ("sm", 2), 1e-9
    case = Case(KVSpec(2, 4, 16, 4, torch.bfloat16, head_group=2), "layer_first", "page_unified", 3)
    ways = parse_ways("sm@8,tma@8,ce")
    rows = compare.compare_case(machine, case, "h2d", ways, rounds=3, seconds=1.0)
    first, *others = [row for row in rows if "why" not in row]
    assert first["way"] == "hikv: sm@2 (default)"
    ratios = {row["way"]: row["ratio"] for row in others}
    assert ratios["sm@8"] == pytest.approx(1.0, rel=1e-3)
    assert ratios["ce"] == pytest.approx(0.4, rel=1e-3)
    assert first["ratio"] == 1.0
    assert {"cudaMemcpyAsync per run", "torch index, copy_", "engine, one piece"} <= ratios.keys()
    waived = {row["way"]: row["why"] for row in rows if "why" in row}
    assert waived["tma@8"] == "too old"
    assert waived["vLLM swap_blocks"].startswith("vllm._custom_ops is not installed")
    assert len(waived) == 6


def test_a_slow_submission_is_part_of_what_a_caller_gets(gpu):
    machine = gpu(FakeGpu(lambda path, quota: RATES[path]))
    case = Case(KVSpec(2, 4, 16, 4, torch.bfloat16), "layer_first", "page_first", 3)
    machine.submit_seconds = 1e-3
    (row, *_) = compare.compare_case(machine, case, "d2h", (), rounds=1, seconds=1.0)
    assert row["gbps_p50"] == pytest.approx(20.0, rel=1e-2)
    assert row["gbps_served"] == pytest.approx(case.nbytes / 1e-3 / 1e9)


def test_one_call_for_each_run_is_waived_where_there_are_too_many(gpu, monkeypatch):
    monkeypatch.setattr(compare, "MAX_RUNS", 10)
    case = Case(KVSpec(2, 4, 16, 4, torch.bfloat16), "layer_first", "page_first", 3)
    rows = compare.compare_case(gpu(FakeGpu()), case, "h2d", (), rounds=1, seconds=1.0)
    why = {row["way"]: row.get("why") for row in rows}["cudaMemcpyAsync per run"]
    assert why == f"{2 * 2 * 3 * 4} calls a copy; at most 10 are tried"


def test_a_peer_that_is_there_is_timed_beside_the_others(gpu, monkeypatch):
    class Peer:
        name = "another system"

        def candidate(self, machine, work, direction):
            if direction == "d2h":
                raise Waived("it only loads")
            return Candidate(self.name, work.nbytes, lambda turn: machine.work(1.0), lambda: None)

    monkeypatch.setattr(compare, "PEERS", [Peer()])
    case = Case(KVSpec(2, 4, 16, 4, torch.bfloat16), "layer_first", "page_first", 3)
    rows = {
        direction: compare.compare_case(gpu(FakeGpu()), case, direction, (), 1, 1.0)[-1]
        for direction in DIRECTIONS
    }
    assert rows["d2h"]["why"] == "it only loads"
    measured = compare.compare_case(FakeGpu(), case, "h2d", (), 1, 1.0)
    (row,) = (row for row in measured if row["way"] == "another system")
    assert row["gbps_p50"] == pytest.approx(case.nbytes / 1e9)
    assert row["ratio"] > 1e3


def test_the_command_covers_the_host_layouts_and_fits_a_terminal(gpu, tmp_path, capsys):
    gpu(FakeGpu(lambda path, quota: RATES[path]))
    file, text = tmp_path / "out.json", tmp_path / "out.md"
    arguments = [*SMALL, "--rounds", "1", "--json", str(file), "--markdown", str(text)]
    assert main(["compare", *arguments]) == 0
    printed = capsys.readouterr().out
    assert widest(printed) <= WIDTH
    tables = json.loads(file.read_text())["tables"]
    cases = [(table["rows"][0]["host"], table["rows"][0]["direction"]) for table in tables]
    assert cases == [(host, way) for host in compare.HOST_LAYOUTS for way in DIRECTIONS]
    assert "D2H, host page_first, 4 heads in 2 groups: 48 runs of 128 B, measured" in printed
    assert text.read_text().count("\n### ") == 6
    assert printed.count("GB/s: payload over") == 1
    assert "waived, LMCache, own chunk: lmcache.c_ops is not installed" in printed
    assert main(["compare", *SMALL, "--host-layout", "page_head", "--rounds", "1"]) == 0
    assert "host page_first" not in capsys.readouterr().out
    assert main(["compare", *SMALL, "--mla", "48", "--rounds", "1"]) == 0
    assert "H2D, host page_first_direct, rows of 48 B: 6 runs of" in capsys.readouterr().out


def test_a_wrong_byte_leaves_the_figure_out_and_ends_with_1(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: path == "staged" and flip_a_bit(plan)))
    assert main(["compare", *SMALL, "--rounds", "1"]) == 1
    assert capsys.readouterr().out.count("WRONG, staged@8: page") == 6


@pytest.mark.parametrize("command", ["compare", "crossover"])
def test_the_picture_is_drawn(command, gpu, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    gpu(FakeGpu(lambda path, quota: RATES[path]))
    size = SMALL if command == "compare" else ["--page-bytes", "64,256", "--runs", "4"]
    file = tmp_path / "out.png"
    assert main([command, *size, "--rounds", "1", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_grid_leaves_out_copies_that_are_too_long():
    cases = list(crossover.grid((1 << 20, 64), (16, 4096)))
    assert [(c.spec.bytes_per_page, c.num_pages) for c in cases] == [
        (1 << 20, 16),
        (64, 16),
        (64, 4096),
    ]


def test_a_grid_of_copies_that_are_all_too_large_is_refused(capsys):
    assert main(["crossover", "--page-bytes", str(1 << 40)]) == 2
    assert "expected a copy of at most 256 MiB" in capsys.readouterr().err


def test_a_kernel_is_predicted_to_win_with_many_short_runs_and_the_engine_with_long_or_few():
    ways = parse_ways("sm@2,sm@8,ce")
    cases = list(crossover.grid((1024, 262144), (16, 4096)))
    cases.append(replace(cases[-1], num_pages=1000))
    rows = crossover.predicted_rows(cases, ways, PCIE5, {})
    wins = {(r["direction"], r["bytes"], r["runs"]): r["predicted wins"] for r in rows}
    assert wins["h2d", 1024, 16] == wins["d2h", 1024, 16] == "ce"
    # Both come to the link: the fewer CTAs win.
    assert wins["h2d", 1024, 4096] == "sm@2"
    assert wins["h2d", 262144, 1000] == wins["h2d", 262144, 16] == "ce"
    faster = crossover.predicted_rows(cases, ways, C2C, {"h2d": 400.0})
    by_key = {(r["direction"], r["bytes"], r["runs"]): r for r in faster}
    assert by_key["h2d", 1024, 4096]["predicted wins"] == "sm@8"
    assert by_key["d2h", 262144, 1000]["predicted ce"] == pytest.approx(192.0)


def test_a_path_that_the_model_does_not_describe_has_no_prediction():
    (row, _) = crossover.predicted_rows(
        list(crossover.grid((64,), (4,))), parse_ways("tma@4"), PCIE5, {}
    )
    assert (row["predicted tma@4"], row["predicted wins"]) == (None, None)


@without_gpu
def test_without_a_gpu_crossover_is_a_prediction_and_says_so(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert main(["crossover", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("perf crossover: predicted, not measured\n")
    assert "Who wins, predicted, not measured" in printed
    assert widest(printed) <= WIDTH
    told = json.loads(file.read_text())
    assert told["kind"] == "predicted, not measured"
    assert "gbps" not in json.dumps(told["tables"])


def test_measured_winners_stand_beside_the_predicted_ones(gpu, tmp_path, capsys):
    def rate(path, quota):
        return {"ce": 50.0}.get(path, 5.0 * (quota or 1))

    gpu(FakeGpu(rate, refused={"tma": "too old"}))
    file = tmp_path / "out.json"
    arguments = ["--page-bytes", "64,65536", "--runs", "64", "--ways", "sm@2,sm@8,tma@8,ce"]
    assert main(["crossover", *arguments, "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert widest(printed) <= WIDTH
    assert "waived, tma@8: too old" in printed
    measured, predicted = json.loads(file.read_text())["tables"]
    assert measured["title"] == "Who wins, measured"
    assert predicted["title"] == "Who wins, predicted, not measured"
    rows = {(row["direction"], row["bytes"]): row for row in measured["rows"]}
    long = rows["h2d", 65536]
    assert long["gbps ce"] == pytest.approx(50.0, rel=1e-2)
    assert long["gbps sm@8"] == pytest.approx(40.0, rel=1e-2)
    assert (long["wins"], long["predicted wins"], long["kept"]) == ("ce", "ce", 1.0)
    # The engine's ceiling of this run, 50 GB/s, is what the prediction is made for.
    assert long["predicted ce"] == pytest.approx(50.0, rel=1e-2)
    # This machine launches in no time; the model does not, and knows what a descriptor costs.
    short = rows["h2d", 64]
    assert (short["wins"], short["predicted wins"]) == ("ce", "sm@2")
    assert short["kept"] == pytest.approx(10 / 50, rel=1e-2)


def test_an_unknown_link_has_no_prediction(gpu, capsys):
    machine = gpu(FakeGpu())
    machine.info = replace(GPU, link=None)
    assert main(["crossover", "--page-bytes", "64", "--runs", "4", "--rounds", "1"]) == 0
    assert "Who wins, predicted" not in capsys.readouterr().out


def test_a_wrong_copy_cannot_win(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: quota == 32 and flip_a_bit(plan)))
    assert main(["crossover", "--page-bytes", "64", "--runs", "4", "--rounds", "1"]) == 1
    assert "WRONG, h2d, sm@32: page" in capsys.readouterr().out


def test_nothing_is_kept_of_a_predicted_winner_that_is_wrong(gpu):
    machine = gpu(FakeGpu(fault=lambda plan, path, quota: quota == 2 and flip_a_bit(plan)))
    cases = list(crossover.grid((64,), (256,)))
    _, rows = crossover.measured_report(machine, cases, parse_ways("sm@2,tma@4,ce"), 1)
    assert {(r["predicted wins"], r["wins"], r["kept"]) for r in rows} == {("sm@2", "ce", 0.0)}
    _, rows = crossover.measured_report(FakeGpu(), cases, parse_ways("tma@4"), 1)
    assert [(r["predicted wins"], r["wins"], r["kept"]) for r in rows] == [
        (None, "tma@4", None)
    ] * 2
