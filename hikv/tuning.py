"""Which path, how many CTAs and which kernel configuration a plan gets.

Read-only and quick: a GPU's tables are read at its first copy, and nothing here times anything.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hikv.device import DeviceInfo
from hikv.env import read_env
from hikv.errors import ArgumentError
from hikv.plan import CopyPlan
from hikv.tables import (
    HARD,
    SHIPPED,
    SOFT,
    Entry,
    Key,
    Table,
    differences,
    file_name,
    identity,
    read_table,
    simulated,
)

DEFAULT_BLOCK_QUOTA = 2
"""CTAs of a copy kernel where nothing is tuned: little contention with the forward pass."""

_SECONDS_PER_DESCRIPTOR = 0.5e-6
"""CPU time to submit one copy of a batch, as published for H100 (vLLM #48434)."""

# The sizes that tables are about. Beyond them nothing changes any more, a rate has settled.
MIN_RUN_BYTES, MAX_RUN_BYTES = 64, 2 << 20
MAX_RUNS = 1 << 16
MAX_COPY_BYTES = 256 << 20

# How far, in octaves, an entry may be from a copy and still speak for it.
_REACH = {"run_bytes": 1, "num_runs": 2, "layout_run": 1}


@dataclass(frozen=True)
class Choice:
    """How a plan will run, and who said so.

    Attributes:
        path: a name of `hikv.transfers.PATHS`.
        block_quota: CTAs at most; 0 for paths without a kernel.
        source: `"caller"`, the file of a tuned table, or `"default"` where none spoke.
        config: fields of the kernel's `Config`, or `None` for its default.
    """

    path: str
    block_quota: int
    source: str
    config: Mapping[str, int] | None = None


def key_of(plan: CopyPlan) -> Key:
    """The key under which `plan` is tuned: decided by the copies that it submits."""
    copies = max(plan.num_descriptors, 1)
    return rounded_key(
        plan.direction, plan.nbytes // copies, copies, plan.run_bytes, plan.vector_bytes
    )


def rounded_key(
    direction: str, run_bytes: int, num_runs: int, layout_run: int, vector_bytes: int
) -> Key:
    """The key of these sizes: to the nearest power of two, within the sizes of tables."""
    run = min(max(_nearest_power(run_bytes), MIN_RUN_BYTES), MAX_RUN_BYTES)
    runs = min(_nearest_power(num_runs), MAX_RUNS, MAX_COPY_BYTES // run)
    layout = min(max(_nearest_power(layout_run), MIN_RUN_BYTES), MAX_RUN_BYTES)
    return Key(direction, run, runs, layout, vector_bytes)


def _nearest_power(number: int) -> int:
    """The power of two nearest to `number` ≥ 1 by ratio: ⌊log₂ n + ½⌋ = ⌊bits of n² / 2⌋."""
    return 1 << (number * number).bit_length() // 2 if number > 0 else 1


class Tuned:
    """What the tables of one GPU say, the user's own ahead of the shipped one.

    Attributes:
        tables: file and table, first come first heard.
        notes: what was ignored, and what is doubtful about what was not.
    """

    def __init__(self, tables: Sequence[tuple[Path, Table]], notes: Sequence[str] = ()) -> None:
        self.tables, self.notes = tuple(tables), tuple(notes)
        self._found: dict[Key, tuple[Entry, str] | None] = {}

    def find(self, key: Key) -> tuple[Entry, str] | None:
        """The entry nearest to `key`, and its table's file; `None` if none is near enough."""
        try:
            return self._found[key]
        except KeyError:
            return self._found.setdefault(key, self._search(key))

    def _search(self, key: Key) -> tuple[Entry, str] | None:
        for path, table in self.tables:
            near = [(far, k) for k in table.entries if (far := distance(k, key)) is not None]
            if near:
                return table.entries[min(near)[1]], str(path)
        return None


def distance(key: Key, other: Key) -> tuple[int, int] | None:
    """Octaves from `other` to `key`, of two as far the larger copy first, whose CTAs suffice for
    both; `None` where one says nothing about the other."""
    if any(
        a != b for name, a, b in zip(Key._fields, key, other, strict=True) if name not in _REACH
    ):
        return None
    octaves = {n: round(math.log2(getattr(key, n) / getattr(other, n))) for n in _REACH}
    if any(abs(octaves[name]) > reach for name, reach in _REACH.items()):
        return None
    nbytes = octaves["run_bytes"] + octaves["num_runs"]
    return abs(nbytes) + abs(octaves["run_bytes"]) + abs(octaves["layout_run"]), -nbytes


def read_tuned(info: DeviceInfo) -> Tuned:
    """The tables for the GPU `info`: one that does not fit this machine is ignored, and one that is
    only doubtful used; notes say so. Raises `ArgumentError` for a bad `HIKV_*` variable."""
    name = file_name(info.name, info.num_sms)
    files = [folder / name for folder in (read_env().tuned_dir, SHIPPED)]
    there = [file for file in files if file.exists()]
    return load(there, identity(info)) if there else Tuned(())


@functools.cache
def tuned(info: DeviceInfo) -> Tuned:
    """`read_tuned`, once a process, with a warning for each note."""
    found = read_tuned(info)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return found


def load(files: Sequence[Path], expected: Mapping[str, object]) -> Tuned:
    """The tables among `files` that fit `expected`, a table's identity."""
    tables, notes = [], []
    for path in files:
        if not path.exists():
            continue
        try:
            table = read_table(path)
        except ArgumentError as error:
            notes.append(f"tuned table ignored: {error}")
            continue
        if simulated(table):
            notes.append(f"tuned table {path} ignored: it is simulated; tune on this GPU")
            continue
        if hard := differences(table.header, expected, HARD):
            notes.append(f"tuned table {path} ignored: it is for {'; '.join(hard)}; tune again")
            continue
        if soft := differences(table.header, expected, SOFT):
            notes.append(f"tuned table {path} may be stale: it is for {'; '.join(soft)}")
        tables.append((path, table))
    return Tuned(tables, notes)


def _as_tuned(entry: Entry, piece_bytes: int | None) -> bool:
    """Whether pieces of this size are at most an octave below those that `entry` was timed with."""
    tuned_with = entry.record.get("piece_bytes")
    return piece_bytes is None or tuned_with is None or 2 * piece_bytes >= tuned_with


def choose(
    plan: CopyPlan,
    *,
    block_quota: int | None,
    link_gbps: float,
    serves: Callable[[str], bool],
    path: str | None = None,
    table: Tuned | None = None,
    piece_bytes: Callable[[str], int | None] = lambda path: None,
) -> Choice:
    """The path for `plan`, CTAs and configuration, where the caller left them open.

    Between host buffers torch copies. Then the tuned table decides; a `block_quota` of 0 allows the
    choices of it that launch no kernel. Where it says nothing, that quota is the copy engine run by
    run. Else the copy engine takes a plan whose copies, joined over consecutive pages, are so large
    that the link needs longer for one than the CPU for submitting the next; a kernel takes the
    rest, and all copies within one GPU, where the copy engine is far slower than the SMs. Strided
    boxes are chosen by a table alone: nobody has published what they reach.

    Args:
        block_quota: the caller's bound on CTAs, kept whatever a table says.
        link_gbps: decimal GB/s between host and GPU.
        serves: whether this machine can run a path for this plan.
        path: the caller's path with a kernel; a table can still say how many CTAs.
        piece_bytes: mean bytes of what a path hands to a copy engine at a time, where the key of
            the plan does not tell.
    """
    if path is None and plan.gpu is None:
        return Choice("cpu", 0, "default")
    engine_alone = path is None and block_quota == 0
    found = table.find(key_of(plan)) if table is not None and table.tables else None
    if found is not None:
        entry, source = found
        allowed = path is None and not (engine_alone and entry.block_quota)
        if path == entry.path or (
            allowed and serves(entry.path) and _as_tuned(entry, piece_bytes(entry.path))
        ):
            bound = (
                entry.block_quota if block_quota is None or not entry.block_quota else block_quota
            )
            return Choice(entry.path, bound, source, dict(entry.config) or None)
    if engine_alone:
        return Choice("ce", 0, "caller")
    bound = DEFAULT_BLOCK_QUOTA if block_quota is None else block_quota
    if path is not None:
        return Choice(path, bound, "caller")
    mean_copy = plan.nbytes / max(plan.num_descriptors, 1)
    keeps_link_busy = mean_copy >= _SECONDS_PER_DESCRIPTOR * link_gbps * 1e9
    if plan.direction != "d2d" and keeps_link_busy and serves("ce"):
        return Choice("ce", 0, "default")
    return Choice("sm", bound, "default")
