"""A cache of full KV with an indexer, a sliding window with scales, and a recurrent state, whose
every byte tells which prefix it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cache_cases import compute, fill, holds, prefix, settle, spec, wrong_pages

from hikv.cache.components import Recurrent, SlidingWindow
from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.holding import ABSENT
from hikv.cache.node import DEVICE, Namespace
from hikv.cache.pools import DevicePool, HostPool
from hikv.cache.requests import Request
from hikv.spec import KVSpec


def rows(page_size: int, width: int, layers: int = 1) -> KVSpec:
    return KVSpec(layers, 1, width, page_size, torch.uint8, latent=True)


def pools(
    specs: dict[str, KVSpec],
    device_pages: int,
    host_pages: int,
    config: HiCacheConfig,
    reserved: int = 0,
):
    device = DevicePool.empty(specs, "layer_first", device_pages + reserved, reserved=reserved)
    host = HostPool.beside(device, config, num_pages=host_pages)
    for pool in (device, host):
        for buffer in pool.buffers.values():
            for page in range(buffer.num_pages):
                fill(buffer, page, b"poison")
    return device, host


def hybrid_cache(
    page_size: int = 1,
    *,
    window: int | None = None,
    kv: tuple[int, int] = (16, 32),
    swa: tuple[int, int] = (16, 32),
    states: tuple[int, int] | None = (8, 16),
    lanes: tuple | None = None,
    on_event=None,
    clock=lambda: 0.0,
    reserved: int = 0,
    **settings,
) -> HiRadixCache:
    """Pools of `(GPU pages, host pages)`; `window` in tokens, default 3 pages, 0 for none."""
    config = HiCacheConfig(**{"load_back_threshold": 0, "mem_layout": "page_first", **settings})
    device, host = pools(
        {"kv": spec(page_size), "indexer": rows(page_size, 12)}, *kv, config, reserved
    )
    window = 3 * page_size if window is None else window
    components: list = []
    if states is not None:
        kinds = {"conv": rows(1, 8), "ssm": rows(1, 20, 2)}
        components.append(Recurrent("state", *pools(kinds, *states, config, reserved)))
    if window:
        kinds = {"swa": spec(page_size, 3), "swa_scales": rows(page_size, 4)}
        components.append(SlidingWindow("swa", window, *pools(kinds, *swa, config, reserved)))
    return HiRadixCache(
        device,
        host,
        config,
        after=None,
        lanes=lanes,
        on_event=on_event,
        clock=clock,
        components=components,
    )


def text(name: str, namespace: Namespace, tokens: Sequence[int], end: int) -> bytes:
    return name.encode() + prefix(namespace, tokens, end)


def state_is(cache, tier: int, page: int, namespace, tokens, end: int) -> bool:
    """Whether a page of the state's pools holds the state after the first `end` tokens."""
    pool = cache.hybrid.trails["state"].pools[tier]
    return all(
        holds(buffer, page, text(name, namespace, tokens, end))
        for name, buffer in pool.buffers.items()
    )


def write_state(cache, page: int, namespace, tokens, end: int) -> None:
    for name, buffer in cache.hybrid.trails["state"].pools[DEVICE].buffers.items():
        fill(buffer, page, text(name, namespace, tokens, end))


def window_wrong(cache, tier: int, ids: Sequence[int], namespace, tokens) -> list[int]:
    """Which pages of the prompt have a window entry with other bytes than theirs."""
    pool = cache.hybrid.trails["swa"].pools[tier]
    return [
        number
        for number, page in enumerate(ids)
        if page != ABSENT and wrong_pages(pool, [page], namespace, tokens, number)
    ]


def read_hit(cache: HiRadixCache, request: Request, cached: int) -> None:
    """What a forward pass reads first: KV of the `cached` pages, their window, their state."""
    space, tokens, page = request.namespace, request.tokens, cache.page_size
    assert wrong_pages(cache.device, request.pages[:cached], space, tokens) == []
    for name, table in request.windows.items():
        need = cache.hybrid.trails[name].need
        assert np.all(table[max(0, cached - need) : cached] != ABSENT)
        assert window_wrong(cache, DEVICE, table[:cached], space, tokens) == []
    for slot in request.states.values():
        assert cached == 0 or state_is(cache, DEVICE, slot, space, tokens, cached * page)


