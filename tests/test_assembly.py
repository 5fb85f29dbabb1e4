"""Reading assembly: texts that are right, and texts with a narrow access, an early store, a spill.

The lines are as Triton 3.6 and 3.9, `cuobjdump -sass` and `ptxas -v` print them.
"""

from __future__ import annotations

import re

import pytest

from hikv.assembly import (
    Access,
    accesses,
    amd_resources,
    amd_steps,
    loads_first,
    ptx_accesses,
    ptxas_resources,
    sass_steps,
    widths,
)

LOAD, STORE = Access("load", 16), Access("store", 16)

PTX = {
    "@%p1 ld.global.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];": LOAD,
    "@%p1 st.global.v2.b64 [ %rd3 + 0 ], { %rd1, %rd2 };": STORE,
    "ld.global.nc.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd1];": LOAD,
    "@!%p1 ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd1, %rd2 }, [ %rd3 ], %rd4;": LOAD,
    "ld.relaxed.gpu.global.b32 %r1, [%rd1];": Access("load", 4),
    "@%p1 ld.global.b64 { %rd1 }, [ %rd3 + 0 ];": Access("load", 8),
    "st.global.b16 [ %rd3 + 0 ], { %rs1 };": Access("store", 2),
    "@%p1 st.global.L1::no_allocate.u8 [%rd3], %rs1;": Access("store", 1),
}


@pytest.mark.parametrize("line", PTX)
def test_width_of_a_ptx_access(line):
    assert [*ptx_accesses(f"\t{line}\n")] == [PTX[line]]


@pytest.mark.parametrize(
    "line",
    [
        "ld.param.b64 %rd1, [relayout_kernel_param_0];",
        "ld.shared.v2.b64 {%rd1, %rd2}, [%r1];",
        "st.local.v2.b64 [%rd1], {%rd2, %rd3};",
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4];",
        "cvta.global.u64 %rd1, %rd2;",
        ".extern .shared .align 16 .b8 global_smem[];",
    ],
)
def test_what_is_no_ptx_access_of_global_memory(line):
    assert [*ptx_accesses(f"\t{line}\n")] == []


def test_one_narrow_access_among_wide_ones_shows():
    load, store, *_, narrow, _, _ = PTX
    loads, stores = widths(ptx_accesses("\n".join([load] * 15 + [narrow] + [store] * 16)))
    assert (loads, stores) == ({16: 15, 8: 1}, {16: 16})


def sass(*lines):
    """SASS with an instruction every 16 bytes from address 0x10, its encoding behind."""
    return "\t\tFunction : relayout_kernel\n" + "".join(
        f"        /*{16 * i:04x}*/  {line} ;  /* 0x0000000c02008981 */\n"
        f"                          /* 0x001ea2000c1e1900 */\n"
        for i, line in enumerate(lines, 1)
    )


SASS = {
    "@!P3 LDG.E.128 R8, desc[UR12][R30.64]": LOAD,
    "LDG.E.128 R8, [R30.64+0x100]": LOAD,
    "@P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]": LOAD,
    "LDG.E.EF.LTC128B.128 R4, desc[UR4][R2.64]": LOAD,
    "@P0 STG.E.EF.128 desc[UR12][R90.64], R4": STORE,
    "@P2 STG.E.128 desc[R16][R2.64], R4   &req={3} &rd=0x1   ?trans4": STORE,
    "@!P0 LDG.E R0, desc[UR12][R2.64]": Access("load", 4),
    "LDG.E.64 R28, desc[UR6][R28.64]": Access("load", 8),
    "LDG.E.U8 R1, desc[UR6][R28.64]": Access("load", 1),
    "@!P1 STG.E.U16 desc[UR6][R28.64], R1": Access("store", 2),
    "LD.E.128 R4, desc[UR6][R2.64]": LOAD,
    "ST.E.64 desc[UR6][R2.64], R4": Access("store", 8),
    "LDL.128 R8, [R1+0x10]": None,
    "STL [R1+0x10], R8": None,
    "LDGSTS.E.128 [R5], desc[UR6][R2.64]": None,
    "IMAD.WIDE R2, R0, 0x10, R4": None,
}


@pytest.mark.parametrize("line", SASS)
def test_width_of_a_sass_access(line):
    assert [step.access for step in sass_steps(sass(line))] == [SASS[line]]


