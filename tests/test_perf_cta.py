"""`perf cta`: the published shapes, the figures of a fake GPU, and what is only predicted."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser

import pytest
from fake_machine import GPU, FakeGpu, flip_a_bit

from hikv.compiled import Report as Compiled
from perf import cta
from perf.__main__ import main
from perf.case import DIRECTIONS, add_case_options, cases_from
from perf.compiler_table import COMPILERS, compiler_table, outcome, variant
from perf.output import WIDTH, Column, Progress, Table
from perf.published import published_case

SMALL = ["--layers", "2", "--heads", "4:1,4:2", "--head-dim", "16", "--page", "4", "--tokens", "12"]


def cases(*arguments):
    parser = ArgumentParser()
    add_case_options(parser)
    return cases_from(parser.parse_args(arguments))


def compiled(part, target="sm_90", in_flight=131072):
    loads = {16: 8, 4: 2}
    return Compiled("kernel", target, 64, 0, 0, loads, {16: 8}, True, in_flight, {})


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setitem(COMPILERS, "sm", compiled)


@pytest.fixture
def gpu(monkeypatch):
    """Let the command find a fake GPU; the test chooses which."""

    def install(machine):
        monkeypatch.setattr(cta, "device_info", lambda: GPU)
        monkeypatch.setattr(cta.Machine, "of_gpu", lambda: machine)
        return machine

    return install


def test_the_default_cases_are_the_published_table_with_its_runs_and_bytes():
    found = cases()
    assert found == [published_case(h, g) for h, g in cases_of_the_table()]
    runs = {direction: [case.plan(direction).row_run for case in found] for direction in DIRECTIONS}
    assert runs["h2d"] == runs["d2h"] == [2048, 1024, 512, 256, 4096, 512, 256]
    assert [case.nbytes >> 20 for case in found] == [488] * 4 + [976] * 3
    assert cta.counted(found).endswith("488 or 976 MiB a copy")


def cases_of_the_table():
    return [(8, 1), (8, 2), (8, 4), (8, 8), (16, 1), (16, 8), (16, 16)]


def test_options_choose_the_shape():
    (latent,) = cases("--mla", "576", "--tokens", "65")
    assert latent.label == {"row": 576}
    assert (latent.spec.latent, latent.host_layout, latent.num_pages) == (
        True,
        "page_first_direct",
        2,
    )
    assert latent.describe().endswith("2 scattered pages of 64 tokens, 65 rounded up to 128")
    (whole,) = cases("--heads", "4", "--tokens", "64")
    assert whole.describe().endswith("bf16, 1 scattered page of 64 tokens")
    (odd,) = cases("--mla", "133")
    assert odd.plan("h2d").row_run == 133
    (case,) = cases("--heads", "4", "--gpu-layout", "page_head", "--host-layout", "page_unified")
    assert (case.gpu_layout, case.host_layout, case.spec.num_groups) == (
        "page_head",
        "page_unified",
        1,
    )


def test_the_help_tells_groups_from_heads_per_group_and_bytes_from_elements(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["cta", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "heads:number of groups (KVSpec.head_group is heads per group)" in told
    assert "bytes of a latent row (576 bf16 = 1152), instead of heads" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "8:3"], "3 groups do not divide 8 heads"),
        (["--quotas", "0,2"], "at least 1, got '0'"),
        (["--tokens", "many"], "at least 1, got 'many'"),
        (["--path", "dma"], "invalid choice: 'dma'"),
    ],
)
def test_bad_options_are_refused_by_the_parser(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["cta", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "staged"], "--path: expected sm or tma where there is no GPU"),
        (["--json", "/nowhere/at/all.json"], "--json: expected a file in a folder that exists"),
        (["--json", "/"], "--json: expected a file that can be written"),
        (["--mla", "576", "--host-layout", "page_head"], "expected a layout for latent rows"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_work(arguments, message, capsys, no_compiler):
    assert main(["cta", *SMALL, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["cta", *SMALL, "--plot", "figure.png"]) == 2
    assert "pip install 'hikv[plot]'" in capsys.readouterr().err


def test_measured_rows_are_the_clocks_figures_beside_ceiling_model_and_published():
    rates = {("sm", 2): 20.0, ("sm", 32): 48.0, ("ce", 0): 60.0}
    machine = FakeGpu(lambda path, quota: rates[path, quota])
    report, rows = cta.measured_report(machine, cases(*SMALL), (2, 32), "sm", 3)
    assert report.kind == "measured"
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        rate = rates["sm", row["quota"]]
        assert row["wrong"] is None
        assert [row[f"gbps_p{p}"] for p in (20, 50, 80)] == pytest.approx([rate] * 3, rel=1e-3)
        assert row["ceiling"] == pytest.approx(60.0, rel=1e-3)
        assert row["ratio"] == pytest.approx(rate / 60, rel=1e-3)
        assert row["predicted"] == pytest.approx(60.0, rel=1e-3)  # 128 KiB × 2 ÷ 2.4 µs is more
        assert row["published"] is None
        assert row["submit_us"] == pytest.approx(5.0)
        assert row["rounds"] == 3
    summary, detail = report.tables
    assert len(summary.rows) == 2
    assert len(detail.rows) == 8
    assert detail.terminal().count("  ≤60.0  ") == 8
    assert "20.0  48.0    60.0   20.0  48.0    60.0" in summary.terminal()


def test_the_copy_engine_runs_in_turn_with_the_kernel():
    machine = FakeGpu()
    cta.measured_report(machine, cases(*SMALL)[:1], (2,), "sm", 10)
    timed = machine.copied[2 : 2 + 2 * 12]  # two checks, then two warm-ups and ten rounds
    assert all({*timed[i : i + 2]} == {("sm", 2), ("ce", 0)} for i in range(0, 24, 2))


def test_one_wrong_byte_leaves_its_figure_out_and_ends_with_1(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: quota == 32 and flip_a_bit(plan)))
    assert main(["cta", *SMALL, "--rounds", "1"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG, h2d: page") == printed.count("WRONG, d2h: page") == 2
    rows = [line.split() for line in printed.splitlines() if line.endswith(("right", "WRONG"))]
    assert [row[5] for row in rows if row[-1] == "WRONG"] == ["–"] * 4
    assert len([row for row in rows if row[-1] == "right"]) == 4


def test_a_copy_engine_that_is_wrong_condemns_the_row(gpu, capsys):
    gpu(FakeGpu(fault=lambda plan, path, quota: path == "ce" and flip_a_bit(plan)))
    assert main(["cta", *SMALL, "--rounds", "1"]) == 1
    assert "WRONG, h2d: copy engine: page" in capsys.readouterr().out


def test_on_a_gpu_the_json_names_machine_and_versions(gpu, tmp_path, capsys):
    gpu(FakeGpu())
    file = tmp_path / "out.json"
    assert main(["cta", *SMALL, "--path", "ce", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert told["kind"] == "measured"
    assert (told["device"]["name"], told["link"], told["driver"]) == (GPU.name, "pcie5x16", "580.0")
    assert {"hikv", "torch", "triton", "python"} <= told["versions"].keys()
    assert told["date"].endswith("+00:00")
    assert {row["quota"] for row in told["tables"][1]["rows"]} == {0}
    assert all("predicted" not in row for row in told["tables"][1]["rows"])
    assert "NVIDIA Fake 100, 132 SMs, pcie5x16 (63.0 GB/s theoretical)" in capsys.readouterr().out


def test_without_a_gpu_nothing_but_the_cpu_path_looks_measured(no_compiler, tmp_path, capsys):
    json_file, markdown_file = tmp_path / "out.json", tmp_path / "out.md"
    outputs = ["--json", str(json_file), "--markdown", str(markdown_file)]
    assert main(["cta", *SMALL, *outputs]) == 0
    printed = capsys.readouterr().out
    told = json.loads(json_file.read_text())
    assert printed.startswith("perf cta: predicted, not measured\n")
    assert told["kind"] == "predicted, not measured"
    assert told["device"] is None
    predicted, machine_code, host = told["tables"]
    assert predicted["title"] == "GB/s at most, by a model; not measured"
    marks = {c["title"]: c["mark"] for c in predicted["columns"]}
    assert marks == {"H": "", "HG": "", "run B": "", "16K": "", "hikv": "≤"}
    assert "≤50.6" in printed
    assert "H heads in HG groups." in printed
    assert "not run" in machine_code["title"]
    assert host["title"].startswith("Measured on this host's CPU")
    assert "gbps_p50" not in json.dumps([predicted, machine_code])
    for row in host["rows"]:
        assert row["h2d bytes"] == row["d2h bytes"] == "right"
        assert row["h2d gbps_p50"] > 0
    assert markdown_file.read_text().count("\n### ") == 3


def test_a_wrong_byte_on_the_cpu_path_ends_with_1(no_compiler, monkeypatch, capsys):
    copy = cta.Machine.copy

    def spoilt(self, plan, path, block_quota=None):
        copy(self, plan, path, block_quota)
        flip_a_bit(plan)

    monkeypatch.setattr(cta.Machine, "copy", spoilt)
    assert main(["cta", *SMALL]) == 1
    assert "WRONG, h2d: page" in capsys.readouterr().out


def test_the_prediction_uses_the_bytes_in_flight_that_the_compiler_reports():
    case = published_case(8, 1)
    reports = {(case, way): compiled(None, in_flight=8192) for way in DIRECTIONS}
    (row,) = cta.predicted_rows([case], (2, 32), cta.PCIE5, reports)
    assert row["h2d@2 hikv"] == pytest.approx(2 * 8192 / 2.4e-6 / 1e9)
    assert row["h2d@2 baseline"] == pytest.approx(13.65, abs=0.01)
    assert (row["h2d@2 published"], row["d2h@32 published"]) == (13.6, 52.4)


def test_every_table_fits_a_terminal_of_100_columns(capsys):
    found = cases()
    reports = {(case, way): compiled(None) for case in found for way in DIRECTIONS}
    rows = cta.predicted_rows(found, (2, 32), cta.PCIE5, reports)
    texts = [
        cta.predicted_table(rows, (2, 32), cta.PCIE5).terminal(),
        compiler_table(
            [
                variant("tma", case, way, case.plan(way).parts[0]) | outcome(report)
                for (case, way), report in reports.items()
            ],
            "sm_90",
        ).terminal(),
    ]
    report, _ = cta.measured_report(FakeGpu(), cases(*SMALL), (2, 32), "sm", 1)
    texts.append(report.terminal())
    assert WIDTH == 100
    assert max(len(line) for text in texts for line in text.splitlines()) <= WIDTH
    assert "≤52.5  52.4" in texts[0]
    assert "what was published of one, so that it agrees there is no test" in texts[0]


def test_a_table_for_people_and_for_markdown():
    columns = [
        Column("way", "way"),
        Column("a", "GB/s", ".1f", "H2D"),
        Column("b", "p20", ".1f", "H2D"),
        Column("c", "n", ",", "a long title"),
    ]
    rows = [{"way": "sm", "a": 1.25, "b": 10.0, "c": 1000}, {"way": "tma", "a": None, "b": 2.0}]
    table = Table("Title", columns, rows, ["Note."])
    assert table.terminal().splitlines() == [
        "Title",
        "",
        "      ── H2D ───   ─ a long title ─",
        "way   GB/s   p20" + " " * 18 + "n",
        "sm     1.2  10.0" + " " * 14 + "1,000",
        "tma      –   2.0" + " " * 18 + "–",
        "",
        "Note.",
    ]
    assert table.markdown().splitlines() == [
        "### Title",
        "",
        "| way | H2D GB/s | H2D p20 | a long title n |",
        "| ---: | ---: | ---: | ---: |",
        "| sm | 1.2 | 10.0 | 1,000 |",
        "| tma | – | 2.0 | – |",
        "",
        "Note.",
    ]
    assert table.json()["rows"] == rows


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bar_is_drawn_on_a_terminal_alone(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Progress(4, "work") as bar:
        for label in ("first", "second", "third"):
            bar.step(label)
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    if terminal:
        assert drawn == ["", f"work {'░' * 24} 0/4 first", *drawn[2:4], ""]
        assert drawn[3] == f"work {'█' * 12}{'░' * 12} 2/4 third"
    else:
        assert drawn == [""]


@pytest.mark.parametrize("name", ["figure.png", "figure.svg"])
def test_the_plot_is_written_in_the_format_of_its_name(name, no_compiler, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    file = tmp_path / name
    assert main(["cta", *SMALL, "--plot", str(file)]) == 0
    start = {"figure.png": b"\x89PNG", "figure.svg": b"<?xml"}[name]
    assert file.read_bytes().startswith(start)


def test_the_plot_of_a_measured_table_has_its_points_and_spread(gpu, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    machine = gpu(FakeGpu(lambda path, quota: 40.0 + (quota or 0)))
    report, rows = cta.measured_report(machine, cases(*SMALL), (2, 32), "sm", 3)
    panels = cta.cta_panels(cases(*SMALL)[0], rows, report.facts["in_flight"], cta.PCIE5)
    labels = [series.label for series in panels["D2H"]]
    assert labels == ["model, 16 KiB a CTA", "upper bound, hikv", "measured"]
    (measured,) = (series for series in panels["D2H"] if series.label == "measured")
    assert measured.x == [2, 32]
    assert measured.y == pytest.approx([42.0, 72.0], rel=1e-3)
    assert main(["cta", *SMALL, "--plot", str(tmp_path / "out.pdf")]) == 0
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.aot
def test_the_real_compiler_and_the_real_copy(capsys):
    arguments = ["--layers", "2", "--heads", "8:4", "--tokens", "128", "--rounds", "1"]
    assert main(["cta", *arguments, "--target", "sm_100"]) == 0
    printed = capsys.readouterr().out
    assert "Compiled for sm_100, not run" in printed
    assert len(re.findall(r"16×16( \d+×4)?  16×16 ", printed)) == 2
    assert printed.count("131072") == 2
    assert main(["cta", *arguments, "--path", "tma"]) == 0
    assert len(re.findall(r"\d box .*\d box", capsys.readouterr().out)) == 2


@pytest.mark.aot
def test_every_variant_is_compiled_or_has_a_reason(tmp_path, capsys):
    arguments = ["compile", "--layers", "2", "--heads", "8:4", "--tokens", "128"]
    assert main([*arguments, "--assembly", str(tmp_path / "asm")]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(?:sm|tma) +8   4    512  (?:h2d|d2h) ", printed, re.M)) == 4
    assert max(map(len, printed.splitlines())) <= WIDTH
    files = sorted(file.name for file in (tmp_path / "asm").iterdir())
    assert len(files) == 4 * 3
    assert "sm-8-4-d2h-kv.ptx" in files
    assert main([*arguments, "--target", "sm_80"]) == 0
    printed = capsys.readouterr().out
    assert "No figures: target: expected sm_90 or later" in printed
    assert len(re.findall(r"^tma .*–  +–  +–  +–", printed, re.M)) == 2


def test_assembly_goes_into_a_folder(tmp_path, capsys):
    file = tmp_path / "taken"
    file.touch()
    assert main(["compile", "--assembly", str(file)]) == 2
    assert f"--assembly: expected a folder, got {file}" in capsys.readouterr().err
