"""What this host cannot hold is refused, before the kernel ends a process for it."""

from __future__ import annotations

from hikv.errors import CapacityError
from hikv.host_memory import memory_bounds


def check_room(nbytes: int, remedy: str) -> None:
    """Raise `CapacityError` unless this process may still take `nbytes` of host memory."""
    available = min(bound.available_bytes for bound in memory_bounds())
    if nbytes > available:
        raise CapacityError("host memory", required=nbytes, available=available, remedy=remedy)
