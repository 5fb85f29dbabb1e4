"""`KVSpec`: the logical geometry of one rank's KV cache, and byte arithmetic.

A spec says what a page holds, never how it lies in memory: that is the layout's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hikv.errors import ArgumentError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Component:
    """One kind of row that a page holds for every layer and token.

    `kv` is 2 where K and V have rows of one width and form one component, else 1; `width` is the
    number of elements of one head's row.
    """

    name: str
    kv: int
    width: int


@dataclass(frozen=True)
class KVSpec:
    """Geometry of the KV cache that one rank holds.

    Args:
        num_layers: layers on this rank.
        num_kv_heads: K/V heads on this rank; 1 for latent rows.
        head_dim: elements of one head's K row, or of the whole latent row.
        page_size: tokens per page.
        dtype: torch dtype of an element. Copies never interpret it; opaque rows use `torch.uint8`.
        latent: one row per token and no V (MLA, an indexer's rows, a row of scales).
        head_group: heads per group, the grid of head-grouped layouts; `None` is one group.
        first_layer, total_layers: this rank's place among the model's layers (pipeline stages).
        total_kv_heads, first_head: this rank's place among the model's heads (tensor ranks).
        v_head_dim: elements of one head's V row where it differs from K's.

    Raises:
        ArgumentError: a size that is not positive, a head grid that does not divide the heads, or
            a place that lies outside the model.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    latent: bool = False
    head_group: int | None = None
    first_layer: int = 0
    total_layers: int | None = None
    total_kv_heads: int | None = None
    first_head: int = 0
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            _require_positive(name, getattr(self, name))
        for name in ("head_group", "v_head_dim"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        import torch  # whoever holds a torch.dtype has loaded it, so reading this file need not

        if not isinstance(self.dtype, torch.dtype):
            raise ArgumentError(
                "dtype",
                expected="a torch.dtype",
                got=repr(self.dtype),
                remedy="pass e.g. torch.bfloat16",
            )
        if self.latent:
            self._check_latent()
        elif self.num_kv_heads % self.heads_per_group:
            raise ArgumentError(
                "head_group",
                expected=f"a divisor of num_kv_heads={self.num_kv_heads}",
                got=self.head_group,
                remedy="choose heads per group so that every group is whole",
            )
        self._check_place("first_layer", self.first_layer, self.num_layers, self.total_layers)
        self._check_place("first_head", self.first_head, self.num_kv_heads, self.total_kv_heads)

    def _check_latent(self) -> None:
        for name, allowed in (("num_kv_heads", 1), ("head_group", None), ("v_head_dim", None)):
            if getattr(self, name) != allowed:
                raise ArgumentError(
                    name,
                    expected=f"{allowed} for latent rows, which have no head axis and no V",
                    got=getattr(self, name),
                    remedy=f"leave {name} at {allowed} or set latent=False",
                )

    def _check_place(self, name: str, first: int, count: int, total: int | None) -> None:
        if not isinstance(first, int) or first < 0 or (total is not None and first + count > total):
            raise ArgumentError(
                name,
                expected=f"an int >= 0, {count} from it within a total of {total}",
                got=repr(first),
                remedy="correct the rank's place or the model's total",
            )

    @property
    def components(self) -> tuple[Component, ...]:
        """The rows of one page: one component, or K and V apart where their widths differ."""
        if self.latent:
            return (Component("latent", 1, self.head_dim),)
        if self.v_head_dim in (None, self.head_dim):
            return (Component("kv", 2, self.head_dim),)
        return (Component("k", 1, self.head_dim), Component("v", 1, self.v_head_dim or 0))

    @property
    def heads_per_group(self) -> int:
        """Heads in one group of the storage grid."""
        return self.num_kv_heads if self.head_group is None else self.head_group

    @property
    def num_groups(self) -> int:
        """Head groups (HG) of the storage grid."""
        return self.num_kv_heads // self.heads_per_group

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        values = sum(c.kv * c.width for c in self.components)
        return self.num_kv_heads * values * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over this rank's layers, K and V together."""
        return self.num_layers * self.bytes_per_token_layer

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over this rank's layers, K and V together."""
        return self.page_size * self.bytes_per_token

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`, the last one possibly partial."""
        return -(-num_tokens // self.page_size)

    def same_geometry(self, other: KVSpec) -> bool:
        """Whether pages of both specs hold the same rows; the storage grid may differ."""
        return self.geometry == other.geometry

    @cached_property
    def geometry(self) -> dict[str, object]:
        """What the two buffers of a copy must share, by name; the head grid is not among it."""
        rows = ", ".join(f"{c.kv} × {c.name} of {c.width}" for c in self.components)
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "rows": rows,
            "page_size": self.page_size,
            "dtype": self.dtype,
            "first_layer": self.first_layer,
            "first_head": self.first_head,
        }


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ArgumentError(
            name, expected="a positive int", got=repr(value), remedy=f"pass {name} >= 1"
        )
