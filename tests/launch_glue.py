"""Cases that go through Triton's own launcher, on the GPU that `launch_stub.c` plays.

A program for a process of its own, since the driver library must be chosen before Triton is
imported. Beside the stub's folder in `LD_LIBRARY_PATH` and `TRITON_LIBCUDA_PATH` it needs
`LAUNCH_LOG`, the file where the stub notes launches. It prints a line of JSON per case: what
reached `cuLaunchKernelEx`, what the plan says should have, or the exception.

Buffers in CPU memory pass for a GPU's.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from cases import Form, Place, Pool, Rows, dense, one_storage, per_layer, random_rows, stay

from hikv.boxes import plan_boxes
from hikv.buffer import KVBuffer
from hikv.compiled import compile_relayout, compile_relayout_tma
from hikv.kernels.relayout import Config, default_config, launch, relayout_kernel, variant
from hikv.kernels.relayout_tma import Config as TmaConfig
from hikv.kernels.relayout_tma import default_config as default_tma_config
from hikv.kernels.relayout_tma import launch as launch_tma
from hikv.kernels.relayout_tma import relayout_tma_kernel
from hikv.kernels.submit import upload_pages, upload_table
from hikv.plan import CopyPlan, PartPlan, plan_transfer
from hikv.spec import KVSpec

STREAM = 0x5000
PAGE_COUNTS = (1, 2, 16, 17)
SRC_PAGES, DST_PAGES = 20, 24
SWIZZLED_WORDS = 32
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has no name for it

tables: list[torch.Tensor] = []
"""Every table that went up, in order, kept so that no address is used twice."""


@dataclass(frozen=True)
class Case:
    """Launches between one pair of pools: of every span of layers, of 1, 2, 16 and 17 pages.

    Where `ahead` is set, the kernel is also compiled without a launch, to compare the two.
    """

    spec: KVSpec
    src: Form
    dst: Form
    layers: tuple[tuple[int, int] | None, ...] = (None,)
    block_quota: int = 2
    config: Any = None
    ahead: bool = False


def vast(layout: str) -> Form:
    """A dense pool of 64 GiB of address space that takes no memory, whatever the rows."""

    def build(spec: KVSpec, rows: Rows, place: Place) -> Pool:
        del rows, place
        size = 64 << 30
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8))
        return Pool(KVBuffer.from_tensor(memory, spec, layout), [memory])

    return build


HEADS = KVSpec(3, 8, 64, 4, torch.bfloat16, head_group=4)
WIDE = KVSpec(3, 4, 192, 4, torch.bfloat16, v_head_dim=128)
LATENT = KVSpec(3, 1, 576, 4, torch.uint8, latent=True)
SEED = KVSpec(2, 8, 128, 64, torch.bfloat16)
LOOPS = (dense("layer_first"), dense("page_head"))
LAYERS = ((0, 1), (1, 2), (2, 3))

REGISTERS = {
    "loops on both sides": Case(HEADS, *LOOPS, ahead=True),
    "one loop on the destination": Case(HEADS, dense("layer_first"), dense("page_unified")),
    "one loop on both sides": Case(HEADS, dense("page_unified"), dense("page_unified")),
    "a table on the source": Case(HEADS, per_layer, dense("page_unified")),
    "a table on the destination": Case(HEADS, dense("page_head"), per_layer),
    "tables on both sides": Case(HEADS, per_layer, per_layer, ahead=True),
    "a stride of one vector": Case(KVSpec(3, 4, 8, 4, torch.bfloat16), *LOOPS, ahead=True),
    "latent rows": Case(LATENT, dense("layer_first"), dense("page_first")),
    "rows of 132 bytes": Case(
        KVSpec(3, 1, 132, 4, torch.uint8, latent=True), one_storage, dense("page_first")
    ),
    "rows of 33 bytes": Case(
        KVSpec(3, 1, 33, 4, torch.uint8, latent=True), one_storage, dense("page_first")
    ),
    "K wider than V": Case(WIDE, dense("layer_first"), dense("page_head")),
    "layer by layer": Case(HEADS, *LOOPS, layers=LAYERS),
    "layer by layer from a table": Case(HEADS, per_layer, dense("page_unified"), layers=LAYERS),
    "more CTAs than tiles": Case(SEED, *LOOPS, block_quota=1000),
    "a config of its own": Case(HEADS, *LOOPS, config=Config(num_warps=4, loads=8)),
    "a stride of 2³¹ vectors": Case(SEED, vast("layer_first"), dense("page_unified")),
}
TMA = {
    "loops on both sides": Case(HEADS, *LOOPS, ahead=True),
    "one loop on both sides": Case(HEADS, dense("page_unified"), dense("page_unified")),
    "latent rows": Case(LATENT, dense("layer_first"), dense("page_first"), ahead=True),
    "K wider than V": Case(WIDE, dense("layer_first"), dense("page_head")),
    "layer by layer": Case(HEADS, *LOOPS, layers=LAYERS),
    "more CTAs than tiles": Case(SEED, *LOOPS, block_quota=1000),
    "a config of its own": Case(HEADS, *LOOPS, config=TmaConfig(buffers=2, num_warps=8)),
    "a pool of 64 GiB": Case(SEED, vast("layer_first"), dense("page_unified")),
}
KERNELS: dict[str, tuple[Any, Callable[..., None], dict[str, Case]]] = {
    "sm": (relayout_kernel, launch, REGISTERS),
    "tma": (relayout_tma_kernel, launch_tma, TMA),
}


def use_stub() -> None:
    """Make Triton's own CUDA driver the active one, and CPU memory something it may launch on."""
    from triton.backends.nvidia.driver import CudaDriver

    mock.patch("torch.cuda.current_device", return_value=0).start()
    mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)).start()
    mock.patch.object(CopyPlan, "unreachable", return_value=None).start()
    driver = CudaDriver()
    driver.get_current_stream = lambda device: STREAM
    triton.runtime.driver.set_active(driver)

    def upload(*args: Any) -> torch.Tensor | None:
        table = upload_table(*args)
        tables.extend([] if table is None else [table])
        return table

    module = sys.modules["hikv.kernels.relayout"]  # the name in the package is the function
    mock.patch.object(module, "upload_table", upload).start()


