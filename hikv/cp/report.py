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
        backend, engine: who moved the bytes.
        batches, layers: how many were gathered.
        copies: copies after merging consecutive pages.
        bytes_from: per owner, payload bytes read from its pool.
        spans: one per layer of the last batch.
    """

    backend: str
    engine: str
    batches: int
    layers: int
    copies: int
    bytes_from: list[int]
    spans: list[LayerSpan] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Payload bytes over all owners, each counted once."""
        return sum(self.bytes_from)
