"""`perf gather`: real ranks, verified bytes, a ratio."""

from __future__ import annotations

import argparse
import json

import pytest

from perf import gather


def parsed(*options):
    parser = argparse.ArgumentParser()
    gather.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize("rows", [("--mla", "576"), ("--heads", "2")])
def test_a_small_run(tmp_path, capsys, rows):
    sizes = ("--ranks", "2", "--tokens", "100", "--page", "16", "--layers", "3", "--rounds", "2")
    file = tmp_path / "gather.json"
    assert gather.run(parsed(*rows, *sizes, "--json", str(file))) == 0
    assert "host back end beside gloo" in capsys.readouterr().out
    result = json.loads(file.read_text())
    (row,) = result["tables"][0]["rows"]
    assert (row["ranks"], row["wrong bytes"], row["engine"]) == (2, 0, "CPU threads")
    assert row["ratio"] > 0
    assert row["layer MiB"] == pytest.approx(7 * 16 * (576 if "--mla" in rows else 1024) / 2**20)


def test_a_wrong_byte_is_counted_and_fails_the_run(capsys, monkeypatch):
    row = {"ranks": 2, "layer MiB": 1.0, "copies": 1, "engine": "CPU threads", "wrong bytes": 3}
    row |= {f"{way}{part}": 1.0 for way in ("hikv", "gloo") for part in (" p10", "", " p90")}
    monkeypatch.setattr(gather, "measure_ranks", lambda work, n: row | {"ratio": 1.0})
    assert gather.run(parsed("--ranks", "2")) == 1
    assert "wrong bytes" in capsys.readouterr().out


def test_a_picture_can_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    row = {"ranks": 2, "layer MiB": 1.0, "copies": 1, "engine": "CPU threads", "wrong bytes": 0}
    row |= {f"{way}{part}": 1.0 for way in ("hikv", "gloo") for part in (" p10", "", " p90")}
    monkeypatch.setattr(gather, "measure_ranks", lambda work, n: row | {"ratio": 1.0, "ranks": n})
    file = tmp_path / "gather.svg"
    assert gather.run(parsed("--plot", str(file))) == 0
    assert "gloo, GB/s a rank" in file.read_text()


def test_ranks_are_whole_numbers():
    with pytest.raises(SystemExit):
        parsed("--ranks", "2,x")
