"""Host memory that processes of one machine share, without a name that could be left behind.

The memory is an anonymous file. Another process of the same user reaches it through the owner's
entry in /proc, and the kernel frees it with its last mapping, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import NamedTuple

import torch

from hikv.errors import ArgumentError, GatherError


class MemoryHandle(NamedTuple):
    """Where another process finds shared memory: the owner's process and file descriptor."""

    pid: int
    fd: int
    nbytes: int


_HANDLES: dict[int, MemoryHandle] = {}


def shared_host_memory(nbytes: int) -> torch.Tensor:
    """`nbytes` of zeroed host memory, uint8, which processes started apart may attach.

    The tensor is memory like any other; views of it keep it alive. Raises `ArgumentError` for less
    than a byte.
    """
    if nbytes < 1:
        raise ArgumentError("nbytes", expected="at least 1", got=nbytes, remedy="ask for memory")
    fd = os.memfd_create("hikv")
    os.ftruncate(fd, nbytes)
    tensor, memory = _map(fd, nbytes)
    address = tensor.data_ptr()
    _HANDLES[address] = MemoryHandle(os.getpid(), fd, nbytes)
    weakref.finalize(memory, _forget, address, fd)
    return tensor


def handle_of(tensor: torch.Tensor) -> MemoryHandle | None:
    """The handle of the shared memory that `tensor` lies in; `None` for any other memory."""
    return _HANDLES.get(tensor.untyped_storage().data_ptr())


def attach(handle: MemoryHandle) -> torch.Tensor:
    """Map another process's shared memory, or this one's, as uint8.

    Raises `GatherError` where the owner is gone or out of sight.
    """
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
    except OSError as error:
        raise GatherError(
            f"the memory of process {handle.pid} is out of reach ({error.strerror})",
            remedy="run all ranks as one user, in one process namespace of one host",
        ) from error
    try:
        return _map(fd, handle.nbytes)[0]
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> tuple[torch.Tensor, mmap.mmap]:
    memory = mmap.mmap(fd, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8), memory


def _forget(address: int, fd: int) -> None:
    del _HANDLES[address]
    os.close(fd)
