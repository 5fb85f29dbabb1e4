"""What the compiler made of a kernel variant, as a row and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hikv.compiled import Report, compile_relayout, compile_relayout_tma
from hikv.plan import PartPlan

from .case import Case
from .output import Column, Table, label_columns, label_notes

COMPILERS: dict[str, Callable[[PartPlan, str], Report]] = {
    "sm": compile_relayout,
    "tma": compile_relayout_tma,
}
"""Path → the compiler of its kernel for a part and a target."""


def variant(path: str, case: Case, direction: str, part: PartPlan) -> dict[str, Any]:
    """What tells one variant from the others."""
    return {
        "path": path,
        **case.label,
        "direction": direction,
        "part": part.name,
        "run": part.row_run,
        "merged": part.run_bytes,
    }


def outcome(report: Report) -> dict[str, Any]:
    """What became of it: the compiler's summary, and its accesses in words."""
    return {
        **report.summary(),
        "loads": _accesses(report.load_widths, report.bulk_loads),
        "stores": _accesses(report.store_widths, report.bulk_stores),
    }


def _accesses(widths: Mapping[int, int], boxes: int) -> str:
    """Boxes of a descriptor, and how many accesses there are of each width, widest first."""
    words = [f"{count}×{width}" for width, count in sorted(widths.items(), reverse=True)]
    return " ".join([f"{boxes} box"] * bool(boxes) + words) or "none"


def compiler_table(rows: Sequence[Mapping[str, Any]], target: str) -> Table:
    """One line a variant; one that was `"refused"` has a reason below instead of figures."""
    columns = [
        Column("path", "path"),
        *label_columns(rows),
        Column("direction", "copy"),
        Column("merged", "merged B"),
        Column("loads", "loads"),
        Column("stores", "stores"),
        Column("registers", "regs"),
        Column("spill_bytes", "spill B"),
        Column("bytes_in_flight", "in flight B"),
    ]
    notes = [
        *label_notes(rows),
        "loads, stores: accesses to global memory per thread as count×bytes, page ids and tables "
        "included; box: instructions that move one. in flight B: per CTA.",
    ]
    if any(row.get("ring_buffers") for row in rows):
        columns += [Column("ring_buffers", "ring"), Column("shared_bytes", "shared B")]
        notes.append("ring: boxes in flight, each in shared memory.")
    refused = sorted({row["refused"] for row in rows if "refused" in row})
    notes += [f"No figures: {reason}" for reason in refused]
    return Table(f"Compiled for {target}, not run", columns, rows, notes)
