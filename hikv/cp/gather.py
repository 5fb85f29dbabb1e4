"""`ZeroSMGather`: every rank's pages of a layer, in a scratch of every rank, one layer ahead.

    gather = ZeroSMGather(pool, shards, rank_group, max_pages=…, backend="p2p")   # collective
    gather.begin(plan)                      # reserves the scratch; before the reload is queued
    gather.restored(after=load_back)        # this rank's own pages, layer by layer
    for layer in range(num_layers):
        kv = gather.wait(layer, stream)     # starts layer + 1, which needs the other slot
        kv.k[…], kv.v[…], kv.page_table     # stage the chunk, run attention on `stream`
    gather.end(stream)                      # from here on the pages may be freed or written

The order is restore(l) → gather(l) → attention(l), for each layer by fences of that layer alone.
Ranks never wait for each other without a bound. When anything goes wrong on one of them, all raise
one `GatherError`, the group stays failed, and closing it frees everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from hikv.buffer import KVBuffer
from hikv.cp.backends import Group, Moved
from hikv.cp.board import reason
from hikv.cp.group import meet
from hikv.cp.plan import GatherPlan
from hikv.cp.report import GatherReport, LayerSpan
from hikv.cp.scratch import NUM_SLOTS, scratch_bytes
from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError, CapacityError, GatherError


class GatheredLayer(NamedTuple):
    """One layer, ready on the stream that waited: `k`, `v` as in `Slot`, and the page table.

    Good until `wait` of the next layer but one, that is until the work that reads it was queued
    before `wait` of the next layer.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    page_table: torch.Tensor


