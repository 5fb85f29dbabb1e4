"""The hardware prober against fake NVML, fake torch.cuda and a fake sysfs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hikv import device
from hikv.errors import ArgumentError


class NVMLError(Exception):
    pass


class FakeNvml:
    """One machine of several boards, keyed by PCI bus id in NVML's own order."""

    NVMLError = NVMLError
    NVML_AFFINITY_SCOPE_NODE = 0
    NVML_FI_DEV_C2C_LINK_COUNT, NVML_FI_DEV_C2C_LINK_GET_STATUS = 170, 171
    NVML_FI_DEV_C2C_LINK_GET_MAX_BW = 172

    def __init__(self, boards: dict[str, dict]) -> None:
        self.boards = boards
        self.sessions = 0

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.82.07"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        if bus_id not in self.boards:
            raise NVMLError("Not Found")
        return bus_id

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return self.boards[handle]["uuid"]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return self._known(handle, "generation")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return self._known(handle, "width")

    def nvmlDeviceGetMemoryAffinity(self, handle: str, words: int, scope: int) -> list[int]:
        return self._known(handle, "affinity")

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list:
        ((field, link),) = fields
        speeds = self._known(handle, "c2c")  # MB/s of each link, 0 = inactive
        value = {170: len(speeds), 171: int(speeds[link] > 0), 172: speeds[link]}[field]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value))]

    def _known(self, handle: str, key: str):
        if key not in self.boards[handle]:
            raise NVMLError("Not Supported")
        return self.boards[handle][key]


def properties(bus: int, name: str = "NVIDIA H200", **others) -> SimpleNamespace:
    values = {
        "name": name,
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 150_000_000_000,
        "uuid": "runtime-uuid",
        "pci_domain_id": 0,
        "pci_bus_id": bus,
        "pci_device_id": 0,
    }
    return SimpleNamespace(**values | others)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call it with the CUDA-visible devices and NVML's boards; gives the fake NVML."""

    def build(visible: list[SimpleNamespace], boards: dict[str, dict], current: int = 0):
        nvml = FakeNvml(boards)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: visible[index])
        return nvml

    device._probe.cache_clear()
    yield build
    device._probe.cache_clear()


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


PCIE5 = {"uuid": "GPU-a", "generation": 5, "width": 16}


