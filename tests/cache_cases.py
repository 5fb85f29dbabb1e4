"""What the cache's tests share: small pools, bytes that tell which prefix a page holds, and a lane
that runs a copy when the test says so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from hikv.cache.config import HiCacheConfig
from hikv.cache.draft import DraftMode
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.lanes import CopyRequest
from hikv.cache.node import DEVICE, HOST, Namespace
from hikv.cache.pools import DevicePool, HostPool, PagePool
from hikv.cache.requests import Request
from hikv.errors import CopyFailed
from hikv.spec import KVSpec
from hikv.transfers import transfer

LAYERS = 2


def spec(page_size: int, num_layers: int = LAYERS) -> KVSpec:
    return KVSpec(num_layers, 1, 4, page_size, torch.uint8)


def small_cache(
    page_size: int = 1,
    device_pages: int = 8,
    host_pages: int = 16,
    *,
    specs: KVSpec | dict[str, KVSpec] | None = None,
    drafts: dict[str, DraftMode] | None = None,
    owners: int = 1,
    lanes: tuple | None = None,
    on_event=None,
    after=None,
    clock=lambda: 0.0,
    **settings,
) -> HiRadixCache:
    """A cache over CPU pools; any span is worth loading unless `load_back_threshold` is given."""
    config = HiCacheConfig(**{"load_back_threshold": 0, **settings})
    device = DevicePool.empty(specs or spec(page_size), "layer_first", device_pages)
    if owners > 1:
        device = DevicePool(device.buffers, num_owners=owners)
    host = HostPool.beside(device, config, num_pages=host_pages, drafts=drafts)
    for pool in (device, host):
        for buffer in pool.buffers.values():
            for page in range(buffer.num_pages):
                fill(buffer, page, b"poison")
    return HiRadixCache(
        device, host, config, after=after, lanes=lanes, on_event=on_event, clock=clock
    )


def views(buffer, page: int) -> list[torch.Tensor]:
    return [view[page] for region in buffer.regions for _, _, view in region.tensors(torch.uint8)]


def pattern(text: bytes, size: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(text).digest(size), np.uint8)


def fill(buffer, page: int, text: bytes) -> None:
    for view in views(buffer, page):
        view.copy_(torch.from_numpy(pattern(text, view.numel()).copy()).reshape(view.shape))


def holds(buffer, page: int, text: bytes) -> bool:
    return all(
        np.array_equal(view.numpy().ravel(), pattern(text, view.numel()))
        for view in views(buffer, page)
    )


def prefix(namespace: Namespace, tokens: Sequence[int], end: int) -> bytes:
    return repr((namespace.fields, [int(t) for t in tokens[:end]])).encode()


def compute(cache: HiRadixCache, request: Request, tokens: Sequence[int], start: int) -> None:
    """The forward pass: write the pages of `tokens` from page number `start` on."""
    page_size, pool = cache.page_size, cache.device
    for number in range(start, len(tokens) // page_size):
        text = prefix(request.namespace, tokens, (number + 1) * page_size)
        page = request.pages[number : number + 1]
        if pool.mine(page)[0]:
            for name, buffer in pool.buffers.items():
                fill(buffer, int(pool.local(page)[0]), name.encode() + text)


def wrong_pages(
    pool: PagePool,
    pages: Sequence[int],
    namespace: Namespace,
    tokens: Sequence[int],
    start: int = 0,
) -> list[int]:
    """Which page numbers of the prompt do not hold what they should, in this owner's buffers."""
    wrong = []
    for number, page in enumerate(np.asarray(pages, np.int64), start):
        text = prefix(namespace, tokens, (number + 1) * pool.page_size)
        if pool.mine(page) and not all(
            holds(buffer, int(pool.local(page)), name.encode() + text)
            for name, buffer in pool.buffers.items()
        ):
            wrong.append(number)
    return wrong


def serve(
    cache: HiRadixCache,
    tokens: Sequence[int],
    namespace: Namespace = ANYONE,
    rid: object = "serve",
    quota: int | None = None,
) -> Request:
    """A whole request; checks every byte that it reuses. Returns it, released."""
    cache.poll()
    request = cache.acquire(rid, tokens, namespace)
    cache.load_back(rid, quota)
    cached = request.pages.size
    cache.allocate(rid, len(tokens))
    request.wait()
    assert wrong_pages(cache.device, request.pages[:cached], namespace, tokens) == []
    compute(cache, request, tokens, cached)
    cache.insert(rid)
    cache.release(rid)
    return request


def settle(cache: HiRadixCache) -> None:
    """Acknowledge everything in flight."""
    cache.poll(tuple(len(queue) for queue in cache.controller.queues))


def on_host(cache: HiRadixCache, tokens: Sequence[int], namespace: Namespace = ANYONE) -> None:
    """Serve `tokens`, back them up, and evict them from the GPU."""
    serve(cache, tokens, namespace)
    settle(cache)
    cache.evict(cache.device.num_pages)
    assert cache.match_prefix(tokens, namespace).device_len == 0


class ManualLane:
    """Runs each copy when told to: `complete` it, wholly or in part, or `fail` it."""

    def __init__(self) -> None:
        self.copies: list[ManualCopy] = []
        self.refuse: Exception | None = None

    def submit(self, request: CopyRequest) -> ManualCopy:
        if self.refuse is not None:
            raise self.refuse
        self.copies.append(ManualCopy(request))
        return self.copies[-1]

    def close(self) -> None:
        for copy in self.copies:
            copy.synchronize()


class ManualCopy:
    def __init__(self, request: CopyRequest) -> None:
        self.request, self.pages, self.running = request, None, False
        self.error: Exception | None = None

    def complete(self, pages: int | None = None, error: Exception | None = None) -> None:
        """Move the first `pages` pages (default all) and end."""
        if self.pages is not None:
            return
        total = len(self.request.src_pages)
        self.pages = total if pages is None else min(pages, total)
        if self.pages < total:
            self.error = error or CopyFailed("the link broke")
        for source, target in self.request.buffers:
            moved = (self.request.src_pages[: self.pages], self.request.dst_pages[: self.pages])
            transfer(source, target, *moved, after=None)

    def done(self) -> bool:
        return self.pages is not None

    def arrived(self) -> int:
        return self.pages

    def failure(self) -> Exception | None:
        return self.error

    def seconds(self) -> None:
        return None

    def withdraw(self) -> None:
        if not self.running:
            self.complete(0, CopyFailed("withdrawn"))

    def synchronize(self) -> None:
        self.complete()

    def wait(self, stream=None) -> None:
        self.synchronize()
        if self.error is not None:
            raise CopyFailed("the pages are not there") from self.error

    def wait_layer(self, layer: int, stream=None) -> None:
        self.wait()


def manual_lanes() -> tuple[ManualLane, ManualLane]:
    lanes = (ManualLane(), ManualLane())
    assert (DEVICE, HOST) == (0, 1)
    return lanes
