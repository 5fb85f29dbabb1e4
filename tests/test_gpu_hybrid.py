"""Windows and states on a real GPU: the copy of a cached state between the engine's kernels."""

from __future__ import annotations

import pytest
import torch

from hikv.buffer import KVBuffer
from hikv.cache.components import Recurrent, SlidingWindow
from hikv.cache.config import HiCacheConfig
from hikv.cache.hiradix import HiRadixCache
from hikv.cache.pools import DevicePool, HostPool
from hikv.kernels.copy_engine import unavailable
from hikv.spec import KVSpec

reason = unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]

PAGES, PAGE = 8, 4
BLOCKED = 200_000_000  # cycles: some 0.1 s, far longer than a launch takes


class Model:
    """A cache of one buffer each for KV, window and state, and the tensors of their GPU pools."""

    def __init__(self, backend: str) -> None:
        self.stream = torch.cuda.Stream()
        config = HiCacheConfig(load_back_threshold=0, io_backend=backend)
        self.memory: dict[str, torch.Tensor] = {}
        pools = {}
        for name, spec in (
            ("kv", KVSpec(2, 1, 64, PAGE, torch.uint8, latent=True)),
            ("swa", KVSpec(2, 1, 64, PAGE, torch.uint8, latent=True)),
            ("state", KVSpec(2, 1, 4096, 1, torch.uint8, latent=True)),
        ):
            shape = (spec.num_layers, PAGES, spec.page_size, spec.head_dim)
            memory = self.memory[name] = torch.zeros(shape, dtype=torch.uint8, device="cuda")
            device = DevicePool({name: KVBuffer.from_layers(list(memory), None, spec)})
            pools[name] = device, HostPool.beside(device, config, num_pages=PAGES)
        components = [
            SlidingWindow("swa", 2 * PAGE, *pools["swa"]),
            Recurrent("state", *pools["state"]),
        ]
        self.cache = HiRadixCache(*pools["kv"], config, after=self.stream, components=components)

    def write(self, name: str, pages, value: int, *, late: bool = False) -> None:
        """A kernel on the engine's stream, `late` one that runs long after the call."""
        with torch.cuda.stream(self.stream):
            if late:
                torch.cuda._sleep(BLOCKED)
            for page in pages:
                self.memory[name][:, int(page)] = value

    def read(self, name: str, page: int) -> set[int]:
        """The values in one page, as the engine's stream sees them."""
        with torch.cuda.stream(self.stream):
            seen = self.memory[name][:, int(page)].unique().tolist()
        return set(seen)


@pytest.mark.parametrize("backend", ["kernel", "direct"])
def test_a_request_goes_on_in_a_copy_of_what_the_last_kernel_left(backend: str) -> None:
    """The kernel that writes the cached state still waits when its copy is queued."""
    model = Model(backend)
    cache, tokens = model.cache, list(range(2 * PAGE))
    first = cache.acquire("first", tokens)
    cache.allocate("first", len(tokens))
    slot = first.states["state"]
    model.write("state", [slot], 7, late=True)
    cache.insert("first", states={"state": slot})
    second = cache.acquire("second", [*tokens, 99])
    cache.allocate("second", len(tokens) + 1)
    second.wait(model.stream)
    own = second.states["state"]
    assert own != slot
    assert model.read("state", own) == {7}
    model.write("state", [own], 9)
    assert model.read("state", slot) == {7}
    for rid in ("first", "second"):
        cache.release(rid)
    cache.poll(tuple(len(queue) for queue in cache.controller.queues))
    cache.check()
    cache.close()


@pytest.mark.parametrize("backend", ["kernel", "direct"])
def test_window_and_state_come_back_before_the_first_layer(backend: str) -> None:
    model = Model(backend)
    cache, tokens = model.cache, list(range(4 * PAGE))
    request = cache.acquire("first", tokens)
    cache.allocate("first", len(tokens))
    for number, (page, window) in enumerate(
        zip(request.pages, request.windows["swa"], strict=True), 1
    ):
        model.write("kv", [page], number)
        model.write("swa", [window], 10 + number)
    model.write("state", [request.states["state"]], 77)
    cache.insert("first", states=request.states)
    cache.release("first")
    cache.poll((len(cache.controller.queues[0]), 1))
    cache.evict(PAGES)
    with torch.cuda.stream(model.stream):
        for memory in model.memory.values():
            memory.fill_(255)
    request = cache.acquire("again", [*tokens, 99])
    assert cache.load_back("again").loaded_len == len(tokens)
    request.wait_layer(0, model.stream)
    windows = request.windows["swa"]
    assert [model.read("swa", page) for page in windows[2:4]] == [{13}, {14}]
    assert model.read("state", request.states["state"]) == {77}
    request.wait(model.stream)
    assert [model.read("kv", page) for page in request.pages[:4]] == [{n} for n in range(1, 5)]
    cache.release("again")
    cache.poll((1, len(cache.controller.queues[1])))
    cache.check()
    cache.close()
