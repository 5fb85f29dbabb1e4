"""Why a request computes what it computes: where its prompt was, what was loaded, what stayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hikv.errors import ArgumentError

REASONS = {
    "load_back_threshold": "the span on the host is shorter than load_back_threshold",
    "gpu_quota": "this step's GPU quota is used up",
    "no_room": "no GPU page is free and none can be evicted",
    "locked": "the pages that could make room are locked",
    "copy_failed": "the copy was refused or failed",
    "in_flight": "the copy has not arrived",
    "prefetch_threshold": "the hit in L3 is shorter than prefetch_threshold",
    "prefetch_ended": "the request stopped waiting for its prefetch",
    "page_missing": "a page in between is missing or came back damaged",
    "component_missing": "a window, state or sidecar that the prefix needs is missing",
    "rank_minimum": "another rank can use less",
    "cancelled": "the request was cancelled or retracted",
}
"""Why tokens that a slower tier holds are computed all the same, in the order to look: first what
stops a load-back, then what stops a prefetch."""


class TtftSplit(NamedTuple):
    """The six parts of the time to the first token, in seconds: 0.0 where a part did not happen,
    `None` where nobody measured."""

    scheduler_wait: float | None = None
    storage_query: float | None = None
    prefetch: float | None = None
    load_back: float | None = None
    prefill: float | None = None
    sampling: float | None = None

    @property
    def total(self) -> float | None:
        """The sum, or `None` while a part is unknown."""
        known = [seconds for seconds in self if seconds is not None]
        return sum(known) if len(known) == len(self) else None


TTFT_TERMS = TtftSplit._fields


@dataclass(frozen=True)
class Explanation:
    """What one request found and what it will compute. Lengths are in tokens.

    Attributes:
        device_len, host_len: prompt tokens in L1, and after them in L2.
        storage_len: tokens after those in L3; `None` until L3 was asked.
        loaded_len: tokens loaded back to the GPU for this prefill.
        reasons: keys of `REASONS`, needed where held tokens are not used.
        last_device_node, last_host_node: serials of the nodes where the match ends in each tier.
        unusable_len, missing: tokens beyond all of those whose full KV L1 or L2 holds in vain, as
            these components lack what the prefix needs.
        ttft: the six terms; `estimated` says that they come from a model, not from a clock.

    Raises:
        ArgumentError: lengths that cannot be, or reasons that do not fit them.
    """

    rid: str
    page_size: int
    prompt_len: int
    device_len: int
    host_len: int = 0
    storage_len: int | None = None
    loaded_len: int = 0
    reasons: tuple[str, ...] = ()
    last_device_node: int | None = None
    last_host_node: int | None = None
    write_policy: str = ""
    prefetch_policy: str = ""
    unusable_len: int = 0
    missing: tuple[str, ...] = ()
    ttft: TtftSplit = field(default_factory=TtftSplit)
    estimated: bool = False

    def __post_init__(self) -> None:
        below = self.host_len + (self.storage_len or 0)
        for name, most in (
            ("device_len", self.prompt_len),
            ("host_len", self.prompt_len - self.device_len),
            ("storage_len", self.prompt_len - self.device_len - self.host_len),
            ("loaded_len", below),
            ("unusable_len", self.prompt_len - self.device_len - self.host_len),
        ):
            if not 0 <= (getattr(self, name) or 0) <= most:
                raise ArgumentError(
                    name,
                    expected=f"0 to {most} tokens",
                    got=getattr(self, name),
                    remedy="tiers follow each other within the prompt; only what they hold loads",
                )
        unknown = [reason for reason in self.reasons if reason not in REASONS]
        if unknown or bool(self.reasons) != (self.left_len > 0):
            raise ArgumentError(
                "reasons",
                expected=f"some of {', '.join(REASONS)} exactly where held tokens stay behind",
                got=f"{self.reasons} for {self.left_len} tokens",
                remedy="say why they were not loaded",
            )

    @property
    def left_len(self) -> int:
        """Tokens that some tier holds and that are computed all the same."""
        return self.host_len + (self.storage_len or 0) - self.loaded_len + self.unusable_len

    @property
    def extend_len(self) -> int:
        """Tokens that this prefill computes."""
        return self.prompt_len - self.device_len - self.loaded_len

    def __str__(self) -> str:
        """The lines to read from top to bottom when a request was slower than hoped."""
        asked = "not asked" if self.storage_len is None else self.storage_len
        lines = [
            f"request {self.rid}: {self.prompt_len} tokens, page {self.page_size}",
            f"  L1 device_len    {self.device_len:>9}",
            f"  L2 host_len      {self.host_len:>9}",
            f"  L3 storage_len   {asked:>9}",
            f"  loaded_len       {self.loaded_len:>9}",
            f"  extend_len       {self.extend_len:>9}  {self._because()}",
            f"  nodes            device {self.last_device_node}, host {self.last_host_node}",
            f"  policies         write {self.write_policy}, prefetch {self.prefetch_policy}",
        ]
        if any(seconds is not None for seconds in self.ttft):
            terms = " + ".join(
                f"{name} {'?' if seconds is None else format(seconds, '.4f')}"
                for name, seconds in self.ttft._asdict().items()
            )
            total = "?" if self.ttft.total is None else f"{self.ttft.total:.4f}"
            source = "estimated" if self.estimated else "measured"
            lines.append(f"  first token      {total} s {source} = {terms}")
        return "\n".join(lines)

    def _because(self) -> str:
        if self.left_len:
            why = "; ".join(REASONS[reason] for reason in self.reasons)
            names = f" ({', '.join(self.missing)})" if self.missing else ""
            return f"{self.left_len} of them held below: {why}{names}"
        if self.device_len + self.loaded_len == 0 and self.prompt_len >= self.page_size:
            return "no tier holds any: compare namespace, salt and page size with the writer's"
        return "no tier holds them"