def test_fields_of_a_pcie_gpu(machine, tmp_path):
    nvml = machine([properties(0x3B)], {"0000:3b:00.0": PCIE5})
    put(tmp_path, "bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    info = device.device_info(sysfs=tmp_path)
    assert info == device.DeviceInfo(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-a",
        vendor="nvidia",
        capability=(9, 0),
        num_sms=132,
        memory_bytes=150_000_000_000,
        driver_version="580.82.07",
        cuda_driver_version=13000,
        link="pcie",
        pcie_generation=5,
        pcie_width=16,
        link_gbps=32 * 128 / 130 / 8 * 16,
        numa_node=1,
    )
    assert device.probe_failure(sysfs=tmp_path) is None
    assert nvml.sessions == 0


def test_cuda_ordinal_reaches_its_own_board(machine, tmp_path):
    """CUDA_VISIBLE_DEVICES=2,0 makes ordinal 0 the third board of NVML."""
    boards = {f"0000:0{i}:00.0": PCIE5 | {"uuid": f"GPU-{i}"} for i in range(3)}
    machine([properties(2), properties(0)], boards, current=1)
    assert [device.device_info(i, sysfs=tmp_path).uuid for i in (0, 1)] == ["GPU-2", "GPU-0"]
    assert device.device_info(sysfs=tmp_path).index == 1, "default is torch's current device"


@pytest.mark.parametrize("index", [-1, 1])
def test_ordinal_out_of_range_is_refused(machine, tmp_path, index):
    machine([properties(0)], {"0000:00:00.0": PCIE5})
    with pytest.raises(ArgumentError, match="index: expected 0 to 0"):
        device.device_info(index, sysfs=tmp_path)


def test_probed_once(machine, tmp_path):
    machine([properties(0)], {"0000:00:00.0": PCIE5})
    assert device.device_info(0, sysfs=tmp_path) is device.device_info(sysfs=tmp_path)


@pytest.mark.parametrize(
    ("generation", "width", "gbps"),
    [(1, 16, 4.0), (2, 8, 4.0), (3, 16, 15.754), (4, 16, 31.508), (5, 8, 31.508), (6, 16, 118.0)],
)
def test_theoretical_pcie_rate(machine, tmp_path, generation, width, gbps):
    board = PCIE5 | {"generation": generation, "width": width}
    machine([properties(0)], {"0000:00:00.0": board})
    assert round(device.device_info(sysfs=tmp_path).link_gbps, 3) == gbps


def test_c2c_counts_active_links_only(machine, tmp_path):
    board = PCIE5 | {"c2c": [44712] * 10 + [0] * 4}
    machine([properties(9, "NVIDIA GH200 480GB")], {"0000:09:00.0": board})
    info = device.device_info(sysfs=tmp_path)
    assert (info.link, info.link_gbps) == ("c2c", 447.12)
    assert info.fingerprint()["link"] == "c2c"


def test_unanswered_link_is_none_not_a_guess(machine, tmp_path):
    machine([properties(0)], {"0000:00:00.0": {"uuid": "GPU-v"}})
    info = device.device_info(sysfs=tmp_path)
    assert (info.link, info.link_gbps, info.pcie_width, info.numa_node) == (None,) * 4


def test_fingerprint_survives_json(machine, tmp_path):
    machine([properties(0)], {"0000:00:00.0": PCIE5})
    fingerprint = device.device_info(sysfs=tmp_path).fingerprint()
    assert fingerprint == {
        "name": "NVIDIA H200",
        "num_sms": 132,
        "capability": "9.0",
        "link": "pcie5x16",
        "driver": "580.82.07",
        "cuda": 13000,
    }
    assert json.loads(json.dumps(fingerprint)) == fingerprint


def test_amd_gpu_has_no_capability_and_needs_no_nvml(machine, tmp_path, monkeypatch):
    machine([properties(0xC1, "AMD Instinct MI300X")], {})
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    put(tmp_path, "bus/pci/devices/0000:c1:00.0/numa_node", "0\n")
    info = device.device_info(sysfs=tmp_path)
    assert (info.vendor, info.capability, info.link, info.numa_node) == ("amd", None, None, 0)
    assert (info.num_sms, info.fingerprint()["capability"]) == (132, None)


def test_reason_cpu_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert device.device_info() is None
    assert device.probe_failure() == f"torch {torch.__version__} is a CPU build"


def test_reason_hidden_devices(machine, monkeypatch):
    machine([], {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.device_info() is None
    assert device.probe_failure().endswith("CUDA_VISIBLE_DEVICES=''")


def check_unanswered(tmp_path: Path, reason: str) -> None:
    """The GPU is there, from what CUDA and sysfs tell; what only NVML tells is unknown, and why."""
    put(tmp_path, "bus/pci/devices/0000:07:00.0/numa_node", "1\n")
    info = device.device_info(sysfs=tmp_path)
    assert (info.vendor, info.name, info.uuid) == ("nvidia", "NVIDIA H200", "runtime-uuid")
    assert (info.num_sms, info.capability, info.numa_node) == (132, (9, 0), 1)
    assert (info.link, info.link_gbps, info.driver_version) == (None, None, None)
    assert reason in info.unanswered
    assert device.probe_failure(sysfs=tmp_path) is None
    assert json.loads(json.dumps(info.fingerprint())) == info.fingerprint()


def test_a_gpu_without_nvml_is_a_gpu(machine, tmp_path, monkeypatch):
    machine([properties(7)], {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    check_unanswered(tmp_path, "nvidia-ml-py is not installed")
    assert device.disturbances(0) == ()


def test_a_gpu_where_nvml_does_not_start_is_a_gpu(machine, tmp_path, monkeypatch):
    nvml = machine([properties(7)], {})

    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    check_unanswered(tmp_path, "Driver Not Loaded")


def test_a_gpu_that_nvml_does_not_know_is_a_gpu(machine, tmp_path):
    nvml = machine([properties(7)], {"0000:01:00.0": PCIE5})
    check_unanswered(tmp_path, "0000:07:00.0")
    assert nvml.sessions == 0


@pytest.mark.parametrize(("text", "node"), [("0\n", 0), ("3\n", 3), ("-1\n", None), (None, None)])
def test_numa_of_gpu(tmp_path, text, node):
    if text is not None:
        put(tmp_path, "bus/pci/devices/0000:3b:00.0/numa_node", text)
    assert device.numa_of_gpu("0000:3B:00.0", sysfs=tmp_path) == node


@pytest.mark.parametrize(("words", "node"), [([0b10, 0], 1), ([0, 0b100], 66), ([0, 0], None)])
def test_numa_from_nvml_where_sysfs_is_masked(machine, tmp_path, words, node):
    machine([properties(0)], {"0000:00:00.0": PCIE5 | {"affinity": words}})
    assert device.device_info(sysfs=tmp_path).numa_node == node


def test_cpu_numa_nodes(tmp_path, monkeypatch):
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):
        put(tmp_path, f"devices/system/node/node{node}/cpulist", cpus + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9})
    assert device.cpu_numa_nodes(sysfs=tmp_path) == (0,)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 12})
    assert device.cpu_numa_nodes(sysfs=tmp_path) == (0, 1)


def test_wrong_node_is_flagged():
    message = device.numa_mismatch(1, (0,))
    assert message.startswith("CPU on NUMA node 0, GPU on node 1")
    assert "--cpunodebind=1 --membind=1" in message
    assert "memory on NUMA node 0, 1" in device.numa_mismatch(1, (0, 1), "memory")


@pytest.mark.parametrize(("gpu_node", "nodes"), [(0, (0,)), (None, (0, 1)), (1, ())])
def test_right_or_unknown_node_is_not_flagged(gpu_node, nodes):
    assert device.numa_mismatch(gpu_node, nodes) is None


def test_software_versions_agree_with_the_loaded_libraries(machine):
    machine([], {})
    versions = device.software_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["driver"] == "580.82.07"


def test_cuda_of_torch_is_read_from_its_version_file(monkeypatch, tmp_path):
    put(tmp_path, "torch/version.py", "debug = False\ncuda: Optional[str] = '13.0'\nhip = None\n")
    fake = SimpleNamespace(version="2.13.0", locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(device.importlib.metadata, "distribution", lambda package: fake)
    assert device.software_versions()["torch_cuda"] == "13.0"
    put(tmp_path, "torch/version.py", "cuda: Optional[str] = None\nhip = '7.0'\n")
    assert device.software_versions()["torch_cuda"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_gpu_is_described():
    info = device.device_info()
    assert device.probe_failure() is None
    assert info.name == torch.cuda.get_device_name()
    assert info.capability == torch.cuda.get_device_capability()
    assert info.link_gbps > 0
    assert info.uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(info.index).uuid)
