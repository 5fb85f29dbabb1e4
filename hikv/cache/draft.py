"""A draft model's state in host memory, kept with the target's pages.

A prefix hit spares the target its prefill, but the draft has not seen that prefix either: without
its own state it guesses badly. So whatever the draft holds of a page is one of the buffers of the
target's pool on the GPU, moves by the same page ids in the same copy, and is there or not there
together with the target's rows.

On the host it lies in one of two ways, which `HostPool.beside` is told per buffer:

| mode | host memory | asks for |
|---|---|---|
| `Packed` | the layers behind those of a target's buffer | the target's rows, dtype and page size |
| `Sidecar` | a buffer of its own, in a layout of its own | the page ids of a target's buffer |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.layout import get_layout
from hikv.spec import KVSpec


@dataclass(frozen=True)
class Packed:
    """The draft's layers follow those of `target` in one host buffer, of which both are views.

    A page's bytes of one model no longer touch those of the next page, so whole pages are a copy
    each, for each model. Where layers lie inside tokens or heads, rows of both models alternate
    there, and a copy is as short as that.
    """

    target: str = "kv"


@dataclass(frozen=True)
class Sidecar:
    """The draft has a host buffer of its own, moved by the page ids of `source`.

    `layout`: how it lies there; `None` is the host pool's.
    """

    source: str = "kv"
    layout: str | None = None


DraftMode: TypeAlias = "Packed | Sidecar"


def host_buffers(
    specs: Mapping[str, KVSpec],
    drafts: Mapping[str, DraftMode],
    layout: str,
    num_pages: int,
    *,
    pinned: bool,
) -> dict[str, KVBuffer]:
    """Allocate the host's side of a pool with buffers `specs`, of which `drafts` are the draft's.

    `layout` is for all that is not declared otherwise. Raises `ArgumentError`, before anything is
    allocated, for a draft that cannot be kept as declared.
    """
    for name, mode in drafts.items():
        _check(name, mode, specs, drafts)
    behind = {name: mode.target for name, mode in drafts.items() if isinstance(mode, Packed)}
    layouts = dict.fromkeys(specs, layout)
    for name, mode in drafts.items():
        if isinstance(mode, Sidecar) and mode.layout is not None:
            layouts[name] = mode.layout
    for name, spec in specs.items():
        get_layout(layouts[name]).order(spec)
    made: dict[str, KVBuffer] = {}
    for name in (each for each in specs if each not in behind):
        stack = [name, *(each for each, target in behind.items() if target == name)]
        views = _stacked([specs[each] for each in stack], layouts[name], num_pages, pinned)
        made.update(zip(stack, views, strict=True))
    return {name: made[name] for name in specs}


def _stacked(specs: Sequence[KVSpec], layout: str, num_pages: int, pinned: bool) -> list[KVBuffer]:
    """One allocation that holds the layers of all `specs` in turn, and a view of it for each."""
    ends = list(accumulate((spec.num_layers for spec in specs), initial=0))
    whole = replace(specs[0], num_layers=ends[-1], total_layers=None)
    buffer = KVBuffer.empty(whole, layout, num_pages, pinned=pinned)
    return [
        replace(buffer.layer_range(start, stop), spec=spec)  # each model numbers its own layers
        for spec, (start, stop) in zip(specs, pairwise(ends), strict=True)
    ]


def _check(
    name: str,
    mode: DraftMode,
    specs: Mapping[str, KVSpec],
    drafts: Mapping[str, DraftMode],
) -> None:
    if not isinstance(mode, Packed | Sidecar) or name not in specs:
        raise ArgumentError(
            f"drafts[{name!r}]",
            expected=f"Packed or Sidecar for one of the GPU pool's buffers, {', '.join(specs)}",
            got=repr(mode),
            remedy="put the draft's GPU buffer into the pool, and declare it under its name",
        )
    other = mode.target if isinstance(mode, Packed) else mode.source
    targets = [each for each in specs if each not in drafts]
    if other not in targets:
        raise ArgumentError(
            f"drafts[{name!r}]",
            expected=f"a buffer of the target in this pool, one of {', '.join(targets) or 'none'}",
            got=repr(other),
            remedy="a draft moves by the page ids of the pool that it is in: put it where they are",
        )
    if isinstance(mode, Packed):
        _check_rows(name, _rows(specs[name]), other, _rows(specs[other]))


def _rows(spec: KVSpec) -> dict[str, object]:
    """What two models must share to lie in one buffer: all of a page but its layers."""
    shared = ("num_kv_heads", "rows", "page_size", "dtype")
    return {name: spec.geometry[name] for name in shared} | {"head_group": spec.heads_per_group}


def _check_rows(
    name: str, ours: Mapping[str, object], target: str, theirs: Mapping[str, object]
) -> None:
    differing = [fact for fact in ours if ours[fact] != theirs[fact]]
    if differing:
        raise ArgumentError(
            f"draft buffer {name!r}",
            expected=", ".join(f"{fact} {theirs[fact]}" for fact in differing)
            + f" as in {target!r}, to be packed behind it",
            got=", ".join(f"{fact} {ours[fact]}" for fact in differing),
            remedy=f"declare it Sidecar({target!r}), a host buffer of its own",
        )
