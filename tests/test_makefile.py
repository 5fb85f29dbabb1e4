"""The two commands on a Python of one's own, `VENV=`, where packages are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("table", "torch, triton"),
        ("test", "torch, triton, pytest, pytest_benchmark, hypothesis, ruff, mypy"),
    ],
)
def test_a_python_that_lacks_packages_is_told_which_and_what_to_do(target, missing):
    bare = f"PYTHON={sys.executable} -I -S"  # without site-packages
    command = ["make", "--no-print-directory", target, "VENV=", bare]
    outside = {name: v for name, v in os.environ.items() if not name.startswith("MAKE")}
    ended = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert ended.returncode == 2
    told, *after = ended.stderr.splitlines()
    assert told == (
        f"{sys.executable} has no {missing}; run {sys.executable} -m pip install -e '.[dev]', "
        "or leave VENV= out, and make installs what it needs in .venv"
    )
    assert len(after) == 1, "make's own line alone, no traceback"
    assert ended.stdout == ""
