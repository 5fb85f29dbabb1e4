"""The `nccl` back end over a collective of the tests' own: ranks are threads, pools host memory.

Everything is here but NCCL itself: agreement, the watched rehearsal, packing, blocks, bytes.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from fake_streams import FakeStream, Threads, install, on_gpu

from hikv.buffer import KVBuffer
from hikv.cp import collective, nccl
from hikv.cp.collective import NcclCollective
from hikv.cp.gather import ZeroSMGather
from hikv.cp.plan import Request, plan_gather
from hikv.cp.scratch import make_slot, scratch_bytes
from hikv.cp.shard_map import ShardMap
from hikv.cp.witness import device_work, kernels
from hikv.errors import GatherError
from hikv.spec import KVSpec

MHA = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)
MLA = KVSpec(num_layers=3, num_kv_heads=1, head_dim=36, page_size=4, dtype=torch.uint8, latent=True)
WIDE = replace(MHA, v_head_dim=4, page_size=1)
LOCAL_PAGES, MAX_PAGES = 20, 31
COPIES = ["Memcpy PtoP (Device -> Device)", "nccl:_all_gather_base"]
KERNEL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class FakeCollective:
    """An all-gather between threads. `world` says what goes wrong, and on which rank."""

    def __init__(self, world):
        self.world, self.calls = world, []
        world.collectives.append(self)

    def obstacle(self, device):
        self.rank = device.index
        return self.world.obstacles.get(self.rank)

    def allocate(self, nbytes, device):
        if self.world.fails.get(self.rank) == "allocate":
            raise RuntimeError("no symmetric memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    def _step(self, name):
        self.calls.append(name)
        if self.world.fails.get(self.rank) == name:
            raise RuntimeError(f"{name} failed")

    def open(self, ranks, device, timeout_s):
        assert ranks == list(range(self.world.threads.size))
        assert timeout_s == 7.0
        self._step("open")

    def register(self, memory):
        self._step("register")

    def all_gather(self, gathered, block, stream):
        assert isinstance(stream, FakeStream)
        threads = self.world.gathering
        self.calls.append(block.numel())
        blocks = threads.exchange(self.rank, block)
        torch.cat(blocks, out=gathered)
        if self.world.fails.get(self.rank) == "bytes":
            gathered[-1] ^= 1
        threads.exchange(self.rank, None)  # nobody packs again before all have read

    def watch(self, run, device):
        run()
        if self.calls and self.world.fails.get(self.rank) == "sight":
            return []
        return self.world.seen.get(self.rank, COPIES)

    def close(self):
        self._step("close")


@pytest.fixture
def world(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(nccl, "unavailable", lambda: None)
    found = SimpleNamespace(obstacles={}, fails={}, seen={}, collectives=[])
    monkeypatch.setattr(nccl, "NcclCollective", lambda: FakeCollective(found))

    def of(size):
        found.threads, found.gathering = Threads(size), Threads(size)
        return found

    found.of = of
    return found


def content(spec, owner):
    rng = np.random.default_rng([owner, spec.head_dim])
    memory = torch.from_numpy(rng.integers(0, 255, LOCAL_PAGES * spec.bytes_per_page, np.uint8))
    return KVBuffer.from_tensor(memory, spec, "layer_first")


def build(group, spec=MHA, **options):
    shards = ShardMap(group.size, spec.page_size)
    pool = on_gpu(content(spec, group.rank), group.rank)
    options = {"max_pages": MAX_PAGES, "backend": "nccl", "timeout_s": 7.0, **options}
    return ZeroSMGather(pool, shards, group, **options)


def assert_all_raise(answers, message):
    """Every rank raised one and the same error, which begins with `message`."""
    assert {type(answer) for answer in answers} == {GatherError}
    assert len({str(answer) for answer in answers}) == 1
    assert str(answers[0]).startswith(message), str(answers[0])


def gather_batches(group, spec):
    """Batches with blocks of unequal length; what was read, the report and the memory."""
    gather = build(group, spec)
    pools = [content(spec, owner) for owner in range(group.size)]
    num_ranks, moved = group.size, 0
    for chosen in (
        [(0, 1), (0, 5), (0, 2), (1, 3)],  # three pages of rank 0, one of rank 1
        [(num_ranks - 1, 7)],  # all of one rank
        [],
        [(r, page) for page in (9, 4, 12) for r in range(num_ranks)],  # equal
    ):
        pages = [gather.shards.page(owner, local) for owner, local in chosen]
        plan = plan_gather(gather.shards, [Request(pages, len(pages) * spec.page_size, 2)])
        assert gather.fits(plan)
        gather.begin(plan)
        gather.restored()
        stream = FakeStream()
        for layer in range(spec.num_layers):
            kv = gather.wait(layer, stream)
            for place, (owner, local) in zip(plan.table(0).tolist(), chosen, strict=False):
                held = pools[owner].layer_range(layer, layer + 1).logical([local])[0, 0]
                parts = [t[place] for t in (kv.k, kv.v) if t is not None]
                found = torch.stack(parts) if len(held) == len(parts) else torch.cat(parts, -1)
                assert torch.equal(
                    found.view(torch.uint8).flatten(), held.view(torch.uint8).flatten()
                )
        gather.end(stream)
        own = len(plan.local_pages[group.rank])
        moved += (own + num_ranks * plan.block_pages) * spec.bytes_per_page
    report = gather.report()
    assert report.moved_bytes == moved
    assert report.nbytes == sum(report.bytes_from) == (4 + 1 + 3 * num_ranks) * spec.bytes_per_page
    staging = MAX_PAGES // num_ranks
    assert gather.scratch_bytes == scratch_bytes(spec, MAX_PAGES, staging)
    gather.close()
    return report


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("spec", [MHA, MLA, WIDE], ids=["mha", "mla", "wide k"])
def test_blocks_of_unequal_length_are_packed_padded_and_gathered(world, num_ranks, spec):
    reports = world.of(num_ranks).threads.run(lambda group: gather_batches(group, spec))
    for report in reports:
        assert not isinstance(report, Exception), report
        assert (report.backend, report.engine, report.batches) == ("nccl", "copy engine", 4)
        assert report.own_shard is None
        assert report.bytes_from == reports[0].bytes_from
    kinds = 1 if spec.latent else 2
    for fake in world.collectives:
        assert fake.calls[:4] == ["open", "register", "register", "register"]
        sizes = [call for call in fake.calls if not isinstance(call, str)]
        # Of K or of V alone: the rehearsal's, two blocks into two slots, then the batches'.
        rehearsed, served = sizes[: 4 * kinds], sizes[4 * kinds :]
        pages = spec.page_size * spec.bytes_per_token_layer
        assert sum(rehearsed) == 2 * (1 + MAX_PAGES // num_ranks) * pages
        assert sum(served) == (3 + 1 + 0 + 3) * spec.num_layers * pages
        assert len(served) == 3 * spec.num_layers * kinds, "an empty batch gathers nothing"
        assert fake.calls[-1] == "close"


def test_a_layer_is_packed_by_one_batch_behind_its_own_fence_and_the_readers(world):
    def body(group):
        backend = nccl.NcclBackend()
        spec, pool = MHA, on_gpu(content(MHA, group.rank), group.rank)
        assert backend.obstacle(pool) is None
        backend.connect(group.exchange(backend.export(pool, group.rank, group.size)))
        slots = [make_slot(spec, 8, backend.allocate) for _ in range(2)]
        staging = make_slot(spec, backend.staging_pages(8), backend.allocate)
        for step in backend.steps(slots, staging, group, 7.0):
            step()
        backend._stream.notes.clear()
        plan = plan_gather(ShardMap(2, 4), [Request([2, 6, 3], 12)])
        backend.begin(plan)
        reader = FakeStream()
        backend.release(1, reader)
        freed = reader.notes[-1][1]
        moved = backend.copy(2, 1)
        own = len(plan.local_pages[group.rank])
        assert backend._driver.copied == [(backend._stream.cuda_stream, 2 * own)]
        assert backend._stream.notes[:2] == [("wait", None), ("wait", freed)]
        assert moved == (2 * own, (own + 2 * 2) * spec.bytes_per_page // spec.num_layers)
        backend.close()
        return True

    assert world.of(2).threads.run(body) == [True, True]


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_lacks_a_capability_stops_all_before_anything_is_made(
    world, lacking, monkeypatch
):
    exported = []
    monkeypatch.setattr(nccl.NcclBackend, "export", lambda *pool: exported.append(pool))
    world.obstacles[lacking] = "NCCL is 2.27.3, and has a zero-CTA policy from 2.28 on"
    answers = world.of(2).threads.run(build)
    assert_all_raise(
        answers, f"back end 'nccl' cannot serve the group (rank {lacking}: NCCL is 2.27.3"
    )
    assert [fake.calls for fake in world.collectives] == [[], []]
    assert exported == [], "what a process shares it may never get back"


def test_after_a_refusal_the_ranks_go_another_way_together(world):
    """The fall-back is the caller's, and every rank takes it: all have heard the same."""

    def body(group):
        try:
            build(group)
        except GatherError:
            world.obstacles.clear()
            gather = build(group, allow_sm=True)
            group.exchange(None)
            gather.close()
            return gather.report().engine

    world.obstacles[1] = "NCCL is 2.27.3"
    assert world.of(2).threads.run(body) == ["copy engine", "copy engine"]


