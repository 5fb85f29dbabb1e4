"""Requests to replay: trace files, and workloads that are made here.

A request is a list of block ids; equal leading ids mean an equal prefix. One block is one page.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hikv.errors import ArgumentError


@dataclass(frozen=True)
class Arrival:
    """A request: `prompt` and `output` are ids of its blocks, `timestamp` is in milliseconds."""

    prompt: Sequence[int]
    output: Sequence[int] = ()
    timestamp: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests in the order they arrive, and what they are."""

    name: str
    block_tokens: int
    arrivals: Sequence[Arrival]

    @property
    def touches(self) -> int:
        """Blocks of all prompts."""
        return sum(len(arrival.prompt) for arrival in self.arrivals)

    @property
    def longest(self) -> int:
        """Blocks of the longest request, its output among them."""
        return max((len(a.prompt) + len(a.output) for a in self.arrivals), default=0)

    @cached_property
    def blocks(self) -> int:
        """Different blocks, each behind what comes before it: a cache without bound holds them."""
        numbers: dict[tuple[int, int], int] = {}
        for arrival in self.arrivals:
            prefix = 0
            for block in (*arrival.prompt, *arrival.output):
                prefix = numbers.setdefault((prefix, block), len(numbers) + 1)
        return len(numbers)


def read_trace(path: Path, block_tokens: int | None = None) -> Workload:
    """A file of one JSON object a line, with `timestamp`, `input_length` and `hash_ids`.

    `block_tokens`: tokens of one id; `None` takes the size that fits every `input_length`, whether
    the last, partial block has an id or not. Raises `ArgumentError` for a line that is no request,
    and where no size or several fit.
    """
    arrivals, sizes = [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                ids = [_whole(block) for block in record["hash_ids"]]
                sizes.append((int(record["input_length"]), len(ids)))
                arrivals.append(Arrival(ids, timestamp=float(record["timestamp"])))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ArgumentError(
                    f"{path}, line {number}",
                    expected="an object with timestamp, input_length and hash_ids",
                    got=f"{line[:60]!r} ({error})",
                    remedy="pass one JSON object a line",
                ) from error
    return Workload(path.stem, block_tokens or _block_size(path, sizes), arrivals)


def _whole(block: object) -> int:
    if not isinstance(block, int) or not -(1 << 63) <= block < 1 << 63:
        raise ValueError(f"{block!r} is no id, a whole number of 64 bits")
    return block


def _block_size(path: Path, sizes: Sequence[tuple[int, int]]) -> int:
    def fits(block: int) -> bool:
        return all(-(-tokens // block) == ids for tokens, ids in sizes) or all(
            tokens // block == ids for tokens, ids in sizes
        )

    fitting = [block for block in (2**n for n in range(14)) if fits(block)]
    if len(fitting) != 1:
        raise ArgumentError(
            str(path),
            expected="lengths that fit one size of blocks",
            got=f"{len(fitting)} sizes that do",
            remedy="say it with --block-tokens",
        )
    return fitting[0]


class _Blocks:
    """Hands out ids nobody has yet."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, tokens: int) -> list[int]:
        """Ids of `tokens` new tokens."""
        first, self._next = self._next, self._next + tokens // _BLOCK
        return list(range(first, self._next))


_BLOCK = 64


def _conversations(
    groups: int, each: int, shared: int, turn: int, output: int, rounds: int
) -> Iterator[Arrival]:
    """Rounds in which every conversation asks once; those of a group share their beginning."""
    new = _Blocks()
    histories = [list(head) for head in (new(shared) for _ in range(groups)) for _ in range(each)]
    for _ in range(rounds):
        for history in histories:
            history += new(turn)
            answer = new(output)
            yield Arrival(tuple(history), tuple(answer))
            history += answer


def _alternating() -> Iterator[Arrival]:
    new = _Blocks()
    documents = [[new(16_384) for _ in range(4)] for _ in range(2)]
    for visit in range(24):
        for document in documents[visit % 2]:
            yield Arrival([*document, *new(256)], new(128))


def _random() -> Iterator[Arrival]:
    new, chance = _Blocks(), random.Random(0)
    for _ in range(400):
        yield Arrival(new(64 * chance.randrange(8, 65)), new(128))


_MADE: dict[str, tuple[str, Callable[[], Iterator[Arrival]]]] = {
    "shared-prefix": (
        "4 × 8 conversations, 32K tokens shared by each 8, 86 rounds of 1K in and 512 out",
        lambda: _conversations(4, 8, 32_768, 1024, 512, 86),
    ),
    "A": (
        "one system prompt of 2K tokens, 400 questions of 256",
        lambda: _conversations(1, 400, 2_048, 256, 128, 1),
    ),
    "B": (
        "4 documents of 16K tokens, 4 conversations about each, 12 rounds of questions",
        lambda: _conversations(4, 4, 16_384, 256, 512, 12),
    ),
    "C": ("two groups of four documents of 16K tokens, asked about in turn", _alternating),
    "E": ("400 prompts of 512 to 4,096 tokens that share nothing", _random),
}
WORKLOADS = {name: what for name, (what, _) in _MADE.items()}
"""What each made workload is, by name. (`D` would be several instances over one storage.)"""


def make_workload(name: str) -> Workload:
    """One of `WORKLOADS`, the same every time; blocks of 64 tokens."""
    return Workload(name, _BLOCK, list(_MADE[name][1]()))
