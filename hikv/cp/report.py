"""What a gather says of itself: who moved how many bytes, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class LayerSpan(NamedTuple):
    """When a layer's gather could start, found all restored, and had submitted its copies.

    In `time.monotonic_ns`, which all processes of a host share. On the CPU the copies are over at
    `done_ns`.
    """

    layer: int
    start_ns: int
    restored_ns: int
    done_ns: int


@dataclass
class GatherReport:
    """What ran since the gather was built.

    Attributes:
        backend, engine: who moved the bytes; engine `"sm"` is NCCL with kernels, where those were
            allowed.
        own_shard: how this rank's own pages are copied; `None` where there is one way alone.
        own_shard_gbps: by way, what decided that: the rate of a whole layer, GB/s, measured when
            the group met.
        batches, layers: how many were gathered.
        copies: copies after merging consecutive pages.
        bytes_from: per owner, payload bytes read from its pool.
        moved_bytes: bytes written into this rank's memory for them: the payload and, where blocks
            are packed and padded, that too.
        spans: one per layer of the last batch.
    """

    backend: str
    engine: str
    bytes_from: list[int]
    own_shard: str | None = None
    own_shard_gbps: dict[str, float] = field(default_factory=dict)
    batches: int = 0
    layers: int = 0
    copies: int = 0
    moved_bytes: int = 0
    spans: list[LayerSpan] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Payload bytes over all owners, each counted once."""
        return sum(self.bytes_from)
