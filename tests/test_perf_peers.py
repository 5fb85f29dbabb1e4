"""Other systems' kernels, stood in for by copies of memory that take their arguments literally."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_machine import FakeGpu

from hikv.spec import KVSpec
from perf.case import DIRECTIONS, Case
from perf.machine import workload
from perf.peers import PEERS, Waived

HEADS = KVSpec(3, 2, 16, 4, torch.bfloat16)
LATENT = KVSpec(3, 1, 48, 4, torch.uint8, latent=True)
BY_NAME = {peer.name: peer for peer in PEERS}


def move(dst, src, nbytes):
    ctypes.memmove(int(dst), int(src), nbytes)


def sgl_kernel():
    """Slot by slot, as the signatures say: bytes of an item, and of a slot in `page_first`."""
    module = ModuleType("sgl_kernel.kvcacheio")
    module.quotas = []

    def pairs(src_slots, dst_slots, block_quota):
        assert src_slots.dtype == dst_slots.dtype == torch.int64
        module.quotas.append(block_quota)
        return list(zip(src_slots.tolist(), dst_slots.tolist(), strict=True))

    def all_layer(tables, src, dst, *, item_size, num_layers, block_quota):
        for source, target in zip(tables[::2], tables[1::2], strict=True):
            assert source.dtype == target.dtype == torch.uint64
            assert len(source) == len(target) == num_layers
            for s, d in pairs(src, dst, block_quota):
                for here, there in zip(source.tolist(), target.tolist(), strict=True):
                    move(there + d * item_size, here + s * item_size, item_size)

    def lf_pf(ends, src, dst, *, item_size, dst_layout_dim, num_layers, block_quota):
        for table, target in zip(ends[::2], ends[1::2], strict=True):
            for s, d in pairs(src, dst, block_quota):
                for layer, here in enumerate(table.tolist()):
                    there = target.data_ptr() + d * dst_layout_dim + layer * item_size
                    move(there, here + s * item_size, item_size)

    def pf_lf(ends, src, dst, *, layer_id, item_size, src_layout_dim, block_quota):
        for source, target in zip(ends[::2], ends[1::2], strict=True):
            for s, d in pairs(src, dst, block_quota):
                here = source.data_ptr() + s * src_layout_dim + layer_id * item_size
                move(target.data_ptr() + d * item_size, here, item_size)

    def taking(count, call):
        return lambda *args, **options: call(args[:count], *args[count:], **options)

    for mla, count in (("", 4), ("_mla", 2)):
        setattr(module, f"transfer_kv_all_layer{mla}", taking(count, all_layer))
        setattr(module, f"transfer_kv_all_layer{mla}_lf_pf", taking(count, lf_pf))
        setattr(module, f"transfer_kv_per_layer{mla}_pf_lf", taking(count, pf_lf))
    return module


def vllm(with_size=True):
    module = ModuleType("vllm._custom_ops")

    def swap(src, dst, nbytes, mapping):
        assert mapping.dtype == torch.int64
        assert mapping.is_contiguous()
        assert src[0].nbytes == dst[0].nbytes == nbytes
        for s, d in mapping.tolist():
            move(dst.data_ptr() + d * nbytes, src.data_ptr() + s * nbytes, nbytes)

    def old(src, dst, block_mapping):
        swap(src, dst, src[0].nbytes, block_mapping)

    def new(src, dst, block_size_in_bytes, block_mapping):
        swap(src, dst, block_size_in_bytes, block_mapping)

    def batch(src_ptrs, dst_ptrs, sizes):
        for s, d, n in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
            move(d, s, n)

    module.swap_blocks = new if with_size else old
    module.swap_blocks_batch = batch
    return module


def lmcache(formats="EngineKVFormat"):
    module = ModuleType("lmcache.c_ops")
    kinds = SimpleNamespace(TWO_X_NL_X_NBBS_NH_HS="k and v", NL_X_NBBS_ONE_HS="latent")
    setattr(module, formats, kinds)
    module.TransferDirection = SimpleNamespace(H2D="in", D2H="out")

    def call(chunk, pointers, slots, device, capacity, way, kind, *, block_size, head_size):
        num_kv, layers, tokens, _ = chunk.shape
        assert kind == ("k and v" if num_kv == 2 else "latent")
        assert (len(pointers), len(slots)) == (num_kv * layers, tokens)
        assert int(slots.max()) < capacity
        for pointer, rows in zip(pointers.tolist(), chunk.flatten(0, 1), strict=True):
            for slot, row in zip(slots.tolist(), rows, strict=True):
                ends = row.data_ptr(), pointer + slot * row.nbytes
                move(*(ends if way == "out" else ends[::-1]), row.nbytes)

    module.multi_layer_kv_transfer = call
    return module


@pytest.fixture
def install(monkeypatch):
    def install(module):
        parent = module.__name__.partition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def candidate(name, host_layout="layer_first", direction="h2d", spec=HEADS):
    machine = FakeGpu()
    case = Case(spec, "layer_first", host_layout, 5)
    machine.reserve_for([case])
    work = workload(machine, case, direction)
    return BY_NAME[name].candidate(machine, work, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", [HEADS, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize(
    ("name", "make", "host"),
    [
        ("sgl_kernel, 2 CTAs", sgl_kernel, "layer_first"),
        ("sgl_kernel, 32 CTAs", sgl_kernel, "page_first"),
        ("vLLM swap_blocks", vllm, "layer_first"),
        ("vLLM swap_blocks_batch", vllm, "page_first_direct"),
        ("LMCache, own chunk", lmcache, "page_first_direct"),
    ],
)
def test_a_peer_that_copies_as_it_is_told_moves_every_byte(
    name, make, host, spec, direction, install
):
    install(make())
    found = candidate(name, host, direction, spec)
    assert found.name == name
    assert found.check() is None
    found.run(3)


def test_the_number_of_ctas_is_passed_on(install):
    module = sgl_kernel()
    install(module)
    candidate("sgl_kernel, 32 CTAs")
    assert set(module.quotas) == {32}


def test_older_versions_are_served_by_their_own_signatures(install):
    install(vllm(with_size=False))
    install(lmcache("GPUKVFormat"))
    assert candidate("vLLM swap_blocks").check() is None
    assert candidate("LMCache, own chunk", direction="d2h").check() is None


@pytest.mark.parametrize(
    ("name", "make", "host", "reason"),
    [
        ("vLLM swap_blocks", vllm, "page_first", "copies pools in layer_first, not in page_first"),
        ("sgl_kernel, 2 CTAs", sgl_kernel, "page_head", "no kernel for page_head on the host"),
        (
            "LMCache, own chunk",
            lambda: lmcache("OtherFormat"),
            "layer_first",
            "this version has no format TWO_X_NL_X_NBBS_NH_HS",
        ),
    ],
)
def test_a_pair_of_layouts_or_a_version_without_a_kernel_is_waived(
    name, make, host, reason, install
):
    install(make())
    with pytest.raises(Waived, match=reason):
        candidate(name, host)


def test_a_peer_that_is_missing_raises_or_is_wrong_is_waived_with_the_reason(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Waived, match=r"^vllm._custom_ops is not installed: "):
        candidate("vLLM swap_blocks")
    module = vllm()
    module.swap_blocks = lambda src, dst, size, mapping: None
    install(module)
    with pytest.raises(Waived, match="as called here it copies other bytes: page"):
        candidate("vLLM swap_blocks")
    module.swap_blocks_batch = lambda src_ptrs, dst_ptrs: None
    with pytest.raises(Waived, match="as called here it raises TypeError: "):
        candidate("vLLM swap_blocks_batch")
