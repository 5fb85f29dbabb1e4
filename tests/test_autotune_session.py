"""A whole search and its command line: budgets, interruptions, disturbances, exit codes."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from fake_machine import GPU

from autotune import __main__ as command
from autotune.cases import Case, full_cases, parse_cases, quick_cases
from autotune.session import Options, tune
from autotune.simulate import PRESETS, SimulatedGpu
from hikv import ArgumentError, cli, tuning
from hikv.tables import SPACE, file_name, identity, read_table

CASES = parse_cases("h2d:1024x4096,d2h:1024x4096,h2d:2097152x16,d2h:64x256:4")
search = partial(tune, date="2026-01-01")


class Ticks:
    """A clock on which every question takes a second."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu(PRESETS["h100"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json"


def test_a_search_writes_what_it_found_and_nothing_else(gpu, path):
    seen = []
    options = Options(cases=CASES)
    outcome = search(gpu, path, options, progress=lambda *step: seen.append(step))
    assert (outcome.searched, outcome.stopped, outcome.wrong) == (4, None, {})
    assert set(outcome.table.entries) == {case.key for case in CASES}
    assert read_table(path) == outcome.table
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert seen == [(done, 4, str(case)) for done, case in enumerate(CASES)]
    header = read_table(path).header
    assert header["name"] == "simulated H100 PCIe 5"
    assert header["date"] == "2026-01-01"
    assert {entry.record["target"] for entry in read_table(path).entries.values()} == {0.9}
    assert header["kind"].startswith("simulated")


def test_a_budget_ends_a_search_and_the_next_goes_on(gpu, path):
    options = Options(cases=CASES, budget=3.5)
    first = search(gpu, path, options, clock=Ticks())
    assert 0 < first.searched < 4
    assert "budget" in first.stopped
    assert len(read_table(path).entries) == first.searched
    second = search(gpu, path, Options(cases=CASES))
    assert second.searched == 4 - first.searched
    assert set(read_table(path).entries) == {case.key for case in CASES}
    assert first.table.entries.items() <= second.table.entries.items()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", [{"target": 0.5}, {"gpu": "gb300"}])
def test_another_goal_does_not_go_on_from_here(gpu, path, change):
    search(gpu, path, Options(cases=CASES, budget=3.5), clock=Ticks())
    other = SimulatedGpu(PRESETS[change.get("gpu", "h100")])
    outcome = search(other, path, Options(change.get("target", 0.9), cases=CASES))
    assert outcome.searched == 4


def test_a_full_search_does_not_go_on_from_a_quick_one(gpu, path):
    search(gpu, path, Options(quick=True, budget=3.5), clock=Ticks())
    assert search(gpu, path, Options(cases=CASES)).searched == 4


def test_a_case_that_nothing_copies_right_ends_the_search(path):
    gpu = SimulatedGpu(PRESETS["h100"], spoiled=tuple(SPACE))
    outcome = search(gpu, path, Options(cases=CASES))
    assert (outcome.searched, outcome.failed) == (0, True)
    assert "h2d:1024x4096" in outcome.stopped
    assert not path.exists()


