"""Pinned host memory of exact size: mmap, huge pages, NUMA, registered in page-aligned chunks.

torch's pinned allocator rounds a request up to a power of two; here it is rounded to one OS page.
The mapping is anonymous and private, is touched before it is registered (so no later copy pays for
page faults), and is hidden from forked children, as memory from the driver itself would be.

A registration larger than a driver limit fails (one of 512 GiB in 4 KiB pages does), so the range
is registered in chunks. No copy may cross the border of two registrations; the borders therefore
fall between KV pages, and `registration_borders` tells them to whoever merges copies.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from hikv.device import device_info, numa_mismatch, probe_failure
from hikv.driver import CudaHostRegistry, cuda_driver
from hikv.env import read_env
from hikv.errors import ArgumentError, CapacityError, DriverError, Unavailable
from hikv.host_memory import (
    OS_PAGE,
    PROC,
    SYSFS,
    Budget,
    address_of,
    map_touched,
    memory_bounds,
    numa_nodes,
)

CHUNK_BYTES = 256 << 30

_LOWER = "lower num_pages or HIKV_PINNED_BUDGET"
_FINAL = f"a failed pin is final for the process: restart it and {_LOWER}"
_CUDA_ERROR_INVALID_VALUE, _CUDA_ERROR_OUT_OF_MEMORY = 1, 2


def pinned_budget(
    *, environ: Mapping[str, str] | None = None, proc: Path = PROC, sysfs: Path = SYSFS
) -> Budget:
    """The tightest of `memory_bounds` and `HIKV_PINNED_BUDGET` less what is pinned already."""
    bounds = memory_bounds(proc=proc, sysfs=sysfs)
    limit = read_env(environ).pinned_budget
    if limit is not None:
        bounds.append(Budget(limit, max(0, limit - pinned_bytes()), "HIKV_PINNED_BUDGET"))
    return min(bounds, key=lambda bound: bound.available_bytes)


class Registry(Protocol):
    """What page-locks a range for the GPU. Both calls raise `DriverError` on refusal."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` from `address` on."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of the same address."""


@functools.cache
def _default_registry() -> CudaHostRegistry:
    if reason := probe_failure():
        raise Unavailable("pinned memory", reason, remedy="run where torch sees an NVIDIA GPU")
    return CudaHostRegistry(cuda_driver(), torch.cuda.current_device())


class PinnedMemory:
    """A page-locked range; made by `allocate_pinned`.

    It lives as long as this object or any tensor over it, whichever is longer, and is then
    unregistered chunk by chunk and unmapped. At process exit the driver and the OS do both.

    Attributes:
        address, nbytes: the range.
        borders: int64 [num_chunks + 1], read-only: the address of each registration, then the end.
        refusals: what the kernel would not do (huge pages, NUMA placement), one sentence each.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        borders: np.ndarray,
        registry: Registry,
        refusals: Sequence[str] = (),
    ) -> None:
        self.address = int(borders[0])
        self.nbytes = int(borders[-1] - borders[0])
        self.borders = borders
        self.refusals = tuple(refusals)
        # Every tensor holds this array and the array holds the mapping: when it dies, the callback
        # unregisters, then the mapping goes.
        array = np.frombuffer(mapping, np.uint8, self.nbytes)
        finalizer = weakref.finalize(array, _free, registry, borders, os.getpid())
        finalizer.atexit = False
        self._tensor: torch.Tensor | None = torch.from_numpy(array)
        _live[self.address] = borders

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] on the CPU over the range; any view of it keeps the memory alive."""
        if self._tensor is None:
            raise ArgumentError(
                "memory", expected="open", got="closed", remedy="take the tensor before close()"
            )
        return self._tensor

    def numa_nodes(self) -> tuple[int, ...]:
        """Nodes on which the memory lies, by sample; empty where the kernel will not tell."""
        return numa_nodes(self.address, self.nbytes)

    def close(self) -> None:
        """Gives up this object's hold; a second call does nothing. Memory that tensors still use is
        freed with the last of them. A chunk that the driver will not unregister is reported through
        `sys.unraisablehook`, as for any failing finalizer."""
        self._tensor = None


# Address of each live range → its borders. Single dict operations only: a finalizer may run
# between any two lines, on any thread.
_live: dict[int, np.ndarray] = {}
_allocating = threading.Lock()
_failed_pin: str | None = None


def _free(registry: Registry, borders: np.ndarray, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has neither the mapping nor the registrations
        _live.pop(int(borders[0]), None)
        _unregister(registry, borders[:-1])


def _unregister(registry: Registry, addresses: Sequence[int] | np.ndarray) -> None:
    """Newest first; tries all, then raises the first error."""
    errors = []
    for address in reversed(addresses):
        try:
            registry.unregister(int(address))
        except DriverError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def pinned_bytes() -> int:
    """Bytes that this process has pinned through this module."""
    return sum(int(borders[-1] - borders[0]) for borders in list(_live.values()))


def registration_borders(tensor: torch.Tensor) -> np.ndarray | None:
    """`PinnedMemory.borders` of the range that holds `tensor`; `None` outside every range."""
    return _borders_around(tensor.data_ptr())


def is_registered(address: int) -> bool:
    """Whether `address` lies in live pinned memory of this module."""
    return _borders_around(address) is not None


def _borders_around(address: int) -> np.ndarray | None:
    ranges = list(_live.values())
    return next((b for b in ranges if b[0] <= address < b[-1]), None)


def allocate_pinned(
    nbytes: int,
    *,
    page_bytes: int,
    huge_pages: bool = True,
    numa_node: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    register: Registry | None = None,
    prefault_threads: int | None = None,
    budget: Budget | None = None,
) -> PinnedMemory:
    """Maps, places, touches and registers `nbytes` of zeroed host memory. Returns when all is done.

    Args:
        nbytes: a positive multiple of `page_bytes`.
        page_bytes: bytes that one copy may move together; no registration border falls inside.
        huge_pages: advise 2 MiB pages.
        numa_node: preferred node; default the node of the current GPU, where one is known.
        chunk_bytes: most bytes of one registration, at least `page_bytes`.
        register: default `CudaHostRegistry` on the current GPU.
        prefault_threads: default one per CPU of this process, at most 16.
        budget: default `pinned_budget()`.

    Raises:
        ArgumentError: a value above is out of its range.
        CapacityError: more than the budget, or the OS or the driver has not that much. Nothing
            stays mapped or registered, and no smaller size is tried.
        DriverError: the driver refuses for another reason. After a refusal by the driver every
            later call in this process fails too: some platforms do not recover.
        Unavailable: no `register` was given and there is no NVIDIA GPU.
    """
    if prefault_threads is None:
        prefault_threads = min(16, len(os.sched_getaffinity(0)))
    _check_arguments(nbytes, page_bytes, numa_node, chunk_bytes, prefault_threads)
    with _allocating:
        budget = pinned_budget() if budget is None else budget
        _check_capacity(nbytes, budget)
        registry = _default_registry() if register is None else register
        if numa_node is None and (info := device_info()):
            numa_node = info.numa_node
        try:
            mapping, refusals = map_touched(
                nbytes, huge_pages=huge_pages, numa_node=numa_node, threads=prefault_threads
            )
        except OSError as error:
            what, free = f"pinned memory, refused by the OS ({error})", budget.available_bytes
            raise CapacityError(what, required=nbytes, available=free, remedy=_LOWER) from error
        start = address_of(mapping)
        if far := numa_mismatch(numa_node, numa_nodes(start, nbytes), "pinned memory"):
            refusals += (far,)
        borders = start + chunk_borders(nbytes, page_bytes, chunk_bytes)
        borders.flags.writeable = False
        try:
            _register(registry, borders, budget)
        except BaseException:
            mapping.close()
            raise
        return PinnedMemory(mapping, borders, registry, refusals)


def chunk_borders(nbytes: int, page_bytes: int, chunk_bytes: int) -> np.ndarray:
    """Offsets at which registrations start, then `nbytes`; int64 [num_chunks + 1].

    Every border is a multiple of `page_bytes`, and of the OS page too where such a multiple fits
    into `chunk_bytes`; where none does, two registrations share an OS page at each border.
    """
    unit = math.lcm(page_bytes, OS_PAGE)
    if unit > chunk_bytes:
        unit = page_bytes
    step = chunk_bytes // unit * unit
    return np.append(np.arange(0, nbytes, step, dtype=np.int64), np.int64(nbytes))


def _check_arguments(
    nbytes: int, page_bytes: int, numa_node: int | None, chunk_bytes: int, threads: int
) -> None:
    def require(fits: bool, argument: str, got: object, expected: str, remedy: str) -> None:
        if not fits:
            raise ArgumentError(argument, expected=expected, got=got, remedy=remedy)

    require(page_bytes >= 1, "page_bytes", page_bytes, "at least 1", "pass the bytes of a KV page")
    whole = nbytes >= 1 and nbytes % page_bytes == 0
    pages = f"a positive multiple of page_bytes={page_bytes}"
    require(whole, "nbytes", nbytes, pages, "pass num_pages * page_bytes")
    holds, least = chunk_bytes >= page_bytes, f"at least page_bytes={page_bytes}"
    require(holds, "chunk_bytes", chunk_bytes, least, "raise it to a page, or leave it out")
    node = numa_node is None or numa_node >= 0
    require(node, "numa_node", numa_node, "0 or more, or None", "pass None for the GPU's own node")
    require(threads >= 1, "prefault_threads", threads, "at least 1", "leave it out for the default")


def _check_capacity(nbytes: int, budget: Budget) -> None:
    if _failed_pin is not None:
        what, remedy = f"pinned memory, after an earlier refusal ({_failed_pin})", _FINAL
    elif nbytes > budget.available_bytes:
        what = f"pinned memory, within {budget.limit_bytes} bytes of {budget.source}"
        remedy = "lower num_pages or raise that bound"
    else:
        return
    raise CapacityError(what, required=nbytes, available=budget.available_bytes, remedy=remedy)


def _register(registry: Registry, borders: np.ndarray, budget: Budget) -> None:
    """Registers every chunk, or none."""
    global _failed_pin
    done: list[int] = []
    try:
        for address, end in itertools.pairwise(borders.tolist()):
            registry.register(address, end - address)
            done.append(address)
    except DriverError as error:
        _failed_pin = f"{error.name} for {borders[-1] - borders[0]} bytes"
        _unregister(registry, done)
        raise _refused_pin(error, borders, len(done), budget) from error
    except BaseException:
        _unregister(registry, done)
        raise


def _refused_pin(
    error: DriverError, borders: np.ndarray, chunk: int, budget: Budget
) -> CapacityError | DriverError:
    """The driver's refusal with the bytes asked, the bytes free and the knob."""
    nbytes, free = int(borders[-1] - borders[0]), budget.available_bytes
    where = f"chunk {chunk + 1} of {len(borders) - 1}"
    if error.code in (_CUDA_ERROR_INVALID_VALUE, _CUDA_ERROR_OUT_OF_MEMORY):
        what = f"pinned memory ({error.call} refused {where} with {error.name})"
        return CapacityError(what, required=nbytes, available=free, remedy=_FINAL)
    remedy = f"{nbytes} bytes asked ({where}), {free} free; {_FINAL}"
    return DriverError(error.call, error.code, error.name, remedy=remedy)
