"""Tables for people: one shown, two compared, one checked against this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from hikv.console import quantity
from hikv.device import DeviceInfo
from hikv.tables import HARD, SOFT, Entry, Key, Table, differences, identity, simulated

_SOFTWARE = ("schema", "source", "space", "triton")


_FEW = 16  # entries that are told one by one


def show(table: Table) -> str:
    """The header, then per direction and access width a grid of choices: path × CTAs.

    Of a few entries also the figures that each rests on, beside the bound of a model.
    """
    lines = _header(table)
    if len(table.entries) <= _FEW:
        lines += [
            f"{_named(key):<34}{_told(entry)} {_figures(entry.record)}"
            for key, entry in sorted(table.entries.items())
        ]
    for direction, vector in sorted({(k.direction, k.vector_bytes) for k in table.entries}):
        part = {
            (key.layout_run, key.num_runs): entry
            for key, entry in table.entries.items()
            if (key.direction, key.vector_bytes) == (direction, vector)
        }
        lines += ["", f"{direction}, {vector}-byte accesses: path × CTAs, runs across, bytes down"]
        lines += _grid(part)
    return "\n".join(lines)


def _header(table: Table) -> list[str]:
    header = table.header
    link = dict(header.get("link_gbps_and_latency") or {})
    targets = sorted({str(entry.record.get("target")) for entry in table.entries.values()})
    lines = [
        f"{header.get('name')}, {header.get('num_sms')} SMs, {header.get('link')}",
        *textwrap.wrap(str(header.get("kind")), 100, break_on_hyphens=False),
        f"{header.get('date')}; fewest CTAs for {' or '.join(targets)} of the ceiling",
    ]
    if link.keys() >= {"h2d", "d2h", "both", "latency"}:
        lines.append(
            f"copy engine {link['h2d']} GB/s h2d, {link['d2h']} GB/s d2h, {link['both']} GB/s both "
            f"at once; a load from the host {link['latency'] * 1e6:.2f} µs"
        )
    return lines


def _grid(part: dict[tuple[int, int], Entry]) -> Iterator[str]:
    counts = sorted({count for _, count in part})
    yield "  " + "".join(f"{text:>10}" for text in ("", *(f"{count:,}" for count in counts)))
    for run in sorted({run for run, _ in part}):
        cells = [_cell(part.get((run, count))) for count in counts]
        yield "  " + "".join(f"{text:>10}" for text in (_bytes(run), *cells))


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "·"
    return f"{entry.path}×{entry.block_quota}" if entry.block_quota else entry.path


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"


def _figures(record: Any) -> str:
    rates, second = record.get("gbps", {}), record.get("runner_up") or {}
    words = [f"(p20 {rates.get('p20')}, p80 {rates.get('p80')}), {record.get('required')} required"]
    if record.get("predicted"):
        words.append(f"at most {record['predicted']} by Little's law")
    if second:
        ctas = f"×{second['block_quota']}" if second["block_quota"] else ""
        words.append(f"next {second['path']}{ctas} {second['gbps']}")
    if record.get("gemm_slowdown"):
        words.append(f"GEMM {record['gemm_slowdown']} × as long")
    return ", ".join(words)


def compare(first: Table, second: Table) -> str:
    """Where two tables choose differently, and the rates that each saw for its own choice."""
    lines = [
        f"{name}: {first.header.get(name)!r} → {second.header.get(name)!r}"
        for name in (*HARD, *SOFT, "kind")
        if first.header.get(name) != second.header.get(name)
    ]
    both = sorted(first.entries.keys() & second.entries.keys())
    changed = [key for key in both if _choice(first, key) != _choice(second, key)]
    for key in changed:
        before, after = _told(first.entries[key]), _told(second.entries[key])
        lines.append(f"{_named(key):<36}{before:>42} → {after}")
    alone = (len(first.entries) - len(both), len(second.entries) - len(both))
    lines.append(
        f"{len(changed)} of {len(both)} shared choices differ; "
        f"{alone[0]} only in the first, {alone[1]} only in the second"
    )
    return "\n".join(lines)


def _named(key: Key) -> str:
    return f"{key.direction} {_bytes(key.run_bytes)} × {key.num_runs:,}, {key.vector_bytes}-byte"


def _choice(table: Table, key: Key) -> tuple[Any, ...]:
    entry = table.entries[key]
    return entry.path, entry.block_quota, dict(entry.config)


def _told(entry: Entry) -> str:
    config = "".join(f" {name} {value}" for name, value in entry.config.items())
    rate = entry.record.get("gbps", {}).get("p50")
    return f"{_cell(entry)}{config}, {rate} GB/s"


def check(table: Table, info: DeviceInfo | None) -> tuple[bool, str]:
    """Whether `transfer()` would use `table` on the GPU `info`, and why.

    Without a GPU only the software is compared.
    """
    if simulated(table):
        return False, "not used, it is simulated: transfer() never uses such a table"
    if info is None:
        stand_in = DeviceInfo(0, "", "", "", None, 0, 0)
        hard, soft = differences(table.header, identity(stand_in), _SOFTWARE), []
        note = "; the GPU is not compared, since there is none here"
    else:
        expected = identity(info)
        hard, soft = (differences(table.header, expected, names) for names in (HARD, SOFT))
        note = ""
    if hard:
        return False, f"not used, it is for {'; '.join(hard)}: tune again{note}"
    doubt = f", but it may be stale: it is for {'; '.join(soft)}" if soft else ""
    return True, f"used, {quantity(len(table.entries), 'entry')}{doubt}{note}"