class ZeroSMGather:
    """Gathers layers from the pools of a group of ranks with no SM.

    Args:
        pool: this rank's pages: logical page q is page `shards.local_page(q)` of its owner's pool.
        shards: who owns what; `num_ranks` is the size of `group`, in its order.
        group: exchanges small objects with the other ranks, while this object is built.
        max_pages: scratch pages of the largest batch: N · (longest block) + pages of the chunks.
            The least that any rank gives is what `fits` goes by.
        backend: a name of `hikv.cp.group.BACKENDS`.
        allow_sm: let `nccl` launch NCCL's kernels where NCCL insists on it; the report says `"sm"`.
        timeout_s: how long to wait for a peer at any one point.

    Building it is collective: ranks show each other what they can do, and either all of them get a
    gather or all of them raise the same error, before anything is used. Back ends on GPUs time and
    verify copies meanwhile, so nothing may write to the pools.

    Raises:
        ArgumentError: ranks that differ in back end, map, geometry, `allow_sm` or host.
        GatherError: a rank that lacks the capability, cannot reach a peer's memory, has no room for
            the scratch or saw a kernel: which rank, and why. Nothing is tried in its place.
    """

    def __init__(
        self,
        pool: KVBuffer,
        shards: ShardMap,
        group: Group,
        *,
        max_pages: int,
        backend: str,
        allow_sm: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        met = meet(
            pool,
            shards,
            group,
            max_pages=max_pages,
            backend=backend,
            allow_sm=allow_sm,
            timeout_s=timeout_s,
        )
        self.shards, self.spec = shards, pool.spec
        self.max_pages: int = met.max_pages
        self._rank, self._pool_pages = group.rank, met.pool_pages
        self._backend, self._board = met.backend, met.board
        self._timeout_s = timeout_s
        self._slots = met.slots
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hikv-gather")
        self._batch, self._next = 0, 0
        self._plan: GatherPlan | None = None
        self._pending: dict[int, Future[None]] = {}
        own_shard, rates = self._backend.own_shard or (None, {})
        self._report = GatherReport(
            backend, self._backend.engine, [0] * shards.num_ranks, own_shard, rates
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of both slots and of what is packed, held from building to `close`."""
        staging = self._backend.staging_pages(self.max_pages)
        return scratch_bytes(self.spec, self.max_pages, staging)

    def fits(self, plan: GatherPlan) -> bool:
        """Whether `begin` has room for the batch; the same answer on every rank."""
        return plan.num_pages <= self.max_pages

    def begin(self, plan: GatherPlan, *, resident: np.ndarray | None = None) -> None:
        """Reserve the scratch for a batch and let its first layers gather as they are restored.

        Args:
            plan: the same on every rank.
            resident: bool `[pages of this rank's pool]`: the page holds its KV, or will once
                `restored`.

        Raises:
            ArgumentError: another page size or group, a page that its owner's pool does not have,
                or a batch that has not ended: the same on every rank. Also `resident` of another
                kind. Nothing has begun.
            CapacityError: more pages than `max_pages`, on every rank. Nothing has begun.
            GatherError: a page of this rank that is not resident, copies that cannot be prepared,
                or an earlier failure.
        """
        self._check(plan)
        self._check_resident(resident)
        self._board.raise_verdict()
        self._batch += 1
        own = plan.local_pages[self._rank]
        if resident is not None and not resident[own].all():
            missing = int(own[np.argmin(resident[own])])
            logical = self.shards.page(self._rank, missing)
            raise self._board.fail(
                f"page {logical} is not resident: rank {self._rank} has no KV in its page {missing}"
            )
        with self._heard():
            self._backend.begin(plan)
        self._plan = plan
        self._table = torch.from_numpy(plan.page_table).to(self._slots[0].k.device)
        self._next = 0
        self._report.spans = []
        self._board.digest[self._rank] = plan.digest
        self._board.begun[self._rank] = self._batch
        for layer in range(min(NUM_SLOTS, self.spec.num_layers)):
            self._start(layer)

    def restored(self, layer: int | None = None, *, after: Any = None) -> None:
        """This rank's pages of `layer` (all layers: `None`) hold their KV once `after` has passed.

        Args:
            after: what wrote them: a stream, an event, or the `Transfer` of a load-back, of which
                on a GPU each layer waits for its own part, or several; `None` where the bytes are
                there.

        Every rank says this of every layer of every batch, also when nothing was to be restored:
        `after` is then the stream that wrote the pages last.

        Raises `ArgumentError` outside a batch, for a layer that the pool lacks and for an `after`
        of another kind, and `GatherError`, which every rank then raises, where `after` failed.
        """
        if self._plan is None:
            raise ArgumentError(
                "layer", expected="begin() first", got=layer, remedy="begin a batch"
            )
        layers = range(self.spec.num_layers)
        if layer is not None and layer not in layers:
            raise ArgumentError(
                "layer",
                expected=f"None or a layer in 0..{self.spec.num_layers - 1}",
                got=layer,
                remedy="count from the pool's first layer",
            )
        for index in layers if layer is None else (layer,):
            with self._heard(ArgumentError):
                self._backend.restored(index, after)
            self._board.restored[self._rank, index] = self._batch

    def wait(self, layer: int, stream: torch.cuda.Stream | None = None) -> GatheredLayer:
        """The gathered `layer`, on `stream` (default: torch's current one).

        Layers come in order. The call also ends the use of the layer before, so the next layer
        gathers into that one's slot while `stream` computes this one. On a GPU the calling thread
        waits only until the copies are queued. Raises `ArgumentError` for a layer out of turn,
        `GatherError` for a failed group.
        """
        self._running(layer, self.spec.num_layers)
        with self._heard():
            if layer:
                # What reads the layer before is queued by now, so its slot may be filled again.
                self._backend.release((layer - 1) % NUM_SLOTS, stream)
                if layer + 1 < self.spec.num_layers and layer + 1 not in self._pending:
                    self._start(layer + 1)
            self._pending.pop(layer).result()
            self._backend.acquire(layer % NUM_SLOTS, stream)
        self._next = layer + 1
        slot = self._slots[layer % NUM_SLOTS]
        return GatheredLayer(slot.k, slot.v, self._table)

    def end(self, stream: torch.cuda.Stream | None = None) -> None:
        """End the batch: on return no rank reads this rank's pages any more.

        Blocks until the slowest rank has gathered its last layer. Raises `GatherError` for a failed
        group, and `ArgumentError` while layers are outstanding.
        """
        self._running(self.spec.num_layers, self.spec.num_layers + 1)
        with self._heard():
            for slot in range(NUM_SLOTS):
                self._backend.release(slot, stream)
            self._backend.drain()
        board = self._board
        board.finished[self._rank] = self._batch
        for rank in range(self.shards.num_ranks):
            self._wait_for(rank, board.finished, "end the batch")
        self._plan = None
        self._report.batches += 1

    def fail(self, reason: str) -> None:
        """Tell the group that this rank cannot go on; every rank raises `GatherError` with it."""
        self._board.fail(f"rank {self._rank}: {reason}")

    def report(self) -> GatherReport:
        """What ran, and who moved the bytes."""
        return self._report

    def close(self) -> None:
        """Free the scratch and leave the group; peers in the middle of a batch fail."""
        if self._plan is not None:
            self._board.fail(f"rank {self._rank} left in the middle of a batch")
        self._worker.shutdown(wait=True, cancel_futures=True)
        try:
            self._backend.drain()
        finally:  # a GPU that failed must not keep this rank in the group
            self._board.close()
            self._backend.close()
            self._slots, self._pending = [], {}
            self._plan = None

    def _check(self, plan: GatherPlan) -> None:
        if self._plan is not None or not self._slots:
            raise ArgumentError(
                "plan",
                expected="a batch after the last one ended, on an open gather",
                got="a second one" if self._slots else "one after close()",
                remedy="call end() on every rank first, and close() last",
            )
        if plan.shards != self.shards:
            raise ArgumentError(
                "plan",
                expected=f"a plan for {self.shards}",
                got=plan.shards,
                remedy="plan with the gather's own map",
            )
        if not self.fits(plan):
            raise CapacityError(
                "gather scratch",
                required=plan.num_pages,
                available=self.max_pages,
                unit="pages",
                remedy="ask fits() before admission, or build the gather with more max_pages",
            )
        for owner, (held, pages) in enumerate(zip(self._pool_pages, plan.local_pages, strict=True)):
            if len(pages) and pages[-1] >= held:
                raise ArgumentError(
                    "plan",
                    expected=f"pages of rank {owner}'s pool, which has {held}",
                    got=f"its page {int(pages[-1])}",
                    remedy="plan with logical pages that the group's allocator gave",
                )

    def _check_resident(self, resident: np.ndarray | None) -> None:
        pages = self._pool_pages[self._rank]
        told = (getattr(resident, "shape", None), getattr(resident, "dtype", type(resident)))
        if resident is not None and told != ((pages,), np.dtype(bool)):
            raise ArgumentError(
                "resident",
                expected=f"a bool array of this rank's {pages} pages, or None",
                got=f"{told[1]} of shape {told[0]}",
                remedy="pass a numpy mask over the local pages, not a list of them",
            )

    @contextmanager
    def _heard(self, *mended: type[Exception]) -> Iterator[None]:
        """What this rank fails at, every rank raises, but for what its caller can mend."""
        try:
            yield
        except Exception as error:  # whatever it is, the peers must hear of it
            if isinstance(error, (GatherError, *mended)):
                raise
            raise self._board.fail(f"rank {self._rank}: {reason(error)}") from error

    def _running(self, layer: int, stop: int) -> None:
        """Refuse all but the next layer, which is below `stop`; `end` counts as one behind them."""
        if self._plan is None or layer != self._next or layer >= stop:
            due = "end()" if self._next >= stop else f"layer {self._next}"
            raise ArgumentError(
                "layer",
                expected="begin() first" if self._plan is None else due,
                got=layer,
                remedy="wait for every layer of a batch in order, then end it",
            )
        self._board.raise_verdict()

    def _start(self, layer: int) -> None:
        self._pending[layer] = self._worker.submit(self._gather, layer, time.monotonic_ns())

    def _gather(self, layer: int, start_ns: int) -> None:
        """One layer, in the worker's thread."""
        board = self._board
        for rank in range(self.shards.num_ranks):
            self._wait_for(rank, board.begun, "begin the batch")
            if board.digest[rank] != board.digest[self._rank]:
                ranks = sorted((rank, self._rank))
                raise board.fail(f"ranks {ranks[0]} and {ranks[1]} planned different batches")
            self._wait_for(rank, board.restored[:, layer], f"restore layer {layer}")
        restored_ns = time.monotonic_ns()
        with self._heard():
            moved = self._backend.copy(layer, layer % NUM_SLOTS)
        span = LayerSpan(layer, start_ns, restored_ns, time.monotonic_ns())
        self._count(span, moved)

    def _count(self, span: LayerSpan, moved: Moved) -> None:
        report, spec = self._report, self.spec
        assert self._plan is not None
        for owner, pages in enumerate(self._plan.local_pages):
            report.bytes_from[owner] += spec.page_size * spec.bytes_per_token_layer * len(pages)
        report.spans.append(span)
        report.layers += 1
        report.copies += moved.copies
        report.moved_bytes += moved.nbytes

    def _wait_for(self, rank: int, words: np.ndarray, what: str) -> None:
        """Wait until the board's `words[rank]` has reached this batch."""
        self._board.wait(rank, lambda: bool(words[rank] >= self._batch), what, self._timeout_s)
