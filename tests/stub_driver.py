"""`driver_stub.c` as a library: found headers, the build, and what the C side recorded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from hikv.kernels.memcpy import MemcpyDriver

SOURCE = Path(__file__).with_name("driver_stub.c")
STREAM, DEVICE = 0x5000, torch.device("cuda", 3)
CONTEXT = 0xC000 + 3  # what the stub calls the primary context of DEVICE


def find_headers() -> dict[int, Path]:
    """Folders with a cuda.h that declares the batched copy, by CUDA version."""
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    if nvcc := shutil.which("nvcc"):
        roots.append(Path(nvcc).resolve().parents[1])
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        roots.append(Path(triton.origin).parent / "backends" / "nvidia")
    found: dict[int, Path] = {}
    for folder in (root / "include" for root in roots):
        header = folder / "cuda.h"
        text = header.read_text(errors="replace") if header.is_file() else ""
        version = re.search(r"#define CUDA_VERSION (\d+)", text)
        if version and int(version[1]) >= 12080:
            found.setdefault(int(version[1]), folder)
    return found


HEADERS = find_headers()
_BUILDS = tempfile.TemporaryDirectory(prefix="hikv-stub-")  # removed when the process ends


@functools.cache
def build(version: int | None = None) -> Path:
    """The library built from the header of `version`, default the newest; skips where it cannot."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not HEADERS or compiler is None:
        pytest.skip("no C compiler" if HEADERS else "no cuda.h of CUDA 12.8 or later")
    folder = HEADERS[max(HEADERS) if version is None else version]
    out = Path(_BUILDS.name) / f"libstub-{version}.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-I{folder}"]
    command = [compiler, *flags, "-o", str(out), str(SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


@dataclass(frozen=True)
class Stream:
    """What a launcher needs of a torch stream."""

    cuda_stream: int = STREAM
    device: torch.device = DEVICE


@dataclass(frozen=True)
class Record:
    """One call as the C side saw it; `generation` is 12080 or 13000, or 0 for a single copy."""

    generation: int
    count: int
    num_attrs: int
    first: int
    src_access_order: int
    src_type: int
    src_id: int
    dst_type: int
    dst_id: int
    flags: int
    stream: int
    context: int


@dataclass(frozen=True)
class Box:
    """A queued copy that has not run; `row` and `layer` are bytes from each to the next."""

    src: int
    src_row: int
    src_layer: int
    dst: int
    dst_row: int
    dst_layer: int
    width: int
    height: int
    depth: int


class Stub:
    """The driver that the tests control. Copies wait until `run()`."""

    def __init__(self, version: int | None = None) -> None:
        self.path = str(build(version))
        self.library = ctypes.CDLL(self.path)

    def driver(self, version: int = 13000) -> MemcpyDriver:
        """Start afresh as a driver of CUDA `version`."""
        self.library.stub_reset(version)
        return MemcpyDriver(ctypes.CDLL(self.path))

    def records(self) -> list[Record]:
        out = (ctypes.c_longlong * len(fields(Record)))()
        calls = []
        for i in range(self.library.stub_num_records()):
            self.library.stub_record(ctypes.c_size_t(i), out)
            calls.append(Record(*out))
        return calls

    def run(self) -> None:
        self.library.stub_run()

    def pending(self) -> list[Box]:
        out = (ctypes.c_size_t * len(fields(Box)))()
        boxes = []
        for i in range(self.library.stub_num_pending()):
            self.library.stub_pending(ctypes.c_size_t(i), out)
            boxes.append(Box(*out))
        return boxes

    def sizes(self, which: str, count: int) -> list[int]:
        """Sizes, offsets and constants of the header, from the function `stub_<which>`."""
        out = (ctypes.c_size_t * count)()
        getattr(self.library, f"stub_{which}")(out)
        return list(out)


def balanced() -> Iterator[Stub]:
    """A fixture's body: a stub on which every context that was pushed has been popped."""
    stub = Stub()
    yield stub
    assert stub.library.stub_context_depth() == 0
