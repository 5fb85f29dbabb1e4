"""The sections of `perf gpu-check`: each looks at its deadline before it starts another piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from hikv.doctor import describe
from hikv.kernels.relayout import Config, default_config
from hikv.measure import Candidate, measure
from hikv.plan import CopyPlan
from hikv.spec import KVSpec

from .case import DIRECTIONS, HEADS, Case, head_grids
from .checks import checks
from .compare import WAYS, compare_case, comparison_tables
from .cta import CEILING, ceiling_candidate, figures, measured_report
from .gather import gather_tables, measure_ranks
from .gather_places import Work
from .machine import Machine, Workload, workload
from .output import Column, Table
from .plot import Series
from .published import published_case
from .ways import parse_ways

QUOTAS = (1, 2, 4, 8, 16, 32)
CONFIGS = tuple(
    Config(warps, loads) for warps, loads in ((8, 16), (16, 8), (16, 16), (32, 4), (32, 8))
)


GATHER_SPEC = KVSpec(8, 1, 1152, 64, torch.uint8, latent=True)
GATHER_TOKENS, GATHER_SECONDS = 32_768, 60.0


class Deadline:
    """The end of a section's time."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; negative beyond."""
        return self._end - self._now()

    @property
    def passed(self) -> bool:
        """Whether nothing new should start."""
        return self._now() >= self._end


@dataclass
class Findings:
    """What a section found: tables, rows to sum up, one line for each wrong copy, and remarks."""

    tables: list[Table] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def facts(machine: Machine, deadline: Deadline) -> Findings:
    """The device, its link, the software, and which paths can run."""
    found = machine.facts()
    lines = [{"line": line} for line in describe(found).splitlines()]
    return Findings([Table("Machine", [Column("line", "")], lines)], [found])


def copies(machine: Machine, deadline: Deadline) -> Findings:
    """`perf.checks`, byte for byte on a poisoned destination."""
    counts: dict[tuple[str, str], dict[str, Any]] = {}
    found, todo = Findings(), checks()
    for done, check in enumerate(todo):
        if deadline.passed:
            found.remarks.append(f"out of time: {len(todo) - done} of {len(todo)} not started")
            break
        row = counts.setdefault(
            (check.group, check.path),
            {"group": check.group, "path": check.path, "right": 0, "wrong": 0, "waived": 0},
        )
        verdict = check.verify(machine)
        row[verdict.kind] += 1
        if verdict.why:
            row.setdefault("why", verdict.why)
        if verdict.kind == "wrong":
            found.wrong.append(f"{check.name}: {verdict.why}")
    found.rows = list(counts.values())
    columns = [Column(name, name) for name in ("group", "path", "right", "wrong", "waived", "why")]
    found.tables = [Table("Copies verified byte for byte", columns, found.rows)]
    return found


def table(machine: Machine, deadline: Deadline) -> Findings:
    """The CTA table on path sm."""
    cases = [published_case(heads, groups) for heads, groups in head_grids(HEADS)]
    report, rows = measured_report(machine, cases, (2, 32), "sm", 5, lambda: deadline.passed)
    found = Findings(report.tables, rows)
    found.wrong = [
        f"{row['direction']} @{row['quota']}: {row['wrong']}" for row in rows if row["wrong"]
    ]
    expected = len(cases) * len(DIRECTIONS) * 2
    if len(rows) < expected:
        found.remarks.append(f"out of time: {len(rows)} of {expected} rows")
    return found


def sweep(machine: Machine, deadline: Deadline) -> Findings:
    """Path sm over quotas and configurations, and path tma over quotas, for one case."""
    found, case = Findings(), published_case(8, 4, num_pages=8)
    for direction in DIRECTIONS:
        work = workload(machine, case, direction)
        for quota in QUOTAS:
            if deadline.passed:
                found.remarks.append(f"out of time: {direction} from {quota} CTAs on not started")
                break
            results = measure(_sweep_candidates(machine, work, quota), machine.clock, rounds=5)
            at = {"direction": direction, "quota": quota}
            found.rows += [at | {"way": result.name} | figures(result) for result in results]
    found.wrong = _wrong(found.rows)
    found.tables = [_sweep_table(found.rows, case)]
    return found


