"""`perf interference` and `perf overlap` on a fake GPU whose time is told."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from fake_machine import FakeGpu, flip_a_bit

from hikv.device import device_info
from hikv.spec import KVSpec
from perf import duet, interference, overlap
from perf.__main__ import main
from perf.case import DIRECTIONS, Case
from perf.compute import Compute, attention, gemm, one_element
from perf.duet import summarise
from perf.machine import CallerClock, workload
from perf.output import WIDTH
from perf.ways import Way, parse_ways

SMALL = ["--layers", "4", "--heads", "4:2", "--head-dim", "16", "--page", "4", "--tokens", "12"]
CASE = Case(KVSpec(4, 4, 16, 4, torch.bfloat16, head_group=2), "layer_first", "page_unified", 3)


def slowing(way):
    """Two percent a CTA."""
    return 0.02 * (way[1] or 0)


@pytest.fixture
def gpu(monkeypatch):
    """Let the commands find a fake GPU and compute that takes the time it is told to."""

    def install(machine, seconds=1e-3):
        def compute(name, flops):
            return lambda device, *size: Compute(name, flops, lambda: machine.work(seconds))

        for module in (interference, overlap):
            monkeypatch.setattr(module.Machine, "of_gpu", lambda: machine)
            monkeypatch.setattr(module, "gemm", compute("GEMM 8", 2e9))
        monkeypatch.setattr(interference, "attention", compute("attention 8", 1e9))
        monkeypatch.setattr(interference, "one_element", compute("launch", 0.0))
        return machine

    return install


@pytest.mark.parametrize("command", ["interference", "overlap"])
@pytest.mark.skipif(device_info() is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(command, capsys):
    assert main([command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"python -m perf {command}: a GPU is unavailable: torch")
    assert printed.err.count("\n") == 1


def test_only_copies_that_end_beside_the_compute_count_for_their_rate():
    long = summarise(1.0, 5.0, 8, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert (long.compute_seconds, long.copy_seconds, long.covered) == (0.5, 1.0, 1.0)
    short = summarise(1.0, 5.0, 8, [0.5, 2.0, 3.0])
    assert (short.copy_seconds, short.covered) == (1.0, 0.5)
    assert math.isnan(summarise(1.0, 5.0, 1, [0.5, 2.0]).copy_seconds)
    assert summarise(1.0, 5.0, 1, [0.2, 0.5]).covered == 0.0
    assert summarise(1.0, 5.0, 1, []).covered == 0.0


class Streams:
    """Stands in for `torch.cuda`: every stream has its own time, and work adds to the current's."""

    def __init__(self):
        self.times, self.current, self.waited = {}, None, 0
        owner = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = owner.times[owner.current]

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Stream:
            device = "gpu"

            def __init__(self):
                owner.times[self] = 0.0

            def wait_stream(self, other):
                owner.times[self] = max(owner.times[self], owner.times[other])

        self.Event, self.Stream = Event, Stream

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def device(self, device):
        return nullcontext()

    def synchronize(self, device):
        self.waited += 1
        self.times = dict.fromkeys(self.times, max(self.times.values()))

    def spend(self, seconds):
        self.times[self.current] += seconds

    def _sleep(self, cycles):
        self.spend(0.004)


def test_copies_and_compute_start_together_on_streams_of_their_own(monkeypatch):
    cuda = Streams()
    monkeypatch.setattr(duet, "torch", SimpleNamespace(cuda=cuda))
    main, aside = cuda.Stream(), cuda.Stream()
    turns = []

    def copy(turn):
        turns.append((turn, cuda.current is aside))
        cuda.spend(0.25)

    def compute():
        assert cuda.current is main
        cuda.spend(0.1)

    found = duet.play(main, aside, compute, 10, copy, 6)
    assert turns == [(turn, True) for turn in range(6)]
    assert found.compute_seconds == pytest.approx(0.1)
    assert found.copy_seconds == pytest.approx(0.25)
    assert found.covered == 1.0
    assert cuda.waited == 2
    assert duet.play(main, aside, compute, 10, copy, 2).covered == pytest.approx(0.5)
    alone = duet.play(main, aside, compute, 5, copy, 0)
    assert (alone.compute_seconds, alone.covered) == (pytest.approx(0.1), 0.0)


