"""What Triton makes of a kernel for a target, without a GPU: widths, registers, spills, order.

Compiling ahead of time needs a process without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from hikv.assembly import (
    accesses,
    amd_resources,
    amd_steps,
    loads_first,
    ptx_accesses,
    ptxas_resources,
    sass_steps,
    widths,
)
from hikv.boxes import plan_boxes
from hikv.errors import ArgumentError
from hikv.kernels.relayout import Config, arguments, default_config, relayout_kernel, variant
from hikv.kernels.relayout_tma import MIN_CAPABILITY, relayout_tma_kernel
from hikv.kernels.relayout_tma import Config as TmaConfig
from hikv.kernels.relayout_tma import arguments as tma_arguments
from hikv.kernels.relayout_tma import default_config as default_tma_config
from hikv.kernels.relayout_tma import variant as tma_variant
from hikv.kernels.submit import interpreted, word_dtype
from hikv.plan import PartPlan

_BULK_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\b")
_BULK_STORE = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.global\.shared::\w+\b")
_RING_BARRIER = re.compile(r"\bmbarrier\.init\b")


# What compilers of Triton 3.6 and later are known to take; some end the process on another.
_CUDA_TARGETS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
_AMD_TARGETS = ("gfx908", "gfx90a", "gfx942", "gfx950")


def parse_target(name: str) -> GPUTarget:
    """`"sm_90"` or `"gfx942"` as Triton's target; raises `ArgumentError` for an unknown one."""
    match = re.fullmatch(r"sm_(\d{2,3})a?", name)
    if match and int(match[1]) in _CUDA_TARGETS:
        return GPUTarget("cuda", int(match[1]), 32)
    if name in _AMD_TARGETS:
        return GPUTarget("hip", name, 64)
    known = ", ".join([*(f"sm_{arch}" for arch in _CUDA_TARGETS), *_AMD_TARGETS])
    raise ArgumentError(
        "target", expected=f"one of {known}", got=repr(name), remedy="pass e.g. sm_90 or gfx942"
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
        loads_first: whether every 16-byte load of a tile comes ahead of its first store, along the
            control flow of the final machine code; `None` where no disassembler here reads it.
        bytes_in_flight: payload a CTA has requested before it waits.
        ring_buffers: loads that a ring in shared memory keeps in flight; 0 without a ring.
        stage_bytes: shared memory of each of them.
        payload_share: payload over what those loads span.
        bulk_loads, bulk_stores: instructions that move boxes of a tensor descriptor.
        assembly: name → text or bytes (`ptx`, `cubin`, `sass`, `amdgcn`).
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_widths: Mapping[int, int]
    store_widths: Mapping[int, int]
    loads_first: bool | None
    bytes_in_flight: int
    assembly: Mapping[str, Any] = field(repr=False)
    ring_buffers: int = 0
    stage_bytes: int = 0
    payload_share: float = 1.0
    bulk_loads: int = 0
    bulk_stores: int = 0

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
            "ring_buffers": self.ring_buffers,
            "stage_bytes": self.stage_bytes,
            "payload_share": self.payload_share,
            "bulk_loads": self.bulk_loads,
            "bulk_stores": self.bulk_stores,
        }


def compile_relayout(part: PartPlan, target: str = "sm_90", config: Config | None = None) -> Report:
    """Compile the register kernel for `part` as a launch would, and read the result.

    Raises `ArgumentError` on an unknown target, and under `TRITON_INTERPRET`.
    """
    gpu = parse_target(target)
    config = config or default_config(part.vector_bytes, warp_size=gpu.warp_size)
    anchor = torch.empty(1, dtype=word_dtype(part.vector_bytes), device="meta")
    pages = torch.empty((2, 64), dtype=torch.int32, device="meta")
    constants = variant(part, config)
    run_time = arguments(part, (anchor, anchor), pages, constants)
    source = ast_source(relayout_kernel, run_time, constants)
    in_flight = min(config.tile, 64 * part.page_vectors) * part.vector_bytes
    return compile_report(source, gpu, config.num_warps, in_flight)