def test_an_interruption_keeps_what_was_found(gpu, path, monkeypatch):
    measure = gpu.measure

    def interrupted(case, *arguments):
        if case == CASES[2]:
            raise KeyboardInterrupt
        return measure(case, *arguments)

    monkeypatch.setattr(gpu, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(gpu, path, Options(cases=CASES))
    assert not path.exists()
    monkeypatch.setattr(gpu, "measure", measure)
    assert search(gpu, path, Options(cases=CASES)).searched == 2


def test_single_cases_join_the_table_that_is_there(gpu, path):
    search(gpu, path, Options(cases=CASES[:3]))
    outcome = search(gpu, path, Options(0.5, cases=CASES[2:]))
    assert outcome.searched == 2
    entries = read_table(path).entries
    assert [entries[case.key].record["target"] for case in CASES] == [0.9, 0.9, 0.5, 0.5]


def test_a_table_of_other_sources_or_a_broken_one_is_replaced(gpu, path):
    search(gpu, path, Options(cases=CASES[:3]))
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    search(gpu, path, Options(cases=CASES[3:]))
    assert len(read_table(path).entries) == 1
    path.write_text(path.read_text()[:99])
    search(gpu, path, Options(cases=CASES[:2]))
    assert len(read_table(path).entries) == 2


def test_a_disturbed_machine_ends_the_search_and_writes_no_table(path):
    told = iter([(), (), ("the GPU is throttled by heat",)])
    gpu = SimulatedGpu(PRESETS["h100"], disturbed=lambda: next(told))
    outcome = search(gpu, path, Options(cases=CASES))
    assert (outcome.searched, outcome.failed) == (2, True)
    assert "throttled" in outcome.stopped
    assert not path.exists()
    again = SimulatedGpu(PRESETS["h100"])
    assert search(again, path, Options(cases=CASES)).searched == 2


def test_quick_looks_closer_only_between_different_choices(gpu, path):
    outcome = search(gpu, path, Options(quick=True, interference=False))
    coarse = {case.key for case in quick_cases()}
    assert coarse < set(outcome.table.entries) < {case.key for case in full_cases()}
    assert outcome.searched == len(outcome.table.entries)


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"target": t}, "--target") for t in (0, -1, 1.1, float("nan"))]
    + [({"budget": b}, "--budget") for b in (0, -1, float("nan"))],
)
def test_bad_options_are_refused(options, argument):
    with pytest.raises(ArgumentError, match=argument):
        Options(**options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HIKV_TUNED_DIR", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


CASE = "h2d:1024x4096,d2h:65536x64"
SIMULATED = ["--simulate", "h100", "--cases", CASE]


def test_the_command_writes_shows_compares_and_checks(folder, capsys):
    assert cli.main(["tune", *SIMULATED]) == 0
    (path,) = folder.iterdir()
    assert path.name == file_name("simulated H100 PCIe 5", 132)
    out = capsys.readouterr().out
    assert "2 cases searched, 2 entries in" in out
    assert "simulated H100 PCIe 5, 132 SMs" in out
    assert "copy engine 55.6 GB/s h2d" in out
    assert len(re.findall(r"GB/s \(p20 [\d.]+, p80 [\d.]+\), [\d.]+ required", out)) == 2
    bound = r"at most [\d.]+ by Little's law"
    assert re.search(rf"h2d 1 KiB × 4,096, .* {bound}, next .*GEMM 1\.\d+ × as long", out)

    assert command.main(["show", str(path)]) == 0
    assert "1 KiB" in capsys.readouterr().out

    other = folder / "other.json"
    document = json.loads(path.read_text())
    document["entries"][0].update(path="sm", block_quota=6, config={})
    document["header"]["driver"] = "of old"
    other.write_text(json.dumps(document))
    assert command.main(["compare", str(path), str(other)]) == 0
    out = capsys.readouterr().out
    assert "driver: None → 'of old'" in out
    assert "1 of 2 shared choices differ" in out
    assert "sm×6" in out

    assert command.main(["check", str(path)]) == 1
    never = "not used, it is simulated: transfer() never uses such a table"
    assert capsys.readouterr().out == f"{path}: {never}\n"
    as_if_measured(path, path)
    assert command.main(["check", str(path)]) == 0
    assert "used, 2 entries; the GPU is not compared" in capsys.readouterr().out
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    assert command.main(["check", str(path)]) == 1
    assert "not used, it is for schema 0" in capsys.readouterr().out


def as_if_measured(path, copy, **header):
    document = json.loads(path.read_text())
    document["header"] |= {"kind": "measured"} | header
    copy.write_text(json.dumps(document))


def test_a_simulated_table_is_never_used_even_under_a_real_gpus_name(folder, monkeypatch):
    command.main(SIMULATED)
    (path,) = folder.iterdir()
    monkeypatch.setattr(tuning, "SHIPPED", folder / "shipped")
    own = folder / file_name(GPU.name, GPU.num_sms)
    as_if_measured(path, own, kind=read_table(path).header["kind"], **identity(GPU))
    found = tuning.read_tuned(GPU)
    assert found.tables == ()
    assert found.notes == (f"tuned table {own} ignored: it is simulated; tune on this GPU",)
    as_if_measured(path, own, **identity(GPU))
    assert [file for file, _ in tuning.read_tuned(GPU).tables] == [own]


def test_a_single_case_is_told_in_the_singular(folder, capsys):
    assert cli.main(["tune", "--simulate", "h100", "--cases", "h2d:65536x64"]) == 0
    assert "\n1 case searched, 1 entry in " in capsys.readouterr().out


def test_check_compares_with_the_gpu_that_is_there(folder, capsys, monkeypatch):
    command.main(SIMULATED)
    (path,) = folder.iterdir()
    as_if_measured(path, path)
    capsys.readouterr()
    monkeypatch.setattr(command, "device_info", lambda: GPU)
    assert command.main(["check", str(path)]) == 1
    assert "name 'simulated H100 PCIe 5'" in capsys.readouterr().out
    assert command.main(["check"]) == 2
    told = capsys.readouterr().err
    assert "expected one for NVIDIA Fake 100" in told
    assert "run hikv tune" in told
    own = folder / file_name(GPU.name, GPU.num_sms)
    as_if_measured(path, own, name=GPU.name, link=GPU.fingerprint()["link"], cuda=13000)
    assert command.main(["check"]) == 0
    assert "may be stale: it is for driver None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "torch"),  # no GPU here
        (["--target", "1.5", *SIMULATED], "--target: expected a share"),
        (["--budget", "0", *SIMULATED], "--budget"),
        (["--cases", "h2d:5x5"], "--cases"),
        (["--cases", "", *SIMULATED[:2]], "--cases: expected DIRECTION"),
        (["--ship", *SIMULATED], "--ship: expected a table measured on a GPU"),
        (["show", "/nowhere.json"], "expected a tuned table"),
        (["show"], "name one file"),
        (["compare", "one.json"], "compare [-h] FILE FILE"),
    ],
)
def test_refusals_say_why_and_write_nothing(folder, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        code = command.main(arguments)
    except SystemExit as refusal:  # as argparse ends a program
        code = refusal.code
    assert code == 2
    assert words in capsys.readouterr().err
    assert not folder.exists()


def test_a_table_that_could_not_be_written_is_refused_before_the_search(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "tune", lambda *options, **more: pytest.fail("it searched"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HIKV_TUNED_DIR", str(tmp_path / "file" / "tuned"))
    assert command.main(SIMULATED) == 2
    assert "HIKV_TUNED_DIR: expected a folder" in capsys.readouterr().err


def test_a_busy_gpu_is_refused_and_a_hot_one_stops(folder, capsys, monkeypatch):
    told = [("process 7 is on the GPU too: end it",)]
    simulated = partial(SimulatedGpu, disturbed=lambda: told.pop(0))
    monkeypatch.setattr(command, "SimulatedGpu", simulated)
    assert command.main(SIMULATED) == 2
    assert "expected an idle GPU, got process 7" in capsys.readouterr().err
    told = [(), (), ("throttled by hardware thermal slowdown: let it cool",)]
    assert command.main(SIMULATED) == 1
    assert "no table written: throttled by hardware thermal slowdown" in capsys.readouterr().out
    assert [file.suffix for file in folder.iterdir()] == [".partial"]


def test_wrong_bytes_are_told_and_fail_the_command(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "SimulatedGpu", partial(SimulatedGpu, spoiled=("staged",)))
    assert command.main(SIMULATED) == 1
    assert "h2d:1024x4096 by staged × 1 was left out: a byte is wrong" in capsys.readouterr().err
    (path,) = folder.iterdir()
    assert {entry.path for entry in read_table(path).entries.values()} <= {"sm", "tma", "ce"}


def test_only_gpus_with_tensor_descriptors_search_for_rings(gpu):
    old, case = SimulatedGpu(PRESETS["a100"]), Case("h2d", 1024, 4096)
    assert "tma" in {point.path for point in gpu.points(case, False)}
    assert "tma" not in {point.path for point in old.points(case, False)}
    narrow = Case("h2d", 1024, 4096, 4)
    assert "tma" not in {point.path for point in gpu.points(narrow, False)}