L, S, WORK = "@!P1 LDG.E.128 R8, [R30.64]", "@!P1 STG.E.128 [R30.64], R8", "IADD3 R0, R0, 0x1, RZ"
NARROW = "@!P1 LDG.E R0, [R2.64]"


def order(*lines):
    return loads_first(sass_steps(sass(*lines)))


def test_stores_behind_all_loads():
    assert order(L, L, S, S, "EXIT")
    assert order(S, S, "EXIT")
    assert order(L, L, "EXIT")


def test_a_store_ahead_of_a_load():
    assert not order(L, S, L, S, "EXIT")


def test_narrow_loads_may_come_late():
    assert order(NARROW, L, S, NARROW, S, "EXIT")


# The first instruction is at 0x10, a loop begins at 0x20.
LOOPS = {
    "do while": (True, [WORK, L, L, S, S, "@!P0 BRA 0x20", "EXIT"]),
    "exit in front": (True, [WORK, "@P0 EXIT", L, S, "BRA 0x20"]),
    "exit by call": (True, [WORK, "@P0 CALL.REL.NOINC 0x60", L, S, "BRA 0x20", "EXIT"]),
    "predicate among operands": (True, [WORK, L, S, "BRA.U !UP0, 0x20  ?trans5", "EXIT"]),
    "blocks out of order": (True, ["BRA 0x50", S, "@P0 EXIT", "BRA 0x50", L, L, "BRA 0x20"]),
    "early store in a loop": (False, [WORK, L, S, L, "@!P0 BRA 0x20", "EXIT"]),
    "early store by a jump": (False, [WORK, "BRA 0x50", L, "BRA 0x60", S, "@P0 BRA 0x30", "EXIT"]),
    "load behind a loop": (False, [WORK, L, S, "@!P0 BRA 0x20", L, S, "EXIT"]),
    "load behind a branch": (False, [L, S, "BRA.U !UP0, 0x50  ?trans5", L, "EXIT"]),
    "load behind a call": (False, [L, S, "CALL.REL.NOINC 0x50", L, "EXIT"]),
    "load behind a call out": (False, [L, S, "CALL.ABS.NOINC R2", L, "EXIT"]),
    "store behind a call out": (True, [L, "CALL.ABS.NOINC R2", S, "EXIT"]),
    "loop in front": (True, [WORK, L, "@!P0 BRA 0x20", L, S, "EXIT"]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_pass_of_a_loop_stands_for_itself(name):
    expected, lines = LOOPS[name]
    assert order(*lines) is expected


def test_code_that_nothing_reaches_does_not_count():
    assert order(L, S, "EXIT", L, S, L, "BRA 0x40")


@pytest.mark.parametrize("line", ["BRX R2 -0x80", "JMX R4", "BRA `(.L_x_1)"])
def test_sass_that_branches_to_a_computed_address_is_refused(line):
    with pytest.raises(ValueError, match="computed address"):
        sass_steps(sass(line))


def test_sass_of_two_functions_is_refused():
    with pytest.raises(ValueError, match="more than one function"):
        sass_steps(sass("EXIT") + sass("EXIT"))


AMD = {
    "global_load_dwordx4 v[0:3], v[0:1], off": LOAD,
    "global_store_dwordx4 v[38:39], v[0:3], off": STORE,
    "buffer_load_dwordx4 v[0:3], v1, s[20:23], 0 offen": LOAD,
    "flat_load_dwordx2 v[0:1], v[2:3]": Access("load", 8),
    "global_load_dword v37, v33, s[22:23]": Access("load", 4),
    "global_load_dwordx3 v[0:2], v[3:4], off": Access("load", 12),
    "global_load_ushort v1, v[2:3], off": Access("load", 2),
    "global_load_short_d16_hi v1, v[2:3], off": Access("load", 2),
    "global_store_byte v[2:3], v1, off": Access("store", 1),
    "global_load_sbyte v1, v[2:3], off": Access("load", 1),
    "s_load_dwordx4 s[0:3], s[4:5], 0x0": None,
    "ds_read_b128 v[0:3], v4": None,
    "scratch_load_dwordx4 v[0:3], off, s0": None,
    "; global_load_dwordx4 in a comment": None,
}


@pytest.mark.parametrize("line", AMD)
def test_width_of_an_amd_access(line):
    assert [*accesses(amd_steps(f"\t{line}\n"))] == ([AMD[line]] if AMD[line] else [])


def test_an_amd_access_of_unknown_width_is_refused():
    with pytest.raises(ValueError, match="global_load_tr_b64 has no known width"):
        amd_steps("\tglobal_load_tr_b64 v[0:1], v[2:3], off\n")


def test_an_amd_branch_to_a_computed_address_is_refused():
    with pytest.raises(ValueError, match="computed address"):
        amd_steps("\ts_setpc_b64 s[30:31]\n")


AMD_LOOP = """
relayout_kernel:                        ; @relayout_kernel
	.cfi_startproc
	s_branch .LBB0_3
.LBB0_2:                                ;   in Loop: Header=BB0_3 Depth=1
	global_store_dwordx4 v[38:39], v[0:3], off
	s_cbranch_scc0 .LBB0_9
.LBB0_3:                                ; %.lr.ph
	s_cbranch_scc1 .LBB0_5
	global_load_dwordx4 v[0:3], v[0:1], off
.LBB0_5:                                ;   in Loop: Header=BB0_3 Depth=1
	s_cbranch_execz .LBB0_2
	global_load_dwordx4 v[4:7], v[0:1], off
	s_branch {after_the_loads}
.LBB0_7:
	global_store_dwordx4 v[38:39], v[4:7], off
	s_branch .LBB0_2
.LBB0_9:                                ; %._crit_edge
	s_endpgm
"""


def test_amd_order_follows_branches_not_text():
    assert loads_first(amd_steps(AMD_LOOP.format(after_the_loads=".LBB0_2")))
    assert loads_first(amd_steps(AMD_LOOP.format(after_the_loads=".LBB0_7")))


def test_amd_store_ahead_of_a_load():
    early = AMD_LOOP.replace("s_cbranch_scc1 .LBB0_5", "global_store_dwordx4 v[8:9], v[4:7], off")
    assert not loads_first(amd_steps(early.format(after_the_loads=".LBB0_2")))


def test_amd_code_behind_a_branch_that_is_always_taken_does_not_count():
    store, load = (
        "\tglobal_store_dwordx4 v[0:1], v[4:7], off\n",
        "\tglobal_load_dwordx4 v[0:3], v4\n",
    )
    after = f"{load}.LBB0_1:\n\ts_endpgm\n"
    assert loads_first(amd_steps(f"{store}\ts_branch .LBB0_1\n{after}"))
    assert not loads_first(amd_steps(f"{store}\ts_cbranch_scc0 .LBB0_1\n{after}"))


LOG = """\
{0} info    : 0 bytes gmem
{0} info    : Compiling entry function 'relayout_kernel' for 'sm_90a'
{0} info    : Function properties for relayout_kernel
    {1} bytes stack frame, {2} bytes spill stores, {3} bytes spill loads
{0} info    : Used {4} registers, used 0 barriers, {1} bytes cumulative stack size
{0} info    : Compile time = 38.360 ms
"""


@pytest.mark.parametrize("assembler", ["ptxas", "ptxas-blackwell"])
def test_registers_and_spills_of_ptxas(assembler):
    assert ptxas_resources(LOG.format(assembler, 0, 0, 0, 100)) == (100, 0)
    assert ptxas_resources(LOG.format(assembler, 280, 292, 300, 64)) == (64, 592)


def test_a_stack_frame_alone_is_no_spill():
    assert ptxas_resources(LOG.format("ptxas", 128, 0, 0, 100)).spill_bytes == 0


@pytest.mark.parametrize("log", ["", LOG.format("ptxas", 0, 0, 0, 100) * 2], ids=["none", "two"])
def test_a_log_that_does_not_report_on_one_kernel_is_refused(log):
    with pytest.raises(ValueError, match=re.escape("expected one report of registers in the log")):
        ptxas_resources(log)


METADATA = """
    .private_segment_fixed_size: {0}
    .sgpr_spill_count: 0
    .vgpr_count:     {1}
    .vgpr_spill_count: {2}
"""


def test_registers_and_scratch_of_amd():
    assert amd_resources(METADATA.format(0, 45, 0)) == (45, 0)
    assert amd_resources(METADATA.format(200, 128, 24)) == (128, 200)
    # Spilled to accumulation registers: no scratch, but no free ride either.
    assert amd_resources(METADATA.format(0, 128, 3)) == (128, 12)


def test_amd_assembly_without_metadata_is_refused():
    with pytest.raises(ValueError, match="expected one report of vgpr_count, got 0"):
        amd_resources("\ts_endpgm\n")
