"""`GatherPlan`: what a batch gathers, planned once in pages and good for every layer. Pure.

The scratch of a layer holds one block of pages per rank, in the order of the ranks, and behind them
the pages that the current chunk adds:

    | owner 0's pages, padding | owner 1's pages, padding | … | pages of the chunk |

Nothing is put into logical order. The page table is what restores it: attention reads token t of a
request at `page_table[t // page_size]`, row `t % page_size`, as it does in any paged pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from hikv.cp.shard_map import ShardMap
from hikv.errors import ArgumentError
from hikv.pages import check_pages


class Request(NamedTuple):
    """One request of a batch.

    `pages`: the logical pages, in order, that hold the `prefix_tokens` tokens already cached; the
    last may be partial. `chunk_tokens`: tokens that this batch computes behind them. Every rank has
    the KV of the whole chunk at the cache-write boundary, so the chunk is staged, not gathered.
    """

    pages: Sequence[int] | np.ndarray | torch.Tensor
    prefix_tokens: int
    chunk_tokens: int = 0


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Where every page of a batch lies in the scratch of a layer.

    Attributes:
        shards: who owns what.
        local_pages: per owner, the pages to read from its pool: int64, ascending, each once.
        block_pages: pages of one owner's block: the longest of `local_pages`; the rest is padding.
        chunk_pages: pages behind the blocks, which the chunks begin.
        page_table: int32, all requests one after another: the scratch page of each page that holds
            a token of prefix or chunk.
        table_starts: int64 `[requests + 1]`: request i has `page_table[starts[i] : starts[i + 1]]`.
        prefix_tokens, chunk_tokens: int64 `[requests]`.
    """

    shards: ShardMap
    local_pages: tuple[np.ndarray, ...]
    block_pages: int
    chunk_pages: int
    page_table: np.ndarray
    table_starts: np.ndarray
    prefix_tokens: np.ndarray
    chunk_tokens: np.ndarray

    @property
    def num_pages(self) -> int:
        """Pages that the scratch of a layer must hold."""
        return self.shards.num_ranks * self.block_pages + self.chunk_pages

    @property
    def gathered_pages(self) -> int:
        """Pages that every rank reads a layer, its own among them; padding is not moved."""
        return sum(map(len, self.local_pages))

    def block(self, owner: int) -> np.ndarray:
        """Scratch pages, int64, of `local_pages[owner]`."""
        return owner * self.block_pages + np.arange(len(self.local_pages[owner]))

    def table(self, request: int) -> np.ndarray:
        """The page table of one request, a view."""
        return self.page_table[self.table_starts[request] : self.table_starts[request + 1]]

    @cached_property
    def chunk_slots(self) -> np.ndarray:
        """The scratch slot, int64, of every token of every chunk, one request after another.

        A chunk begins behind the last token of its prefix, so its first slots may lie on the last
        page of a block: stage the chunk after that layer was gathered.
        """
        p, counts = self.shards.page_size, self.chunk_tokens
        token = _counting(counts) + np.repeat(self.prefix_tokens, counts)
        page = np.repeat(self.table_starts[:-1], counts) + token // p
        return self.page_table[page].astype(np.int64) * p + token % p

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits that ranks compare, to see that they planned one batch."""
        digest = blake2b(digest_size=8)
        arrays = (self.table_starts, self.page_table, self.prefix_tokens, self.chunk_tokens)
        for array in (*arrays, *self.local_pages):
            digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1


def plan_gather(shards: ShardMap, requests: Sequence[Request]) -> GatherPlan:
    """Plan the gather of a batch; every rank plans the same from the same logical pages.

    A page that several requests share is gathered once. Costs O(pages), but for one sort of them.

    Raises `ArgumentError` for page ids that are no whole numbers from 0 on, for a count of pages
    that the prefix does not fill, for negative token counts, and for a partial page that a chunk
    continues and another request names too.
    """
    prefix = _counts("prefix_tokens", [request.prefix_tokens for request in requests])
    chunk = _counts("chunk_tokens", [request.chunk_tokens for request in requests])
    named = [
        check_pages(f"requests[{i}].pages", request.pages, np.iinfo(np.int32).max)
        for i, request in enumerate(requests)
    ]
    in_prefix = np.array([len(pages) for pages in named], np.int64)
    _check_filled(in_prefix, prefix, shards.page_size)
    pages = np.concatenate([np.empty(0, np.int64), *named])
    _check_tails(pages, in_prefix, prefix, chunk, shards.page_size)
    local_pages, block_pages, scratch_pages = _blocks(shards, pages)

    in_all = -(-(prefix + chunk) // shards.page_size)
    starts = np.concatenate(([0], np.cumsum(in_all)))
    table = np.empty(starts[-1], np.int32)
    cached = _counting(in_all) < np.repeat(in_prefix, in_all)
    table[cached] = scratch_pages
    chunk_pages = len(table) - len(pages)
    table[~cached] = shards.num_ranks * block_pages + np.arange(chunk_pages)
    return GatherPlan(shards, local_pages, block_pages, chunk_pages, table, starts, prefix, chunk)


def _blocks(shards: ShardMap, pages: np.ndarray) -> tuple[tuple[np.ndarray, ...], int, np.ndarray]:
    """Per owner its pages, ascending and each once; the block's length; each page's place."""
    if not len(pages):
        return (np.empty(0, np.int64),) * shards.num_ranks, 0, pages
    owner, local = shards.page_owner(pages), shards.local_page(pages)
    rows = int(local.max()) + 1
    key = owner * rows + local
    # np.unique hashes and is some 50 times slower than a sort and a comparison of neighbours.
    ordered = np.sort(key)
    ordered = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    ends = np.searchsorted(ordered, np.arange(shards.num_ranks + 1) * rows)
    local_pages = tuple(ordered[a:b] - r * rows for r, (a, b) in enumerate(pairwise(ends)))
    lengths = np.diff(ends)
    block_pages = int(lengths.max())
    place = np.empty(shards.num_ranks * rows, np.int32)  # never read where it was not written
    shift = np.arange(shards.num_ranks) * block_pages - ends[:-1]
    place[ordered] = np.arange(len(ordered)) + np.repeat(shift, lengths)
    return local_pages, block_pages, place[key]


def _counting(counts: np.ndarray) -> np.ndarray:
    """0, 1, … `counts[0]` − 1, 0, 1, … `counts[1]` − 1, and so on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _counts(name: str, values: Sequence[int]) -> np.ndarray:
    for i, value in enumerate(values):
        if not isinstance(value, int | np.integer) or value < 0:
            raise ArgumentError(
                f"requests[{i}].{name}",
                expected="a number of tokens, 0 or more",
                got=repr(value),
                remedy="count tokens, not pages",
            )
    return np.array(values, np.int64)