def test_who_waits_pays_for_the_call_and_for_the_copy():
    log = []
    sample = CallerClock(lambda: log.append("wait")).time(lambda: log.append("call"))
    assert log == ["wait", "call", "wait"]
    assert 0 <= sample.submit_seconds <= sample.seconds


def test_pieces_of_compute_are_what_they_say():
    cpu = torch.device("cpu")
    assert gemm(cpu, 8).flops == 2 * 8**3
    out = gemm(cpu, 8).run()
    assert (out.shape, out.dtype) == ((8, 8), torch.bfloat16)
    assert out.unique().numel() > 8
    found = attention(cpu, 16, heads=2, head_dim=8)
    # Half of 4·heads·head_dim·tokens², since what lies ahead is masked.
    assert found.flops == 2 * 2 * 8 * 16**2
    assert found.run().shape == (1, 2, 16, 8)
    launch = one_element(cpu)
    launch.run()
    assert launch.run().item() == 2.0


def test_a_slowdown_is_the_time_beside_a_copy_over_the_time_alone(gpu):
    machine = gpu(FakeGpu(lambda path, quota: 10.0, contention=slowing))
    piece = Compute("GEMM 8", 2e9, lambda: machine.work(1e-3))
    ways = parse_ways("ce,sm@2,sm@8")
    report, rows = interference.measured_report(machine, CASE, [piece], ways, rounds=3)
    assert [(row["direction"], row["way"]) for row in rows] == [
        (direction, str(way)) for direction in DIRECTIONS for way in ways
    ]
    for row in rows:
        slower = 1 + slowing(("", row["quota"]))
        assert row["slowdown"] == pytest.approx(slower)
        assert row["seconds"] == pytest.approx(1e-3 * slower)
        assert row["copy_gbps"] == pytest.approx(10.0 / slower, rel=1e-3)
        assert row["copy_alone_gbps"] == pytest.approx(10.0, rel=1e-3)
    assert "alone, GEMM 8: 1,000.00 µs, 2 TFLOPS" in report.terminal()


def test_copies_are_as_many_as_cover_the_compute_and_not_more_than_allowed():
    fast = FakeGpu(lambda path, quota: 10.0)
    assert CASE.nbytes / 10e9 * interference.MAX_COPIES < 0.02
    slow = FakeGpu(lambda path, quota: CASE.nbytes / 0.01 / 1e9)
    for on, expected in ((fast, interference.MAX_COPIES), (slow, math.ceil(1.25 * 2) + 2)):
        work = workload(on, CASE, "h2d")
        piece = Compute("GEMM", 1.0, lambda on=on: on.work(0.02))
        copies = {Way("sm", 2): Way("sm", 2).candidate(on, work)}
        (row,) = interference.beside(on, "h2d", piece, copies, rounds=2)
        assert {made for _, made in on.duets} == {0, expected}
        assert (row["covered"] < 0.95) == (on is fast)


def test_a_copy_too_slow_to_end_beside_the_compute_has_no_rate(monkeypatch):
    machine = FakeGpu()
    monkeypatch.setattr(machine, "duet", lambda *args, **more: summarise(0.0, 1.0, 1, [0.5]))
    work = workload(machine, CASE, "h2d")
    copies = {Way("sm", 1): Way("sm", 1).candidate(machine, work)}
    (row,) = interference.beside(machine, "h2d", Compute("GEMM", 1.0, lambda: None), copies, 2)
    assert row["copy_gbps"] is None
    assert row["covered"] == 0.5
    table = interference.interference_table([row], "h2d", {})
    assert "copies ended before GEMM did: sm@1" in table.notes


def test_every_round_plays_each_once_in_an_order_of_its_own():
    order = []
    plays = {way: lambda way=way: order.append(way) for way in (None, *parse_ways("ce,sm@2,sm@4"))}
    found = interference.in_turns(plays, 8)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 32, 4)]
    assert all(set(one) == plays.keys() for one in rounds)
    assert len(set(rounds)) > 2
    assert all(len(duets) == 8 for duets in found.values())


