"""`HiCacheConfig`: every setting of the cache, its default, and what is refused or filled in.

Three verdicts, each given in one place. A value out of range and a combination that contradicts
itself are refused when the object is made. A value left at `None` is filled in by `normalized()`.
Everything else is served as it was given. docs/configuration.md lists all three.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from hikv.cache.conflicts import CONFLICTS, keeps_objects, object_layouts
from hikv.cache.eviction import POLICIES
from hikv.cache.options import (
    COUNT,
    ENTRIES,
    FROM_0,
    NAME,
    POSITIVE,
    SECONDS,
    SHARE,
    SWITCH,
    one_of,
    option,
)
from hikv.cache.sglang_args import ENABLE, read_flags
from hikv.errors import ArgumentError, CapacityError
from hikv.layout import get_layout, list_layouts
from hikv.spec import KVSpec

HOST_RATIO = 2.0
"""Host pages a GPU page where no size is given."""

_COPY_PATHS = {"kernel": "sm", "direct": "ce"}


@dataclass(frozen=True)
class HiCacheConfig:
    """Settings of one rank's cache; the metadata of each field say what it takes and means.

    `notes` are sentences on what was overridden or skipped on the way here.

    Raises:
        ArgumentError: a value out of range, or a combination that contradicts itself.
    """

    enabled: bool = option(True, SWITCH, "False keeps the cache on the GPU: no host pool, no L3")
    page_size: int | None = option(None, COUNT, "tokens a page; unset is the pools' own")
    host_mode: str = option(
        "cache", one_of("cache", "buffer_only"), "what the host pool is for; see below"
    )
    host_ratio: float | None = option(None, POSITIVE, "host pages a GPU page")
    host_size_gb: float | None = option(
        None, POSITIVE, "host pool in GB (10⁹ bytes) a rank; overrides host_ratio"
    )
    host_memory_fraction: float | None = option(
        None, SHARE, "host pool as a share of the host memory left to this rank"
    )
    mem_layout: str | None = option(None, one_of(*list_layouts()), "layout of the host pool")
    io_backend: str | None = option(
        None,
        one_of(*_COPY_PATHS),
        "who copies between GPU and host: a kernel, or the copy engine; unset chooses per copy",
    )
    block_quota: int | None = option(
        None, FROM_0, "most CTAs a copy may occupy; 0 is none, the copy engine; unset is tuned"
    )
    write_policy: str = option(
        "write_through",
        one_of("write_through", "write_through_selective", "write_back"),
        "when a slower tier gets its copy: at once, after some uses, at eviction",
    )
    write_through_threshold: int = option(
        2, COUNT, "uses after which write_through_selective copies a node"
    )
    eviction: str = option("lru", one_of(*POLICIES), "who leaves first")
    granularity: str = option(
        "segment", one_of("segment", "page"), "what leaves: whole segments, or pages off their end"
    )
    load_back_threshold: int = option(
        10, FROM_0, "tokens; a shorter span on the host is computed instead of loaded back"
    )
    layerwise: bool = option(
        True, SWITCH, "load back layer by layer, under the forward; False waits once for all"
    )
    storage: str | None = option(None, NAME, "L3 adapter; unset is no L3")
    storage_options: Mapping[str, Any] = option(dict, ENTRIES, "the adapter's own settings")
    key_scheme: str | None = option(
        None, one_of("unified"), "names of L3 objects: free of ranks and topology"
    )
    head_group: int | None = option(None, COUNT, "KV heads an L3 object; unset is all of a rank")
    layer_partition: int | None = option(None, COUNT, "layers an L3 object; unset is a rank's")
    split_kv: bool = option(False, SWITCH, "K and V as two L3 objects instead of one")
    dcp_size: int = option(1, COUNT, "ranks of decode context parallelism")
    prefetch_policy: str = option(
        "timeout",
        one_of("best_effort", "wait_complete", "timeout"),
        "how long a request waits for L3: until the GPU could go on, to the end, up to the limit",
    )
    prefetch_threshold: int = option(256, FROM_0, "tokens; a shorter L3 hit is not fetched")
    prefetch_timeout_base: float = option(2.0, SECONDS, "limit for 0 tokens")
    prefetch_timeout_per_ki_token: float = option(0.1, SECONDS, "added for each 1024 tokens")
    prefetch_timeout_max: float = option(30.0, SECONDS, "the limit's own limit")
    prefetch_host_fraction: float = option(
        0.5, SHARE, "share of the host pool that prefetches under way may hold"
    )
    prefetch_retry_interval: int = option(8, COUNT, "polls between two queries of a missed span")
    prefetch_retry_attempts: int = option(8, FROM_0, "queries of a missed span after the first")
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for each in options():
            value, allowed = getattr(self, each.name), each.metadata["allowed"]
            if not (value is None and each.default is None) and not allowed.holds(value):
                raise ArgumentError(
                    each.name,
                    expected=allowed.text + (", or None" if each.default is None else ""),
                    got=repr(value),
                    remedy=f"the option says: {each.metadata['meaning']}",
                )
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        for conflict in CONFLICTS:
            if conflict.when(self):
                raise conflict.error(self)

    @classmethod
    def from_sglang_args(
        cls, command: str | Iterable[str], *, strict: bool = False
    ) -> HiCacheConfig:
        """The configuration that an SGLang launch command asks for.

        What this cache does differently overrides the flag, with a warning and a line in `notes`:
        the host layout that L3 objects need replaces `--hicache-mem-layout`, and the flags of the
        cache have no effect in a command that does not turn it on. With `strict` both are refused.

        Args:
            command: words, or shell text with the assignments of its variables in front.

        Raises:
            ArgumentError: an unknown `--hicache-…` flag, or whatever else is refused.
        """
        flags = read_flags(command)
        values, notes = dict(flags.options), []
        if flags.skipped:
            notes.append(f"not the cache's, skipped: {', '.join(flags.skipped)}")
        if not flags.enabled and flags.cache_flags:
            given = ", ".join(flags.cache_flags)
            if strict:
                raise ArgumentError(
                    ENABLE, expected="to be given", got=f"only {given}", remedy=f"add {ENABLE}"
                )
            notes.append(_announced(f"without {ENABLE} these have no effect: {given}"))
            values = {n: v for n, v in values.items() if n in ("page_size", "eviction", "dcp_size")}
        layout = values.get("mem_layout")
        if layout is not None and not strict:
            get_layout(layout)
            rest = cls(**{**values, "mem_layout": None})
            if keeps_objects(rest) and layout not in object_layouts(rest):
                del values["mem_layout"]
                served = rest.host_layout
                notes.append(
                    _announced(f"mem_layout {layout} is overridden by {served}, which L3 needs")
                )
        return cls(**values, enabled=flags.enabled, notes=tuple(notes))

    def normalized(self) -> HiCacheConfig:
        """The effective configuration: unset values filled in, given ones untouched; idempotent."""
        fills = {name: v for name, v in self._fills().items() if getattr(self, name) is None}
        return replace(self, **fills)

    def describe(self) -> str:
        """The effective configuration, one option a line, with where each value comes from."""
        effective = self.normalized()
        lines = ["HiCache configuration"]
        for each in options():
            given, value = getattr(self, each.name), getattr(effective, each.name)
            default = each.default if each.default is not MISSING else {}
            source = "filled in" if given != value else "default" if given == default else "given"
            lines.append(f"  {each.name:<30} {value!s:<24} {source}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def check(self, spec: KVSpec) -> None:
        """Raise `ArgumentError` where the pools' geometry contradicts this configuration."""
        get_layout(self.host_layout).order(spec)
        for name in ("page_size", "head_group"):
            given, actual = getattr(self, name), getattr(spec, name)
            if given is not None and given != actual:
                raise ArgumentError(
                    name,
                    expected=f"{actual}, as the pools' spec says",
                    got=given,
                    remedy=f"build the spec with {name}={given}, or leave it unset",
                )
        if self.split_kv and spec.latent:
            raise ArgumentError(
                "split_kv",
                expected="False for latent rows, which have no V",
                got=True,
                remedy="leave it False",
            )

    def host_pages(self, num_device_pages: int, bytes_per_page: int, available_bytes: int) -> int:
        """Pages of the host pool, rounded down; 0 with `enabled=False`.

        Args:
            num_device_pages: pages of the GPU pool.
            bytes_per_page: bytes of one page over all pools that share its id.
            available_bytes: host memory that this rank may still take.

        Raises:
            CapacityError: less than one page, or more than is available.
        """
        if not self.enabled:
            return 0
        if self.host_size_gb is not None:
            source, budget = "host_size_gb", _times(self.host_size_gb, 10**9)
        elif self.host_memory_fraction is not None:
            source, budget = (
                "host_memory_fraction",
                _times(self.host_memory_fraction, available_bytes),
            )
        else:
            ratio = HOST_RATIO if self.host_ratio is None else self.host_ratio
            source, budget = "host_ratio", _times(ratio, num_device_pages) * bytes_per_page
        pages = budget // bytes_per_page
        if pages < 1:
            raise CapacityError(
                "host pool", required=bytes_per_page, available=budget, remedy=f"raise {source}"
            )
        if pages * bytes_per_page > available_bytes:
            raise CapacityError(
                "host pool",
                required=pages * bytes_per_page,
                available=available_bytes,
                remedy=f"lower {source}",
            )
        return pages

    def prefetch_timeout(self, num_tokens: int) -> float:
        """Seconds that a request waits at most for `num_tokens` from L3 under `timeout`:
        min(max, base + per_ki_token × num_tokens / 1024)."""
        grown = self.prefetch_timeout_base + self.prefetch_timeout_per_ki_token * num_tokens / 1024
        return min(self.prefetch_timeout_max, grown)

    @property
    def host_layout(self) -> str:
        """The effective `mem_layout`."""
        return self.mem_layout or object_layouts(self)[0]

    @property
    def backup_after_uses(self) -> int | None:
        """Uses of a node after which the host gets its copy; `None`: when the GPU evicts it."""
        uses = {"write_through": 1, "write_through_selective": self.write_through_threshold}
        return uses.get(self.write_policy)

    @property
    def copy_options(self) -> dict[str, Any]:
        """`path` and `block_quota` for `hikv.transfer()` between the two pools."""
        effective = self.normalized()
        path = _COPY_PATHS[effective.io_backend] if effective.io_backend else None
        return {"path": path, "block_quota": effective.block_quota}

    def _fills(self) -> dict[str, Any]:
        fills: dict[str, Any] = {"mem_layout": self.host_layout}
        if self.storage is not None:
            fills["key_scheme"] = "unified"
        if self.host_size_gb is None and self.host_memory_fraction is None:
            fills["host_ratio"] = HOST_RATIO
        if self.io_backend == "direct":
            fills["block_quota"] = 0
        if self.block_quota == 0:
            fills["io_backend"] = "direct"
        return fills


def options() -> list[Field[Any]]:
    """The fields that are settings, in order; their metadata are those of `options.option`."""
    return [each for each in fields(HiCacheConfig) if each.metadata]


def _times(factor: float, whole: int) -> int:
    """`factor × whole` rounded down, `factor` taken as the decimal number it prints as."""
    return int(Fraction(str(factor)) * whole)


def _announced(note: str) -> str:
    warnings.warn(note, stacklevel=3)
    return note
