"""Launches as the CUDA driver gets them: hikv's own launchers, and Triton's launcher under them.

The driver library is a stub that reads parameters by the list in the machine code and runs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_glue import KERNELS

pytestmark = pytest.mark.aot

TESTS = Path(__file__).parent
NAMES = [f"{path}:{name}" for path, (_, _, cases) in KERNELS.items() for name in cases]
AHEAD = [
    f"{path}:{name}"
    for path, (_, _, cases) in KERNELS.items()
    for name, case in cases.items()
    if case.ahead
]


def obstacle(compiler: str | None, headers: Path) -> str | None:
    """Why no launcher can be built and run over a stub here, or `None`."""
    if torch.cuda.is_available():
        return "a GPU is here, and its driver is the better judge"
    if compiler is None:
        return "no C compiler"
    if not (headers / "cuda.h").is_file():
        return "this Triton has no cuda.h"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "no Python.h, which Triton's launcher needs"
    return None if Path("/usr/include/elf.h").is_file() else "no elf.h"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `launch_glue.py` prints per case; one that it did not reach has its standard error."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    triton = importlib.util.find_spec("triton")
    headers = Path(str(triton and triton.origin)).parent / "backends" / "nvidia" / "include"
    reason = obstacle(compiler, headers)
    if reason is not None:
        pytest.skip(reason)

    folder = tmp_path_factory.mktemp("launch")
    library = folder / "libcuda.so.1"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    flags += [f"-Wl,-soname,{library.name}", f"-I{headers}"]
    build = [str(compiler), *flags, "-o", str(library), str(TESTS / "launch_stub.c")]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    paths = {"LD_LIBRARY_PATH": folder, "PYTHONPATH": TESTS.parent}
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {k: os.pathsep.join(filter(None, (str(v), env.get(k)))) for k, v in paths.items()}
    env |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    env |= {"LAUNCH_LOG": str(folder / "log")}
    command = [sys.executable, str(TESTS / "launch_glue.py"), *NAMES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = map(json.loads, done.stdout.splitlines())
    return {name: {"error": done.stderr} for name in NAMES} | {o["case"]: o for o in lines}


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_reaches_the_driver_as_planned(outcomes, name):
    outcome = outcomes[name]
    assert "error" not in outcome, outcome["error"]
    assert outcome["expected"]
    assert outcome["launched"] == outcome["expected"]
    # Whatever the number of pages, where their ids begin, and which layer: one compilation a part.
    assert outcome["loaded"] == outcome["parts"]


@pytest.mark.parametrize("name", AHEAD)
def test_what_is_compiled_ahead_is_what_a_launch_runs(outcomes, name):
    assert outcomes[name]["code"] == outcomes[name]["code_ahead"]


def test_cases_are_what_they_are_called(outcomes):
    def strides(name):
        return outcomes[f"sm:{name}"]["strides"][0]

    assert all(len(side) > 1 for side in strides("loops on both sides"))
    assert len(strides("one loop on the destination")[1]) == 1
    assert [len(side) for side in strides("one loop on both sides")] == [1, 1]
    assert 16 in strides("a stride of one vector")[0][:-1]
    assert max(strides("a stride of 2³¹ vectors")[0]) == 16 << 31
    assert outcomes["sm:K wider than V"]["parts"] == 2