def plans(case: Case) -> Iterator[tuple[CopyPlan, torch.Tensor]]:
    """The plans of a case and their page ids, all between the same two pools."""
    rng = np.random.default_rng(0)
    src = case.src(case.spec, random_rows(case.spec, SRC_PAGES, rng), stay).buffer
    dst = case.dst(case.spec, random_rows(case.spec, DST_PAGES, rng), stay).buffer
    for layers, count in product(case.layers, PAGE_COUNTS):
        ids = rng.permutation(SRC_PAGES)[:count], rng.permutation(DST_PAGES)[:count]
        plan = plan_transfer(src, dst, *ids, layers=layers)
        yield plan, upload_pages(plan, torch.device("cpu"))


def run(path: str, case: Case) -> dict[str, Any]:
    """Launch a case: what the stub noted, and what it should have."""
    kernel, launcher, _ = KERNELS[path]
    kernel.device_caches.clear()
    log, expected = Path(os.environ["LAUNCH_LOG"]), []
    log.write_text("")
    for plan, pages in plans(case):
        first = len(tables)
        launcher(plan, block_quota=case.block_quota, config=case.config, pages=pages)
        going_up = iter(tables[first:])
        expect = expect_registers if path == "sm" else expect_tma
        expected += [expect(case, plan, part, pages, going_up) for part in plan.parts]
    compiled = list(kernel.device_caches[0][0].values())
    for i, launched in enumerate(expected):
        launched["shared"] = compiled[i % len(compiled)].metadata.shared
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "launched": [decode(note) for note in notes if "kernel" in note],
        "expected": expected,
        "loaded": sum("loaded" in note for note in notes),
        "parts": len(plan.parts),
        "strides": [[part.src.strides, part.dst.strides] for part in plan.parts],
        "code": [digest(kernel.asm["cubin"]) for kernel in compiled],
        "code_ahead": [digest(ahead(path, part)) for part in plan.parts] if case.ahead else None,
    }


def digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def ahead(path: str, part: PartPlan) -> bytes:
    """The machine code that `part` compiles to without a launch."""
    report = compile_relayout(part) if path == "sm" else compile_relayout_tma(part)
    return report.assembly["cubin"]


def expect_registers(
    case: Case,
    plan: CopyPlan,
    part: PartPlan,
    pages: torch.Tensor,
    going_up: Iterator[torch.Tensor],
) -> dict[str, Any]:
    """The launch of the register kernel for `part`, from the plan.

    Triton makes an element of a tuple that is 1 a constant, whatever the kernel says of the tuple.
    """
    width = part.vector_bytes
    config = case.config or default_config(width)
    _, depth, _, lanes = variant(part, config)["SHAPE"]
    chunks = plan.num_pages * -(-part.page_vectors // (depth * lanes))
    num_tiles = -(-chunks // (config.tile // (depth * lanes)))
    sides = part.src, part.dst
    params = [
        *(side.address for side in sides),
        *(row.data_ptr() for row in pages),
        *(next(going_up).data_ptr() for side in sides if side.table is not None),
        plan.num_pages,
        num_tiles,
        *(side.page_stride // width for side in sides),
        *(stride // width for side in sides for stride in side.strides[:-1] if stride != width),
    ]
    return expected_launch("relayout_kernel", case, num_tiles, config.num_warps, params)


def expect_tma(
    case: Case,
    plan: CopyPlan,
    part: PartPlan,
    pages: torch.Tensor,
    going_up: Iterator[torch.Tensor],
) -> dict[str, Any]:
    """The launch of the TMA kernel for `part`, from the plan and its boxes.

    Triton cuts a box that is wider than what shared memory swizzles, and copies it in pieces.
    """
    del going_up
    config = case.config or default_tma_config(part)
    boxes = plan_boxes(part, config.stage_bytes)
    num_tiles = plan.num_pages * boxes.per_page
    params: list[Any] = []
    for side, own, pool in ((part.src, boxes.src, plan.src), (part.dst, boxes.dst, plan.dst)):
        sizes = [pool.num_pages, *own.sizes]
        tensor_map = {
            "address": side.address,
            "sizes": sizes[::-1],
            "strides": list(own.strides[::-1]),
            "box": [min(boxes.box[-1], SWIZZLED_WORDS), *boxes.box[-2::-1]],
        }
        params += [tensor_map, *sizes, *(stride // 4 for stride in own.strides), 1]
    params += [row.data_ptr() for row in pages]
    params += [num_tiles, *(s for own in (boxes.src, boxes.dst) for s in own.steps if s != 1)]
    return expected_launch("relayout_tma_kernel", case, num_tiles, config.num_warps, params)


def expected_launch(
    kernel: str, case: Case, num_tiles: int, num_warps: int, params: list[Any]
) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "grid": [min(case.block_quota, num_tiles), 1, 1],
        "block": [32 * num_warps, 1, 1],
        "stream": STREAM,
        "attributes": 0,
        "params": [*params, 0, 0],  # no scratch memory, neither global nor for profiles
    }


def decode(note: dict[str, Any]) -> dict[str, Any]:
    """A launch with its parameters as numbers, and tensor maps as the stub packs them."""
    return {**note, "params": [decode_parameter(bytes.fromhex(p)) for p in note["params"]]}


def decode_parameter(raw: bytes) -> Any:
    if len(raw) <= 8:
        return int.from_bytes(raw, "little", signed=True)
    words = struct.unpack("<16Q", raw)
    rank = words[14]
    return {
        "address": words[0],
        "sizes": list(words[2 : 2 + rank]),
        "strides": list(words[7 : 6 + rank]),
        "box": list(struct.unpack_from(f"<{rank}I", raw, 11 * 8)),
    }


if __name__ == "__main__":
    use_stub()
    for wanted in sys.argv[1:]:
        path, name = wanted.split(":")
        try:
            outcome = run(path, KERNELS[path][2][name])
        except Exception:
            outcome = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps({"case": wanted, **outcome}) + "\n")
        sys.stdout.flush()