def compile_relayout_tma(
    part: PartPlan, target: str = "sm_90", config: TmaConfig | None = None
) -> Report:
    """Compile the TMA kernel for `part` as a launch would, and read the result.

    Raises `ArgumentError` on a target without tensor copies and under `TRITON_INTERPRET`,
    `PathUnavailable` where no descriptor serves `part`.
    """
    gpu = parse_target(target)
    if gpu.backend != "cuda" or gpu.arch < MIN_CAPABILITY:
        raise ArgumentError(
            "target",
            expected=f"sm_{MIN_CAPABILITY} or later, which copies through tensor descriptors",
            got=repr(target),
            remedy="compile the register kernel for this target",
        )
    config = config or default_tma_config(part, gpu.arch)
    boxes = plan_boxes(part, config.stage_bytes)
    anchor = torch.empty(1, dtype=torch.int32, device="meta")
    pages = torch.empty((2, 64), dtype=torch.int32, device="meta")
    run_time = tma_arguments(boxes, (anchor, anchor), (64, 64), pages)
    source = ast_source(relayout_tma_kernel, run_time, tma_variant(boxes, config))
    report = compile_report(source, gpu, config.num_warps, 0)
    ptx = report.assembly["ptx"]
    buffers = len(_RING_BARRIER.findall(ptx))
    return replace(
        report,
        bytes_in_flight=int(buffers * boxes.stage_bytes * boxes.payload_share),
        ring_buffers=buffers,
        stage_bytes=boxes.stage_bytes,
        payload_share=boxes.payload_share,
        bulk_loads=len(_BULK_LOAD.findall(ptx)),
        bulk_stores=len(_BULK_STORE.findall(ptx)),
    )


def ast_source(kernel: Any, run_time: Mapping[str, Any], constants: Mapping[str, Any]) -> ASTSource:
    """The source and specialisation that a launch with these arguments would compile.

    As at a launch, an integer of 1 is a constant, and what is a multiple of 16 is known to be, but
    for the parameters that the kernel says not to specialise.
    """
    if interpreted(kernel):
        raise ArgumentError(
            "TRITON_INTERPRET",
            expected="no such variable: kernels of an interpreting process cannot compile",
            got=repr(os.environ.get("TRITON_INTERPRET")),
            remedy="unset it",
        )
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def align(path: tuple[int, ...], value: int) -> None:
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]

    def integer(path: tuple[int, ...], value: int) -> str:
        if value == 1:
            constexprs[path] = 1
            return "constexpr"
        align(path, value)
        return _integer_type(value)

    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, run_time.get(parameter.name)
        if name in constants or value is None:
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
        elif isinstance(value, (torch.Tensor, TensorDescriptor)):
            signature[name] = mangle_type(value)
            fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if isinstance(value, torch.Tensor) and not fixed:
                align((i,), value.data_ptr())
        elif isinstance(value, tuple):
            signature[name] = tuple(integer((i, j), v) for j, v in enumerate(value))
        elif parameter.do_not_specialize:
            signature[name] = parameter.annotation_type or _integer_type(value)
        else:
            signature[name] = integer((i,), value)
    return ASTSource(kernel, signature, constexprs, attributes)


def _integer_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_report(source: ASTSource, target: GPUTarget, num_warps: int, in_flight: int) -> Report:
    """Compile `source` afresh and read the assembly and the assembler's own log."""
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    log = io.StringIO()
    # The log of the very assembly that made the cubin; a cached compilation would print none.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    asm = compiled.asm
    if target.backend == "hip":
        steps = amd_steps(asm["amdgcn"])
        first: bool | None = loads_first(steps)
        loads, stores = widths(accesses(steps))
        resources = amd_resources(asm["amdgcn"])
        assembly = {"amdgcn": asm["amdgcn"]}
    else:
        sass = disassemble(asm["cubin"])
        first = None if sass is None else loads_first(sass_steps(sass))
        loads, stores = widths(ptx_accesses(asm["ptx"]))
        resources = ptxas_resources(log.getvalue())
        assembly = {"ptx": asm["ptx"], "cubin": asm["cubin"], **({"sass": sass} if sass else {})}
    return Report(
        kernel=source.fn.__name__,
        target=target.arch if target.backend == "hip" else f"sm_{target.arch}",
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        load_widths=loads,
        store_widths=stores,
        loads_first=first,
        bytes_in_flight=in_flight,
        assembly=assembly,
    )


def disassemble(cubin: bytes) -> str | None:
    """SASS of `cubin`, by the disassembler in Triton's wheel; `None` for a GPU newer than that."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if "Cannot decode architecture" in done.stderr:
        return None
    done.check_returncode()
    return done.stdout
