"""The only prober of hardware: the GPU, its link to the host, NUMA, the driver, software versions.

torch and NVML are loaded by the first probe, never by an import of this file. Every function that
reads sysfs takes its root, so a test can build a machine in a folder.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hikv.errors import ArgumentError

SYSFS = Path("/sys")

# GB/s of one lane in one direction: transfer rate (GT/s) × share of payload bits ÷ 8. The share is
# 8b/10b in generations 1 and 2, 128b/130b in 3 to 5, and 236 of 256 bytes of a flit in 6 (PCI
# Express Base Specification 6.0). Packet headers come off this; they depend on the transfer.
PCIE_LANE_GBPS = {
    1: 2.5 * 8 / 10 / 8,
    2: 5.0 * 8 / 10 / 8,
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 236 / 256 / 8,
}


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU under its CUDA ordinal, and the link to its host. A field nobody answers is `None`.

    Attributes:
        index: CUDA ordinal, as `CUDA_VISIBLE_DEVICES` numbers it.
        capability: (major, minor) on NVIDIA, `None` on AMD.
        cuda_driver_version: newest CUDA of the driver, 13000 for 13.0.
        link: `"pcie"`, `"c2c"` (coherent chip-to-chip, Grace), or `None`.
        pcie_generation, pcie_width: the most that the GPU and its slot reach together; an idle
            link trains lower, so the present state says nothing.
        link_gbps: theoretical GB/s (10⁹) in one direction: `PCIE_LANE_GBPS` × width, or the sum
            of the active C2C links as NVML reports it.
        numa_node: the host node nearest to the GPU; `None` also where the host has a single node.
        vendor: `"nvidia"` or `"amd"`; on AMD the link and driver fields are `None`.
        unanswered: why NVML could not be asked, where it could not; what it tells is `None` then.
    """

    index: int
    name: str
    uuid: str
    vendor: str
    capability: tuple[int, int] | None
    num_sms: int
    memory_bytes: int
    driver_version: str | None = None
    cuda_driver_version: int | None = None
    link: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    link_gbps: float | None = None
    numa_node: int | None = None
    unanswered: str | None = None

    def fingerprint(self) -> dict[str, str | int | None]:
        """What a tuned table is keyed on; plain values, equal after a round trip through JSON."""
        link = self.link
        if link == "pcie":
            link = f"pcie{self.pcie_generation}x{self.pcie_width}"
        return {
            "name": self.name,
            "num_sms": self.num_sms,
            "capability": "{}.{}".format(*self.capability) if self.capability else None,
            "link": link,
            "driver": self.driver_version,
            "cuda": self.cuda_driver_version,
        }


def device_info(index: int | None = None, *, sysfs: Path = SYSFS) -> DeviceInfo | None:
    """The GPU with CUDA ordinal `index` (default: torch's current device); `None` without a GPU.

    Probed once per process; `probe_failure()` tells why there is none.

    Raises:
        ArgumentError: no GPU has this ordinal.
    """
    probed = _probe_checked(index, sysfs)
    return probed if isinstance(probed, DeviceInfo) else None


def probe_failure(index: int | None = None, *, sysfs: Path = SYSFS) -> str | None:
    """Why `device_info(index)` is `None`, in one sentence; `None` where there is a GPU."""
    probed = _probe_checked(index, sysfs)
    return probed if isinstance(probed, str) else None


def _probe_checked(index: int | None, sysfs: Path) -> DeviceInfo | str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"torch sees no GPU: no driver, no device, or CUDA_VISIBLE_DEVICES={visible!r}"
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if index is None else index
    if not 0 <= index < count:
        raise ArgumentError(
            "index", expected=f"0 to {count - 1}", got=index, remedy="pass the ordinal of a GPU"
        )
    return _probe(index, sysfs)


@functools.cache
def _probe(index: int, sysfs: Path) -> DeviceInfo:
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    # The bus id names the board under every renumbering; a MIG slice has a UUID of its own.
    bus_id = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        f":{properties.pci_device_id:02x}.0"
    )
    amd = torch.version.hip is not None
    fields: dict[str, Any] = {
        "vendor": "amd" if amd else "nvidia",
        "uuid": str(properties.uuid),
        "capability": None if amd else (properties.major, properties.minor),
        "numa_node": None,
    }
    if not amd:
        fields |= _ask_nvml(bus_id)
    node = numa_of_gpu(bus_id, sysfs=sysfs)
    return DeviceInfo(
        index,
        properties.name,
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        **(fields if node is None else fields | {"numa_node": node}),
    )


def _ask_nvml(bus_id: str) -> dict[str, Any]:
    """The fields that NVML knows of the board, or `unanswered` alone: some virtual machines and
    containers show a GPU to CUDA and none to NVML."""
    nvml = _start_nvml()
    if isinstance(nvml, str):
        return {"unanswered": nvml}
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        return {
            "uuid": nvml.nvmlDeviceGetUUID(handle),
            "numa_node": _nearest_node(nvml, handle),
            "driver_version": nvml.nvmlSystemGetDriverVersion(),
            "cuda_driver_version": nvml.nvmlSystemGetCudaDriverVersion_v2(),
            **_host_link(nvml, handle),
        }
    except nvml.NVMLError as error:
        return {"unanswered": f"NVML cannot describe the GPU at {bus_id}: {error}"}
    finally:
        nvml.nvmlShutdown()


