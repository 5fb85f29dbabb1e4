"""hikv: KV-cache pages between GPU, pinned host memory and storage, in any layout.

Names are imported when first used, so `import hikv` loads neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hikv.buffer import KVBuffer
    from hikv.cache.components import Recurrent, SlidingWindow
    from hikv.cache.config import HiCacheConfig
    from hikv.cache.hiradix import HiRadixCache
    from hikv.cache.node import Namespace
    from hikv.cache.pools import DevicePool, HostPool
    from hikv.device import DeviceInfo, device_info
    from hikv.errors import (
        ArgumentError,
        CapacityError,
        CopyFailed,
        DriverError,
        GatherError,
        HikvError,
        InvariantError,
        PathUnavailable,
        Unavailable,
    )
    from hikv.handle import Transfer
    from hikv.layout import list_layouts
    from hikv.pages import pages_of_slots
    from hikv.plan import CopyPlan
    from hikv.spec import KVSpec
    from hikv.transfers import plan_transfer, transfer

_HOMES = {
    "ArgumentError": "hikv.errors",
    "CapacityError": "hikv.errors",
    "CopyFailed": "hikv.errors",
    "CopyPlan": "hikv.plan",
    "DeviceInfo": "hikv.device",
    "DevicePool": "hikv.cache.pools",
    "DriverError": "hikv.errors",
    "GatherError": "hikv.errors",
    "HiCacheConfig": "hikv.cache.config",
    "HiRadixCache": "hikv.cache.hiradix",
    "HikvError": "hikv.errors",
    "HostPool": "hikv.cache.pools",
    "InvariantError": "hikv.errors",
    "KVBuffer": "hikv.buffer",
    "KVSpec": "hikv.spec",
    "Namespace": "hikv.cache.node",
    "PathUnavailable": "hikv.errors",
    "Recurrent": "hikv.cache.components",
    "SlidingWindow": "hikv.cache.components",
    "Transfer": "hikv.handle",
    "Unavailable": "hikv.errors",
    "device_info": "hikv.device",
    "list_layouts": "hikv.layout",
    "pages_of_slots": "hikv.pages",
    "plan_transfer": "hikv.transfers",
    "transfer": "hikv.transfers",
}
__all__ = [
    "ArgumentError",
    "CapacityError",
    "CopyFailed",
    "CopyPlan",
    "DeviceInfo",
    "DevicePool",
    "DriverError",
    "GatherError",
    "HiCacheConfig",
    "HiRadixCache",
    "HikvError",
    "HostPool",
    "InvariantError",
    "KVBuffer",
    "KVSpec",
    "Namespace",
    "PathUnavailable",
    "Recurrent",
    "SlidingWindow",
    "Transfer",
    "Unavailable",
    "device_info",
    "list_layouts",
    "pages_of_slots",
    "plan_transfer",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hikv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