def _sweep_candidates(machine: Machine, work: Workload, quota: int) -> list[Candidate]:
    def configured(config: Config) -> Callable[[CopyPlan], None]:
        return lambda plan: machine.relayout(plan, quota, config)

    candidates = [
        work.candidate(f"{config.num_warps} × {config.loads}", configured(config), machine)
        for config in CONFIGS
    ]
    if machine.obstacle("tma", work.plans[0]) is None:
        tma = partial(machine.copy, path="tma", block_quota=quota)
        candidates.append(work.candidate("tma", tma, machine))
    return [*candidates, ceiling_candidate(machine, work)]


def _sweep_table(rows: list[dict[str, Any]], case: Case) -> Table:
    """One line a direction and quota: the best configuration beside the default one."""
    default = default_config(16)
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key, rate = (row["direction"], row["quota"]), row.get("gbps_p50")
        line = lines.setdefault(key, {"direction": key[0], "quota": key[1]})
        if row["way"] in ("tma", CEILING):
            line[row["way"]] = rate
        else:
            if row["way"] == f"{default.num_warps} × {default.loads}":
                line["default"] = rate
            if rate is not None and rate > line.get("best", 0.0):
                line |= {"best": rate, "config": row["way"]}
    columns = [
        Column("direction", "copy"),
        Column("quota", "CTAs"),
        Column("best", "best sm", ".1f"),
        Column("config", "warps × loads"),
        Column("default", f"{default.num_warps} × {default.loads}", ".1f"),
        Column("tma", "tma", ".1f"),
        Column(CEILING, "engine", ".1f"),
    ]
    title = f"Sweep, GB/s, {case.spec.num_kv_heads} heads in {case.spec.num_groups} groups"
    return Table(title, columns, list(lines.values()), [case.describe()])


def sweep_panels(rows: list[dict[str, Any]]) -> dict[str, list[Series]]:
    """One line a configuration over the quotas, and the copy engine's."""
    panels: dict[str, list[Series]] = {}
    for direction in DIRECTIONS:
        timed = [row for row in rows if row["direction"] == direction and row.get("gbps_p50")]
        panels[direction.upper()] = [
            Series(
                way,
                [row["quota"] for row in timed if row["way"] == way],
                [row["gbps_p50"] for row in timed if row["way"] == way],
            )
            for way in dict.fromkeys(row["way"] for row in timed)
        ]
    return panels


def comparison(machine: Machine, deadline: Deadline) -> Findings:
    """`perf compare` on pages that stay whole and on pages that are cut into runs of 512 bytes.

    Of the latter only two, so that one copy per run ends in time.
    """
    found, ways = Findings(), parse_ways(WAYS)
    for case, direction in product((published_case(8, 1), published_case(8, 4, 2)), DIRECTIONS):
        if deadline.passed:
            found.remarks.append(f"out of time: {direction}, HG {case.spec.num_groups} not started")
            continue
        found.rows += compare_case(machine, case, direction, ways, rounds=5, seconds=2.0)
    found.wrong = _wrong(found.rows)
    found.tables = comparison_tables(found.rows) if found.rows else []
    return found


def gather(machine: Machine, deadline: Deadline) -> Findings:
    """Two processes on this GPU: CUDA IPC, fences and copies of `p2p`, its bytes, and no kernel.

    What is copied between them is copied within one GPU, so it is no rate between GPUs.
    """
    index = machine.info.index if machine.info is not None else 0
    seconds = min(deadline.left, GATHER_SECONDS)
    work = Work(GATHER_SPEC, GATHER_TOKENS, 5, "p2p", (index, index), gemm=4096, seconds=seconds)
    row = measure_ranks(work, 2)
    if "refused" in row:
        return Findings(rows=[row], remarks=[f"skipped: {row['refused']}"])
    found = Findings(gather_tables([row], "p2p", "by two processes on one GPU"), [row])
    if row["wrong bytes"]:
        found.wrong.append(f"{row['wrong bytes']} bytes of the gather")
    if row["kernels"] is None:
        found.remarks.append("torch's profiler saw nothing: no proof that no kernel ran")
    elif row["kernels"]:
        found.wrong.append(f"SM kernels ran in the gather: {', '.join(row['kernels'])}")
    return found


def _wrong(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['direction']}, {row['way']}: {row['wrong']}" for row in rows if row["wrong"]]
