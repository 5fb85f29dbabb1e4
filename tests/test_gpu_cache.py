"""The cache on a real GPU: fences between the engine's stream and the copies, pinned memory."""

from __future__ import annotations

import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import ANYONE, HiRadixCache
from hikv.cache.pools import DevicePool, HostPool
from hikv.kernels.copy_engine import unavailable
from hikv.spec import KVSpec

reason = unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]

SPEC = KVSpec(2, 2, 64, 4, torch.uint8)
BLOCKED = 200_000_000  # cycles: some 0.1 s, far longer than a launch takes


def gpu_cache(stream: torch.cuda.Stream, pages: int = 8) -> tuple[HiRadixCache, torch.Tensor]:
    """A cache, and its GPU pool's tensors `[layer][K or V]` of `[page, token, head, dim]`."""
    shape = (SPEC.num_layers, 2, pages, SPEC.page_size, SPEC.num_kv_heads, SPEC.head_dim)
    memory = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    k, v = list(memory[:, 0]), list(memory[:, 1])
    device = DevicePool(KVBuffer.from_layers(k, v, SPEC))
    config = HiCacheConfig(load_back_threshold=0)
    host = HostPool.beside(device, config, num_pages=16)
    assert host.buffers["kv"].pinned
    return HiRadixCache(device, host, config, after=stream), memory


def test_a_backup_waits_for_the_kernel_that_writes_its_pages() -> None:
    """The forward pass is still running when the insert queues the backup."""
    stream = torch.cuda.Stream()
    cache, memory = gpu_cache(stream)
    request = cache.acquire("r", range(4))
    cache.allocate("r", 4)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
        memory[:, :, int(request.pages[0])] = 7
    cache.insert("r")
    cache.release("r")
    cache.poll((0, 1))
    host_page = cache.tree.match(ANYONE, range(4)).pages(1)
    assert cache.host.buffers["kv"].logical(host_page).eq(7).all()
    cache.check()


def test_a_load_back_waits_for_the_step_that_still_writes_its_pages() -> None:
    """A launched step writes 7 into a page that is freed and loaded with 5 meanwhile."""
    stream = torch.cuda.Stream()
    cache, memory = gpu_cache(stream, pages=1)
    request = cache.acquire("first", range(4))
    cache.allocate("first", 4)
    with torch.cuda.stream(stream):
        memory.fill_(5)
    cache.insert("first")
    cache.release("first")
    cache.poll((0, 1))
    cache.evict(1)
    running = cache.acquire("running", range(10, 14))
    cache.allocate("running", 4)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BLOCKED)
        memory.fill_(7)
    cache.cancel("running")
    request = cache.acquire("second", range(4))
    assert cache.load_back("second").loaded_len == 4
    assert request.pages.tolist() == running.pages.tolist()
    for layer in range(SPEC.num_layers):
        request.wait_layer(layer, stream)
        with torch.cuda.stream(stream):
            seen = memory[layer].clone()
        stream.synchronize()
        assert seen.eq(5).all()
    cache.check()


def test_pages_come_back_as_they_left_through_pinned_memory() -> None:
    stream = torch.cuda.Stream()
    cache, memory = gpu_cache(stream)
    tokens = list(range(32))
    cache.acquire("r", tokens)
    pages = cache.allocate("r", 32)
    with torch.cuda.stream(stream):
        for number, page in enumerate(pages.tolist()):
            memory[:, :, page] = number + 1
    want = memory[:, :, torch.as_tensor(pages, device="cuda")].clone()
    cache.insert("r")
    cache.release("r")
    cache.poll((0, 1))
    cache.evict(8)
    stream.synchronize()
    memory.fill_(99)
    request = cache.acquire("again", tokens)
    assert cache.load_back("again").loaded_len == 32
    request.wait(stream)
    with torch.cuda.stream(stream):
        got = memory[:, :, torch.as_tensor(request.pages, device="cuda")]
    stream.synchronize()
    assert torch.equal(got, want)
    cache.check()
    cache.close()