def _check_filled(in_prefix: np.ndarray, prefix: np.ndarray, page_size: int) -> None:
    wrong = np.flatnonzero(in_prefix != -(-prefix // page_size))
    if len(wrong):
        at = int(wrong[0])
        raise ArgumentError(
            f"requests[{at}].pages",
            expected=f"the {-(-int(prefix[at]) // page_size)} pages of {int(prefix[at])} tokens",
            got=int(in_prefix[at]),
            remedy="pass the pages of the cached prefix alone; those of the chunk are staged",
        )


def _check_tails(
    pages: np.ndarray,
    in_prefix: np.ndarray,
    prefix: np.ndarray,
    chunk: np.ndarray,
    page_size: int,
) -> None:
    """Refuse a partial page that a chunk continues while another request reads it."""
    continued = np.flatnonzero((prefix % page_size != 0) & (chunk > 0))
    tails = pages[np.cumsum(in_prefix)[continued] - 1]
    if len(tails) and np.isin(pages, tails).sum() > len(tails):
        counts = [(pages == tail).sum() for tail in tails]
        at = int(np.argmax(counts))
        raise ArgumentError(
            f"requests[{int(continued[at])}].pages",
            expected="a partial last page of the request's own, since the chunk continues it",
            got=f"page {int(tails[at])}, which {int(counts[at])} requests name",
            remedy="share whole pages only",
        )
