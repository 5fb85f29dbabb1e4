"""What this machine can do for hikv, and why it cannot do the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from hikv.buffer import KVBuffer
from hikv.console import quantity
from hikv.device import (
    DeviceInfo,
    cpu_numa_nodes,
    device_info,
    numa_mismatch,
    probe_failure,
    software_versions,
)
from hikv.errors import HikvError
from hikv.layout import list_layouts
from hikv.pinned import pinned_budget
from hikv.plan import plan_transfer
from hikv.spec import KVSpec
from hikv.transfers import PATHS, obstacle
from hikv.tuning import DEFAULT_BLOCK_QUOTA, read_tuned


def examine() -> dict[str, Any]:
    """Facts about the GPU, its link, the host, the software, and every path; ready for JSON.

    `paths` maps a path to `None` where it can run here, else to the reason why it cannot.
    """
    info = device_info()
    budget = pinned_budget()
    nodes = cpu_numa_nodes()
    return {
        "gpu": asdict(info) if info else None,
        "no_gpu_because": probe_failure(),
        "cpu_numa_nodes": sorted(nodes),
        "numa_warning": numa_mismatch(info.numa_node, nodes) if info else None,
        "pinned_budget": {"bytes": budget.available_bytes, "source": budget.source},
        "software": software_versions(),
        "tuned": _tuned(info) if info else None,
        "paths": _paths(),
    }


def _tuned(info: DeviceInfo) -> dict[str, Any]:
    """The tables that `transfer()` would ask, first come first heard, and what is odd with any."""
    found = read_tuned(info)
    tables = [
        {"file": str(file), "date": table.header.get("date"), "entries": len(table.entries)}
        for file, table in found.tables
    ]
    return {"tables": tables, "notes": list(found.notes)}


def _paths() -> dict[str, str | None]:
    """Every path, tried on a page between the GPU and pinned memory; `"cpu"` within the host."""
    spec = KVSpec(2, 1, 64, 4, torch.bfloat16)  # of several runs a page, as boxes need
    host_layout, gpu_layout, *_ = list_layouts()
    host, other = (KVBuffer.empty(spec, layout, 1) for layout in (host_layout, gpu_layout))
    within = plan_transfer(host, other, [0], [0])
    reason = probe_failure()
    if reason is None:
        try:
            pinned = KVBuffer.empty(spec, host_layout, 1, pinned=True)
        except HikvError as error:
            reason = f"no pinned memory: {error}"
    if reason is not None:
        return {name: obstacle(name, within) if name == "cpu" else reason for name in PATHS}
    gpu = KVBuffer.empty(spec, gpu_layout, 1, device="cuda")
    across = plan_transfer(pinned, gpu, [0], [0])
    return {name: obstacle(name, within if name == "cpu" else across) for name in PATHS}


def describe(facts: dict[str, Any]) -> str:
    """`examine()` for people, several lines."""
    gpu, software = facts["gpu"], facts["software"]
    lines = []
    if gpu is None:
        lines.append(f"GPU       none: {facts['no_gpu_because']}")
    else:
        capability = ".".join(map(str, gpu["capability"] or ())) or "unknown"
        lines += [
            f"GPU       {gpu['name']}, {gpu['num_sms']} SMs, capability {capability}, "
            f"{gpu['memory_bytes'] / 2**30:.1f} GiB",
            f"link      {_link(gpu)}",
            f"NUMA      GPU node {gpu['numa_node']}, this process on {facts['cpu_numa_nodes']}",
            f"driver    {gpu['driver_version']}, CUDA {gpu['cuda_driver_version']}",
        ]
        if facts["numa_warning"]:
            lines.append(f"warning   {facts['numa_warning']}")
    budget = facts["pinned_budget"]
    lines.append(f"pinned    up to {budget['bytes'] / 2**30:.1f} GiB ({budget['source']})")
    lines.append("software  " + ", ".join(f"{name} {v}" for name, v in software.items()))
    if facts["tuned"] is not None:
        lines += _tuned_lines(facts["tuned"])
    for name, reason in facts["paths"].items():
        lines.append(f"path      {name:<7} {'ready' if reason is None else 'no: ' + reason}")
    return "\n".join(lines)


def _tuned_lines(tuned: dict[str, Any]) -> list[str]:
    lines = [
        f"tuned     {quantity(table['entries'], 'choice')} of {table['date']}, {table['file']}"
        for table in tuned["tables"]
    ]
    none = f"tuned     none: kernels get {DEFAULT_BLOCK_QUOTA} CTAs; hikv tune finds better"
    return [*(lines or [none]), *(f"warning   {note}" for note in tuned["notes"])]


def _link(gpu: dict[str, Any]) -> str:
    if gpu["link"] is None:
        return f"unknown: {gpu['unanswered'] or 'the GPU does not tell'}"
    kind = gpu["link"]
    if kind == "pcie":
        kind = f"PCIe {gpu['pcie_generation']} x{gpu['pcie_width']}"
    if gpu["link_gbps"] is None:
        return f"{kind}, of a generation whose rate is not known here"
    return f"{kind}, {gpu['link_gbps']:.1f} GB/s in theory, each way"
