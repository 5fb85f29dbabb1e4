"""What a copy reaches at most: a kernel min(link, CTAs × bytes in flight ÷ latency), Little's law.

The latency is what a CTA waits for before it can ask for more. From the host that is the round trip
over the link. To the host the stores are posted, nobody waits for them, so it is the load from the
GPU's own memory. Both are fitted to kernels whose bytes in flight are known, at 2 CTAs, where the
link is not yet the bound. Not modelled: the SM's own limits on outstanding misses and on stores,
the run length (a loss of at most 15 % in the published table).

The copy engine has the link to itself, but needs a descriptor for every run, and the CPU takes its
time to submit one: the longer of the two decides. A kernel pays once, for its launch. Not modelled:
what one H100 showed below 28 KiB from 50,000 copies a call on, 4 to 7 GB/s (vLLM #42212).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hikv.device import PCIE_LANE_GBPS, DeviceInfo

BASELINE_IN_FLIGHT = 16 << 10
"""Bytes a CTA of the published kernel has in flight: 1024 threads with one 16-byte load each."""

DESCRIPTOR_SECONDS = 6.33e-3 / 12_288
"""CPU time to submit one copy of a batch: 12,288 of 8 KiB on an H100 (vLLM #48434)."""

LAUNCH_SECONDS = 15e-6
"""From the call of a kernel until it moves bytes, page ids uploaded. Fitted to vLLM #57555, an A30:
16 copies of 1 KiB by a Triton kernel take twice as long as by the copy engine at 0.5 µs each; its
other ratios at 16 copies give 7 to 14 µs."""


@dataclass(frozen=True)
class Link:
    """A link between GPU and host, per direction `"h2d"` and `"d2h"`.

    Attributes:
        name: for people.
        theoretical: GB/s of the link's own encoding, packet headers included.
        ceiling: GB/s, the most that the source saw a kernel reach.
        latency: seconds, fitted.
        source: of ceiling and latency.
    """

    name: str
    theoretical: float | None
    ceiling: Mapping[str, float]
    latency: Mapping[str, float]
    source: str


PCIE5 = Link(
    "PCIe 5 x16",
    theoretical=16 * PCIE_LANE_GBPS[5],
    # Best figures at 32 CTAs.
    ceiling={"h2d": 50.6, "d2h": 52.5},
    # 8 heads in one group, 2 CTAs × 16 KiB: ÷ 13.6 GB/s and ÷ 34.2 GB/s.
    latency={"h2d": 2.4e-6, "d2h": 0.96e-6},
    source="sgl-project/sglang#33651, one B200",
)
C2C = Link(
    "C2C",
    theoretical=None,
    # The copy engine's.
    ceiling={"h2d": 210.0, "d2h": 192.0},
    # Register kernel, 2 CTAs × 64 KiB: ÷ 97 GB/s and ÷ 93 GB/s.
    latency={"h2d": 1.35e-6, "d2h": 1.41e-6},
    source="sgl-project/sglang#40278, one GB300",
)


def link_of(info: DeviceInfo | None) -> Link | None:
    """The constants for a GPU's kind of link: PCIe 5 without a GPU, `None` for an unknown link.

    Older PCIe generations keep PCIe 5's latency; their ceiling must be measured.
    """
    if info is None:
        return PCIE5
    return {"pcie": PCIE5, "c2c": C2C}.get(info.link or "")


def predict(
    link: Link, direction: str, block_quota: int, in_flight: int, ceiling: float | None = None
) -> float:
    """GB/s at most, with `in_flight` bytes per CTA; `ceiling` replaces the link's own."""
    limit = link.ceiling[direction] if ceiling is None else ceiling
    return min(limit, block_quota * in_flight / link.latency[direction] / 1e9)


def kernel_seconds(
    link: Link,
    direction: str,
    block_quota: int,
    in_flight: int,
    nbytes: int,
    ceiling: float | None = None,
) -> float:
    """Seconds of a kernel's copy from the call on."""
    gbps = predict(link, direction, block_quota, in_flight, ceiling)
    return LAUNCH_SECONDS + nbytes / gbps / 1e9


def engine_seconds(
    link: Link, direction: str, num_descriptors: int, nbytes: int, ceiling: float | None = None
) -> float:
    """Seconds of the copy engine's copy from the call on."""
    limit = link.ceiling[direction] if ceiling is None else ceiling
    return max(num_descriptors * DESCRIPTOR_SECONDS, nbytes / limit / 1e9)