def _start_nvml() -> Any:
    """The started NVML module, or the reason (a string) why there is none."""
    try:
        import pynvml
    except ImportError:
        return "NVML is missing: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return pynvml


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """An NVML answer that some boards do not give; `None` there."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


def _host_link(nvml: Any, handle: Any) -> dict[str, Any]:
    generation = _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    fields: dict[str, Any] = {"pcie_generation": generation, "pcie_width": width}
    if c2c_gbps := _c2c_gbps(nvml, handle):
        return fields | {"link": "c2c", "link_gbps": c2c_gbps}
    if not generation or not width:
        return fields
    lane = PCIE_LANE_GBPS.get(generation)
    return fields | {"link": "pcie", "link_gbps": lane and lane * width}


def _c2c_gbps(nvml: Any, handle: Any) -> float:
    """Sum over the active C2C links of their speed, which NVML gives in MB/s per direction."""

    def field(name: str, link: int = 0) -> int:
        answer = _ask(nvml, "nvmlDeviceGetFieldValues", handle, [(getattr(nvml, name), link)])
        return answer[0].value.uiVal if answer and answer[0].nvmlReturn == 0 else 0

    links = range(field("NVML_FI_DEV_C2C_LINK_COUNT"))
    active = [link for link in links if field("NVML_FI_DEV_C2C_LINK_GET_STATUS", link) == 1]
    return sum(field("NVML_FI_DEV_C2C_LINK_GET_MAX_BW", link) for link in active) / 1000


def _nearest_node(nvml: Any, handle: Any) -> int | None:
    """Lowest node of the GPU's memory affinity. `nvmlDeviceGetNumaNodeId` would be the GPU's own
    memory on Grace, not the host's."""
    scope = nvml.NVML_AFFINITY_SCOPE_NODE
    words = _ask(nvml, "nvmlDeviceGetMemoryAffinity", handle, 16, scope) or ()
    nodes = (64 * i + (word & -word).bit_length() - 1 for i, word in enumerate(words) if word)
    return next(nodes, None)


# Bits of NVML's clock event reasons that slow a copy or a kernel down against the GPU's own will.
_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def disturbances(index: int) -> tuple[str, ...]:
    """What would spoil a timing on the GPU with CUDA ordinal `index` now, a sentence each: other
    processes on it, and throttled clocks, as NVML sees them. Nothing is known on AMD, and where
    NVML does not answer.
    """
    info = device_info(index)
    if info is None or info.vendor != "nvidia" or info.unanswered:
        return ()
    nvml = _start_nvml()
    if isinstance(nvml, str):
        return ()
    try:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", info.uuid)
        running = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    finally:
        nvml.nvmlShutdown()
    others = _other_processes({process.pid for process in running})
    busy = [f"process {pid} is on {info.name} too: end it" for pid in others]
    slow = [
        f"{info.name} is throttled by {what}: let it cool, or look at its power and fans"
        for bit, what in _THROTTLES.items()
        if reasons & bit
    ]
    return (*busy, *slow)


def _other_processes(pids: set[int], proc: Path = Path("/proc")) -> list[int]:
    """Those of `pids` that are not this process. NVML counts outside of a container, whose own
    process it then lists under a number that nobody in there knows."""
    others = sorted(pids - {os.getpid()})
    unknown = [pid for pid in others if not (proc / str(pid)).exists()]
    if len(others) == len(pids) and unknown:
        others.remove(unknown[0])
    return others


def numa_of_gpu(bus_id: str, *, sysfs: Path = SYSFS) -> int | None:
    """Host node of the PCI device `bus_id` (`"0000:3b:00.0"`); `None` if the kernel names none."""
    path = sysfs / "bus" / "pci" / "devices" / bus_id.lower() / "numa_node"
    node = int(path.read_text()) if path.is_file() else -1
    return node if node >= 0 else None


def cpu_numa_nodes(*, sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Nodes of the CPUs on which the calling thread may run, ascending."""
    cpus = os.sched_getaffinity(0)
    lists = (sysfs / "devices" / "system" / "node").glob("node[0-9]*/cpulist")
    return tuple(
        sorted(int(path.parent.name[4:]) for path in lists if cpus & _cpulist(path.read_text()))
    )


def _cpulist(text: str) -> set[int]:
    """The kernel's list format, for example `0-3,8`."""
    bounds = (part.split("-") for part in text.strip().split(",") if part)
    return {cpu for bound in bounds for cpu in range(int(bound[0]), int(bound[-1]) + 1)}


def numa_mismatch(gpu_node: int | None, nodes: Collection[int], what: str = "CPU") -> str | None:
    """A warning where not all of `nodes` (of the process's CPUs, or of a pool's memory) are the
    GPU's node; `None` where they are, or where either side is unknown. Host copies from the far
    socket run several times slower."""
    if gpu_node is None or not nodes or set(nodes) == {gpu_node}:
        return None
    far = ", ".join(str(node) for node in sorted(nodes))
    return (
        f"{what} on NUMA node {far}, GPU on node {gpu_node}: start the process with "
        f"numactl --cpunodebind={gpu_node} --membind={gpu_node}"
    )


def software_versions() -> dict[str, str | None]:
    """Versions of torch, Triton, torch's CUDA and the GPU driver, without importing torch."""
    nvml = _start_nvml()
    driver = None
    if not isinstance(nvml, str):
        driver = _ask(nvml, "nvmlSystemGetDriverVersion")
        nvml.nvmlShutdown()
    return {
        "torch": _installed("torch"),
        "triton": _installed("triton"),
        "torch_cuda": _cuda_of_torch(),
        "driver": driver,
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """`torch.version.cuda`, from the file that defines it; the package metadata lacks it."""
    if _installed("torch") is None:
        return None
    path = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
    text = path.read_text() if path.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", text, re.M)
    return match.group(1) if match else None
