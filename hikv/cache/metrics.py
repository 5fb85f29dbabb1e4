"""Counters, gauges and histograms of the cache, in Prometheus' text format.

Every series is there from the start with value 0, under labels fixed in advance, so a scrape never
sees one appear and a hot path adds to an object that it already holds. One lock an object makes a
change and a scrape whole; nothing is imported for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from hikv.cache.explain import TTFT_TERMS, Explanation
from hikv.errors import ArgumentError

SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2.5, 5))
"""Upper bounds of the time buckets, 100 µs to 50 s."""
HOPS = ("backup", "load_back", "prefetch", "flush")
"""L1 → L2, L2 → L1, L3 → L2, L2 → L3."""
TIERS = ("device", "host")

Sample = tuple[str, str, float]
"""Suffix of the name, one `label="value"` or nothing, value."""


class Counter:
    """A number that only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self._value: float = 0
        self._lock = Lock()

    def add(self, amount: float = 1) -> None:
        """Add `amount`; raises `ArgumentError` where it is negative or not a number."""
        if not amount >= 0:
            raise ArgumentError(
                "amount", expected="0 or more", got=amount, remedy="use a gauge for what can fall"
            )
        with self._lock:
            self._value += amount

    @property
    def value(self) -> float:
        """The sum so far."""
        return self._value

    def samples(self) -> Iterator[Sample]:
        """The one sample."""
        yield "", "", self._value


class Gauge:
    """A number that is what it was last set to."""

    kind = "gauge"

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value

    def samples(self) -> Iterator[Sample]:
        """The one sample."""
        yield "", "", self.value


class Histogram:
    """How many observations fell under each bound, and their sum."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum: float = 0
        self._lock = Lock()

    def observe(self, value: float) -> None:
        """Count one value; raises `ArgumentError` where it is not a number, which no bucket has."""
        if math.isnan(value):
            raise ArgumentError("value", expected="a number", got=value, remedy="leave it out")
        at = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += 1
            self._sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Their sum."""
        return self._sum

    def samples(self) -> Iterator[Sample]:
        """The cumulative buckets, the sum and the count, all of one moment."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        below = 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            below += count
            yield "_bucket", f'le="{_number(bound)}"', below
        yield "_sum", "", total
        yield "_count", "", below


M = TypeVar("M", Counter, Gauge, Histogram)


class Family(Generic[M]):
    """One metric under each value of one label: `family["host"]`."""

    def __init__(self, label: str, members: Mapping[str, M]) -> None:
        self.label = label
        self.members: dict[str, M] = dict(members)

    def __getitem__(self, value: str) -> M:
        try:
            return self.members[value]
        except KeyError:
            raise ArgumentError(
                self.label,
                expected=f"one of {', '.join(self.members)}",
                got=repr(value),
                remedy="values of a label are fixed in advance",
            ) from None


class Metrics:
    """All series of one rank's cache.

    `labels` go on every sample, for example `{"rank": "0"}`. Bandwidth of a hop is the rate of
    `copied_bytes` over the rate of `copy_seconds`' sum. Write amplification is the bytes of
    `backup` and `flush` over `requests`. The latencies are the engine's to observe.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        pairs = (f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
        self._labels = ",".join(pairs)
        self._families: dict[str, tuple[str, Family[Any]]] = {}
        one, each = self._one, self._each
        self.requests = one(Counter, "requests_total", "Requests whose prefill was planned.")
        self.prompt_tokens = one(Counter, "prompt_tokens_total", "Tokens of their prompts.")
        self.matched_tokens = each(
            Counter, "matched_tokens_total", "Prompt tokens found in the tree.", tier=TIERS
        )
        self.loaded_tokens = one(
            Counter, "loaded_tokens_total", "Tokens loaded back to the GPU for a prefill."
        )
        self.extend_tokens = one(Counter, "extend_tokens_total", "Prompt tokens computed.")
        self.storage_queried_tokens = one(
            Counter, "storage_queried_tokens_total", "Tokens that L3 was asked for."
        )
        self.storage_loaded_tokens = one(
            Counter, "storage_loaded_tokens_total", "Tokens that came back from L3."
        )
        self.prefetch_wait = one(
            Histogram, "prefetch_wait_seconds", "Time a request was held back for its prefetch."
        )
        self.copied_bytes = each(Counter, "copied_bytes_total", "Bytes that arrived.", hop=HOPS)
        self.copy_seconds = each(Histogram, "copy_seconds", "Time of one copy.", hop=HOPS)
        self.copy_failures = each(
            Counter, "copy_failures_total", "Copies that failed or were given up.", hop=HOPS
        )
        self.copies_in_flight = each(Gauge, "copies_in_flight", "Copies under way.", hop=HOPS)
        self.evicted_pages = each(
            Counter, "evicted_pages_total", "Pages that left a tier for room.", tier=TIERS
        )
        self.used_pages = each(Gauge, "used_pages", "Pages owned.", tier=TIERS)
        self.total_pages = each(Gauge, "total_pages", "Pages of the pool.", tier=TIERS)
        self.ttft = one(Histogram, "ttft_seconds", "Time to the first token.")
        self.ttft_terms = each(
            Histogram, "ttft_term_seconds", "Parts of the time to the first token.", term=TTFT_TERMS
        )
        self.tpot = one(Histogram, "tpot_seconds", "Time of each further token.")

    def record(self, explanation: Explanation) -> None:
        """Count one request: its lengths by tier, and the measured terms of its first token.

        Terms of an estimate are not measurements and are left out.
        """
        self.requests.add()
        self.prompt_tokens.add(explanation.prompt_len)
        self.matched_tokens["device"].add(explanation.device_len)
        self.matched_tokens["host"].add(explanation.host_len)
        self.loaded_tokens.add(explanation.loaded_len)
        self.extend_tokens.add(explanation.extend_len)
        if explanation.estimated:
            return
        for term, seconds in explanation.ttft._asdict().items():
            if seconds is not None:
                self.ttft_terms[term].observe(seconds)
        if explanation.ttft.total is not None:
            self.ttft.observe(explanation.ttft.total)

    def render(self) -> str:
        """Every series in the text format 0.0.4 (`text/plain; version=0.0.4`)."""
        lines = []
        for name, (text, family) in self._families.items():
            kind = next(iter(family.members.values())).kind
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for value, metric in family.members.items():
                own = f'{family.label}="{_escaped(value)}"' if family.label else ""
                for suffix, label, number in metric.samples():
                    labels = ",".join(part for part in (self._labels, own, label) if part)
                    braced = f"{{{labels}}}" if labels else ""
                    lines.append(f"{name}{suffix}{braced} {_number(number)}")
        return "\n".join(lines) + "\n"

    def _each(self, metric: type[M], name: str, text: str, **label: Sequence[str]) -> Family[M]:
        ((key, values),) = label.items()
        family = Family(key, {value: metric() for value in values})
        self._families[f"hikv_{name}"] = (text, family)
        return family

    def _one(self, metric: type[M], name: str, text: str) -> M:
        family = Family("", {"": metric()})
        self._families[f"hikv_{name}"] = (text, family)
        return family[""]


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
