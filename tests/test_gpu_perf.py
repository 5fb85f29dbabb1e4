"""The commands that need a GPU, on a small case: every byte right, and figures that can be."""

from __future__ import annotations

import json

import pytest
import torch

from perf.__main__ import main
from perf.compute import gemm
from perf.machine import Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SMALL = ["--layers", "4", "--heads", "8:4", "--tokens", "256", "--rounds", "3"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", *SMALL],
        ["crossover", "--page-bytes", "4096,65536", "--runs", "64", "--rounds", "3"],
        ["interference", *SMALL, "--gemm", "2048", "--attention", "2048", "--ways", "ce,sm@2"],
        ["overlap", *SMALL, "--gemm", "2048", "--ways", "ce,sm@2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_is_right_about_every_byte_and_its_result_can_be_shown(
    arguments, tmp_path, capsys
):
    file = tmp_path / "out.json"
    assert main([*arguments, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["kind"] == "measured"
    assert main(["show", str(file)]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_copies_run_beside_compute():
    machine = Machine.of_gpu()
    piece = gemm(machine.device, 2048)
    memory = torch.empty(2, 64 << 20, dtype=torch.uint8, device=machine.device)

    def copy(turn):
        memory[0].copy_(memory[1])

    alone = machine.duet(piece.run, 20, copy, 0)
    both = machine.duet(piece.run, 20, copy, 400)
    assert alone.covered == 0.0
    assert both.covered > 0.9
    assert both.compute_seconds > 0.9 * alone.compute_seconds
    assert 0 < both.copy_seconds < both.compute_seconds * 20
