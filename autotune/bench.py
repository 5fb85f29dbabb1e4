"""What a search asks of a machine, whether it is a GPU or a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hikv.device import DeviceInfo
from hikv.measure import Measurement

from .cases import Case
from .space import Point


class Bench(Protocol):
    """A GPU and its link, real or simulated.

    Attributes:
        info: the GPU, whose table is to be written.
        kind: `"measured"`, or `"simulated"` with the name of the preset.
    """

    info: DeviceInfo
    kind: str

    def disturbances(self) -> tuple[str, ...]:
        """What would spoil a timing now: other processes on the GPU, throttled clocks."""
        ...

    def link(self) -> dict[str, Any]:
        """The link's ceilings in GB/s by the copy engine, `h2d`, `d2h` and `both` at once, and
        `latency`: seconds of a dependent load from pinned host memory."""
        ...

    def points(self, case: Case, quick: bool) -> list[Point]:
        """The ways to make the case's copy that are worth timing."""
        ...

    def measure(
        self, case: Case, points: Sequence[Point], rounds: int, seed: int
    ) -> list[Measurement]:
        """Verify and time `points` against each other, by the protocol of `hikv.measure`."""
        ...

    def predicted(self, case: Case, point: Point) -> float | None:
        """GB/s at most, by Little's law; `None` where no model speaks."""
        ...

    def slowdown(self, case: Case, point: Point) -> float | None:
        """How many times longer a GEMM takes beside this copy, `None` where nobody can tell."""
        ...
