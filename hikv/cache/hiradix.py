"""`HiRadixCache`: a prefix cache over the GPU and host memory, joined from the floors below.

The states of a prefix, node by node:

| state | where its bytes are | what `match_prefix` says |
|---|---|---|
| on the GPU | L1, with or without a copy in L2 | part of `device_len` |
| on the host | L2 alone | part of `host_len`, until a load-back is acknowledged |
| in flight | in one tier, on the way to the other | as if only the first tier held it |
| unknown | nowhere here, perhaps in storage | nothing: `storage_len` is `None` until asked |

With components (docs/hybrid.md) a prefix counts as far as all of them can serve it.

One thread owns a cache and calls every verb; only the copies run beside it. No scheduler is
assumed, and no verb waits for another rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import PageIds
from hikv.cache.components import Component
from hikv.cache.config import HiCacheConfig
from hikv.cache.controller import Controller, default_lanes
from hikv.cache.events import EventStream, KVEvent
from hikv.cache.explain import Explanation, TtftSplit
from hikv.cache.hybrid import Hybrid, check_components
from hikv.cache.lanes import Fences, Lane, as_fences
from hikv.cache.ledger import Ledger
from hikv.cache.loading import Loader
from hikv.cache.metrics import Metrics
from hikv.cache.node import DEVICE, HOST, TIERS, Namespace, join
from hikv.cache.placement import Placement
from hikv.cache.pools import DevicePool, HostPool, check_tiers
from hikv.cache.requests import (
    AdmissionCost,
    InsertResult,
    Lengths,
    LoadBack,
    Progress,
    Request,
)
from hikv.cache.trail_audit import check_trails
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError, InvariantError, check_count

ANYONE = Namespace()


class HiRadixCache:
    """A prefix cache over the GPU and host memory: it finds what both hold of a prompt, locks it,
    moves pages between the two, and gives each request a page table to compute on.

    One thread owns a cache and calls every verb. Tokens are ids `[n]`, int32 unless `token_dtype`
    says otherwise; lists, and arrays of other integers that fit, are converted.

    Args:
        device, host: the pools; `HostPool.beside(device, config)` makes the second.
        config: every setting; here count `write_policy`, `write_through_threshold`, `eviction`,
            `granularity`, `load_back_threshold`, `layerwise`, `io_backend` and `block_quota`.
        after: what every copy waits for on the GPU side: the stream or events on which the engine
            computes, or a function that is asked for them at each submission. `None` says that the
            engine is always through when it calls, as on the CPU. There is no default: a missing
            fence is how caches get corrupted.
        on_event: gets every `KVEvent`, in order, from `poll`.
        metrics: where to count; default a registry of its own.
        lanes: into the device tier and into the host tier; default streams, or threads on the CPU.
        token_dtype: int32 or int64, of the ids that are kept and compared.
        clock: seconds, for the deadlines of pins.
        components: `SlidingWindow`s and `Recurrent` states that a prefix needs beside full KV.

    Raises `ArgumentError` for what is no pool of its tier, for pools of different geometry, for
    components that cannot be kept beside them, and for settings that need storage, which this cache
    has none of.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        config: HiCacheConfig | None = None,
        *,
        after: Fences | Callable[[], Fences],
        on_event: Callable[[KVEvent], None] | None = None,
        metrics: Metrics | None = None,
        lanes: tuple[Lane, Lane] | None = None,
        token_dtype: npt.DTypeLike = np.int32,
        clock: Callable[[], float] = time.monotonic,
        components: Sequence[Component] = (),
    ) -> None:
        self.config = config = (config or HiCacheConfig()).normalized()
        check_tiers(device, host)
        _refuse_storage(config)
        config.check(next(iter(device.buffers.values())).spec)  # what rides along may lie otherwise
        check_components(device, host, components)
        self.device, self.host, self.page_size = device, host, device.page_size
        self.hybrid = Hybrid(device.page_size, components)
        self.metrics, self.events = metrics or Metrics(), EventStream(on_event)
        self.tree = RadixTree(
            device.page_size,
            policy=config.eviction,
            granularity=config.granularity,
            num_owners=device.num_owners,
            token_dtype=token_dtype,
            clock=clock,
            on_split=self.hybrid.split if components else None,
        )
        self.controller = Controller(
            self.tree,
            device,
            host,
            lanes=lanes or default_lanes(device, **config.copy_options),
            fences=lambda: as_fences(after() if callable(after) else after),
            layerwise=config.layerwise,
        )
        self.placement = Placement(
            self.controller, self.events, self.metrics, config.backup_after_uses, self.hybrid
        )
        self.ledger = Ledger(self.placement)
        self.loader = Loader(self.ledger, self.events, config)
        self.counts = Counter(duplicate_pages=0)

    def poll(self, limits: tuple[int, int] | None = None) -> Progress:
        """Acknowledge copies that are done, in the order they began, and deliver events.

        Call it once a tick, first. `limits`: exactly so many load-backs and backups, as ranks
        agreed; it waits for those that are not done here. `None` takes what `ready()` counts.
        Raises `ArgumentError` for limits that are no counts.
        """
        loads, backups = self.ready() if limits is None else limits
        for name, count in (("limits[0]", loads), ("limits[1]", backups)):
            check_count(name, count, remedy="pass what ready() counts, or its minimum over ranks")
        backed_up = self.placement.acknowledge_backups(backups)
        loaded = self.loader.acknowledge(loads)
        self.tree.expire_pins()
        self.hybrid.expire_pins(self.tree)
        self._set_gauges()
        self.events.deliver()
        return Progress(backed_up, loaded, self.ledger.failures(), self.placement.failures())

    def ready(self) -> tuple[int, int]:
        """How many load-backs and backups `poll()` would acknowledge; ranks take the minimum."""
        return self.controller.ready(DEVICE), self.controller.ready(HOST)

    def match_prefix(
        self, tokens: npt.ArrayLike, namespace: Namespace = ANYONE, limit: int | None = None
    ) -> Lengths:
        """How much of `tokens` `[n]` each tier holds, of at most `limit` tokens.

        Pure. Nothing is protected, so do not plan on it: `acquire` matches and locks in one step.
        Raises `ArgumentError` for ids that do not fit `token_dtype`, a `namespace` that is none,
        and a negative `limit`.
        """
        prompt = self.tree.as_tokens(tokens)
        return self.ledger.lengths(self.tree.match(namespace, prompt, limit), prompt.size)

    def acquire(
        self,
        rid: Hashable,
        tokens: npt.ArrayLike,
        namespace: Namespace = ANYONE,
        limit: int | None = None,
    ) -> Request:
        """Match `tokens` `[n]`, lock that, and open a request; `release` or `cancel` closes it.

        `limit`: reuse at most so many tokens; `n − 1` leaves one to compute, whose output is the
        first new token. Raises `ArgumentError` as `match_prefix` does, for an `rid` that is open,
        and after `close`.
        """
        prompt = self.tree.as_tokens(tokens).copy()
        return self.ledger.open(rid, namespace, prompt, limit)

    def prefetch(self, rid: Hashable) -> int:
        """Ask storage for what follows the cached prefix; returns the tokens it will bring.

        No storage is attached, so the honest answer is that nothing is there: `storage_len` is 0
        from now on.
        """
        request = self.ledger[rid]
        request.lengths = replace(request.lengths, storage_len=0)
        return 0

    def prefetch_ready(self, rid: Hashable) -> bool:
        """Whether the open request need not wait for its prefetch: always so without storage."""
        return rid in self.ledger.requests

    def admission_cost(self, rid: Hashable, num_tokens: int | None = None) -> AdmissionCost:
        """What the request takes if all that the host holds of it is loaded and the rest computed.

        Host hits cost GPU pages as new tokens do. `available` counts what is free and what eviction
        could free; pages in use or on their way are not in it. `num_tokens`: up to there instead of
        the whole prompt, as for `allocate`: the end of the next chunk of a prompt that enters chunk
        by chunk, or a prompt with room for its output. Raises `ArgumentError`.
        """
        request = self.ledger[rid]
        if num_tokens is None:
            num_tokens = request.tokens.size
        check_count("num_tokens", num_tokens, remedy="count from the prompt's first token")
        return self.ledger.cost(request, num_tokens)

    def load_back(self, rid: Hashable, quota: int | None = None) -> LoadBack:
        """Start to bring what the host holds of the request to the GPU.

        `quota`: at most so many tokens of full KV. What exceeds it, or the room that evicting
        others makes, stays on the host. Windows and states come with it, all of them or none, and
        without regard to the threshold where they are all that is missing. Call it before
        `allocate`. The pages are the request's at once (wait for them with its `wait_layer` or
        `wait`), everyone else's once acknowledged.

        Raises `ArgumentError` for a request that is not open or is past this step, and for a
        negative `quota`; and whatever the fences or a lane raise, and nothing is loading then.
        """
        if quota is not None:
            check_count("quota", quota, remedy="pass None for all of it")
        request = self.ledger[rid]
        if request.host_lock is None or request.started or request.loads:
            done = "inserted" if request.host_lock is None else "allocated"
            raise ArgumentError(
                "rid",
                expected="a request that has not loaded, allocated or inserted yet",
                got=f"{rid!r}, which has {'loaded' if request.loads else done}",
                remedy="acquire, then load_back once, then allocate",
            )
        result = self.loader.load_back(request, quota)
        request.reasons = result.reasons
        return result

    def allocate(self, rid: Hashable, num_tokens: int) -> PageIds:
        """Make the request's page table cover `num_tokens` tokens; returns the new pages.

        They are its own, of unknown content, behind what is cached and loading. Its `windows` grow
        alike, and `states` get one to write: a copy of the cached one, if any, for which its
        `wait_layer` and `wait` wait too. Evicts as needed. Raises `CapacityError`, changing
        nothing, when there is no room; it says so where the pool itself is too small.
        """
        check_count("num_tokens", num_tokens, remedy="count from the prompt's first token")
        return self.ledger.allocate(self.ledger[rid], num_tokens)

    def spare_state(self, rid: Hashable, name: str) -> int:
        """One more state page of component `name` for the request, of unknown content: for a state
        on the way, as at the last whole page, that `insert` shall hand over while its own goes on.
        Raises `CapacityError` when there is no room."""
        return self.ledger.shares.spare_state(self.ledger[rid], name)

    def insert(
        self,
        rid: Hashable,
        tokens: npt.ArrayLike | None = None,
        *,
        priority: int = 0,
        states: Mapping[str, int] | None = None,
    ) -> InsertResult:
        """Make what the request has computed findable, and start the copies its policy wants.

        `tokens` `[n]`: those whose KV is computed: the prompt (default), or prompt and output less
        the last sampled token, which has none. ⌊n / page_size⌋ pages enter. The request stays open;
        its page table names the canonical pages from here on, and only then are its duplicates
        freed. Waits for the request's load-back, as its forward pass has done before.

        `states`: by component the page of its own whose state is valid exactly at the end of those
        pages; without one the prefix cannot be resumed there. It is the cache's from here on and
        never written again. If it was the request's `states` entry, `allocate` gives it a copy to
        go on with, and no further page enters before. Its window pages enter by themselves.

        Under context parallelism, pages that are not on the owners which the cached prefix gives
        them stay private: the result says so. Raises `CopyFailed` if the load-back failed, and
        `ArgumentError`, inserting nothing, for other tokens than the prompt's, more than the page
        table covers, and states that are not the request's own to give.
        """
        request = self.ledger[rid]
        prompt = request.tokens
        if tokens is not None:
            prompt = self.tree.as_tokens(tokens)
        if request.ticket is not None:
            self.loader.acknowledge(self.controller.place(request.ticket))
        request.refuse_failed()
        count = prompt.size // self.page_size
        if count > request.pages.size:
            raise ArgumentError(
                "tokens",
                expected=f"at most {request.pages.size} pages of tokens, as the page table has",
                got=f"{prompt.size} tokens, {count} pages",
                remedy="allocate() what is computed, and leave the last sampled token out",
            )
        known = min(prompt.size, request.tokens.size)
        if tokens is not None and not np.array_equal(prompt[:known], request.tokens[:known]):
            raise ArgumentError(
                "tokens",
                expected="the prompt that was acquired, and what follows it",
                got="other tokens",
                remedy="acquire a request for each prompt",
            )
        self.ledger.shares.check_states(request, count, states or {})
        if reason := self.ledger.misfit(request, prompt):
            return InsertResult(request.pages, 0, 0, reason)
        table = request.pages[:count]
        done = self.tree.insert(request.namespace, prompt, table, priority=priority)
        self.ledger.adopt(request, done)
        at = self.hybrid.at(done.node, count)
        doubled = self.ledger.shares.insert(request, at, states or {})
        for node in [*done.revived, *([done.created] if done.created else [])]:
            self.events.stored(node, DEVICE)
        self.placement.write(done.node)
        self.counts["duplicate_pages"] += done.duplicates.size
        length = count * self.page_size
        return InsertResult(request.pages, length, int(done.duplicates.size), None, doubled)

    def pin(self, tokens: npt.ArrayLike, seconds: float, namespace: Namespace = ANYONE) -> int:
        """Keep what each tier holds of `tokens` from eviction, for so long; how many tokens that
        is. For a system prompt that will surely come back."""
        prompt = self.tree.as_tokens(tokens)
        ready, whole = self.hybrid.usable(self.tree.match(namespace, prompt))
        match, *locks = self.tree.acquire(namespace, prompt, whole.pages * self.page_size)
        for lock in locks:
            if lock.node.parent is not None:
                pin = self.tree.pin(lock.node, lock.tier, seconds)
                for pages in {ready, whole.pages}:
                    self.hybrid.pin(self.hybrid.at(match.nodes[-1], pages), pin)
            self.tree.release(lock)
        return match.matched_len

    def evict(self, num_pages: int, tier: str = "device", component: str | None = None) -> int:
        """Free about `num_pages` pages of `"device"` or `"host"`; returns how many it freed.

        Nothing in use goes. On the GPU, what is backed up stays on the host; `placement` says what
        becomes of the rest, and it waits for the copies that this takes. `component`: free its
        pages instead, and leave the full KV alone. Raises `ArgumentError` for a name of neither.
        """
        if tier not in TIERS:
            raise ArgumentError(
                "tier", expected=f"one of {', '.join(TIERS)}", got=repr(tier), remedy="correct it"
            )
        trails = self.hybrid.trails
        if component is not None and component not in trails:
            raise ArgumentError(
                "component",
                expected=f"one of {', '.join(trails) or 'none: the cache has none'}",
                got=repr(component),
                remedy="name it as it was declared",
            )
        trail = None if component is None else trails[component]
        return self.placement.evict(TIERS.index(tier), num_pages, trail)

    def release(self, rid: Hashable, ttft: TtftSplit | None = None) -> None:
        """Close a request: its locks go, and the pages that nobody can find. Cached pages stay.

        `ttft`: what the engine has measured of its time to the first token, for the metrics. The
        total is counted only when all six parts are given: 0.0 for those that did not happen.
        """
        self.metrics.record(self.explain(rid, ttft))
        self.ledger.close(self.ledger[rid])

    def cancel(self, rid: Hashable) -> None:
        """Close a request wherever it stands. Nothing of a load-back in flight becomes visible; its
        pages come back when a `poll` acknowledges it."""
        request = self.ledger[rid]
        if request.ticket is not None:
            self.controller.abort(request.ticket)
        self.ledger.close(request)

    def explain(self, rid: Hashable, ttft: TtftSplit | None = None) -> Explanation:
        """Where the request's prompt was, what was loaded, and why the rest is computed.

        `ttft`: what the engine has measured of its time to the first token; its total is told when
        all six parts are given, 0.0 for those that did not happen.
        """
        request = self.ledger[rid]
        self.ledger.notice(request)
        lengths, host_lock = request.lengths, request.host_lock
        return Explanation(
            str(rid),
            self.page_size,
            request.tokens.size,
            lengths.device_len,
            lengths.host_len,
            lengths.storage_len,
            lengths.loaded_len,
            _reasons(request),
            request.device_lock.node.serial,
            None if host_lock is None else host_lock.node.serial,
            self.config.write_policy,
            self.config.prefetch_policy,
            unusable_len=request.unusable_len,
            missing=request.missing if request.unusable_len else (),
            ttft=ttft or TtftSplit(),
        )

    def reset(self) -> None:
        """Empty both tiers. Raises `ArgumentError` while requests are open: they name pages."""
        if self.ledger.requests:
            raise ArgumentError(
                "cache",
                expected="no open request",
                got=f"{len(self.ledger.requests)}: {list(self.ledger.requests)[:3]} …",
                remedy="release or cancel them first",
            )
        self.controller.abort_all()
        self.placement.acknowledge_backups(len(self.controller.queues[HOST]))
        self.loader.acknowledge(len(self.controller.queues[DEVICE]))
        for pin in list(self.tree.locks):
            self.tree.release(pin)
        self.hybrid.expire_pins(self.tree)
        for tier in (DEVICE, HOST):
            for node in self.tree.nodes():
                self.hybrid.leave(node, tier)
        for tier, pool in enumerate(self.placement.pools):
            for victim in self.tree.evict(tier, pool.num_pages):
                self.placement.free(tier, victim.pages)
        self.events.cleared()

    def check(self) -> None:
        """Prove the books: free and owned pages are disjoint and all, every count equals a walk of
        the tree, every lock has an owner, and no request names a page that is free. Raises
        `InvariantError` naming the broken rule."""
        self.tree.check()
        self.controller.check()
        self.ledger.check()
        self.device.allocator.check(join([self.tree.owned(DEVICE), self.ledger.own_pages()]))
        self.host.allocator.check(self.tree.owned(HOST))
        owned = {operation.lock for operation in self.tree.operations}
        owned |= {k for r in self.ledger.requests.values() for k in self.ledger.locks(r)}
        tickets = [ticket for queue in self.controller.queues for ticket in queue]
        cargo = [each for ticket in tickets for each in ticket.cargo]
        strange = [lock for lock in self.tree.locks ^ owned if lock.deadline == inf]
        if strange:
            raise InvariantError(f"locks: {strange} are held by nobody, or owned but not held")
        check_trails(self.hybrid, self.tree, self.ledger.requests.values(), cargo)

    def stats(self) -> dict[str, int]:
        """Pages by tier and state, open requests; what was dropped, skipped, doubled or lost."""
        now = {"open_requests": len(self.ledger.requests)}
        for tier, (name, pool) in enumerate(zip(TIERS, self.placement.pools, strict=True)):
            now[f"{name}_pages"] = pool.num_pages
            now[f"{name}_free"] = pool.allocator.num_free
            now[f"{name}_evictable"] = self.tree.evictable[tier]
            now[f"{name}_protected"] = self.tree.protected[tier]
            now[f"{name}_copies_in_flight"] = len(self.controller.queues[tier])
            for trail in self.hybrid.trails.values():
                spare = trail.pools[tier].allocator.num_free
                now[f"{trail.name}_{name}_free"] = spare
                now[f"{trail.name}_{name}_evictable"] = trail.evictable[tier]
        return {**now, **self.placement.counts, **self.counts}

    def close(self) -> None:
        """Finish the copies in flight and give the lanes back. No request begins any more; those
        that are open can be released or cancelled."""
        self.controller.close()

    def _set_gauges(self) -> None:
        hops = ("load_back", "backup")
        for name, hop, pool, queue in zip(
            TIERS, hops, self.placement.pools, self.controller.queues, strict=True
        ):
            self.metrics.used_pages[name].set(pool.num_pages - pool.allocator.num_free)
            self.metrics.total_pages[name].set(pool.num_pages)
            self.metrics.copies_in_flight[hop].set(len(queue))


def _reasons(request: Request) -> tuple[str, ...]:
    """Why tokens that some tier holds are computed all the same."""
    stays = request.lengths.host_len > request.lengths.loaded_len
    useless = ("component_missing",) if request.unusable_len else ()
    return (*request.reasons, *useless) if stays else useless


def _refuse_storage(config: HiCacheConfig) -> None:
    for name, plain in (("storage", None), ("enabled", True)):
        if getattr(config, name) != plain:
            raise ArgumentError(
                f"config.{name}",
                expected=f"{plain!r}: this cache has a GPU and a host tier, and no storage",
                got=repr(getattr(config, name)),
                remedy=f"set {name}={plain!r}",
            )
