"""Combinations of settings that contradict each other, and which host layouts L3 objects allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hikv.errors import ArgumentError
from hikv.layout import get_layout, list_layouts

if TYPE_CHECKING:
    from hikv.cache.config import HiCacheConfig


def object_layouts(config: HiCacheConfig) -> tuple[str, ...]:
    """Host layouts in which every L3 object is one run, the one to fill in first.

    An object is named by page, layers, head group and, with `split_kv`, K or V. It is one run where
    nothing else lies outside the layers.
    """
    named = {"page", "kv"} if config.split_kv else {"page"}
    names = []
    for name in list_layouts():
        axes = get_layout(name).axes
        outside = set(axes[: axes.index("layer")])
        if outside - {"group"} == named and ("group" in outside or config.head_group is None):
            names.append(name)
    return tuple(names)


def keeps_objects(config: HiCacheConfig) -> bool:
    """Whether host pages have to be made of L3 objects."""
    return config.storage is not None or config.key_scheme is not None


class Conflict(NamedTuple):
    """A combination that is refused: the argument to blame, when, and what the message says."""

    argument: str
    when: Callable[[HiCacheConfig], Any]
    expected: str
    remedy: str

    def error(self, config: HiCacheConfig) -> ArgumentError:
        """The refusal of `config`."""
        return ArgumentError(
            self.argument,
            expected=self.expected.format(layouts=" or ".join(object_layouts(config))),
            got=repr(getattr(config, self.argument)),
            remedy=self.remedy,
        )


CONFLICTS = (
    Conflict(
        "host_mode",
        lambda c: c.host_mode == "buffer_only",
        "'cache'; a host pool that only passes pages on to L3 is not implemented",
        "use 'cache': its host pages are reclaimed under pressure, so the pool may be small",
    ),
    Conflict(
        "storage",
        lambda c: c.storage is not None and not c.enabled,
        "None with enabled=False, since L3 is reached through the host pool",
        "set enabled=True, or drop storage",
    ),
    Conflict(
        "storage",
        lambda c: c.storage is not None and c.dcp_size > 1,
        "None with dcp_size > 1, whose ranks hold slices of pages that no object name tells apart",
        "use L1 and L2 alone, or dcp_size=1",
    ),
    Conflict(
        "storage_options",
        lambda c: c.storage_options and c.storage is None,
        "none without storage",
        "name the adapter in storage",
    ),
    Conflict(
        "mem_layout",
        lambda c: keeps_objects(c) and c.mem_layout not in (None, *object_layouts(c)),
        "{layouts}, in which every L3 object is one run of a host page",
        "leave mem_layout unset, or drop storage and key_scheme",
    ),
    Conflict(
        "block_quota",
        lambda c: c.io_backend == "direct" and c.block_quota not in (None, 0),
        "0 with io_backend='direct', which runs no kernel",
        "leave it unset, or use io_backend='kernel'",
    ),
    Conflict(
        "block_quota",
        lambda c: c.io_backend == "kernel" and c.block_quota == 0,
        "at least 1 with io_backend='kernel'",
        "leave it unset, or use io_backend='direct'",
    ),
    Conflict(
        "host_memory_fraction",
        lambda c: c.host_memory_fraction is not None and (c.host_size_gb or c.host_ratio),
        "None beside host_size_gb or host_ratio",
        "size the host pool by one of them",
    ),
)
"""Every refused combination; the first that holds is raised."""
