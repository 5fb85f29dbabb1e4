"""`perf show` and `perf compare-results`: result files, read again."""

from __future__ import annotations

import json

import pytest
from fake_machine import GPU, FakeGpu

from perf.__main__ import main
from perf.compare_results import changes
from perf.output import WIDTH, Column, Report, Table

COLUMNS = [
    Column("way", "way"),
    Column("quota", "CTAs"),
    Column("gbps", "GB/s", ".1f", "H2D"),
    Column("submit", "submit µs", ",.0f"),
    Column("wins", "wins"),
]


def report(*rates, extra=(), title="Ways, measured"):
    rows = [
        {"way": "sm", "quota": quota, "gbps": rate, "submit": 10.0, "wins": "ce"}
        for quota, rate in zip((2, 8, 32), rates, strict=False)
    ]
    tables = [Table(title, COLUMNS, [*rows, *extra], ["Note."])]
    return Report("perf cta", "measured", "some copies", "GB/s = 10⁹ bytes", GPU, tables)


def write(path, found):
    path.write_text(json.dumps(found.json(), ensure_ascii=False))
    return str(path)


def test_a_result_is_shown_as_it_was_printed(tmp_path, capsys):
    found, text = report(20.0, 40.0), tmp_path / "out.md"
    file = write(tmp_path / "a.json", found)
    assert main(["show", file, "--markdown", str(text)]) == 0
    printed = capsys.readouterr().out
    header, table = printed.rstrip("\n").split("\n\n\n")
    assert found.terminal().split("\n\n\n")[1] == table
    assert header.splitlines()[:-1] == found.terminal().split("\n\n\n")[0].splitlines()
    assert header.splitlines()[-1].startswith("written 20")
    assert text.read_text().endswith("| sm | 8 | 40.0 | 10 | ce |\n\nNote.\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'schema'"),
        ('{"schema": 99}', "ValueError: schema 99"),
        ('{"schema": 1, "tables": [{"title": "x", "rows": []}]}', "KeyError: 'columns'"),
    ],
)
@pytest.mark.parametrize("command", ["show", "compare-results"])
def test_a_file_that_is_no_result_is_refused(command, text, reason, tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert main([command, *[str(file)] * (1 if command == "show" else 2)]) == 2
    assert f"bad.json: expected a result of perf, schema 1, got {reason}" in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main(["show", str(tmp_path / "none.json")]) == 2
    assert "FileNotFoundError" in capsys.readouterr().err


def test_changes_are_the_figures_beyond_the_threshold(tmp_path, capsys):
    a = write(tmp_path / "a.json", report(20.0, 40.0, 50.0))
    b = write(tmp_path / "b.json", report(20.5, 50.0, 25.0))
    assert main(["compare-results", a, b]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    rows = [line.split() for line in printed.splitlines() if line.startswith("sm ")]
    assert rows == [
        ["sm", "8", "H2D", "GB/s", "40.0", "50.0", "+25.0%"],
        ["sm", "32", "H2D", "GB/s", "50.0", "25.0", "-50.0%"],
    ]
    assert "6 figures compared, 2 changed by 5% or more." in printed
    assert printed.count("NVIDIA Fake 100") == 2
    assert main(["compare-results", a, b, "--threshold", "0.02"]) == 0
    assert "6 figures compared, 3 changed by 2% or more." in capsys.readouterr().out


@pytest.mark.parametrize("share", ["nan", "0", "-1", "inf", "much"])
def test_a_threshold_that_compares_nothing_is_refused(share, tmp_path, capsys):
    a = write(tmp_path / "a.json", report(20.0))
    with pytest.raises(SystemExit, match="2"):
        main(["compare-results", a, a, "--threshold", share])
    assert "argument --threshold" in capsys.readouterr().err


def test_markdown_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    a = write(tmp_path / "a.json", report(20.0))
    assert main(["show", a, "--markdown", str(tmp_path / "nowhere" / "a.md")]) == 2
    printed = capsys.readouterr()
    assert "--markdown: expected a file in a folder that exists" in printed.err
    assert printed.out == ""


def test_rows_and_tables_of_one_file_alone_are_counted_not_compared(tmp_path, capsys):
    lost = [{"way": "tma", "quota": 4, "gbps": 9.0}]
    a = write(tmp_path / "a.json", report(20.0, extra=lost))
    b = write(tmp_path / "b.json", report(20.0, 40.0))
    assert main(["compare-results", a, b]) == 0
    printed = capsys.readouterr().out
    assert "2 figures compared, 0 changed" in printed
    assert "2 rows are in one file only." in printed
    other = write(tmp_path / "c.json", report(1.0, title="Another"))
    assert main(["compare-results", a, other]) == 0
    printed = capsys.readouterr().out
    assert "in one file only: Another" in printed
    assert "in one file only: Ways, measured" in printed


def test_a_figure_that_is_missing_on_one_side_is_not_compared():
    def table(rate):
        return Table("t", COLUMNS, [{"way": "sm", "quota": 2, "gbps": rate}])

    found = changes(table(None), table(5.0), 0.05)
    assert found.notes == ["0 figures compared, 0 changed by 5% or more."]
    assert changes(table(5.0), table(None), 0.05).rows == []
    assert changes(Table("t", COLUMNS[:2], []), Table("t", COLUMNS[:2], []), 0.05) is None


def test_what_a_command_writes_can_be_shown(tmp_path, capsys, monkeypatch):
    from perf import overlap

    machine = FakeGpu()
    monkeypatch.setattr(overlap.Machine, "of_gpu", lambda: machine)
    file = str(tmp_path / "out.json")
    small = ["--layers", "2", "--heads", "4:2", "--head-dim", "16", "--page", "4", "--tokens", "12"]
    assert main(["overlap", *small, "--gemm", "8", "--rounds", "1", "--json", file]) == 0
    first = capsys.readouterr().out
    assert main(["show", file]) == 0
    assert capsys.readouterr().out.split("\n\n\n")[1] == first.split("\n\n\n")[1]
    assert main(["compare-results", file, file]) == 0
    assert " 0 changed by 5% or more." in capsys.readouterr().out