def test_the_interference_tables_fit_and_name_what_was_left_out(gpu, tmp_path, capsys):
    gpu(FakeGpu(lambda path, quota: 10.0, refused={"tma": "too old"}, contention=slowing))
    file, text = tmp_path / "out.json", tmp_path / "out.md"
    outputs = ["--json", str(file), "--markdown", str(text)]
    assert main(["interference", *SMALL, "--rounds", "1", *outputs]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert "waived, tma@4: too old" in printed
    told = json.loads(file.read_text())
    assert [table["title"] for table in told["tables"]] == [
        "Beside copies H2D, measured",
        "Beside copies D2H, measured",
    ]
    ways = [row["way"] for row in told["tables"][0]["rows"]]
    assert ways == ["ce", "sm@1", "sm@2", "sm@4", "sm@8", "sm@16", "sm@32", "staged@8"]
    assert told["tables"][0]["rows"][0]["GEMM 8 slower"] == pytest.approx(1.0)
    assert told["tables"][0]["rows"][6]["launch slower"] == pytest.approx(1.64)
    assert text.read_text().count("\n### ") == 2


def test_a_wrong_copy_is_not_played_and_ends_with_1(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: path == "ce" and flip_a_bit(plan)))
    assert main(["interference", *SMALL, "--rounds", "1"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG, ce: page") == 2
    (line, _) = (line for line in printed.splitlines() if line.startswith("ce "))
    assert line.split()[2:] == ["–"] * (len(line.split()) - 2)


# 4 layers of m to move and c to compute: by layer m + 3·max(m, c) + c, in sequence 4m + 4c.
@pytest.mark.parametrize(("compute", "layer"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_layer_by_layer_takes_as_long_as_a_pipeline_does(compute, layer, gpu):
    machine = gpu(FakeGpu(lambda path, quota: CASE.nbytes / (4 * layer) / 1e9), compute)
    piece = Compute("GEMM", 1.0, lambda: machine.work(compute / 2))
    _, (row,) = overlap.measured_report(machine, CASE, piece, 2, parse_ways("sm@2"), 3)
    assert row["compute"] == pytest.approx(4 * compute)
    assert row["copy"] == row["layers, no compute"] == pytest.approx(4 * layer)
    assert row["sequence"] == pytest.approx(4 * (compute + layer))
    by_layer = layer + 3 * max(layer, compute) + compute
    assert row["layers"] == row["best"] == pytest.approx(by_layer)
    assert row["hidden"] == pytest.approx(1 - (by_layer - 4 * compute) / (4 * layer))
    assert row["speedup"] == pytest.approx(4 * (compute + layer) / by_layer)


def test_the_overlap_table_fits_and_waives_what_moves_whole_pages(gpu, tmp_path, capsys):
    gpu(FakeGpu(lambda path, quota: 10.0, refused={"tma": "too old"}))
    file = tmp_path / "out.json"
    arguments = [*SMALL, "--rounds", "1", "--ways", "sm@2,tma@4,staged@8,ce", "--json", str(file)]
    assert main(["overlap", *arguments]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert "waived, tma@4: too old" in printed
    assert "waived, staged@8: it moves whole pages, not layer by layer" in printed
    (table,) = json.loads(file.read_text())["tables"]
    assert [row["way"] for row in table["rows"]] == ["sm@2", "ce"]


def test_a_wrong_load_has_no_times_and_ends_with_1(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: quota == 8 and flip_a_bit(plan)))
    assert main(["overlap", *SMALL, "--rounds", "1", "--ways", "sm@2,sm@8"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG, sm@8: layers, no compute: page" in printed
    assert "WRONG, sm@2" not in printed


@pytest.mark.parametrize("command", ["interference", "overlap"])
def test_the_picture_is_drawn(command, gpu, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    gpu(FakeGpu(lambda path, quota: 10.0, contention=slowing))
    file = tmp_path / "out.svg"
    assert main([command, *SMALL, "--rounds", "1", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"<?xml")
