"""A `Bench` on torch's current GPU: scratch pools, verified copies, CUDA events.

Only memory that is allocated here is touched: no pool of anybody else is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from hikv.buffer import KVBuffer
from hikv.device import DeviceInfo, device_info, disturbances, probe_failure
from hikv.errors import Unavailable
from hikv.kernels.submit import warp_size
from hikv.measure import (
    Candidate,
    Clock,
    GpuClock,
    Measurement,
    cold_sets,
    fill_random,
    measure,
    wrong_bytes,
)
from hikv.pinned import allocate_pinned
from hikv.plan import CopyPlan
from hikv.spec import KVSpec
from hikv.transfers import PATHS, obstacle
from hikv.tuning import MAX_COPY_BYTES

from .cases import Case
from .link import measure_link, median_seconds
from .space import Point, bytes_in_flight, compiled, littles_law, points, prune, target_of

_CHECKED_PAGES = 16
_MAX_TURNS = 64  # lists of pages that copies take turns with
_MAX_BESIDE = 256  # copies beside a GEMM: more would be waited for at submission
_GEMM, _GEMMS = 4096, 8


def copy(plan: CopyPlan, point: Point) -> None:
    """Queue `plan` on torch's current stream, as `point` says."""
    path = PATHS[point.path]
    options: dict[str, Any] = {"stream": torch.cuda.current_stream(plan.gpu)}
    if path.block_quota:
        options["block_quota"] = point.block_quota
    if point.config and path.config is not None:
        options["config"] = path.config(**dict(point.config))
    path.launch(plan, **options)


class GpuBench:
    """See `Bench`. `of_gpu` makes the real one; the arguments let a test stand in for its parts.

    Args:
        device: where the GPU's pools lie.
        copy_plan: queues a plan at a point on torch's current stream.
        serves: whether a path can run a plan here.
        compile_point: the compiler's report, as for `hikv`'s own pruning.
    """

    kind = "measured"

    def __init__(
        self,
        device: torch.device,
        info: DeviceInfo,
        clock: Clock,
        *,
        copy_plan: Callable[[CopyPlan, Point], Any] = copy,
        serves: Callable[[str, CopyPlan], bool] = lambda path, plan: obstacle(path, plan) is None,
        compile_point: Callable[..., Any] = compiled,
    ) -> None:
        self.info, self._device, self._clock = info, device, clock
        self._copy, self._serves, self._compile = copy_plan, serves, compile_point
        self._memory: dict[str, torch.Tensor] = {}
        self._link: dict[str, Any] | None = None
        self._kept: dict[tuple[object, ...], list[Point]] = {}
        self._right: set[tuple[object, ...]] = set()

    @classmethod
    def of_gpu(cls) -> GpuBench:
        """Torch's current GPU.

        Raises `Unavailable` without one, and inside a graph capture, which a timing would end.
        """
        info = device_info()
        if info is None:
            remedy = "run where torch sees a GPU, or --simulate one"
            raise Unavailable("a GPU", str(probe_failure()), remedy=remedy)
        if torch.cuda.is_current_stream_capturing():
            raise Unavailable(
                "the GPU",
                "the current stream is being captured into a graph",
                remedy="tune before the capture, in a process of its own",
            )
        device = torch.device("cuda", info.index)
        return cls(device, info, GpuClock(device))

    def disturbances(self) -> tuple[str, ...]:
        """What NVML says."""
        return disturbances(self.info.index)

    def link(self) -> dict[str, Any]:
        """Measured at the first call, on an otherwise idle link."""
        if self._link is None:
            blocks = [self._block(side, 2 * MAX_COPY_BYTES) for side in ("host", "gpu")]
            self._link = measure_link(self._clock, *blocks)
        return self._link

    def points(self, case: Case, quick: bool) -> list[Point]:
        """The space, less what the compiler rules out for pages of this kind."""
        kind = (case.direction, case.spec, quick)
        if kind not in self._kept:
            (plan,) = case.plans(self._pool, num_pages=1)
            kept = points(self.info.num_sms, lambda path: self._serves(path, plan), quick=quick)
            if not quick:  # defaults and the smallest tiles fit
                kept = prune(kept, plan.parts, target_of(self.info), self._compile)
            self._kept[kind] = kept
        return self._kept[kind]

    def measure(
        self, case: Case, points: Sequence[Point], rounds: int, seed: int
    ) -> list[Measurement]:
        """Each point once alone on a poisoned destination, then all against each other."""
        wrong = {point: self._check(case, point) for point in points}
        plans = case.plans(self._pool, turns=min(cold_sets(case.nbytes), _MAX_TURNS))

        def candidate(point: Point) -> Candidate:
            def run(turn: int) -> None:
                self._copy(plans[turn % len(plans)], point)

            return Candidate(str(point), plans[0].nbytes, run, check=lambda: wrong[point])

        candidates = [candidate(point) for point in points]
        return measure(candidates, self._clock, rounds=rounds, seed=seed)

    def _check(self, case: Case, point: Point) -> str | None:
        """What is wrong with the bytes of `point` on pages of this kind; checked once."""
        kind = (case.direction, case.spec, point)
        if kind in self._right:
            return None
        (plan,) = case.plans(self._pool, num_pages=min(case.num_pages, _CHECKED_PAGES))
        fill_random(plan.src)
        try:
            wrong = wrong_bytes(plan, lambda: self._copy(plan, point), self._synchronize)
        except OutOfResources as error:
            return f"it does not fit this GPU: {error}"
        if wrong is None:
            self._right.add(kind)
        return wrong

    def predicted(self, case: Case, point: Point) -> float | None:
        """Little's law with the measured latency; from the host, where a kernel waits for it."""
        if case.direction != "h2d":
            return None
        in_flight = bytes_in_flight(point, case.vector_bytes, warp_size())
        link = self.link()
        return littles_law(point, case.nbytes, in_flight, link["latency"], link["h2d"])

    def slowdown(self, case: Case, point: Point) -> float | None:
        """Time of GEMMs (4096³, bf16) beside copies that last as long, over their time alone.

        On random values: a GPU draws less power for equal ones, and keeps higher clocks.
        """
        plans = case.plans(self._pool, turns=min(cold_sets(case.nbytes), _MAX_TURNS))
        shape = (_GEMM, _GEMM)
        a, b, out = (
            torch.randn(shape, dtype=torch.bfloat16, device=self._device) for _ in range(3)
        )
        side = torch.cuda.Stream(self._device)

        def gemms() -> None:
            for _ in range(_GEMMS):
                torch.mm(a, b, out=out)

        alone = median_seconds(self._clock, gemms)
        copies = 1 + int(alone / median_seconds(self._clock, lambda: self._copy(plans[0], point)))

        def beside() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for turn in range(min(copies, _MAX_BESIDE)):
                    self._copy(plans[turn % len(plans)], point)
            gemms()

        return median_seconds(self._clock, beside) / alone

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pool(self, side: str, spec: KVSpec, layout: str, num_pages: int) -> KVBuffer:
        nbytes = num_pages * spec.bytes_per_page
        memory = self._block(side, nbytes)[:nbytes]
        return KVBuffer.from_tensor(memory, spec, layout, pinned=side == "host")

    def _block(self, side: str, nbytes: int) -> torch.Tensor:
        """At least `nbytes` of scratch on `side`, every page of it touched."""
        if side not in self._memory or self._memory[side].numel() < nbytes:
            self._memory.pop(side, None)
            pinned = side == "host" and self._device.type == "cuda"
            self._memory[side] = (
                allocate_pinned(nbytes, page_bytes=nbytes).tensor
                if pinned
                else torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            )
        return self._memory[side]