@pytest.mark.parametrize("step", ["allocate", "open", "register", "bytes"])
def test_a_step_that_fails_on_one_rank_stops_all_before_the_next(world, step):
    world.fails[1] = step
    answers = world.of(3).threads.run(build)
    told = {
        "allocate": "no symmetric memory",
        "bytes": "the rehearsal of blocks of 1 pages brought other bytes than were sent",
    }.get(step, f"{step} failed")
    assert_all_raise(answers, f"back end 'nccl' cannot serve the group (rank 1: {told}")
    made = {"allocate": [], "open": ["open"], "register": ["open", "register"]}
    for fake in world.collectives:
        steps = list(dict.fromkeys(call for call in fake.calls if isinstance(call, str)))
        assert steps == [*made.get(step, ["open", "register"]), "close"]


def test_gpus_must_be_one_a_rank_and_in_reach(world, monkeypatch):
    def on_one_gpu(group):
        return ZeroSMGather(
            on_gpu(content(MHA, group.rank), 0),
            ShardMap(2, MHA.page_size),
            group,
            max_pages=8,
            backend="nccl",
        )

    answers = world.of(2).threads.run(on_one_gpu)
    assert_all_raise(
        answers, "back end 'nccl' cannot serve the group (rank 0: ranks 0 and 1 are both on"
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda near, far: near == 0)
    answers = world.of(2).threads.run(build)
    assert_all_raise(
        answers, "back end 'nccl' cannot serve the group (rank 1: GPU 1 cannot reach the mem"
    )