def forward(
    cache: HiRadixCache, request: Request, tokens: Sequence[int], start: int, keep: int | None
) -> None:
    """Compute the pages from number `start` on and fold all tokens into the request's state; the
    state at the last whole page is left in page `keep`, if any."""
    space, page = request.namespace, cache.page_size
    compute(cache, request, tokens, start)
    for name, table in request.windows.items():
        for number in range(start, len(tokens) // page):
            for each, buffer in cache.hybrid.trails[name].pools[DEVICE].buffers.items():
                fill(buffer, int(table[number]), text(each, space, tokens, (number + 1) * page))
    for slot in request.states.values():
        write_state(cache, slot, space, tokens, len(tokens))
        if keep is not None:
            write_state(cache, keep, space, tokens, len(tokens) // page * page)


def admit(cache, tokens, namespace=ANYONE, rid: object = "serve", quota=None) -> Request:
    """Up to the forward pass, all copies awaited and every reused byte compared."""
    request = cache.acquire(rid, tokens, namespace)
    cache.load_back(rid, quota)
    cached = request.pages.size
    cache.allocate(rid, len(tokens))
    request.wait()
    read_hit(cache, request, cached)
    return request


def publish(cache, request: Request, tokens: Sequence[int], state: bool = True):
    """Insert, with the state at the last whole page if `state`."""
    slots: dict[str, int] = {}
    if state and request.states and len(tokens) >= cache.page_size:
        slots = dict(request.states)
        if len(tokens) % cache.page_size:
            slots = {name: cache.spare_state(request.rid, name) for name in request.states}
            for page in slots.values():
                end = len(tokens) // cache.page_size * cache.page_size
                write_state(cache, page, request.namespace, tokens, end)
    return cache.insert(request.rid, tokens, states=slots)


def serve(
    cache: HiRadixCache,
    tokens: Sequence[int],
    namespace: Namespace = ANYONE,
    rid: object = "serve",
    quota: int | None = None,
    state: bool = True,
) -> Request:
    """A whole request; returns it, released."""
    cache.poll()
    request = admit(cache, tokens, namespace, rid, quota)
    known = (request.lengths.device_len + request.lengths.loaded_len) // cache.page_size
    forward(cache, request, tokens, known, None)
    publish(cache, request, tokens, state)
    cache.release(rid)
    return request


def check_bytes(cache: HiRadixCache) -> None:
    """Every entry of the tree holds the bytes of its prefix, in every tier."""
    page = cache.page_size
    for node in cache.tree.nodes():
        tokens = [t for above in node.path() for t in above.tokens.tolist()]
        first = node.start // page
        for tier, pool in enumerate((cache.device, cache.host)):
            if node.pages[tier] is not None:
                assert wrong_pages(pool, node.pages[tier], node.namespace, tokens, first) == []
            for name, trail in cache.hybrid.trails.items():
                holding = trail.of(node)
                ids = [] if holding is None else holding.ids[tier]
                if name == "swa":
                    padded = [*[ABSENT] * first, *ids]
                    assert window_wrong(cache, tier, padded, node.namespace, tokens) == []
                else:
                    for number, slot in enumerate(ids, first + 1):
                        end = number * page
                        assert slot == ABSENT or state_is(
                            cache, tier, slot, node.namespace, tokens, end
                        )


def entries(cache: HiRadixCache, name: str, tokens: Sequence[int], tier: int) -> list[int]:
    """Page numbers of `tokens` of which component `name` has an entry in `tier`."""
    match = cache.tree.match(ANYONE, tokens)
    if not match.nodes:
        return []
    return np.flatnonzero(cache.hybrid.trails[name].held(match.nodes[-1], tier)).tolist()


def proved(cache: HiRadixCache) -> None:
    """The books of every pool, and every byte that the tree holds."""
    cache.check()
    check_bytes(cache)


def on_host(cache: HiRadixCache, tokens: Sequence[int]) -> None:
    """Serve `tokens`, back them up, and evict them from the GPU."""
    serve(cache, tokens)
    settle(cache)
    cache.evict(cache.device.num_pages)
    assert cache.match_prefix(tokens).device_len == 0


def lose(cache: HiRadixCache, name: str, tier: str | None = None) -> None:
    """Evict all of a component, from both tiers or one."""
    for each in ("device", "host") if tier is None else (tier,):
        cache.evict(64, each, name)
