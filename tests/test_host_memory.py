"""Host memory from the OS: bounds from a fake host, mappings from the real kernel."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hikv import host_memory
from hikv.device import cpu_numa_nodes
from hikv.host_memory import OS_PAGE, Budget, address_of, map_touched, memory_bounds, numa_nodes

MIB = 1 << 20
GIB = 1 << 30


def region(address: int) -> dict[str, Any] | None:
    """The kernel's own account of the mapping around `address`; sizes in bytes."""
    inside: dict[str, Any] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(word, 16) for word in words[0].split("-"))
            if inside:
                return inside
            hit = low <= address < high
            if hit:
                inside["size"] = high - low
        elif hit:
            kib = words[-1] == "kB"
            inside[words[0]] = int(words[1]) << 10 if kib else " ".join(words[1:])
    return inside or None


def touched(nbytes: int, *, huge_pages: bool = True, numa_node: int | None = None):
    return map_touched(nbytes, huge_pages=huge_pages, numa_node=numa_node, threads=3)


@pytest.mark.parametrize("nbytes", [5 << 26, 7000, OS_PAGE, 2 * MIB + 1])
@pytest.mark.parametrize("populate", [True, False])
def test_exactly_the_request_is_mapped_and_present(monkeypatch, nbytes, populate):
    """A power of two would make 2^29 of 1.25 × 2^28. Kernels before 5.14 cannot populate."""
    if not populate:
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 9999)
    gc.collect()
    mapping, _ = touched(nbytes)
    exact = -(-nbytes // OS_PAGE) * OS_PAGE
    kernel = region(address_of(mapping))
    assert (len(mapping), kernel["size"], kernel["Rss:"]) == (exact, exact, exact)
    assert exact - nbytes < OS_PAGE <= 2 * MIB
    mapping.close()


def test_mapping_is_advised_and_hidden_from_forks():
    for huge_pages in (True, False):
        mapping, refusals = touched(4 * MIB, huge_pages=huge_pages)
        flags = region(address_of(mapping))["VmFlags:"].split()
        assert "dc" in flags
        assert ("hg" in flags) == (huge_pages and refusals == ())
        mapping.close()


def test_refused_huge_pages_are_reported(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    (refusal,) = touched(MIB)[1]
    assert refusal == f"no huge pages: madvise says {os.strerror(errno.EINVAL)}"


def test_refused_placement_is_reported(monkeypatch):
    for node, reason in ((1023, "mbind to node 1023 says"), (1024, "beyond the mask")):
        (refusal,) = touched(MIB, huge_pages=False, numa_node=node)[1]
        assert refusal.startswith("no NUMA placement")
        assert reason in refusal
    monkeypatch.setattr(host_memory, "_MBIND", None)
    (refusal,) = touched(MIB, huge_pages=False, numa_node=0)[1]
    assert "mbind is not known" in refusal


def test_placed_memory_lies_on_its_node_or_says_why_not():
    node = cpu_numa_nodes()[0]
    mapping, refusals = touched(4 * MIB, huge_pages=False, numa_node=node)
    assert refusals or numa_nodes(address_of(mapping), 4 * MIB) in ((node,), ())


def test_failure_to_touch_unmaps_and_is_raised(monkeypatch):
    touched_at = []

    def full(address, *rest) -> int:
        touched_at.append(address.value)
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(host_memory, "_libc", SimpleNamespace(madvise=full))
    gc.collect()
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        touched(64 * MIB)
    left = region(touched_at[0])
    assert left is None or left["size"] < 64 * MIB


def host(root: Path, total: int, available: int, cgroup: str = "0::/\n") -> dict[str, Path]:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    table = f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\nHugePages_Free: 0\n"
    (root / "proc/meminfo").write_text(table)
    return {"proc": root / "proc", "sysfs": root / "sys"}


def group(directory: Path, version: int, limit: str, used: int, cache: int = 0) -> str:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    return str(directory / names[0])


@pytest.mark.parametrize(("total", "reserve"), [(8 * GIB, GIB), (400 * GIB, 20 * GIB)])
def test_host_bound_keeps_a_reserve(tmp_path, total, reserve):
    roots = host(tmp_path, total, total - 2 * GIB)
    expected = Budget(total - reserve, total - 2 * GIB - reserve, "host MemAvailable")
    assert memory_bounds(**roots) == [expected]


def test_host_bound_is_never_negative(tmp_path):
    roots = host(tmp_path, 8 * GIB, GIB // 2)
    assert memory_bounds(**roots)[0].available_bytes == 0


def test_cgroup_v2_limit_of_any_ancestor_binds(tmp_path):
    roots = host(tmp_path, 400 * GIB, 300 * GIB, "0::/pod/container\n")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "pod/container", 2, "max", 50 * GIB)
    source = group(mount / "pod", 2, str(100 * GIB), 60 * GIB, cache=25 * GIB)
    assert memory_bounds(**roots)[1:] == [Budget(100 * GIB, 65 * GIB, source)]


def test_cgroup_v1_inside_a_container(tmp_path):
    """The path names a group of the host that the container cannot see; its own is the mount."""
    lines = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    roots = host(tmp_path, 400 * GIB, 300 * GIB, lines)
    source = group(tmp_path / "sys/fs/cgroup/memory", 1, str(16 * GIB), 6 * GIB, cache=GIB)
    assert memory_bounds(**roots)[1:] == [Budget(16 * GIB, 11 * GIB, source)]


def test_unlimited_groups_do_not_bind(tmp_path):
    roots = host(tmp_path, 400 * GIB, 300 * GIB, "4:memory:/a\n0::/../b\n")
    group(tmp_path / "sys/fs/cgroup/memory/a", 1, str((1 << 63) - OS_PAGE), GIB)
    group(tmp_path / "sys/fs/cgroup", 2, "max", GIB)
    tightest = min(memory_bounds(**roots), key=lambda bound: bound.available_bytes)
    assert tightest.source == "host MemAvailable"


def test_this_machine_has_a_bound():
    bounds = memory_bounds()
    assert "host MemAvailable" in [bound.source for bound in bounds]
    assert all(0 <= bound.available_bytes <= bound.limit_bytes for bound in bounds)
