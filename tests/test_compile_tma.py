"""What Triton makes of the TMA kernel for GPUs that are not here: ring, registers, instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from cases import LATENT_PAIRS, LATENT_ROW_BYTES, PAIRS

from hikv.boxes import plan_boxes
from hikv.buffer import KVBuffer
from hikv.compiled import ast_source, compile_relayout_tma
from hikv.errors import ArgumentError, PathUnavailable
from hikv.kernels.relayout_tma import Config, arguments, default_config, relayout_tma_kernel
from hikv.kernels.submit import interpreted
from hikv.plan import plan_transfer
from hikv.spec import KVSpec

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        interpreted(relayout_tma_kernel), reason="kernels of an interpreting process cannot compile"
    ),
]

SHARED_BYTES = {"sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
RING_BYTES = {"sm_90": 128 << 10, "sm_100": 128 << 10, "sm_120": 80 << 10}


def parts(spec, src, dst, layers=None):
    """Parts of a copy from a GPU that is not here to host memory."""
    source = KVBuffer.empty(spec, src, 2, device="meta")
    target = KVBuffer.empty(spec, dst, 2, device="cpu")
    return plan_transfer(source, target, [0], [1], layers=layers).parts


def seed_specs() -> Iterator[KVSpec]:
    """61 layers, pages of 64 tokens: 8 heads in 1, 2, 4 and 8 groups."""
    for head_group in (8, 4, 2, 1):
        yield KVSpec(61, 8, 128, 64, torch.bfloat16, head_group=head_group)


def latent_specs() -> Iterator[KVSpec]:
    for row_bytes in LATENT_ROW_BYTES:
        if row_bytes % 16 == 0:
            yield KVSpec(61, 1, row_bytes, 64, torch.uint8, latent=True)


def other_specs() -> Iterator[KVSpec]:
    """Small pages, few heads, K and V of different width, a row of 80 bytes."""
    yield KVSpec(61, 8, 128, 1, torch.bfloat16)
    yield KVSpec(61, 8, 128, 16, torch.float8_e4m3fn, head_group=4)
    yield KVSpec(32, 2, 64, 16, torch.float16)
    yield KVSpec(61, 16, 192, 64, torch.bfloat16, v_head_dim=128)
    yield KVSpec(61, 1, 80, 64, torch.uint8, latent=True)


def variants(specs, target, *, by_box):
    """Parts whose kernels differ: in their boxes alone, or in anything that is compiled in."""
    capability, seen = int(target.removeprefix("sm_")), set()
    for spec in specs:
        for pair in LATENT_PAIRS if spec.latent else PAIRS:
            for part in parts(spec, *pair):
                boxes = plan_boxes(part)
                key = (boxes.box, default_config(part, capability).buffers)
                key += () if by_box else (boxes.dims, boxes.counts)
                if key not in seen:
                    seen.add(key)
                    yield part


def check(part, target):
    report = compile_relayout_tma(part, target)
    boxes = plan_boxes(part)
    assert report.bulk_loads == report.ring_buffers + 1  # the first ones, and one in the loop
    assert report.bulk_stores == 1
    assert report.ring_buffers * report.stage_bytes >= RING_BYTES[target]
    assert report.shared_bytes <= SHARED_BYTES[target]
    # Every load has a buffer of its own, and the store one more.
    assert report.shared_bytes >= (report.ring_buffers + 1) * report.stage_bytes
    assert report.spill_bytes == 0
    assert report.registers <= 80
    assert max(report.load_widths) == 4  # page ids; all data goes in bulk
    assert not report.store_widths
    assert (report.stage_bytes, report.payload_share) == (boxes.stage_bytes, boxes.payload_share)
    payload = report.ring_buffers * report.stage_bytes * report.payload_share
    assert report.bytes_in_flight == int(payload)
    check_order(report.assembly["ptx"])
    return report


STEPS = {
    "wait for a load": r"mbarrier\.try_wait",
    "read the ring": r"ld\.shared",
    "wait for stores": r"cp\.async\.bulk\.wait_group(?:\.read)?\s+0",
    "write the staging buffer": r"st\.shared",
    "fence": r"fence\.proxy\.async",
    "store": r"cp\.async\.bulk\.tensor\.\dd\.global\.shared",
    "refill the ring": r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global",
}


def check_order(ptx):
    """Shared memory is reused only after its last reader, and the CTA ends after the last store."""
    found = re.finditer("|".join(f"({pattern})" for pattern in STEPS.values()), ptx)
    steps = [list(STEPS)[match.lastindex - 1] for match in found]
    loop = steps[steps.index("wait for a load") :]
    order = [step for i, step in enumerate(loop) if i == 0 or step != loop[i - 1]]
    assert order == [*STEPS, "wait for stores"]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_unique_boxes(target):
    compiled = [
        check(p, target) for p in variants([*seed_specs(), *latent_specs()], target, by_box=True)
    ]
    assert len(compiled) > 5


@pytest.mark.full
@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("specs", [seed_specs, latent_specs, other_specs])
def test_every_variant(specs, target):
    assert [check(part, target) for part in variants(specs(), target, by_box=False)]


@pytest.mark.parametrize(
    ("config", "ring", "stage"),
    [
        (Config(4, 32 << 10), 4, 32 << 10),
        (Config(32, 4 << 10, num_warps=2), 32, 4 << 10),
        (Config(13, num_warps=8), 13, 16 << 10),
    ],
    ids=str,
)
def test_a_ring_is_what_its_config_says(config, ring, stage):
    (part,) = parts(next(seed_specs()), "layer_first", "page_first")
    report = compile_relayout_tma(part, config=config)
    assert (report.ring_buffers, report.stage_bytes) == (ring, stage)
    assert report.shared_bytes <= SHARED_BYTES["sm_90"]
    assert report.spill_bytes == 0


def test_one_layer_of_small_pages_takes_more_and_smaller_loads():
    spec = KVSpec(61, 8, 128, 1, torch.bfloat16)
    (part,) = parts(spec, "layer_first", "page_first", layers=(7, 8))
    report = check(part, "sm_90")
    assert (report.stage_bytes, report.ring_buffers) == (4096, 32)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_targets_without_tensor_copies_are_refused(target):
    (part,) = parts(next(seed_specs()), "layer_first", "page_first")
    with pytest.raises(ArgumentError, match=r"expected sm_90 or later.*got '" + target):
        compile_relayout_tma(part, target)


def test_rows_that_no_descriptor_serves_are_refused():
    (part,) = parts(KVSpec(2, 1, 132, 4, torch.uint8, latent=True), "layer_first", "page_first")
    with pytest.raises(PathUnavailable, match="multiples of 16 bytes"):
        compile_relayout_tma(part)


def test_a_summary_has_all_but_the_assembly():
    (part,) = parts(next(seed_specs()), "layer_first", "page_first")
    report = compile_relayout_tma(part)
    assert set(report.summary()) == set(vars(report)) - {"assembly"}
    assert report.summary()["ring_buffers"] == 8


@pytest.mark.parametrize("num_pages", [1, 3, 16])
def test_another_number_of_pages_makes_no_other_compilation(num_pages):
    (part,) = parts(next(seed_specs()), "layer_first", "page_first")
    boxes, constants = plan_boxes(part), {"BUFFERS": 8}
    anchor = torch.empty(1, dtype=torch.int32, device="meta")
    sources = []
    for count in (2, num_pages):
        pages = torch.zeros(2, count, dtype=torch.int32)
        run_time = arguments(boxes, (anchor, anchor), (40, 40), pages)
        source = ast_source(relayout_tma_kernel, run_time, constants)
        sources.append((source.signature, source.constants, source.attrs))
    assert sources[0] == sources[1]
