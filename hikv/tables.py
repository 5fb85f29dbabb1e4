"""Tuned tables as files: what one says, for which machine, and how it is read and written.

A table is a header and one entry per case, sorted, each on a line of its own, so that a diff of two
tables reads like a list of changed choices. A table that is foreign, cut off or edited into
something that the tuner would never write is refused as a whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hikv.device import DeviceInfo, software_versions
from hikv.errors import ArgumentError

SCHEMA = 1

QUOTAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "ce": {"block_quota": (0,)},
    "ce3d": {"block_quota": (0,)},
    "sm": {
        "block_quota": QUOTAS,
        "num_warps": (8, 16, 32),
        "loads": (8, 16, 32),
        "streaming": (0, 1),
    },
    "tma": {"block_quota": QUOTAS, "buffers": (4, 8, 12)},
    "staged": {"block_quota": QUOTAS},
}
"""Path → what the tuner may choose: CTAs, and the fields of that kernel's `Config`."""

# A copy may only run as it was tuned: by these sources, on such a GPU, found in this space.
HARD = ("schema", "name", "num_sms", "source", "space", "triton")
# A new driver, or the same GPU in another slot, moves the figures but seldom the choice.
SOFT = ("driver", "cuda", "link")

_HOUSE = Path(__file__).parent
SHIPPED = _HOUSE / "tuned"
_SOURCES = ("plan.py", "boxes.py", "shapes.py", "kernels")


class Key(NamedTuple):
    """What a choice depends on. Sizes are powers of two; `hikv.tuning.key_of` rounds a plan's.

    Attributes:
        direction: `"h2d"`, `"d2h"` or `"d2d"`.
        run_bytes: mean size of the copies submitted, runs of consecutive pages joined.
        num_runs: how many those are.
        layout_run: the longest stretch that both layouts keep together, before pages join.
        vector_bytes: the kernels' access width, which the dtype and the rows decide.
        index_dtype: the type of page ids on the GPU.
    """

    direction: str
    run_bytes: int
    num_runs: int
    layout_run: int
    vector_bytes: int
    index_dtype: str = "int32"


@dataclass(frozen=True)
class Entry:
    """The choice for one key, and what it rests on.

    Attributes:
        config: the fields of the kernel's `Config`; empty for its default.
        record: figures of the search, for people: `gbps` with p20, p50 and p80, `required`,
            `predicted` (at most, by Little's law), `runner_up`, `gemm_slowdown`; and `piece_bytes`,
            which a look-up compares.
    """

    key: Key
    path: str
    block_quota: int
    config: Mapping[str, int]
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A header of plain values, and the entries by key."""

    header: Mapping[str, Any]
    entries: Mapping[Key, Entry]


def identity(info: DeviceInfo) -> dict[str, Any]:
    """What the header of a table for `info` and this installation says, `HARD` and `SOFT`."""
    fingerprint = info.fingerprint()
    triton = software_versions()["triton"]
    return {
        "schema": SCHEMA,
        "name": fingerprint["name"],
        "num_sms": fingerprint["num_sms"],
        "source": source_hash(),
        "space": _digest(json.dumps(SPACE, sort_keys=True).encode()),
        "triton": triton and ".".join(triton.split(".")[:2]),
        "driver": fingerprint["driver"],
        "cuda": fingerprint["cuda"],
        "link": fingerprint["link"],
    }


def source_hash(house: Path = _HOUSE) -> str:
    """A digest of the code that plans and runs copies; what it says about itself does not count."""
    roots = [house / name for name in _SOURCES]
    files = [file for root in roots for file in ([root] if root.suffix else root.glob("*.py"))]
    named = [(f.relative_to(house).as_posix(), code_alone(f.read_text("utf-8"))) for f in files]
    return _digest("".join(f"{name}\0{code}\0" for name, code in sorted(named)).encode())


def code_alone(source: str) -> str:
    """The lines of a Python `source` without comments, docstrings and what else is a mere string.

    It is the text that is left, and no syntax tree, so it is the same under every Python.
    """
    lines = source.split("\n")  # as the tokenizer counts; splitlines() ends one at a form feed too
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    code = [token for token in tokens if token.type not in _LAYOUT]
    ends = [tokenize.NEWLINE, *(token.type for token in code)]
    for token, before, after in zip(code, ends, ends[2:], strict=False):
        if token.type == tokenize.STRING and before == after == tokenize.NEWLINE:
            lines[token.start[0] - 1 : token.end[0]] = [""] * (token.end[0] - token.start[0] + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differences(
    header: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """One phrase for each of `names` in which a header differs from `expected`."""
    return [
        f"{name} {header.get(name)!r} where this machine has {expected[name]!r}"
        for name in names
        if header.get(name) != expected[name]
    ]


def simulated(table: Table) -> bool:
    """Whether nothing of `table` was measured: `transfer()` never uses it, whatever it is for."""
    return str(table.header.get("kind")).startswith("simulated")


def file_name(name: str, num_sms: int) -> str:
    """The file of a GPU's table; slices of one GPU differ in their SMs."""
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{num_sms}sm.json"


def read_table(path: Path) -> Table:
    """The table at `path`; raises `ArgumentError` where it is not a whole, valid one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        header = dict(document["header"])
        entries = [_entry(row) for row in document["entries"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            str(path),
            expected="a tuned table",
            got=f"{type(error).__name__}: {error}",
            remedy="remove it, or tune again",
        ) from error
    return Table(header, {entry.key: entry for entry in entries})


_WORDS = ("direction", "index_dtype")


def _power_of_two(value: object) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0


def _entry(row: dict[str, Any]) -> Entry:
    rest = dict(row)
    key = Key(**{name: rest.pop(name) for name in Key._fields})
    for name, value in key._asdict().items():
        if not (type(value) is str if name in _WORDS else _power_of_two(value)):
            raise ValueError(f"{name} is {value!r}")
    path, quota, config = rest.pop("path"), rest.pop("block_quota"), dict(rest.pop("config"))
    space = SPACE.get(path, {})
    if config and config.keys() != space.keys() - {"block_quota"}:
        raise ValueError(f"{path} has other fields than {sorted(config)}")
    for name, value in {"block_quota": quota, **config}.items():
        if type(value) is not int or value not in space.get(name, ()):
            raise ValueError(f"{path} with {name} {value!r} is outside the space of choices")
    if type(rest.get("piece_bytes")) not in (int, type(None)):
        raise ValueError(f"piece_bytes is {rest['piece_bytes']!r}")
    return Entry(key, path, quota, config, rest)


def write_table(path: Path, table: Table) -> None:
    """Write `table` to `path` in one step: a reader sees the old table or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_text(table))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _text(table: Table) -> str:
    rows = [
        json.dumps(
            {
                **entry.key._asdict(),
                "path": entry.path,
                "block_quota": entry.block_quota,
                "config": dict(entry.config),
                **entry.record,
            }
        )
        for _, entry in sorted(table.entries.items())
    ]
    header = json.dumps(dict(table.header), indent=2).replace("\n", "\n  ")
    lines = ",\n    ".join(rows)
    return f'{{\n  "header": {header},\n  "entries": [\n    {lines}\n  ]\n}}\n'
