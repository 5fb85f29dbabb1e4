"""Real processes over shared memory: every rank ends with every rank's pages, layer by layer.

One spawn serves all cases, since every process costs an import of torch. `everything` is what the
ranks run; the tests below look at what came of it.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hikv.buffer import KVBuffer
from hikv.cp.backends import HostBackend
from hikv.cp.board import Board
from hikv.cp.gather import ZeroSMGather
from hikv.cp.group import TorchGroup
from hikv.cp.plan import Request, plan_gather
from hikv.cp.scratch import scratch_bytes
from hikv.cp.shard_map import ShardMap
from hikv.cp.shared_memory import shared_host_memory
from hikv.errors import ArgumentError, CapacityError, GatherError
from hikv.spec import KVSpec
from hikv.transfers import transfer

MHA = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)
MLA = KVSpec(num_layers=3, num_kv_heads=1, head_dim=36, page_size=4, dtype=torch.uint8, latent=True)
WIDE = replace(MHA, v_head_dim=4, page_size=1)
CASES = ((MHA, "layer_first"), (MLA, "layer_first"), (WIDE, "page_first_direct"))
LOCAL_PAGES = 40
TIMEOUT_S = 60.0


def shared_pool(spec, num_pages=LOCAL_PAGES, layout="layer_first"):
    """A pool that peers can reach, as its bytes and as a buffer."""
    memory = shared_host_memory(num_pages * spec.bytes_per_page)
    return memory, KVBuffer.from_tensor(memory, spec, layout)


def build(pool, group, **options):
    options = {"max_pages": 120, "backend": "host", "timeout_s": TIMEOUT_S, **options}
    shards = ShardMap(group.size, pool.spec.page_size)
    return ZeroSMGather(pool, shards, group, **options)


def pool_bytes(spec, owner, num_pages=LOCAL_PAGES):
    """What rank `owner` holds: anybody can compute it."""
    rng = np.random.default_rng([owner, spec.head_dim])
    return torch.from_numpy(rng.integers(0, 255, num_pages * spec.bytes_per_page, np.uint8))


def random_requests(rng, shards, count):
    """Scattered pages, uneven tails, a chunk behind most prefixes."""
    pages = rng.permutation(np.arange(shards.reserved_pages, shards.num_ranks * LOCAL_PAGES))
    requests = []
    for _ in range(count):
        prefix = int(rng.integers(0, 9 * shards.page_size))
        taken, pages = np.split(pages, [-(-prefix // shards.page_size)])
        requests.append(Request(taken, prefix, int(rng.integers(0, 3 * shards.page_size))))
    return requests


def expected_rows(spec, pools, shards, request, chunk, layer):
    """`[token, ...]` of K and V: the request's tokens of `layer` in logical order."""
    slots = [
        int(request.pages[t // spec.page_size]) * spec.page_size + t % spec.page_size
        for t in range(request.prefix_tokens)
    ]
    rows = []
    for slot in slots:
        pool = pools[shards.owner(slot)]
        page, row = divmod(shards.local(slot), spec.page_size)
        logical = pool.logical([page])[0, layer, :, row]  # [kv, head, dim]
        rows.append(logical.reshape(-1).view(torch.uint8))
    return rows + list(chunk)


def rows_read(kv, table, request, spec):
    """The same, read through the page table from the gathered layer."""
    read = []
    for t in range(request.prefix_tokens + request.chunk_tokens):
        page, row = int(table[t // spec.page_size]), t % spec.page_size
        read.append(torch.cat([part.reshape(-1) for part in token_parts(kv, page, row)]))
    return [row.view(torch.uint8) for row in read]


def stage(kv, plan, rows, spec):
    """Write the chunk's rows behind the prefix, as an engine's cache write would."""
    for slot, row in zip(plan.chunk_slots.tolist(), rows, strict=True):
        parts = token_parts(kv, *divmod(slot, spec.page_size))
        values = row.view(spec.dtype).split([part.numel() for part in parts])
        for part, value in zip(parts, values, strict=True):
            part.copy_(value.view(part.shape))


def token_parts(kv, page, row):
    """The rows of one token, as views, in the order in which `KVBuffer.logical` tells them."""
    k = kv.k[page, row]
    if kv.v is None:
        return [k]
    v = kv.v[page, row]
    # K and V of one width are two kv; of different width they are told head by head.
    return [k, v] if k.shape == v.shape else [x for pair in zip(k, v, strict=True) for x in pair]


def gather_batches(group):
    """Batches of every kind of rows; returns a digest of the prefix blocks per batch and layer."""
    seen, num_ranks = [], group.size
    for spec, layout in CASES:
        memory, pool = shared_pool(spec, layout=layout)
        memory.copy_(pool_bytes(spec, group.rank))
        pools = [
            KVBuffer.from_tensor(pool_bytes(spec, owner), spec, layout)
            for owner in range(num_ranks)
        ]
        gather = build(pool, group)
        rng = np.random.default_rng(7)  # the same batches on every rank
        expected_bytes = [0] * num_ranks
        for count in (1, 3, 0, 4):
            requests = random_requests(rng, gather.shards, count)
            plan = plan_gather(gather.shards, requests)
            gather.begin(plan, resident=np.ones(LOCAL_PAGES, bool))
            gather.restored()
            for layer in range(spec.num_layers):
                kv = gather.wait(layer)
                blocks = [
                    kv.k[plan.block(owner)].contiguous().view(torch.uint8).numpy().tobytes()
                    for owner in range(num_ranks)
                ]
                seen.append(hash_of(blocks))
                tokens = sum(request.chunk_tokens for request in requests)
                staged = torch.from_numpy(
                    rng.integers(0, 255, (tokens, spec.bytes_per_token_layer), np.uint8)
                )
                stage(kv, plan, staged, spec)
                at = 0
                for i, request in enumerate(requests):
                    chunk = staged[at : at + request.chunk_tokens]
                    at += request.chunk_tokens
                    expected = expected_rows(spec, pools, gather.shards, request, chunk, layer)
                    read = rows_read(kv, plan.table(i), request, spec)
                    assert len(read) == len(expected)
                    assert all(map(torch.equal, read, expected))
                kv.k.view(torch.uint8).fill_(0xA5)  # poison for the layer after next
            gather.end()
            page_bytes = spec.bytes_per_page
            for owner, pages in enumerate(plan.local_pages):
                expected_bytes[owner] += len(pages) * page_bytes
        report = gather.report()
        assert (report.backend, report.engine, report.batches) == ("host", "CPU threads", 4)
        assert report.bytes_from == expected_bytes
        assert report.layers == 4 * spec.num_layers
        assert gather.scratch_bytes == scratch_bytes(spec, 120)
        gather.close()
    return seen


def hash_of(blocks):
    return hashlib.blake2b(b"".join(blocks)).hexdigest()


def restore_slowly(group):
    """Layer 2 is restored late on rank 1; returns what happened when, as (what, layer, ns)."""
    rank, num_ranks = group.rank, group.size
    spec = replace(MHA, num_layers=5)
    memory, pool = shared_pool(spec)
    memory.fill_(0xEE)  # nothing has been restored
    content = [pool_bytes(spec, owner) for owner in range(num_ranks)]
    own = KVBuffer.from_tensor(content[rank], spec, "layer_first")
    pools = [KVBuffer.from_tensor(c, spec, "layer_first") for c in content]
    gather = build(pool, group)
    request = Request(np.arange(num_ranks, 9 * num_ranks), 8 * num_ranks * spec.page_size)
    plan = plan_gather(gather.shards, [request])
    log, computed = [], [threading.Event() for _ in range(spec.num_layers)]

    def restore():
        pages = np.arange(LOCAL_PAGES)
        for layer in range(spec.num_layers):
            if (rank, layer) == (1, 2):
                # Everybody has gathered and computed what does not need this layer.
                assert computed[1].wait(TIMEOUT_S)
                time.sleep(0.2)
            transfer(own, pool, pages, pages, after=None, layers=(layer, layer + 1))
            log.append(("restored", layer, time.monotonic_ns()))
            gather.restored(layer)

    gather.begin(plan)
    restoring = threading.Thread(target=restore)
    restoring.start()
    for layer in range(spec.num_layers):
        kv = gather.wait(layer)
        log.append(("attention", layer, time.monotonic_ns()))
        expected = expected_rows(spec, pools, gather.shards, request, [], layer)
        assert all(map(torch.equal, rows_read(kv, plan.table(0), request, spec), expected))
        if layer + 1 not in (2, spec.num_layers):
            # Compute goes on until the next layer is there: it can only arrive meanwhile.
            until = time.monotonic() + TIMEOUT_S
            while len(gather.report().spans) < layer + 2:
                assert time.monotonic() < until
                time.sleep(1e-3)
        log.append(("computed", layer, time.monotonic_ns()))
        computed[layer].set()
    restoring.join()
    gather.end()
    spans = gather.report().spans
    log += [("gather", span.layer, span.restored_ns) for span in spans]
    log += [("gathered", span.layer, span.done_ns) for span in spans]
    gather.close()
    return log


class Attempts:
    """What goes wrong on one rank: `raised` holds its errors, case by case."""

    def __init__(self, group):
        self.group, self.raised = group, {}

    def attempt(self, case, act):
        """`act(pool)` on a new pool; `None` where it raised."""
        memory, pool = shared_pool(MHA)
        memory.copy_(pool_bytes(MHA, self.group.rank))
        try:
            return act(pool)
        except (GatherError, ArgumentError, CapacityError) as error:
            self.raised[case] = f"{type(error).__name__}: {error}"

    def build(self, case, **options):
        """An attempt at building a gather."""
        return self.attempt(case, lambda pool: build(pool, self.group, **options))

    def batch(
        self, case, *, pages=None, resident=None, breaks=None, says=None, after=None, **options
    ):
        """An attempt at a batch; `breaks` names the call of the back end that fails."""
        gather = self.build(case, **options)
        pages = np.arange(2, 20) if pages is None else pages

        def run(_):
            plan = plan_gather(gather.shards, [Request(pages, len(pages) * MHA.page_size)])
            if breaks is not None:
                setattr(gather._backend, breaks, broken)
            gather.begin(plan, resident=resident)
            if says is not None:
                gather.fail(says)
            for layer in range(MHA.num_layers):
                if (case, self.group.rank, layer) != ("slow", 1, 1):
                    gather.restored(layer, after=after)
            for layer in range(MHA.num_layers):
                gather.wait(layer)
            gather.end()

        self.attempt(case, run)
        if case in ("room", "pool"):  # nothing had begun, so the gather is as good as new
            pages, resident = np.arange(2, 12), None
            self.attempt(f"{case}, after", run)
        self.group.exchange(None)  # everybody has seen it before anybody leaves
        gather.close()


def fail_in_every_way(group):
    """What this rank raised, case by case, and what it left behind."""
    collect_garbage(group)
    before, attempts = resources(), Attempts(group)
    fail_in_batches(attempts, group.rank)
    fail_to_meet(attempts, group.rank)
    left = leave_in_a_batch(group)
    collect_garbage(group)
    return attempts.raised, left, before, resources()


def fail_in_batches(attempts, rank):
    holes = np.ones(LOCAL_PAGES, bool)
    holes[3 if rank == 0 else 39] = False
    attempts.batch("slow", timeout_s=3.0)
    attempts.batch("hole", resident=holes)
    attempts.batch("room", max_pages=17 + rank)
    attempts.batch("pool", pages=np.array([2, 3, 2 * LOCAL_PAGES]))
    attempts.batch("plans", pages=np.arange(2, 20 + rank))
    attempts.batch("said", says="out of tea" if rank else None)
    attempts.batch("engine", breaks="copy" if rank else None)
    attempts.batch("copies", breaks="begin" if rank else None)
    attempts.batch("reader", breaks="acquire" if rank else None)
    attempts.batch("fence", after=SimpleNamespace(synchronize=broken) if rank else None)


def fail_to_meet(attempts, rank):
    group = attempts.group
    attempts.build("capability", backend="p2p")
    attempts.build("unknown", backend="pigeon")
    attempts.build("mixed", backend="pigeon" if rank else "host")
    attempts.build("endless", timeout_s=math.nan if rank else TIMEOUT_S)
    private = KVBuffer.empty(MHA, "layer_first", 4)
    attempts.attempt("private", lambda shared: build(private if rank else shared, group))
    other = replace(MHA, num_layers=3 + rank)
    attempts.attempt("geometry", lambda _: build(shared_pool(other)[1], group))
    attempts.attempt(
        "size",
        lambda pool: ZeroSMGather(pool, ShardMap(3, 4), group, max_pages=9, backend="host"),
    )
    for step in ("obstacle", "export", "connect", "allocate", "steps"):
        fails = step if rank else None
        attempts.attempt(step, lambda pool, fails=fails: build_that_fails(pool, group, fails))
    fails = None if rank else "memory"
    attempts.attempt("board", lambda pool: build_that_fails(pool, group, fails))


def build_that_fails(pool, group, step):
    """Building, where `step` fails on this rank by an error that is not hikv's own."""
    place = Board if step == "memory" else HostBackend
    with pytest.MonkeyPatch.context() as patch:
        if step is not None:
            patch.setattr(place, step, no_files_left)
        return build(pool, group)


def no_files_left(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def broken(*_):
    raise RuntimeError("paper jam")


def collect_garbage(group):
    group.exchange(None)  # nobody is still at work on the last case
    gc.collect()


def resources():
    """Descriptors and mappings of shared memory, and threads of gathers."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hikv")
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    threads = [t.name for t in threading.enumerate() if t.name.startswith("hikv")]
    return maps, sum("memfd:hikv" in link for link in links), threads


def leave_in_a_batch(group):
    """Rank 1 closes early; what this rank raised."""
    _, pool = shared_pool(MHA)
    gather = build(pool, group)
    try:
        gather.begin(plan_gather(gather.shards, [Request([2, 3], 8)]))
        if group.rank == 1:
            return None
        gather.restored()
        gather.wait(0)
    except GatherError as error:
        return str(error)
    finally:
        gather.close()


def die_in_a_batch(group):
    """Rank 1 is killed while the others wait for it; what they raised."""
    _, pool = shared_pool(MHA)
    gather = build(pool, group)
    pages = np.arange(group.size, 8 * group.size)
    gather.begin(plan_gather(gather.shards, [Request(pages, len(pages) * MHA.page_size)]))
    gather.restored(0)
    gather.wait(0)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather.restored()
    try:
        for layer in range(1, MHA.num_layers):
            gather.wait(layer)
        gather.end()
    except GatherError as error:
        return str(error)
    finally:
        gather.close()


def everything(rank, num_ranks):
    """All cases; every rank returns what all ranks found, and what it heard of the killed one."""
    world = TorchGroup()
    two = dist.new_group([0, 1])  # by every rank, members or not
    pair = TorchGroup(two) if rank < 2 else None
    found = {"four": gather_batches(world)}
    if pair is not None:
        found |= {"two": gather_batches(pair), "log": restore_slowly(pair)}
        found["failures"] = fail_in_every_way(pair)
    found = world.exchange(found)
    return found, die_in_a_batch(world)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    return run_ranks(everything, 4, store, may_die=True)


@pytest.fixture(scope="module")
def found(answers):
    return answers[0][0]


@pytest.mark.parametrize(("group", "num_ranks"), [("two", 2), ("four", 4)])
def test_every_rank_reads_every_prefix_in_logical_order(found, group, num_ranks):
    """The ranks compared every token; here, that all hold the same owner-major bytes."""
    seen = [rank[group] for rank in found[:num_ranks]]
    assert len(seen[0]) == len(CASES) * 4 * 3
    assert all(other == seen[0] for other in seen)


def test_restore_then_gather_then_attention_and_compute_beside_the_next_gather(found):
    when = [{(what, layer): ns for what, layer, ns in rank["log"]} for rank in found[:2]]
    for layer in range(5):
        restored = max(times["restored", layer] for times in when)
        for times in when:
            assert restored <= times["gather", layer], "no gather before the slowest restore"
            assert times["gathered", layer] <= times["attention", layer]
            if layer + 1 not in (2, 5):
                assert times["gathered", layer + 1] <= times["computed", layer]
    assert when[0]["computed", 1] < when[1]["restored", 2], "rank 0 went on meanwhile"


SAME_ON_EVERY_RANK = {
    "slow": "GatherError: rank 1 did not restore layer 1 within 3 s; end the batch",
    "hole": "GatherError: page 6 is not resident: rank 0 has no KV in its page 3",
    "room": "CapacityError: gather scratch: needs 18 pages, 17 available",
    "pool": "ArgumentError: plan: expected pages of rank 0's pool, which has 40, got its page 40",
    "plans": "GatherError: ranks 0 and 1 planned different batches",
    "said": "GatherError: rank 1: out of tea",
    "engine": "GatherError: rank 1: paper jam",
    "copies": "GatherError: rank 1: paper jam",
    "reader": "GatherError: rank 1: paper jam",
    "fence": "GatherError: rank 1: paper jam",
    "capability": "GatherError: back end 'p2p' cannot serve the group (rank 0: its pool is on cpu, "
    "not on a GPU; rank 1: its pool is on cpu, not on a GPU)",
    "unknown": "GatherError: back end 'pigeon' cannot serve the group (rank 0: there is no back",
    "mixed": "GatherError: back end 'host' cannot serve the group (rank 1: there is no back end "
    "'pigeon'",
    "private": "GatherError: back end 'host' cannot serve the group (rank 1: its pool is not in",
    **{
        step: "GatherError: back end 'host' cannot serve the group (rank 1: [Errno 24] Too many op"
        for step in ("obstacle", "export", "connect", "allocate", "steps")
    },
    "board": "GatherError: back end 'host' cannot serve the group (rank 0: [Errno 24] Too many op",
    "endless": "GatherError: back end 'host' cannot serve the group (rank 1: timeout_s is nan, not",
    "geometry": "ArgumentError: geometry: expected the same on every rank",
    "size": "GatherError: back end 'host' cannot serve the group (rank 0: its map is of 3 ranks",
}


def test_whatever_goes_wrong_every_rank_raises_the_same_and_leaves_nothing(found):
    answers = [rank["failures"] for rank in found[:2]]
    for rank, (raised, _, before, after) in enumerate(answers):
        assert before == after == (0, 0, []), f"rank {rank} leaked"
        assert raised.keys() == SAME_ON_EVERY_RANK.keys()
        for case, message in SAME_ON_EVERY_RANK.items():
            assert raised[case].startswith(message), raised[case]
    assert answers[0][0] == answers[1][0]
    assert answers[0][1].startswith("rank 1 left in the middle of a batch; end the batch")


def test_a_killed_rank_is_told_by_the_others_in_one_voice(answers):
    assert answers[1] is None
    heard = [answers[rank][1] for rank in (0, 2, 3)]
    assert heard[0] == heard[1] == heard[2]
    assert heard[0].startswith("rank 1 is gone; end the batch, close the gather on every rank")
