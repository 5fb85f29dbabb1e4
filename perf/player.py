"""A cache over real pools that serves a workload, by one rank or by several in lock-step.

Every page holds the 256-bit hash of its prefix; every page that a request reuses is compared with
what it should hold, in the pool of the rank that owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.keys import namespace_seed, page_hashes
from hikv.cache.pools import DevicePool, HostPool
from hikv.cp.shard_map import ShardMap
from hikv.errors import CapacityError, HikvError
from hikv.pinned import pinned_budget
from hikv.spec import KVSpec

from .room import check_room
from .traces import Arrival, Workload

HASH_BYTES = 32
LAYOUT = "page_first"
NEVER = 1 << 62
"""Uses that no node reaches: with it nothing is ever copied to the host."""
SPEC = KVSpec(1, 1, HASH_BYTES, 1, torch.uint8, latent=True)

Row = dict[str, Any]
T = TypeVar("T")


class Player:
    """Serves a workload, once or several times.

    Args:
        capacity: GPU pages of a rank; 0 is unbounded: a page for every block there is.
        host_ratio: host pages of a rank for each of its GPU pages; 0 never copies to the host.
        settings: of `HiCacheConfig`.
        num_ranks: ranks that the pages are sharded over. Each has a cache of its own over pools of
            its own, is told the same, and must come to the same books; nothing is exchanged.
        hosts: ranks whose host memory is one pool, that of every cache here.
        scratch: GPU pages of a rank, if these are bounded, whose memory something else takes.

    A request finds every copy that was begun before it ended, so hits depend on no timing. Raises
    `HikvError` for the first wrong byte and the first difference between ranks, and `CapacityError`
    before the first request where the longest does not fit, or this host cannot hold the pools.
    """

    def __init__(
        self,
        workload: Workload,
        capacity: int,
        host_ratio: float,
        settings: Mapping[str, Any],
        *,
        num_ranks: int = 1,
        hosts: int = 1,
        scratch: int = 0,
    ) -> None:
        pages = capacity or max(1, workload.blocks)
        options: dict[str, Any] = {"host_ratio": host_ratio or None, **settings}
        if not host_ratio:
            options |= {"write_policy": "write_through_selective"}
            options |= {"write_through_threshold": NEVER}
        config = HiCacheConfig(mem_layout=LAYOUT, load_back_threshold=0, **options)
        available = pinned_budget().available_bytes
        host_pages = hosts * config.host_pages(pages, HASH_BYTES, available) if host_ratio else 1
        if capacity:
            pages = _left(pages, scratch, -(-workload.longest // num_ranks))
        room = num_ranks * (pages + host_pages) * HASH_BYTES
        check_room(room, "lower --capacity, --host-ratio or --cp")
        self.shards = ShardMap(num_ranks, SPEC.page_size)
        self.caches: list[HiRadixCache] = []
        self._rows: list[np.ndarray] = []
        for rank in range(num_ranks):
            memory = torch.zeros(pages * HASH_BYTES, dtype=torch.uint8)
            buffer = KVBuffer.from_tensor(memory, SPEC, LAYOUT)
            device = DevicePool(buffer, num_owners=num_ranks, owner=rank)
            host = HostPool.beside(device, config, num_pages=host_pages)
            cache = HiRadixCache(device, host, config, after=None, token_dtype=np.int64)
            self.caches.append(cache)
            self._rows.append(memory.numpy().reshape(pages, HASH_BYTES))
        self._seed = namespace_seed(ANYONE)
        self._workload, self._counts = workload, Counter[str]()
        self._label: Row = {
            "workload": workload.name,
            "capacity": capacity,
            "host_pages": host_pages if host_ratio else 0,
        }

    def play(self) -> Row:
        """Serve every request and settle what is in flight; returns what this round counted."""
        before = self._totals()
        for rid, arrival in enumerate(self._workload.arrivals):
            self._serve(rid, arrival)
        self._settle()
        now = self._totals()
        row = self._label | {name: count - before[name] for name, count in now.items()}
        return row | {"hit_rate": row["hits"] / max(1, row["touches"])}

    def finish(self) -> None:
        """Prove the books, each rank's and that they are the same, and end the copies' threads."""
        for cache in self.caches:
            cache.check()
        self._agreed("the tree", _tree)
        for cache in self.caches:
            cache.close()

    def _totals(self) -> dict[str, int]:
        names = ("requests", "touches", "hits", "device_hits", "host_hits", "loaded")
        backed_up = sum(cache.metrics.copied_bytes["backup"].value for cache in self.caches)
        cache = self.caches[0]
        return {name: self._counts[name] for name in names} | {
            "backed_up": int(backed_up) // HASH_BYTES,
            "evicted_device": int(cache.metrics.evicted_pages["device"].value),
            "evicted_host": int(cache.metrics.evicted_pages["host"].value),
            "dropped": cache.stats().get("dropped_pages", 0),
        }

    def _serve(self, rid: int, arrival: Arrival) -> None:
        """One request from match to release, on every rank."""
        self._settle()
        known = np.array([*arrival.prompt, *arrival.output], np.int64)
        want = np.frombuffer(b"".join(page_hashes(known, 1, self._seed)), np.uint8)
        want = want.reshape(known.size, HASH_BYTES)
        for cache in self.caches:
            request = cache.acquire(rid, arrival.prompt)
            cache.load_back(rid)
            cache.allocate(rid, known.size)
            request.wait()
        lengths = self._agreed(f"request {rid}: the lengths", lambda c: c.ledger[rid].lengths)
        pages = self._table(rid)
        reused = lengths.device_len + lengths.loaded_len
        self._verify(rid, pages[:reused], want)
        self._compute(pages[reused:], want[reused:])
        for cache in self.caches:
            cache.insert(rid, known)
        self._table(rid)
        for cache in self.caches:
            cache.release(rid)
        self._counts.update(
            requests=1,
            touches=len(arrival.prompt),
            hits=reused,
            device_hits=lengths.device_len,
            host_hits=lengths.host_len,
            loaded=lengths.loaded_len,
        )

    def _settle(self) -> None:
        """Acknowledge everything in flight."""
        for cache in self.caches:
            loads, backups = cache.controller.queues
            cache.poll((len(loads), len(backups)))

    def _compute(self, pages: np.ndarray, want: np.ndarray) -> None:
        """Every owner writes its own of `pages`."""
        owners, local = self.shards.page_owner(pages), self.shards.local_page(pages)
        for rank, rows in enumerate(self._rows):
            rows[local[owners == rank]] = want[owners == rank]

    def _verify(self, rid: int, pages: np.ndarray, want: np.ndarray) -> None:
        """Compare `pages`, each on its owner, with the hashes that they should hold."""
        owners, local = self.shards.page_owner(pages), self.shards.local_page(pages)
        for rank, rows in enumerate(self._rows):
            own = np.flatnonzero(owners == rank)
            wrong = own[(rows[local[own]] != want[own]).any(axis=1)]
            if wrong.size:
                raise HikvError(
                    f"request {rid}, rank {rank}: {wrong.size} of {pages.size} reused pages hold "
                    f"other bytes than their prefix, the first is page {wrong[0]} of the prompt"
                )

    def _table(self, rid: int) -> np.ndarray:
        """The page table that every rank has for an open request."""
        pages = self._agreed(
            f"request {rid}: the page table", lambda cache: cache.ledger[rid].pages.tolist()
        )
        return np.array(pages, np.int64)

    def _agreed(self, what: str, tell: Callable[[HiRadixCache], T]) -> T:
        """What every rank tells. Raises `HikvError` naming the first that tells otherwise."""
        first, *others = map(tell, self.caches)
        for rank, told in enumerate(others, 1):
            if told != first:
                raise HikvError(f"{what} on rank {rank} is not that on rank 0")
        return first


def _left(pages: int, scratch: int, longest: int) -> int:
    if scratch + longest <= pages:
        return pages - scratch
    raise CapacityError(
        "GPU pages of a rank for the longest request and the scratch",
        required=scratch + longest,
        available=pages,
        unit="pages",
        remedy="raise --capacity",
    )


def _tree(cache: HiRadixCache) -> list[tuple[Any, ...]]:
    """Every node: where it is, its rotation, and its pages in both tiers."""
    return [
        (
            node.start,
            node.first_page,
            node.rotation,
            *(None if pages is None else pages.tolist() for pages in node.pages),
        )
        for node in cache.tree.nodes()
    ]