def test_a_kernel_seen_on_one_rank_is_refused_on_all(world):
    world.seen[1] = [*COPIES, KERNEL, KERNEL]
    answers = world.of(2).threads.run(build)
    assert_all_raise(
        answers,
        "back end 'nccl' cannot serve the group (rank 1: NCCL, asked to use no SM, launched "
        f"{KERNEL}; gather by p2p, or allow it with allow_sm=True)",
    )
    assert [fake.calls[-1] for fake in world.collectives] == ["close", "close"]


def test_a_kernel_that_is_allowed_is_reported_on_all(world):
    world.seen[1] = [*COPIES, KERNEL]

    def body(group):
        gather = build(group, allow_sm=True)
        engine = gather.report().engine
        group.exchange(None)
        gather.close()
        return engine

    assert world.of(2).threads.run(body) == ["sm", "sm"]
    world.seen.clear()
    assert world.of(2).threads.run(body) == ["copy engine", "copy engine"]


def test_ranks_that_allow_different_things_do_not_meet(world):
    answers = world.of(2).threads.run(lambda group: build(group, allow_sm=group.rank == 1))
    assert {str(answer) for answer in answers} == {
        "allow_sm: expected the same on every rank, False as on rank 0, got True on rank 1; "
        "build the gather alike on every rank, on one host"
    }


def test_a_profiler_that_sees_nothing_proves_nothing(world):
    world.fails[1] = "sight"  # after the first copy, which it saw
    answers = world.of(2).threads.run(build)
    assert_all_raise(
        answers, "back end 'nccl' cannot serve the group (rank 1: torch's profiler sees no"
    )
    world.fails.clear()
    world.collectives.clear()
    world.seen[0] = []
    answers = world.of(2).threads.run(build)
    assert_all_raise(
        answers, "back end 'nccl' cannot serve the group (rank 0: torch's profiler sees no"
    )
    assert [fake.calls for fake in world.collectives] == [["close"], ["close"]]


def test_a_group_that_torch_does_not_know_is_refused(world):
    def body(group):
        del group.ranks
        return build(group)

    answers = world.of(2).threads.run(body)
    assert_all_raise(
        answers, "back end 'nccl' cannot serve the group (rank 0: its group does not say"
    )


