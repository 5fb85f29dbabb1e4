"""A simulated GPU: the same questions as a real one, answered by a small model with noise.

It is there to try a search against a known truth, and to show the tool where no GPU is. Its figures
are nobody's measurement. The presets take rates and latencies from published ones; what nobody
published is assumed, and said to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from hikv.device import DeviceInfo
from hikv.measure import Candidate, Measurement, Sample, measure
from hikv.shapes import no_rows, num_boxes

from .cases import Case
from .space import Point, bytes_in_flight, littles_law, points

# Assumed of every preset: time to launch a kernel, for the driver to take a batch, for a ring's
# descriptors to be made and fetched; the latency of a GPU's own memory; the payload bytes that
# each run costs a link in headers (the published loss at runs of 256 B is 6 to 14 %).
_LAUNCH, _CE_CALL, _RING_SETUP, _LOCAL_LATENCY, _RUN_OVERHEAD = 4e-6, 8e-6, 2e-6, 1e-6, 32
# Seconds the copy engine needs for each row of a box at least: 2²⁰ rows of 1 byte in 2.6 ms
# (ROCm/rocm-systems#6910 of a CUDA GPU that it does not name). A box costs as much to submit as a
# copy of one run, assumed; nobody has published either for pinned memory and many boxes.
_BOX_ROW = 2.5e-9
_SLOT_BYTES = 32 << 20
# Bytes of warps × loads × access beyond which the register kernel spills, as compiled for sm_90.
_MAX_REGISTER_BYTES = 4096


@dataclass(frozen=True)
class Preset:
    """One GPU and its link.

    Attributes:
        ceiling: GB/s per direction.
        latency: seconds until a CTA's request is answered, per direction; stores to the host are
            posted, so on PCIe that one is the load from the GPU's own memory.
        sm_in_flight: bytes that one SM keeps requested from registers at most.
        cta_gbps: GB/s of one SM at most, whatever is in flight.
        descriptor: seconds the copy engine's submission takes per copy.
        both_ways: share of the sum of both ceilings that is left when both are used.
        source: of these figures.
    """

    name: str
    num_sms: int
    capability: tuple[int, int] | None
    link: str
    ceiling: Mapping[str, float]
    latency: Mapping[str, float]
    sm_in_flight: int
    cta_gbps: float
    descriptor: float
    both_ways: float
    source: str


_PCIE5_LATENCY = {"h2d": 2.4e-6, "d2h": 0.96e-6}  # fitted to sgl-project/sglang#33651

PRESETS = {
    "a100": Preset(
        "A100 PCIe 4", 108, (8, 0), "pcie4x16",
        ceiling={"h2d": 24.8, "d2h": 24.8}, latency=_PCIE5_LATENCY,
        sm_in_flight=64 << 10, cta_gbps=48.0, descriptor=0.5e-6, both_ways=0.7,
        source="ceiling and both ways: A100 reports on the NVIDIA developer forum; latency as on "
        "PCIe 5 and descriptor cost as on H100, assumed",
    ),
    "h100": Preset(
        "H100 PCIe 5", 132, (9, 0), "pcie5x16",
        ceiling={"h2d": 55.6, "d2h": 55.6}, latency=_PCIE5_LATENCY,
        sm_in_flight=64 << 10, cta_gbps=48.0, descriptor=0.5e-6, both_ways=0.9,
        source="ceiling: sample output of NVIDIA nvbandwidth; descriptor cost: "
        "vllm-project/vllm#48434; latency: sgl-project/sglang#33651 (B200)",
    ),
    "b200": Preset(
        "B200 PCIe 5", 148, (10, 0), "pcie5x16",
        ceiling={"h2d": 50.6, "d2h": 52.5}, latency=_PCIE5_LATENCY,
        sm_in_flight=64 << 10, cta_gbps=48.0, descriptor=0.5e-6, both_ways=0.9,
        source="ceiling and latency: sgl-project/sglang#33651; descriptor cost as on H100, assumed",
    ),
    "gb300": Preset(
        "GB300 C2C", 152, (10, 3), "c2c",
        ceiling={"h2d": 210.0, "d2h": 192.0}, latency={"h2d": 1.35e-6, "d2h": 1.41e-6},
        sm_in_flight=64 << 10, cta_gbps=48.0, descriptor=0.5e-6, both_ways=0.9,
        source="ceiling, latency and rate of a CTA: sgl-project/sglang#40278; descriptor cost as "
        "on H100, assumed",
    ),
    "mi300x": Preset(
        "MI300X PCIe 5", 304, None, "pcie5x16",
        ceiling={"h2d": 55.6, "d2h": 55.6}, latency={"h2d": 2.6e-6, "d2h": 2.6e-6},
        sm_in_flight=32 << 10, cta_gbps=12.4, descriptor=1e-6, both_ways=0.9,
        source="ceiling, and 6.2 GB/s a CTA at an assumed 16 KiB in flight: "
        "sgl-project/sglang#37700; descriptor cost assumed",
    ),
}  # fmt: skip
PRESETS["h200"] = replace(PRESETS["h100"], name="H200 PCIe 5")


class SimulatedGpu:
    """A `Bench` on the model of `preset`.

    Args:
        noise: standard deviation of a sample, as a share of it.
        spoiled: paths whose bytes come out wrong.
        disturbed: what `disturbances` says.
    """

    def __init__(
        self,
        preset: Preset,
        *,
        noise: float = 0.05,
        seed: int = 0,
        spoiled: Sequence[str] = (),
        disturbed: Callable[[], tuple[str, ...]] = lambda: (),
    ) -> None:
        self.preset, self._noise, self._random = preset, noise, random.Random(seed)
        self._spoiled, self.disturbances = spoiled, disturbed
        self.kind = f"simulated: {preset.name}; {preset.source}"
        self.info = DeviceInfo(
            index=0,
            name=f"simulated {preset.name}",
            uuid="simulated",
            vendor="nvidia" if preset.capability else "amd",
            capability=preset.capability,
            num_sms=preset.num_sms,
            memory_bytes=80 << 30,
            link=preset.link,
        )

    def link(self) -> dict[str, Any]:
        """The preset's link."""
        h2d, d2h = self.preset.ceiling["h2d"], self.preset.ceiling["d2h"]
        both = round((h2d + d2h) * self.preset.both_ways, 1)
        return {"h2d": h2d, "d2h": d2h, "both": both, "latency": self.preset.latency["h2d"]}

    def points(self, case: Case, quick: bool) -> list[Point]:
        """The space, less what spills or has no tensor descriptors."""
        tensors = case.vector_bytes == 16 and (self.preset.capability or (0, 0)) >= (9, 0)
        serves = {"tma": tensors, "ce3d": _boxes(case) is not None}
        wide = points(self.preset.num_sms, lambda path: serves.get(path, True), quick=quick)

        def held(point: Point) -> int:
            config = dict(point.config)
            return config.get("num_warps", 0) * config.get("loads", 0) * case.vector_bytes

        return [point for point in wide if held(point) <= _MAX_REGISTER_BYTES]

    def measure(
        self, case: Case, points: Sequence[Point], rounds: int, seed: int
    ) -> list[Measurement]:
        """Noisy times of the model, by the protocol of a real GPU."""
        candidates = [
            Candidate(
                str(point),
                case.nbytes,
                run=partial(self._run, self.seconds(case, point)),
                check=partial(self._check, point),
            )
            for point in points
        ]
        return measure(candidates, self, rounds=rounds, warmup=0, seed=seed)

    def time(self, run: Callable[[], Any]) -> Sample:
        """The clock: what the copy says it took, and noise."""
        seconds = run() * math.exp(self._random.gauss(0, self._noise))
        return Sample(seconds, _LAUNCH)

    @staticmethod
    def _run(seconds: float, turn: int) -> float:
        return seconds

    def _check(self, point: Point) -> str | None:
        return "a byte is wrong, as was asked for" if point.path in self._spoiled else None

    def predicted(self, case: Case, point: Point) -> float | None:
        """Little's law alone, without what one SM keeps requested."""
        in_flight = bytes_in_flight(point, case.vector_bytes)
        latency, ceiling = (m[case.direction] for m in (self.preset.latency, self.preset.ceiling))
        return littles_law(point, case.nbytes, in_flight, latency, ceiling)

    def slowdown(self, case: Case, point: Point) -> float | None:
        """A GEMM that loses the copy's SMs for as long as both run."""
        return self.preset.num_sms / (self.preset.num_sms - point.block_quota)

    def seconds(self, case: Case, point: Point) -> float:
        """The truth that a search is to find: how long the model takes, without noise."""
        if point.path == "ce":
            return self._engine(case, case.num_runs)
        if point.path == "ce3d":
            nbytes = case.nbytes + case.num_runs * _RUN_OVERHEAD
            crossing = nbytes / (self.preset.ceiling[case.direction] * 1e9)
            submitting = (_boxes(case) or 0) * self.preset.descriptor
            return _CE_CALL + max(submitting, crossing, case.num_runs * _BOX_ROW)
        if point.path == "staged":
            # One page is converted ahead of what crosses; the rest overlaps.
            nbytes, latency = case.nbytes, _LOCAL_LATENCY
            rate = point.block_quota * min(128 << 10, nbytes) / latency
            convert, cross = nbytes / rate, self._engine(case, case.num_pages)
            return 2 * _LAUNCH + min(nbytes, _SLOT_BYTES) / rate + max(convert, cross)
        return self._kernel(case, point)

    def _engine(self, case: Case, copies: int) -> float:
        crossing = case.nbytes / (self.preset.ceiling[case.direction] * 1e9)
        return _CE_CALL + max(copies * self.preset.descriptor, crossing)

    def _kernel(self, case: Case, point: Point) -> float:
        preset = self.preset
        in_flight = bytes_in_flight(point, case.vector_bytes)
        assert in_flight is not None
        ctas = min(point.block_quota, math.ceil(case.nbytes / in_flight))
        setup = _RING_SETUP if point.path == "tma" else 0.0
        held = in_flight if point.path == "tma" else min(in_flight, preset.sm_in_flight)
        latency = preset.latency[case.direction]
        rate = min(
            ctas * min(held / latency, preset.cta_gbps * 1e9), preset.ceiling[case.direction] * 1e9
        )
        share = case.run_bytes / (case.run_bytes + _RUN_OVERHEAD)
        return _LAUNCH + setup + latency + case.nbytes / (rate * share)


@cache
def _boxes(case: Case) -> int | None:
    """Boxes of a copy; `None` where none would hold two runs."""
    plan = case.part_plan()
    if no_rows(plan) is not None:
        return None
    return math.ceil(num_boxes(plan) * case.num_pages / plan.num_pages)
