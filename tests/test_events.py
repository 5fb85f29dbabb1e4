"""Page hashes and the events that carry them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cache_cases import serve, settle, small_cache

from hikv.cache.events import KVEvent
from hikv.cache.hiradix import ANYONE
from hikv.cache.keys import namespace_seed, page_hashes
from hikv.cache.node import Namespace

GOLDEN = "3e497b07ddaba8f94fe41f271a7abb5b87476fd3be3efb16b479a65e96b91eb3"


def test_the_chain_is_sha256_of_the_hash_before_and_the_tokens() -> None:
    seed = namespace_seed(ANYONE)
    first = hashlib.sha256(seed + np.array([1, 2], "<i8").tobytes()).digest()
    second = hashlib.sha256(first + np.array([3, 4], "<i8").tobytes()).digest()
    assert page_hashes([1, 2, 3, 4, 5], 2, seed) == [first, second]
    assert page_hashes([3, 4], 2, first) == [second]
    assert len(second) == 32


@pytest.mark.parametrize(
    "kind",
    [
        list,
        lambda t: np.array(t, np.int32),
        lambda t: np.array(t, np.int64),
        lambda t: np.array([t, t], np.int64).T[:, 0],
        lambda t: torch.tensor(t, dtype=torch.int32).numpy(),
        lambda t: np.array(t, ">i4"),
    ],
)
def test_any_kind_of_integers_has_the_same_hashes(kind) -> None:
    tokens = [7, 2**31 - 1, 0, -1]
    want = page_hashes(np.array(tokens, np.int64), 2, b"seed")
    assert page_hashes(kind(tokens), 2, b"seed") == want


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_every_process_has_the_same_hashes(hash_seed: str) -> None:
    code = (
        "from hikv.cache.keys import *; from hikv.cache.node import Namespace\n"
        "seed = namespace_seed(Namespace.of(model='m', salt=b's', lora=3))\n"
        "print(page_hashes(range(8), 4, seed)[-1].hex())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == GOLDEN


def test_namespaces_differ_in_name_type_and_value() -> None:
    spaces = [
        ANYONE,
        Namespace.of(lora="X"),
        Namespace.of(salt="X"),
        Namespace.of(lora=b"X"),
        Namespace.of(lora="1"),
        Namespace.of(lora=1),
        Namespace.of(lora="Xsalt", salt=""),
        Namespace.of(lora="X", salt="salt"),
    ]
    assert len({namespace_seed(space) for space in spaces}) == len(spaces)
    assert namespace_seed(Namespace.of(a=1, b=2)) == namespace_seed(Namespace.of(b=2, a=1))


def test_a_follower_hears_what_each_tier_gains_and_loses() -> None:
    events: list[KVEvent] = []
    space = Namespace.of(salt="s")
    cache = small_cache(2, on_event=events.append)
    first, second = page_hashes([1, 2, 3, 4], 2, namespace_seed(space))
    serve(cache, [1, 2], space)
    assert events == [], "events come with poll"
    serve(cache, [1, 2, 3, 4], space)
    settle(cache)
    cache.evict(8)
    cache.poll()
    stored = [(e.tier, e.hashes, e.parent) for e in events if e.kind == "stored"]
    assert ("device", (first,), None) in stored
    assert ("device", (second,), first) in stored
    assert ("host", (first,), None) in stored
    assert ("host", (second,), first) in stored
    assert [(e.kind, e.tier, e.hashes) for e in events[-2:]] == [
        ("removed", "device", (second,)),
        ("removed", "device", (first,)),
    ]
    cache.reset()
    cache.poll()
    assert (events[-1].kind, events[-1].tier, events[-1].hashes) == ("cleared", None, ())
    assert [e.sequence for e in events] == list(range(len(events)))
    assert {e.namespace for e in events[:-1]} == {space}


def test_a_callback_that_raises_leaves_the_cache_whole() -> None:
    def refuse(event: KVEvent) -> None:
        raise RuntimeError(event.kind)

    cache = small_cache(1, on_event=refuse)
    serve(cache, [1, 2])
    with pytest.raises(RuntimeError, match="stored"):
        cache.poll()
    cache.check()
    assert cache.match_prefix([1, 2]).device_len == 2


def test_no_hash_is_computed_for_nobody() -> None:
    cache = small_cache(1)
    serve(cache, [1, 2])
    assert all(node.hashes is None for node in cache.tree.nodes())
