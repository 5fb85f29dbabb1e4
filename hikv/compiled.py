"""What Triton makes of a kernel for a target, without a GPU: widths, registers, spills, order.

Compiling ahead of time needs a process without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hikv.errors import ArgumentError
from hikv.kernels import relayout as register
from hikv.kernels.submit import interpreted, word_dtype
from hikv.plan import PartPlan

_POINTERS = {
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ACCESS = re.compile(
    r"\b(ld|st)\.(?:\w+\.)*?global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bsuf](\d+)\b"
)


def parse_target(name: str) -> GPUTarget:
    """`"sm_90"` or `"gfx942"` as Triton's target; raises `ArgumentError` on another form."""
    if match := re.fullmatch(r"sm_(\d{2,3})a?", name):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9\d+\w?", name):
        return GPUTarget("hip", name, 64)
    raise ArgumentError(
        "target", expected="sm_NN or gfx9NN", got=repr(name), remedy="pass e.g. sm_90 or gfx942"
    )


@dataclass(frozen=True)
class Report:
    """The compiler's account of one kernel variant.

    Attributes:
        kernel, target: what was compiled for what.
        registers: per thread (VGPRs on AMD).
        spill_bytes: spilled stores and loads per thread (scratch on AMD).
        shared_bytes: shared memory of a CTA, rings included.
        load_widths, store_widths: bytes of each access to global memory → how many a thread makes.
        loads_first: whether every wide load of a tile comes ahead of its first store, in the final
            machine code.
        bytes_in_flight: payload a CTA has requested before it waits.
        assembly: name → text or bytes (`ptx`, `cubin`, `sass`, `amdgcn`).
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_widths: Mapping[int, int]
    store_widths: Mapping[int, int]
    loads_first: bool
    bytes_in_flight: int
    assembly: Mapping[str, Any] = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Everything but the assembly, ready for JSON."""
        return {
            "kernel": self.kernel,
            "target": self.target,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "load_widths": dict(self.load_widths),
            "store_widths": dict(self.store_widths),
            "loads_first": self.loads_first,
            "bytes_in_flight": self.bytes_in_flight,
        }


def compile_relayout(
    part: PartPlan, target: str = "sm_90", config: register.Config | None = None
) -> Report:
    """Compile the register kernel for `part` as a launch would, and read the result.

    Raises `ArgumentError` on an unknown target, `RuntimeError` under `TRITON_INTERPRET`.
    """
    gpu = parse_target(target)
    config = config or register.default_config(part.vector_bytes, warp_size=gpu.warp_size)
    anchor = torch.empty(1, dtype=word_dtype(part.vector_bytes), device="meta")
    pages = torch.empty((2, 64), dtype=torch.int32, device="meta")
    constants = register.variant(part, config)
    run_time = register.arguments(part, (anchor, anchor), pages, constants)
    source = ast_source(register.relayout_kernel, run_time, constants)
    in_flight = min(config.tile, 64 * part.page_vectors) * part.vector_bytes
    return compile_report(source, gpu, config.num_warps, in_flight)


def ast_source(kernel: Any, run_time: Mapping[str, Any], constants: Mapping[str, Any]) -> ASTSource:
    """The source and specialisation that a launch with these arguments would compile.

    Pointers and integers that are multiples of 16 are known to be so, as at a launch.
    """
    if interpreted(kernel):
        raise RuntimeError(
            "kernels of an interpreting process cannot compile; unset TRITON_INTERPRET"
        )
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def integer(path: tuple[int, ...], value: int) -> str:
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, name in enumerate(kernel.arg_names):
        value = run_time.get(name)
        if name in constants or value is None:
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[name] = tuple(integer((i, j), v) for j, v in enumerate(value))
        else:
            signature[name] = integer((i,), value)
    return ASTSource(kernel, signature, constexprs, attributes)


def compile_report(source: ASTSource, target: GPUTarget, num_warps: int, in_flight: int) -> Report:
    """Compile `source` afresh and read the assembly and the assembler's own log."""
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    log = io.StringIO()
    # The log of the very assembly that made the cubin; a cached compilation would print none.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    shared = compiled.metadata.shared
    name = source.fn.__name__
    if target.backend == "hip":
        return _amd_report(name, target.arch, compiled.asm["amdgcn"], shared, in_flight)
    used = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if used is None or spills is None:
        raise RuntimeError(f"no resource report from the assembler: {log.getvalue()!r}")
    sass = disassemble(compiled.asm["cubin"])
    loads, stores = _ptx_widths(compiled.asm["ptx"])
    return Report(
        kernel=name,
        target=f"sm_{target.arch}",
        registers=int(used[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=shared,
        load_widths=loads,
        store_widths=stores,
        loads_first=_loads_first(re.findall(r"\b(LDG|STG)\.E\.(?:\w+\.)*128\b", sass), "LDG"),
        bytes_in_flight=in_flight,
        assembly={"ptx": compiled.asm["ptx"], "cubin": compiled.asm["cubin"], "sass": sass},
    )


def disassemble(cubin: bytes) -> str:
    """SASS of `cubin`, by the disassembler in Triton's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _amd_report(kernel: str, arch: str, assembly: str, shared: int, in_flight: int) -> Report:
    widths = {"": 4, "x2": 8, "x3": 12, "x4": 16}
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    order = []
    for kind, width in re.findall(r"\bglobal_(load|store)_dword(x[234])?\b", assembly):
        counts = loads if kind == "load" else stores
        counts[widths[width]] = counts.get(widths[width], 0) + 1
        if width == "x4":
            order.append(kind)
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    if registers is None or scratch is None:
        raise RuntimeError("no resource report in the AMD assembly")
    return Report(
        kernel=kernel,
        target=arch,
        registers=int(registers[1]),
        spill_bytes=int(scratch[1]),
        shared_bytes=shared,
        load_widths=loads,
        store_widths=stores,
        loads_first=_loads_first(order, "load"),
        bytes_in_flight=in_flight,
        assembly={"amdgcn": assembly},
    )


def _ptx_widths(ptx: str) -> tuple[dict[int, int], dict[int, int]]:
    counts: dict[str, dict[int, int]] = {"ld": {}, "st": {}}
    for kind, vector, bits in _ACCESS.findall(ptx):
        width = int(vector or 1) * int(bits) // 8
        counts[kind][width] = counts[kind].get(width, 0) + 1
    return counts["ld"], counts["st"]


def _loads_first(order: list[str], load: str) -> bool:
    """Whether no wide load follows a wide store."""
    stores = [i for i, kind in enumerate(order) if kind != load]
    return not stores or load not in order[stores[0] :]
