"""The command line: what is refused, and output whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hikv.cli import main
from hikv.console import quantity, until_reader_leaves


def test_one_of_a_kind_is_singular():
    assert [quantity(n, "page") for n in (0, 1, 2)] == ["0 pages", "1 page", "2 pages"]
    assert [quantity(n, "entry") for n in (1, 2)] == ["1 entry", "2 entries"]


def test_an_interrupt_has_the_exit_code_of_one(capsys):
    def run() -> int:
        raise KeyboardInterrupt

    assert until_reader_leaves(run) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [["hikv", "doctor"], ["hikv", "doctor", "--json"], ["hikv"], ["perf", "replay", "A"]],
)
def test_a_reader_that_goes_away_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as output:
        command = [sys.executable, "-m", *arguments]
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 141
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor"], "which paths can run here"),
        (["tune"], "the fewest CTAs that move KV pages"),
        (["tune", "show"], "Print a tuned table; without FILE, the one of this GPU."),
        (["tune", "compare"], "Print where two tuned tables choose differently."),
        (["tune", "check"], "1: it would not, as it never uses a simulated one."),
        (["bench"], "Benchmarks of hikv."),
        (["compile"], "without a GPU"),
    ],
)
def test_every_command_has_help(arguments, words, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(f"usage: hikv {' '.join(arguments)} [-h]")
    assert words in told


@pytest.mark.parametrize("arguments", [["nope"], ["doctor", "--jason"], ["doctor", "--json", "x"]])
def test_what_no_command_knows_is_refused(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as refusal:  # as argparse ends a program
        code = refusal.code
    assert code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "hikv" in told.err
    assert arguments[-1] in told.err


def test_an_unknown_variable_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("HIKV_PINED_BUDGET", "1")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("hikv doctor: HIKV_PINED_BUDGET: expected one of")