def test_scratch_without_room_for_a_block_gathers_chunks_alone(world):
    def body(group):
        gather = build(group, max_pages=1)
        plan = plan_gather(gather.shards, [Request([], 0, 3)])
        gather.begin(plan)
        gather.restored()
        for layer in range(MHA.num_layers):
            gather.wait(layer, FakeStream())
        gather.end(FakeStream())
        gather.close()
        return gather.report().moved_bytes

    assert world.of(2).threads.run(body) == [0, 0]


def test_only_copies_and_marks_are_no_kernels():
    assert kernels([*COPIES, "Memset (Device)"]) == []
    seen = [KERNEL, "ncclSymkDevKernel_AllGather_LL", *COPIES, KERNEL, "elementwise_kernel"]
    assert kernels(seen) == ["elementwise_kernel", KERNEL, "ncclSymkDevKernel_AllGather_LL"]


def test_the_witness_names_what_the_device_did(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    events = [("aten::copy_", "CPU"), (COPIES[0], "CUDA"), (KERNEL, "CUDA")]

    class Profile:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            return [
                SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind))
                for name, kind in events
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    ran = threading.Event()
    assert device_work(ran.set, torch.device("cuda", 0)) == [COPIES[0], KERNEL]
    assert ran.is_set()


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def torch_with_nccl(monkeypatch):
    """What torch tells where NCCL would do; the calls that were made."""
    calls = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    process_group = SimpleNamespace(
        NCCL_CTA_POLICY_ZERO=2,
        Options=lambda: SimpleNamespace(config=SimpleNamespace(cta_policy=0)),
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", process_group, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    driver = SimpleNamespace(cuda_driver_version=12050)
    monkeypatch.setattr(collective, "device_info", lambda index: driver)
    monkeypatch.setattr(torch.version, "hip", None)
    return SimpleNamespace(calls=calls, process_group=process_group, driver=driver)


def test_what_nccl_takes_is_probed_and_named(torch_with_nccl, monkeypatch):
    probe = NcclCollective().obstacle
    assert probe(DEVICE) is None
    assert probe(torch.device("cpu")) == "its pool is on cpu, not on a GPU"
    torch_with_nccl.driver.cuda_driver_version = 12040
    assert probe(DEVICE) == "its driver is for CUDA 12.4, not 12.5"
    torch_with_nccl.driver.cuda_driver_version = None
    assert probe(DEVICE) is None, "what nobody can tell is left to the rehearsal"
    monkeypatch.delattr(symmetric, "set_backend")
    assert "cannot set NCCL's zero-CTA policy" in probe(DEVICE)
    monkeypatch.setattr(symmetric, "set_backend", None, raising=False)
    del torch_with_nccl.process_group.NCCL_CTA_POLICY_ZERO
    assert "cannot set NCCL's zero-CTA policy; 2.10 can" in probe(DEVICE)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert probe(DEVICE) == "NCCL is 2.27.5, and has a zero-CTA policy from 2.28 on"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert probe(DEVICE) == "this torch is built without NCCL"


def test_the_communicator_has_the_policy_and_is_used_before_memory_is_registered(
    torch_with_nccl, monkeypatch
):
    install(monkeypatch)
    calls = torch_with_nccl.calls

    def new_group(ranks, **options):
        policy = options.pop("pg_options").config.cta_policy
        calls.append(("new_group", ranks, policy, options["backend"], options["timeout"].seconds))
        assert options["use_local_synchronization"]
        return SimpleNamespace(group_name="seven")

    def all_gather(gathered, block, group, async_op):
        calls.append(("all_gather", group.group_name, async_op))
        return SimpleNamespace(wait=lambda: calls.append(("wait",)))

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: threading.Lock())
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda one, group: calls.append(("all_reduce",)))
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append(("destroy",)))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(symmetric, "set_backend", lambda name: calls.append(("backend", name)))
    monkeypatch.setattr(
        symmetric, "empty", lambda nbytes, dtype, device: calls.append(("empty", nbytes, dtype))
    )
    monkeypatch.setattr(
        symmetric, "rendezvous", lambda memory, name: calls.append(("rendezvous", name))
    )
    mine = NcclCollective()
    memory = mine.allocate(100, DEVICE)
    mine.open([0, 3], DEVICE, 7.0)
    mine.register(memory)
    mine.all_gather(None, None, None)
    mine.close()
    mine.close()
    assert calls == [
        ("backend", "NCCL"),
        ("empty", 100, torch.uint8),
        ("new_group", [0, 3], 2, "nccl", 7),
        ("all_reduce",),
        ("rendezvous", "seven"),
        ("all_gather", "seven", True),
        ("wait",),
        ("destroy",),
    ]
