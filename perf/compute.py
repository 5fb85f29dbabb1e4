"""Compute that runs beside a copy: what a forward pass does most, GEMM and attention.

On random values: a GPU draws less power for equal ones, and then keeps clocks that it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Compute:
    """`run()` queues one piece on torch's current stream.

    Attributes:
        flops: floating-point operations of a piece, a multiplication and an addition as two.
    """

    name: str
    flops: float
    run: Callable[[], object]


def gemm(device: torch.device, size: int) -> Compute:
    """A square GEMM in bf16: 2·size³ operations."""
    a, b, out = (_random((size, size), device) for _ in range(3))
    return Compute(f"GEMM {size}", 2.0 * size**3, lambda: torch.mm(a, b, out=out))


def attention(device: torch.device, tokens: int, heads: int = 32, head_dim: int = 128) -> Compute:
    """Causal attention of a prompt in bf16, torch's kernel: 2·heads·head_dim·tokens² operations."""
    shape = (1, heads, tokens, head_dim)
    q, k, v = (_random(shape, device) for _ in range(3))
    flops = 2.0 * heads * head_dim * tokens**2
    return Compute(
        f"attention {tokens}",
        flops,
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def _random(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def one_element(device: torch.device) -> Compute:
    """A kernel with next to no work: its time is what a launch waits for a place on the GPU."""
    element = torch.zeros(1, device=device)
    return Compute("launch", 0.0, lambda: element.add_(1.0))
