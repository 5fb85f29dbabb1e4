"""What a prefix needs to be usable: the kinds of state beside full KV, and their hit rules.

| kind | a prefix that ends at some page needs | declared as |
|---|---|---|
| full | the KV of every page | the cache's own pools |
| sliding_window | the window's last ⌈window / page_size⌉ pages before its end | `SlidingWindow` |
| recurrent | the one state that is valid exactly at its end | `Recurrent` |
| sidecar | whatever the pool needs on whose page ids it rides | one more buffer in that pool |

So a hit in the full KV alone is no hit: the usable prefix is the longest that every component can
serve. A recurrent state is read and written as a whole at every step, so a request works on a copy
of its own, and the cached one is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hikv.cache.pools import DevicePool, HostPool, check_tiers
from hikv.errors import ArgumentError


@dataclass(frozen=True)
class HitRule:
    """Which pages before a boundary make it usable: the last `trailing`, or `None` for all."""

    trailing: int | None = None

    def boundaries(self, held: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether a prefix of 0 … n pages is usable, bool `[n + 1]`, where `held` `[n]` says which
        pages are there. Nothing is needed of a prefix without pages."""
        hits = np.asarray(held, bool)
        ends = np.arange(1, hits.size + 1)
        unbroken = ends - np.maximum.accumulate(np.where(hits, 0, ends), axis=0)
        needed = ends if self.trailing is None else np.minimum(ends, self.trailing)
        return np.concatenate([[True], unbroken >= needed])


ALL_PAGES = HitRule()
"""Full KV and its sidecars."""


def trailing_pages(count: int) -> HitRule:
    """TRAILING_PAGES: a window's rule, and with a `count` of 1 that of a state."""
    return HitRule(count)


class Usable(NamedTuple):
    """A usable prefix in pages, and the components for which the longest one was not."""

    pages: int
    missing: tuple[str, ...]


def usable_pages(hits: Mapping[str, tuple[HitRule, npt.ArrayLike]]) -> Usable:
    """The longest prefix that all components can serve.

    `hits`: by component its rule, and which of the same n pages it has, bool `[n]`, in prompt
    order. A hole counts, whatever comes after it: a full KV of 6 pages with a sidecar that has
    `[1, 1, 0, 1, 1, 1]` is usable up to 2. Raises `ArgumentError` for vectors of different lengths.
    """
    fits = {name: rule.boundaries(held) for name, (rule, held) in hits.items()}
    if len({usable.size for usable in fits.values()}) != 1:
        raise ArgumentError(
            "hits",
            expected="one entry a page, of equally many pages for each component",
            got=", ".join(f"{name}: {usable.size - 1}" for name, usable in fits.items()) or "none",
            remedy="pad what ends early with False",
        )
    together = np.logical_and.reduce(list(fits.values()))
    longest = int(np.flatnonzero(together)[-1])
    return Usable(longest, tuple(name for name, usable in fits.items() if not usable[-1]))


@dataclass(frozen=True, eq=False)
class SlidingWindow:
    """Layers that attend to the last `window` tokens only, with pools of their own.

    Both pools have the cache's page size. Every page of a prompt has a page here while it is
    computed; what the window has left behind may be evicted.
    """

    name: str
    window: int
    device: DevicePool
    host: HostPool
    kind: ClassVar[str] = "sliding_window"

    def __post_init__(self) -> None:
        check_tiers(self.device, self.host, f"component {self.name!r}, ")

    def rule(self, page_size: int) -> HitRule:
        """What a boundary needs."""
        return trailing_pages(-(-self.window // page_size))


@dataclass(frozen=True, eq=False)
class Recurrent:
    """Layers that fold the prompt into a state; a page of these pools is one state.

    The pools have page size 1 and latent rows, of bytes for example; several buffers share their
    page ids (a convolution's and an SSM's state).
    """

    name: str
    device: DevicePool
    host: HostPool
    kind: ClassVar[str] = "recurrent"

    def __post_init__(self) -> None:
        check_tiers(self.device, self.host, f"component {self.name!r}, ")

    def rule(self, page_size: int) -> HitRule:
        """What a boundary needs."""
        return trailing_pages(1)


Component: TypeAlias = "SlidingWindow | Recurrent"
