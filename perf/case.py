"""A benchmark's shapes: what is copied between which layouts, and the options that choose it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hikv.buffer import KVBuffer
from hikv.console import quantity
from hikv.layout import list_layouts
from hikv.plan import CopyPlan, plan_transfer
from hikv.spec import KVSpec

DIRECTIONS = ("h2d", "d2h")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "uint8": torch.uint8,
}
_MLA = "bytes of a latent row (576 bf16 = 1152), instead of heads"
HEADS = "8:1,8:2,8:4,8:8,16:1,16:8,16:16"


def sides(direction: str) -> tuple[str, str]:
    """Source and destination side of `direction`."""
    return ("host", "gpu") if direction == "h2d" else ("gpu", "host")


@dataclass(frozen=True)
class Case:
    """A spec, a layout for each side, and the pages of one copy, for `tokens` if they are told."""

    spec: KVSpec
    gpu_layout: str
    host_layout: str
    num_pages: int
    tokens: int | None = field(default=None, compare=False)

    @property
    def label(self) -> dict[str, int]:
        """What tells the case from its neighbours: heads and groups, or the bytes of a row."""
        if self.spec.latent:
            return {"row": self.spec.bytes_per_token_layer}
        return {"heads": self.spec.num_kv_heads, "groups": self.spec.num_groups}

    @property
    def nbytes(self) -> int:
        """Payload of one copy."""
        return self.num_pages * self.spec.bytes_per_page

    def layout(self, side: str) -> str:
        """The layout of `side`, `"gpu"` or `"host"`."""
        return self.gpu_layout if side == "gpu" else self.host_layout

    def plan(self, direction: str) -> CopyPlan:
        """How the case is copied, on memory that is never touched: for the compiler."""
        num_pages = min(self.num_pages, 64)
        pools = {
            side: KVBuffer.empty(self.spec, self.layout(side), num_pages, device=device)
            for side, device in (("gpu", "meta"), ("host", "cpu"))
        }
        src, dst = (pools[side] for side in sides(direction))
        return plan_transfer(src, dst, list(range(num_pages)), list(range(num_pages)))

    def describe(self) -> str:
        """The shape in one line, heads left out."""
        spec = self.spec
        name = next(name for name, dtype in DTYPES.items() if dtype == spec.dtype)
        rows = "" if spec.latent else f"head_dim {spec.head_dim}, "
        held = self.num_pages * spec.page_size
        rounded = f", {self.tokens} rounded up to {held}" if self.tokens not in (None, held) else ""
        return (
            f"{self.gpu_layout} on the GPU, {self.host_layout} on the host: {spec.num_layers} "
            f"layers, {rows}{name}, {quantity(self.num_pages, 'scattered page')} of "
            f"{spec.page_size} tokens{rounded}"
        )


def counted(cases: Sequence[Case]) -> str:
    """What a rate counts, with the bytes of one copy."""
    sizes = " or ".join(f"{n / 2**20:,.4g}" for n in sorted({case.nbytes for case in cases}))
    what = "latent rows" if cases[0].spec.latent else "K and V"
    return f"GB/s = 10⁹ payload bytes a second, {what}, each byte once; {sizes} MiB a copy"


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose the cases; the defaults are the published table's."""
    add = parser.add_argument
    add("--layers", type=positive, default=61, metavar="N", help="default 61")
    add(
        "--heads",
        type=head_grids,
        default=HEADS,
        metavar="H:HG,…",
        help="heads:number of groups (KVSpec.head_group is heads per group), default %(default)s",
    )
    add("--head-dim", type=positive, default=128, metavar="N", help="default 128")
    add("--page", type=positive, default=64, metavar="TOKENS", help="tokens a page, default 64")
    add(
        "--tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="rounded up to whole pages, default %(default)s",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="default bf16")
    add("--mla", type=positive, metavar="ROW_BYTES", help=_MLA)
    layouts = list_layouts()
    add(
        "--gpu-layout", choices=layouts, default="layer_first", metavar="LAYOUT", help="layer_first"
    )
    add(
        "--host-layout",
        choices=layouts,
        metavar="LAYOUT",
        help=f"page_first_direct_group, with --mla page_first_direct; any of {', '.join(layouts)}",
    )


def cases_from(args: argparse.Namespace) -> list[Case]:
    """The cases that the options name; raises `ArgumentError` where a spec refuses them."""
    host_layout = args.host_layout
    if args.mla is not None:
        dtype = DTYPES[args.dtype] if args.mla % DTYPES[args.dtype].itemsize == 0 else torch.uint8
        width = args.mla // dtype.itemsize
        specs = [KVSpec(args.layers, 1, width, args.page, dtype, latent=True)]
        host_layout = host_layout or "page_first_direct"
    else:
        dtype = DTYPES[args.dtype]
        specs = [
            KVSpec(args.layers, heads, args.head_dim, args.page, dtype, head_group=heads // groups)
            for heads, groups in args.heads
        ]
        host_layout = host_layout or "page_first_direct_group"
    return [
        Case(spec, args.gpu_layout, host_layout, spec.pages_for(args.tokens), args.tokens)
        for spec in specs
    ]


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """`"2,32"` as numbers of at least 1, each once, for argparse."""
    return tuple(dict.fromkeys(positive(item) for item in text.split(",")))


def positive_number(text: str) -> float:
    """A finite number above 0, for argparse."""
    number = float(text)  # argparse words its ValueError
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return number


def head_grids(text: str) -> list[tuple[int, int]]:
    """`"8:1,8:2"` as pairs of heads and groups."""
    grids = []
    for item in text.split(","):
        heads, _, groups = item.partition(":")
        pair = (positive(heads), positive(groups or "1"))
        if pair[0] % pair[1]:
            raise argparse.ArgumentTypeError(f"{pair[1]} groups do not divide {pair[0]} heads")
        grids.append(pair)
    return grids
