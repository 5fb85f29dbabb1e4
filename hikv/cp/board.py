"""`Board`: how far every rank is, and the one verdict when something went wrong. Host memory.

Every word has one writer. A word that counts batches is never reset, so a late reader cannot take
one batch for another. A rank holds a file lock for as long as it lives; the kernel drops it with
the process, however that ends, so a peer that is gone is told from a slow one. The locks belong to
an open file, not to the process, so nothing else that the process opens or closes touches them.

Words are plain stores, seen after what was stored before them on x86. Python has no fence for
processors that order less; there the copies that a word tells of are ordered by GPU events, and the
back end whose bytes the CPU copies is a test bed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable

import numpy as np

from hikv.cp.shared_memory import MemoryHandle, attach, handle_of, shared_host_memory
from hikv.errors import GatherError

_TEXT_BYTES = 2048
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 2e-3
_LIVENESS_INTERVAL_S = 0.02

REMEDY = "end the batch, close the gather on every rank and build another"


class Board:
    """The shared words of a group.

    Args:
        handle: of the memory that one rank of the group made with `Board.memory`.
        rank, num_ranks, num_layers: this rank and the group's size.

    Attributes: the batch each rank has reached, int64:
        begun, digest, finished: `[rank]`: batch begun, digest of its plan, batch whose pages this
            rank has read to the end.
        restored: `[rank, layer]`: batch for which that rank's pages of that layer are there.
    """

    def __init__(self, handle: MemoryHandle, rank: int, num_ranks: int, num_layers: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._memory = attach(handle)
        raw = self._memory.numpy()
        self._length = raw[:8].view(np.int64)
        self._text = raw[8 : 8 + _TEXT_BYTES]
        words = raw[8 + _TEXT_BYTES :].view(np.int64).reshape(num_ranks, 3 + num_layers)
        self.begun, self.digest, self.finished = words[:, 0], words[:, 1], words[:, 2]
        self.restored = words[:, 3:]
        self._fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
        _lock(self._fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, rank)

    @staticmethod
    def memory(num_ranks: int, num_layers: int) -> tuple[object, MemoryHandle]:
        """Zeroed memory for a board: keep the first until every rank has attached the second."""
        tensor = shared_host_memory(8 + _TEXT_BYTES + 8 * num_ranks * (3 + num_layers))
        handle = handle_of(tensor)
        assert handle is not None
        return tensor, handle

    @property
    def verdict(self) -> str | None:
        """Why the group failed; `None` while all is well."""
        length = int(self._length[0])
        return bytes(self._text[:length]).decode() if length else None

    def fail(self, reason: str) -> GatherError:
        """Make `reason` the verdict unless there is one; the error that every rank raises."""
        _lock(self._fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, self.num_ranks)
        try:
            if not self._length[0]:
                text = reason.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
                self._text[: len(text)] = np.frombuffer(text, np.uint8)
                self._length[0] = len(text)
        finally:
            _lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self.num_ranks)
        return GatherError(self.verdict or reason, remedy=REMEDY)

    def raise_verdict(self) -> None:
        """Raise the verdict, if there is one."""
        if (verdict := self.verdict) is not None:
            raise GatherError(verdict, remedy=REMEDY)

    def wait(self, rank: int, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Return once `reached()`; it depends on `rank`.

        Raises `GatherError` with the group's verdict, or, as a new verdict, when that rank is gone
        or `timeout_s` have passed.
        """
        started = time.monotonic()
        look_again, nap = started + _LIVENESS_INTERVAL_S, _SHORTEST_NAP_S
        while not reached():
            self.raise_verdict()
            now = time.monotonic()
            if now >= look_again:
                if not self._alive(rank) and not reached():
                    raise self.fail(f"rank {rank} is gone")
                look_again = now + _LIVENESS_INTERVAL_S
            if now - started > timeout_s:
                raise self.fail(f"rank {rank} did not {what} within {timeout_s:g} s")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def close(self) -> None:
        """Leave the group: peers that wait for this rank from now on find it gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _alive(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        return _lock(self._fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, rank) != fcntl.F_UNLCK


def reason(error: Exception) -> str:
    """What the peers are told of `error`: its words, or its type where it has none."""
    return str(error) or type(error).__name__


def _lock(fd: int, command: int, kind: int, byte: int) -> int:
    """Run a lock command of fcntl(2) on one byte; the kind of lock that it reports."""
    # struct flock: l_type, l_whence, l_start, l_len, l_pid, padded to whole words.
    words = struct.pack("@hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
    reported: int = struct.unpack_from("@h", fcntl.fcntl(fd, command, words))[0]
    return reported
