"""What Triton makes of the register kernel for GPUs that are not here: widths, spills, order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import LATENT_PAIRS, PAIRS
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from hikv.assembly import accesses, sass_steps, widths
from hikv.buffer import KVBuffer
from hikv.compiled import ast_source, compile_relayout, compile_report, parse_target
from hikv.errors import ArgumentError
from hikv.kernels.relayout import Config, arguments, default_config, relayout_kernel, variant
from hikv.kernels.submit import interpreted, word_dtype
from hikv.plan import PartPlan, plan_transfer
from hikv.spec import KVSpec

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        interpreted(relayout_kernel), reason="kernels of an interpreting process cannot compile"
    ),
]

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
TABLE = "one tensor per layer"


def heads(head_group: int, num_heads: int = 8) -> KVSpec:
    return KVSpec(61, num_heads, 128, 64, torch.bfloat16, head_group=head_group)


def latent(row_bytes: int) -> KVSpec:
    return KVSpec(61, 1, row_bytes, 64, torch.uint8, latent=True)


def pool(spec: KVSpec, layout: str) -> KVBuffer:
    """2 pages that nobody touches, so that they take address space alone."""
    if layout != TABLE:
        return KVBuffer.empty(spec, layout, 2)
    shape = (2, spec.page_size, *([] if spec.latent else [spec.num_kv_heads]), spec.head_dim)
    k, v = ([torch.empty(shape, dtype=spec.dtype) for _ in range(61)] for _ in range(2))
    return KVBuffer.from_layers(k, None if spec.latent else v, spec)


def part(
    spec: KVSpec, src: str, dst: str, direction: str, layers: tuple[int, int] | None = None
) -> PartPlan:
    """The one part of a copy between host memory and a GPU that is not here."""
    source, target, meta = pool(spec, src), pool(spec, dst), torch.device("meta")
    if direction == "d2h":
        source = replace(source, device=meta)
    else:
        target = replace(target, device=meta)
    (only,) = plan_transfer(source, target, [0], [1], layers=layers).parts
    return only


def launch_of(part: PartPlan, config: Config, num_pages: int) -> tuple[dict, dict]:
    """Run-time and compile-time arguments of a launch."""
    anchor = torch.empty(1, dtype=word_dtype(part.vector_bytes), device="meta")
    pages, constants = torch.empty((2, num_pages), dtype=torch.int32), variant(part, config)
    return arguments(part, (anchor, anchor), pages, constants), constants


def key(source: ASTSource) -> tuple[str, ...]:
    """What decides the machine code, beside the target."""
    return repr(source.signature), repr(source.constants), repr(source.attrs)


def variants(parts: Iterable[PartPlan]) -> Iterator[PartPlan]:
    """Those parts whose kernels differ in anything that is compiled in."""
    seen = set()
    for part in parts:
        arguments = launch_of(part, default_config(part.vector_bytes), num_pages=64)
        source = key(ast_source(relayout_kernel, *arguments))
        if source not in seen:
            seen.add(source)
            yield part


def check(part: PartPlan, target: str) -> None:
    gpu = parse_target(target)
    config = default_config(part.vector_bytes, warp_size=gpu.warp_size)
    report = compile_relayout(part, target)
    # Beside the data, ids of 4 bytes and entries of tables, of 8.
    tabled = part.src.table is not None or part.dst.table is not None
    assert set(report.load_widths) == ({4, 8, 16} if tabled else {4, 16})
    assert report.load_widths[16] == config.loads
    assert report.store_widths == {16: config.loads}
    assert report.spill_bytes == 0
    assert report.shared_bytes == 0
    assert report.loads_first
    assert report.bytes_in_flight >= 128 << 10
    if gpu.backend == "hip":
        assert config.num_warps == 16
        assert report.registers <= 128
        assert not re.search(r"^\s+scratch_", report.assembly["amdgcn"], re.MULTILINE)
    else:
        sass = report.assembly["sass"]
        loads, stores = widths(accesses(sass_steps(sass)))
        assert (loads[16], stores) == (config.loads, {16: config.loads})
        assert not re.search(r"\b(LDL|STL)\b", sass)


# Most loops and fewest, rows of 256 bytes and of 4, tables on both sides, one layer.
KINDS = {
    "layer_first to 1 group": (heads(8), "layer_first", "page_first_direct_group", "d2h"),
    "8 groups to layer_first": (heads(1), "page_first_direct_group", "layer_first", "h2d"),
    "page_head to 4 groups": (heads(2), "page_head", "page_unified", "d2h"),
    "page_first to page_head": (heads(8), "page_first", "page_head", "h2d"),
    "one layer": (heads(4), "layer_first", "page_unified", "d2h", (30, 31)),
    "same layout": (heads(8), "page_unified", "page_unified", "h2d"),
    "2 heads": (heads(1, 2), "page_first", "layer_first", "h2d"),
    "table to 2 groups": (heads(4), TABLE, "page_first_direct_group", "d2h"),
    "page_head to table": (heads(8), "page_head", TABLE, "h2d"),
    "528 B": (latent(528), "layer_first", "page_first", "d2h"),
    "576 B to table": (latent(576), "page_first", TABLE, "h2d"),
    "656 B": (latent(656), "page_first", "page_unified", "d2h", (0, 1)),
    "80 B": (latent(80), "page_first", "layer_first", "h2d"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_spread_of_variants(target, kind):
    check(part(*KINDS[kind]), target)


def every_part() -> Iterator[PartPlan]:
    """Every pair of layouts, and every layout with a pool of one tensor per layer, both ways.

    Pairs go to the host alone: the way back has the sides of the pair turned round, with loads and
    stores exchanged.
    """
    specs = [heads(8), heads(4), heads(2), heads(1), heads(2, 2)]
    specs += [latent(row_bytes) for row_bytes in (64, 80, 528, 576, 656, 1152)]
    for spec in specs:
        pairs = LATENT_PAIRS if spec.latent else PAIRS
        for layers in (None, (3, 4)):
            for src, dst in pairs:
                yield part(spec, src, dst, "d2h", layers)
            for layout in dict(pairs):
                yield part(spec, TABLE, layout, "d2h", layers)
                yield part(spec, layout, TABLE, "h2d", layers)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant(target):
    unique = [*variants(every_part())]
    assert len(unique) > 200
    for part in unique:
        check(part, target)


@pytest.mark.parametrize("row_bytes", [64, 128, 192, 256, 512, 528, 576, 640, 656, 1024, 1152])
def test_both_directions_of_a_row_take_the_same_vectors(row_bytes):
    """One rule for reads and writes: no row falls behind on the way back."""
    for pair in (("layer_first", "page_first"), (TABLE, "page_unified")):
        there = part(latent(row_bytes), *pair, "d2h")
        back = part(latent(row_bytes), *pair[::-1], "h2d")
        assert (there.vector_bytes, back.vector_bytes) == (16, 16)
        forth, mirrored = (variant(p, default_config(16)) for p in (there, back))
        for field in ("SIZES", "ENTRIES"):
            src, dst = f"SRC_{field}", f"DST_{field}"
            mirrored[src], mirrored[dst] = mirrored[dst], mirrored[src]
        assert forth == mirrored


def test_rows_of_132_bytes_take_4_byte_vectors_and_half_the_flight():
    report = compile_relayout(part(latent(132), "layer_first", "page_first", "d2h"))
    assert report.store_widths == {4: 32}
    assert set(report.load_widths) == {4}
    assert report.bytes_in_flight == 64 << 10
    assert report.spill_bytes == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_neighbouring_threads_hold_neighbouring_vectors(target):
    """Whatever tie the compiler breaks when it spreads a tile over threads."""
    gpu = parse_target(target)
    for row_bytes, word in ((576, "i64"), (132, "i32")):
        copy = part(latent(row_bytes), "layer_first", "page_first", "d2h")
        config = default_config(copy.vector_bytes, warp_size=gpu.warp_size)
        source = ast_source(relayout_kernel, *launch_of(copy, config, 64))
        options = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=gpu, options=options)
        ttgir = compiled.asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", ttgir, re.MULTILINE))
        pattern = rf"tt\.(?:load|store) .*: tensor<(\w+)x!tt\.ptr<{word}>, (#\w+)>"
        data = [(s, at) for s, at in re.findall(pattern, ttgir) if s.count("x") == 1]
        assert len(data) == 2 * config.loads
        words = 2 if word == "i64" else 1
        for shape, layout in data:
            threads = config.num_warps * config.warp_size
            assert shape == f"{threads}x{words}"
            assert f"sizePerThread = [1, {words}]" in layouts[layout]
            assert f"threadsPerWarp = [{config.warp_size}, 1]" in layouts[layout]
            assert f"warpsPerCTA = [{config.num_warps}, 1]" in layouts[layout]


def bound(target: str, run_time: dict[str, Any], constants: dict[str, Any]) -> ASTSource:
    """The source that Triton itself makes of a launch with these arguments."""
    backend = make_backend(parse_target(target))
    kernel = relayout_kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**run_time, **constants, num_warps=16)
    _, *source = kernel._pack_args(backend, {"num_warps": 16}, bound, specialization, options)
    return ASTSource(kernel, *source)


@pytest.mark.parametrize("kind", ["8 groups to layer_first", "576 B to table"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_is_compiled_here_is_what_a_launch_compiles(target, kind):
    config = default_config(16, warp_size=parse_target(target).warp_size)
    arguments = launch_of(part(*KINDS[kind]), config, 64)
    here, there = ast_source(relayout_kernel, *arguments), bound(target, *arguments)
    assert (here.signature, here.constants) == (there.signature, there.constants)
    assert here.attrs == {
        path: attributes for path, attributes in there.attrs.items() if attributes
    }


def test_one_compilation_serves_every_list_of_pages_and_every_alignment():
    copy = part(*KINDS["8 groups to layer_first"])
    config = default_config(16)
    run_time, constants = launch_of(copy, config, 64)
    keys = {key(bound("sm_90", run_time, constants))}
    for num_pages in (1, 2, 3, 16, 999):
        keys.add(key(bound("sm_90", *launch_of(copy, config, num_pages))))
    for address in (8, 16):  # a view that begins within a vector, and its base
        anchor = torch.empty(4, dtype=torch.int64)[address // 8 :]
        keys.add(key(bound("sm_90", {**run_time, "src": anchor, "dst": anchor}, constants)))
    assert len(keys) == 1


def test_a_tile_that_does_not_fit_the_registers_is_reported_as_spilled():
    copy = part(*KINDS["page_head to 4 groups"])
    report = compile_relayout(copy, config=Config(num_warps=32, loads=32))
    assert report.registers <= 64
    assert report.spill_bytes > 0
    assert re.search(r"\bSTL\b", report.assembly["sass"])
    assert report.bytes_in_flight == 512 << 10


def test_a_second_compilation_reports_its_own_assembly_too():
    copy = part(*KINDS["80 B"])
    first, second = (compile_relayout(copy) for _ in range(2))
    assert first.summary() == second.summary()
    assert first.assembly["ptx"] == second.assembly["ptx"]


@pytest.mark.parametrize("target", TARGETS)
def test_streaming_hints_are_on_the_data_and_cost_no_register(target):
    copy, warp = part(*KINDS["8 groups to layer_first"]), parse_target(target).warp_size
    plain = default_config(16, warp_size=warp)
    without, report = (compile_relayout(copy, target, replace(plain, streaming=s)) for s in (0, 1))
    if target == "gfx942":
        pattern, hinted = r"global_(load|store)_dwordx4 .*\bnt$", report.assembly["amdgcn"]
    else:
        pattern, hinted = r"\b(ld\.global\.cg|st\.global\.cs)\.v2\.b64", report.assembly["ptx"]
    assert len(re.findall(pattern, hinted, re.MULTILINE)) == 2 * plain.loads
    assert report.registers == without.registers
    assert (report.spill_bytes, report.loads_first) == (0, True)
    assert report.load_widths == without.load_widths
    assert report.store_widths == {16: plain.loads}


@triton.jit
def _two_copies(src, dst, half):
    lanes = tl.arange(0, 512)
    tl.store(dst + lanes, tl.load(src + lanes))
    tl.store(dst + half + lanes, tl.load(src + half + lanes))


@pytest.mark.parametrize("target", TARGETS)
def test_a_load_behind_a_store_is_reported(target):
    memory = torch.empty(1024, dtype=torch.int32, device="meta")
    source = ast_source(_two_copies, {"src": memory, "dst": memory, "half": 512}, {})
    num_warps = 2 if target == "gfx942" else 4
    report = compile_report(source, parse_target(target), num_warps, 0)
    assert (report.load_widths, report.store_widths) == ({16: 2}, {16: 2})
    assert not report.loads_first


@pytest.mark.parametrize("target", ["sm_86", "sm_103", "sm_121", "gfx950"])
def test_a_target_that_the_wheel_cannot_disassemble_has_all_figures_but_the_order(target):
    report = compile_relayout(part(*KINDS["80 B"]), target)
    assert report.spill_bytes == 0
    assert report.store_widths == {
        16: default_config(16).loads * 32 // parse_target(target).warp_size
    }
    read = "sass" in report.assembly or "amdgcn" in report.assembly
    assert report.loads_first is (True if read else None)


@pytest.mark.parametrize(
    "target", ["sm_9", "sm_70", "sm_88", "sm_999", "H100", "gfx1100", "cuda", ""]
)
def test_an_unknown_target_is_refused(target):
    with pytest.raises(ArgumentError, match=r"target: expected one of sm_75, .*gfx942") as caught:
        compile_relayout(part(*KINDS["80 B"]), target)
    assert caught.value.got == repr(target)
