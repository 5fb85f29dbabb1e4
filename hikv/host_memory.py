"""Host memory from the OS: how much is left, and a mapping of exact size, placed and touched."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROC, SYSFS = Path("/proc"), Path("/sys")
OS_PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_MBIND, _GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}.get(
    platform.machine(), (None, None)
)
_MPOL_PREFERRED = 1
_MPOL_F_NODE, _MPOL_F_ADDR = 1, 2
_MADV_POPULATE_WRITE = 23
_MASK_WORDS = 16


@dataclass(frozen=True)
class Budget:
    """Host memory that may still be taken, in bytes, and what sets the bound (`source`)."""

    limit_bytes: int
    available_bytes: int
    source: str


def memory_bounds(*, proc: Path = PROC, sysfs: Path = SYSFS) -> list[Budget]:
    """Every bound that the host sets on this process.

    - The host's `MemAvailable` less a reserve of 5 % of `MemTotal`, at least 1 GiB.
    - Each memory cgroup (v1 or v2) from the process's own up to the root: its limit less its use.
      Inactive file cache is not counted as use, since the kernel drops it first.
    """
    return [_host_bound(proc), *_cgroup_bounds(proc, sysfs)]


def _host_bound(proc: Path) -> Budget:
    kib = _table(proc / "meminfo")
    total, available = kib["MemTotal:"] << 10, kib["MemAvailable:"] << 10
    reserve = max(total // 20, 1 << 30)
    return Budget(max(0, total - reserve), max(0, available - reserve), "host MemAvailable")


def _cgroup_bounds(proc: Path, sysfs: Path) -> Iterator[Budget]:
    membership = proc / "self" / "cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers == "":
            mount, files = sysfs / "fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = sysfs / "fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A limit binds every group below it. A container may see its path but not the folders on
        # it; the walk then ends at the mount, which is the container's own group.
        below = mount / group.lstrip("/")
        for directory in (below, *below.parents):
            yield from _cgroup_bound(directory, *files)
            if directory == mount:
                break


def _cgroup_bound(directory: Path, limit: str, usage: str, cache: str) -> Iterator[Budget]:
    path = directory / limit
    text = path.read_text().strip() if path.is_file() else "max"
    if text != "max":
        used = int((directory / usage).read_text())
        stat = directory / "memory.stat"
        reclaimable = _table(stat).get(cache, 0) if stat.is_file() else 0
        yield Budget(int(text), max(0, int(text) - used + reclaimable), str(path))


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def map_touched(
    nbytes: int, *, huge_pages: bool, numa_node: int | None, threads: int
) -> tuple[mmap.mmap, tuple[str, ...]]:
    """A private anonymous mapping of `nbytes` rounded up to an OS page, with every page present.

    Returns the mapping and one sentence for each thing that the kernel would not do (huge pages,
    placement); neither costs correctness, so neither is an error. A forked child does not get the
    range: it could not use the registration, and copying pinned pages would double the memory.

    Raises:
        OSError: the kernel has not that much; nothing stays mapped.
    """
    length = math.ceil(nbytes / OS_PAGE) * OS_PAGE
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_DONTFORK)
        address = address_of(mapping)
        refusals = [_advise_huge_pages(mapping)] if huge_pages else []
        if numa_node is not None:
            refusals.append(_prefer_node(address, length, numa_node))
        _touch(address, length, threads)
    except BaseException:
        mapping.close()
        raise
    return mapping, tuple(refusal for refusal in refusals if refusal)


def address_of(mapping: mmap.mmap) -> int:
    """Where the mapping starts, a multiple of `OS_PAGE`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def numa_nodes(address: int, nbytes: int, samples: int = 64) -> tuple[int, ...]:
    """Nodes that hold the first bytes of `samples` equal parts of a touched range, ascending;
    empty where the kernel will not tell."""
    if _GET_MEMPOLICY is None:
        return ()
    nodes = set()
    flags = ctypes.c_ulong(_MPOL_F_NODE | _MPOL_F_ADDR)
    for start in range(address, address + nbytes, math.ceil(nbytes / samples)):
        node = ctypes.c_int()
        arguments = (ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(start), flags)
        if _libc.syscall(ctypes.c_long(_GET_MEMPOLICY), *arguments) == 0:
            nodes.add(node.value)
    return tuple(sorted(nodes))


def _advise_huge_pages(mapping: mmap.mmap) -> str | None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"no huge pages: madvise says {error.strerror}"
    return None


def _prefer_node(address: int, length: int, node: int) -> str | None:
    """Asks for `node` first and others when it is full: a strict binding would kill the process."""
    if _MBIND is None:
        return f"no NUMA placement: mbind is not known for {platform.machine()}"
    if node >= 64 * _MASK_WORDS:
        return f"no NUMA placement: node {node} is beyond the mask"
    mask = (ctypes.c_uint64 * _MASK_WORDS)()
    mask[node // 64] = 1 << node % 64
    where = (ctypes.c_void_p(address), ctypes.c_ulong(length))
    # The kernel reads one bit less than it is told.
    policy = (ctypes.c_long(_MPOL_PREFERRED), mask, ctypes.c_ulong(64 * _MASK_WORDS + 1))
    if _libc.syscall(ctypes.c_long(_MBIND), *where, *policy, ctypes.c_ulong(0)) == 0:
        return None
    return f"no NUMA placement: mbind to node {node} says {os.strerror(ctypes.get_errno())}"


def _touch(address: int, length: int, threads: int) -> None:
    """Faults all pages in, in parallel; ctypes releases the interpreter lock during each part."""
    part = math.ceil(length / threads / HUGE_PAGE) * HUGE_PAGE

    def touch(offset: int) -> None:
        nbytes = min(part, length - offset)
        where = ctypes.c_void_p(address + offset), ctypes.c_size_t(nbytes)
        if _libc.madvise(*where, ctypes.c_int(_MADV_POPULATE_WRITE)) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))
        ctypes.memset(address + offset, 0, nbytes)  # a kernel before 5.14

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(touch, range(0, length, part)):
            pass
