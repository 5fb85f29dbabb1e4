"""Pools: one page count for all that rides along, sizes that fit or are refused with numbers."""

from __future__ import annotations

import pydoc

import pytest
import torch
from cache_cases import holds, settle, small_cache, spec
from hybrid_cases import hybrid_cache, on_host, proved, serve

from hikv.cache.config import HiCacheConfig
from hikv.cache.controller import Controller
from hikv.cache.pools import DevicePool, HostPool
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError, CapacityError
from hikv.host_memory import Budget
from hikv.spec import KVSpec

LATENT = KVSpec(1, 1, 12, 4, torch.uint8, latent=True)
BUDGET = Budget(10_000, 4_000, "a test")


def device_pool(**options) -> DevicePool:
    return DevicePool.empty({"kv": spec(4), "indexer": LATENT}, "layer_first", 10, **options)


@pytest.mark.parametrize(
    ("setting", "pages"),
    [
        ({}, 20),
        ({"host_ratio": 1.25}, 12),
        ({"host_size_gb": 1e-6}, 8),
        ({"host_memory_fraction": 0.5}, 17),
    ],
)
def test_one_page_count_from_the_bytes_of_all_buffers(setting: dict, pages: int) -> None:
    """A page is 64 B of KV and 48 B of an indexer's rows."""
    config = HiCacheConfig(**setting, mem_layout="page_first")
    pool = HostPool.beside(device_pool(), config, budget=BUDGET)
    assert pool.bytes_per_page == 112
    assert {name: b.num_pages for name, b in pool.buffers.items()} == {
        "kv": pages,
        "indexer": pages,
    }
    assert {b.layout for b in pool.buffers.values()} == {"page_first"}
    assert f"{pages} pages of 4 tokens, 112 B" in repr(pool)


def test_ranks_with_wider_rows_get_fewer_pages_and_all_use_the_least() -> None:
    """100 GB a rank, page 64: 12,464 B a token on one stage, 13,120 B on the other."""
    config = HiCacheConfig(host_size_gb=100)
    pages = [config.host_pages(1, width * 64, 10**12) for width in (12_464, 13_120)]
    assert min(pages) * 64 == 7_621_888
    assert min(pages) * 64 * 13_120 <= 100 * 10**9


@pytest.mark.parametrize(
    ("num_pages", "required", "available"), [(36, 4_032, 4_000), (0, 112, 0), (-1, 112, -112)]
)
def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(
    num_pages: int, required: int, available: int
) -> None:
    with pytest.raises(CapacityError) as error:
        HostPool.beside(device_pool(), num_pages=num_pages, budget=BUDGET)
    assert (error.value.required, error.value.available) == (required, available)


def test_a_size_below_one_page_is_refused() -> None:
    with pytest.raises(CapacityError) as error:
        HostPool.beside(device_pool(), HiCacheConfig(host_size_gb=1e-8), budget=BUDGET)
    assert (error.value.required, error.value.available) == (112, 10)


def test_buffers_of_one_pool_have_the_same_pages() -> None:
    odd = DevicePool.empty(LATENT, "layer_first", 9).buffers["kv"]
    with pytest.raises(ArgumentError, match="as many pages"):
        DevicePool({**device_pool().buffers, "odd": odd})
    with pytest.raises(ArgumentError, match="none"):
        DevicePool({})
    for tensors in (torch.zeros(4), {"kv": torch.zeros(4)}):
        with pytest.raises(ArgumentError, match="buffer 'kv': expected a KVBuffer, got Tensor"):
            DevicePool(tensors)
    with pytest.raises(ArgumentError, match="device_pool: expected a DevicePool, got KVBuffer"):
        HostPool.beside(odd)
    with pytest.raises(ArgumentError, match="owner below num_owners"):
        DevicePool(odd, num_owners=2, owner=2)


def test_reserved_pages_are_never_handed_out_on_any_owner() -> None:
    pool = DevicePool(DevicePool.empty(LATENT, "layer_first", 3).buffers, num_owners=2, reserved=1)
    pages = pool.allocator.alloc(4)
    assert pages.tolist() == [2, 3, 4, 5]
    assert pool.mine(pages).tolist() == [True, False, True, False]
    assert pool.local(pages[pool.mine(pages)]).tolist() == [1, 2]
    with pytest.raises(CapacityError):
        pool.allocator.alloc(1)


def test_the_page_that_an_engine_pads_with_is_left_alone_in_every_pool() -> None:
    """Full pools, to the host and back; the host's own page 0 is a page like any other."""
    cache = hybrid_cache(2, kv=(4, 8), swa=(4, 8), states=(2, 4), reserved=1)
    pools = [cache.device, *(trail.pools[0] for trail in cache.hybrid.trails.values())]
    assert [pool.num_pages for pool in pools] == [4, 4, 2]
    on_host(cache, list(range(8)))
    assert not holds(cache.host.buffers["kv"], 0, b"poison")
    request = serve(cache, list(range(8)))
    assert sorted(request.pages) == [1, 2, 3, 4]
    settle(cache)
    proved(cache)
    for pool in pools:
        for buffer in pool.buffers.values():
            assert holds(buffer, 0, b"poison")


@pytest.mark.parametrize("kind", [DevicePool, HostPool])
def test_the_help_of_a_pool_says_what_it_takes(kind: type) -> None:
    page = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    for argument in ("buffers: one buffer", "num_owners, owner: ranks", "reserved: so many pages"):
        assert page.count(argument) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "of 8"),
        ({"page_size": 8}, "page_size"),
        ({"num_layers": 3}, "num_layers"),
        ({"dtype": torch.int8}, "dtype"),
    ],
)
def test_a_host_that_holds_other_rows_is_refused_at_the_start(change: dict, message: str) -> None:
    """Rows cut short, or host pages that are several GPU pages, would corrupt what is restored."""
    fields = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 4, "page_size": 4}
    other = KVSpec(**{**fields, "dtype": torch.uint8, **change})
    device = DevicePool.empty(spec(4), "layer_first", 4)
    host = HostPool.beside(DevicePool.empty(other, "layer_first", 4))
    with pytest.raises(ArgumentError, match=message) as error:
        controller(device, host)
    assert "HostPool.beside" in str(error.value)


def test_a_host_without_what_rides_along_or_in_other_shards_is_refused() -> None:
    device = device_pool()
    with pytest.raises(ArgumentError, match="indexer"):
        controller(device, HostPool.beside(DevicePool.empty(spec(4), "layer_first", 4)))
    sharded = DevicePool(device.buffers, num_owners=2)
    host = HostPool.beside(device, HiCacheConfig(mem_layout="page_first"))
    with pytest.raises(ArgumentError, match="owners"):
        controller(sharded, host)


def controller(device: DevicePool, host: HostPool) -> Controller:
    tree = RadixTree(4)
    return Controller(tree, device, host, lanes=(), fences=tuple, layerwise=True)


def test_index_arrays_own_their_storage() -> None:
    cache = small_cache(1, 8)
    request = cache.acquire("r", [1, 2])
    pages = cache.allocate("r", 2)
    assert pages.base is None
    assert request.pages.base is None
