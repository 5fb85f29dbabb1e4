"""The radix tree: what matches, what an insert returns, who is protected, what each check finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hikv.cache.node import DEVICE, HOST, Namespace, Node
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError, InvariantError

NONE = Namespace()


def build(page: int, *prompts: list[int], **options) -> RadixTree:
    """A tree of prompts on the GPU; each page has an id of its own."""
    tree = RadixTree(page, **options)
    at = 0
    for prompt in prompts:
        count = len(prompt) // page
        tree.insert(NONE, prompt, range(at, at + count))
        at += count
    return tree


def leaf(tree: RadixTree, tokens: list[int]) -> Node:
    return tree.match(NONE, tokens).nodes[-1]


def back_up(tree: RadixTree, node: Node, pages: list[int]) -> None:
    tree.finish(tree.begin_backup([node], pages))


def lengths(tree: RadixTree, tokens: list[int], limit: int | None = None) -> tuple[int, int]:
    match = tree.match(NONE, tokens, limit)
    return match.device_len, match.host_len


def test_keys_shorter_than_a_page_and_tails() -> None:
    tree = RadixTree(4)
    assert lengths(tree, [1, 2, 3]) == (0, 0)
    assert tree.insert(NONE, range(1, 4), []).created is None
    tree.insert(NONE, range(1, 9), [0, 1])
    assert lengths(tree, list(range(1, 8))) == (4, 0)
    assert lengths(tree, [*range(1, 9), 9]) == (8, 0)
    again = tree.insert(NONE, range(1, 7), [5])
    assert again.created is None
    assert (again.pages.tolist(), again.duplicates.tolist()) == ([0], [5])
    assert [e.pages.tolist() for e in tree.evict(DEVICE, 9)] == [[1], [0]]
    assert tree.evictable == [0, 0]
    assert list(tree.nodes()) == []


@pytest.mark.parametrize(("prompt", "reused"), [(9, 8), (8, 4), (4, 0), (1, 0)])
def test_a_limit_leaves_the_last_token_to_compute(prompt: int, reused: int) -> None:
    tokens = list(range(prompt))
    tree = build(4, tokens)
    assert lengths(tree, tokens, limit=prompt - 1) == (reused, 0)
    acquired = tree.acquire(NONE, tokens, limit=prompt - 1)
    assert acquired.match.device_len == reused
    assert tree.protected[DEVICE] == reused // 4


def test_match_is_pure() -> None:
    tree = build(2, [1, 2, 3, 4, 5, 6], [9, 9])
    before = [(n.start, n.last_access, n.hit_count, list(n.lock)) for n in tree.nodes()]
    match = tree.match(NONE, [1, 2, 3, 4, 7, 7])
    assert (match.device_len, match.tail_pages) == (4, 2)
    assert [(n.num_pages, used) for n, used in match.segments] == [(3, 2)]
    assert match.pages(DEVICE).tolist() == [0, 1]
    assert before == [(n.start, n.last_access, n.hit_count, list(n.lock)) for n in tree.nodes()]
    assert tree.evict(DEVICE, 1)[0].pages.tolist() == [0, 1, 2], "still the least recent"


def test_acquire_splits_where_the_match_ends() -> None:
    tree = build(2, [1, 2, 3, 4, 5, 6])
    acquired = tree.acquire(NONE, [1, 2, 3, 4, 7, 7])
    assert acquired.match.pages(DEVICE).tolist() == [0, 1]
    assert [node.num_pages for node in acquired.match.nodes] == [2]
    assert (tree.protected[DEVICE], tree.evictable[DEVICE]) == (2, 1)
    assert acquired.match.nodes[0].hit_count == 2
    assert leaf(tree, [1, 2, 3, 4, 5, 6]).hit_count == 1
    tree.check()


@pytest.mark.parametrize("kind", [np.int32, np.int64, list])
def test_tokens_of_any_integer_type_name_the_same_prefix(kind) -> None:
    tokens = [7, -1, 2**31 - 1, 0, 5]
    tree = build(1, tokens)
    given = tokens if kind is list else np.array(tokens, kind)
    assert lengths(tree, given) == (5, 0)
    assert lengths(tree, np.array([*tokens, 0], np.int64)[::1][:5]) == (5, 0)


def test_tokens_beyond_the_type_are_refused_and_have_a_remedy() -> None:
    with pytest.raises(ArgumentError, match=r"ids that fit int32.*token_dtype=np.int64"):
        build(1, [2**31])
    wide = build(1, [2**31, 2**40], token_dtype=np.int64)
    assert lengths(wide, [2**31, 2**40]) == (2, 0)


def test_the_tree_keeps_no_alias_of_the_callers_arrays() -> None:
    tokens, pages = np.arange(8, dtype=np.int32), np.arange(4)
    tree = RadixTree(2)
    tree.insert(NONE, tokens, pages)
    host = np.arange(4, 8)
    operation = tree.begin_backup(tree.match(NONE, range(8)).nodes, host)
    host[:] = 99
    assert [node.pages[HOST].tolist() for node in tree.finish(operation).nodes] == [[4, 5, 6, 7]]
    tree.evict(DEVICE, 4)
    tree.insert(NONE, tokens, pages)
    tokens[:], pages[:] = 99, 99
    assert tree.match(NONE, range(8)).pages(DEVICE).tolist() == [0, 1, 2, 3]


def test_equal_hashes_do_not_make_equal_prefixes(monkeypatch) -> None:
    """`-1` and `-2` hash alike in Python; only comparing tokens keeps them apart."""
    assert hash(-1) == hash(-2)
    tree = build(1, [-1, -1, -1])
    assert lengths(tree, [-1, -2, -1]) == (1, 0)
    assert lengths(tree, [-2, -1, -1]) == (0, 0)


def test_namespaces_never_meet() -> None:
    spaces = [
        Namespace.of(lora="X"),
        Namespace.of(salt="X"),
        Namespace.of(lora="X", id=1),
        Namespace.of(lora="X", id=2),
        Namespace.of(lora="X", id="1"),
        NONE,
    ]
    tree = RadixTree(1)
    for at, space in enumerate(spaces):
        assert tree.match(space, [5, 6]).matched_len == 0
        tree.insert(space, [5, 6], [2 * at, 2 * at + 1])
    found = [tree.match(space, [5, 6]).pages(DEVICE).tolist() for space in spaces]
    assert found == [[2 * at, 2 * at + 1] for at in range(len(spaces))]
    assert Namespace.of(a=1, b=2) == Namespace.of(b=2, a=1)
    tree.evict(DEVICE, 99)
    assert tree.roots == {}, "an empty namespace costs nothing"


@pytest.mark.parametrize("fields", [(("a", 1.0),), (("a", True),), (("a", 1), ("a", 2))])
def test_ambiguous_namespaces_are_refused(fields: tuple) -> None:
    with pytest.raises(ArgumentError, match="namespace field 'a'"):
        Namespace(fields)


def test_two_requests_that_computed_the_same_prefix() -> None:
    """The second one's table is rewritten to the canonical pages before its own are freed."""
    tree = RadixTree(4)
    tokens = list(range(1, 9))
    assert tree.insert(NONE, tokens, [0, 1]).duplicates.size == 0
    late = tree.insert(NONE, [*tokens, 9, 10, 11, 12], [2, 3, 4])
    assert late.pages.tolist() == [0, 1, 4]
    assert late.duplicates.tolist() == [2, 3]
    assert late.created is late.node
    assert tree.match(NONE, [*tokens, 9, 10, 11, 12]).pages(DEVICE).tolist() == [0, 1, 4]
    assert leaf(tree, tokens).hit_count == 2, "a second request computed it"
    tree.check()


@pytest.mark.parametrize(("prompt", "generated", "covered"), [(10, 6, 12), (16, 0, 16)])
def test_the_last_sampled_token_is_not_cached(prompt: int, generated: int, covered: int) -> None:
    known = np.arange(prompt + generated)
    computed = known[: prompt + generated - (generated > 0)]
    tree = RadixTree(4)
    tree.insert(NONE, computed, range(computed.size // 4))
    assert tree.match(NONE, known).device_len == covered


def test_an_extension_appends_its_own_pages_after_the_prefix() -> None:
    tree = build(1, [1, 2, 3, 4])
    done = tree.insert(NONE, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 40, 41, 42, 43])
    assert done.pages.tolist() == [0, 1, 2, 3, 40, 41, 42, 43]
    assert done.duplicates.size == 0
    assert done.node.pages[DEVICE].tolist() == [40, 41, 42, 43]


@pytest.mark.parametrize("pages", [[0], [0, 1, 2], [0, -1]])
def test_a_wrong_page_table_changes_nothing(pages: list[int]) -> None:
    tree = RadixTree(2)
    with pytest.raises(ArgumentError, match="device_pages"):
        tree.insert(NONE, [1, 2, 3, 4], pages)
    assert list(tree.nodes()) == []


def test_a_matched_prefix_cannot_be_evicted_between_match_and_use() -> None:
    """Four pages, all cached: an allocation for another request must not take them."""
    tree = build(4, list(range(1, 17)))
    acquired = tree.acquire(NONE, range(1, 17))
    assert tree.evict(DEVICE, 2) == []
    assert tree.match(NONE, range(1, 17)).device_len == 16
    tree.release(acquired.device)
    assert tree.evict(DEVICE, 2)[0].pages.tolist() == [0, 1, 2, 3]


def test_locks_are_counted_per_tier_and_a_receipt_works_once() -> None:
    tree = build(1, [1, 2, 3], [1, 2, 4])
    back_up(tree, leaf(tree, [1, 2]), [0, 1])
    one, two = tree.acquire(NONE, [1, 2, 3]), tree.acquire(NONE, [1, 2, 4])
    assert leaf(tree, [1, 2]).lock == [2, 2]
    assert (tree.protected, tree.evictable) == ([4, 2], [0, 0])
    tree.release(one.device)
    tree.release(one.host)
    tree.release(two.host)
    assert leaf(tree, [1, 2]).lock == [1, 0]
    assert (tree.protected, tree.evictable) == ([3, 0], [1, 2])
    with pytest.raises(ArgumentError, match="released"):
        tree.release(one.device)
    tree.release(two.device)
    assert tree.locks == set()
    tree.check()


def test_a_use_is_counted_once_and_priority_only_rises() -> None:
    tree = build(1, [1, 2])
    acquired = tree.acquire(NONE, [1, 2, 3])
    tree.insert(NONE, [1, 2, 3], [0, 1, 5], priority=2)
    tree.insert(NONE, [1, 2], [0, 1], priority=1)
    assert [(n.hit_count, n.priority) for n in acquired.match.nodes] == [(2, 2)]
    assert leaf(tree, [1, 2, 3]).hit_count == 1


def test_both_halves_of_a_split_keep_what_the_node_was() -> None:
    tree = build(1, [9], [1, 2, 3, 4])
    tree.insert(NONE, [1, 2, 3, 4, 5], [1, 2, 3, 4, 9], priority=3)
    node = leaf(tree, [1, 2, 3, 4])
    names = ("namespace", "rotation", "priority", "hit_count", "created", "last_access", "reach")
    before = [getattr(node, name) for name in names]
    pin = tree.pin(node, DEVICE, 1)
    upper = tree._split(node, 1)
    assert [getattr(upper, name) for name in names] == before
    assert [getattr(node, name) for name in names] == before
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 4)
    assert (upper.lock, node.lock, node.parent) == ([1, 0], [1, 0], upper)
    tree.release(pin)
    tree.check()


def test_pause_and_resume_leave_no_lock() -> None:
    tree = build(2, [1, 2, 3, 4])
    paused = tree.acquire(NONE, [1, 2, 3, 4])
    tree.release(paused.device)
    tree.release(paused.host)
    tree.evict(DEVICE, 2)
    resumed = tree.acquire(NONE, [1, 2, 3, 4])
    assert resumed.match.matched_len == 0
    tree.release(resumed.device)
    tree.release(resumed.host)
    assert tree.locks == set()
    with pytest.raises(ArgumentError, match="held on the device"):
        tree.lock(paused.match.nodes[-1], DEVICE)


def test_a_pin_ends_at_its_deadline_or_when_released() -> None:
    now = [0.0]
    tree = build(1, [1, 2], [3, 4], [5, 6], clock=lambda: now[0])
    pin = tree.pin(leaf(tree, [1, 2]), DEVICE, seconds=10)
    tree.pin(leaf(tree, [3, 4]), DEVICE, seconds=5)
    assert tree.protected[DEVICE] == 4
    assert tree.evict(DEVICE, 99)[0].pages.tolist() == [4, 5]
    now[0] = 5.0
    assert tree.evict(DEVICE, 99)[0].pages.tolist() == [2, 3]
    tree.release(pin)
    now[0] = 99.0
    tree.expire_pins()
    assert tree.evict(DEVICE, 99)[0].pages.tolist() == [0, 1]
    with pytest.raises(ArgumentError, match="released"):
        tree.release(pin)


def test_two_rotations_never_join() -> None:
    """Owners 0, 1 hold the prefix; the page after it belongs to owner 0."""
    tree = RadixTree(1, num_owners=2)
    tree.insert(NONE, [1, 2], [4, 5])
    match = tree.match(NONE, [1, 2, 3])
    assert tree.owner_at(match, 2) == 0
    assert tree.owner_at(tree.match(NONE, [9]), 0) is None
    for table in ([4, 5, 7], [4, 5, 8, 10]):
        with pytest.raises(ArgumentError, match="rotates, got page id"):
            tree.insert(NONE, [1, 2, 3, 4][: len(table)], table)
    with pytest.raises(ArgumentError, match="page 1 of the prompt on owner 0"):
        tree.insert(NONE, [8, 9], [5, 7])
    assert lengths(tree, [1, 2, 3, 4]) == (2, 0)
    twin = tree.insert(NONE, [1, 2], [7, 8])
    assert twin.duplicates.tolist() == [7, 8], "pages that do not enter may rotate as they like"
    tree.insert(NONE, [1, 2, 3], [4, 5, 6])
    tree.check()


def test_a_page_on_a_wrong_owner_is_reported() -> None:
    tree = RadixTree(1, num_owners=2)
    tree.insert(NONE, [1, 2, 3], [5, 6, 7])
    tree.insert_host(NONE, [4, 5], [1, 2], start=0)
    tree.check()
    leaf(tree, [4, 5]).pages[HOST][1] = 3
    with pytest.raises(InvariantError, match=r"^rotation:.*host pages on other owners"):
        tree.check()


def test_a_split_carries_the_rotation_to_both_halves() -> None:
    tree = RadixTree(1, num_owners=3)
    tree.insert(NONE, [1, 2, 3, 4], [5, 6, 7, 8])
    tree.insert(NONE, [1, 2, 9], [5, 6, 10])
    assert [node.rotation for node in tree.nodes()] == [2, 2, 2]
    assert tree.owner_at(tree.match(NONE, [1, 2, 3]), 3) == 2
    with pytest.raises(ArgumentError, match="page 0 of the prompt on owner 2"):
        tree.begin_backup([leaf(tree, [1, 2])], [0, 1])
    back_up(tree, leaf(tree, [1, 2]), [2, 0])
    tree.check()


def test_splits_keep_hashes_and_tell_the_floor_above() -> None:
    told = []
    tree = build(2, [1, 2, 3, 4, 5, 6], on_split=lambda upper, lower: told.append((upper, lower)))
    whole = leaf(tree, [1, 2, 3, 4, 5, 6])
    whole.hashes = [b"a", b"b", b"c"]
    tree.insert(NONE, [1, 2, 7, 8], [0, 9])
    (upper, lower), *_ = told
    assert (upper.hashes, lower.hashes) == ([b"a"], [b"b", b"c"])
    assert lower is whole
    assert [len(list(tree.nodes())), len(told)] == [3, 1]
    tree.check()


def test_halves_of_a_split_do_not_keep_the_whole_alive() -> None:
    tree = build(1, list(range(1000)), granularity="page")
    tree.evict(DEVICE, 10)
    (rest,) = tree.nodes()
    assert rest.tokens.base is not None, "trimming a long node copies nothing"
    tree.evict(DEVICE, 980)
    (rest,) = tree.nodes()
    for array in (rest.tokens, rest.pages[DEVICE]):
        assert (array if array.base is None else array.base).size <= 2 * array.size == 20


def test_a_deep_tree_needs_no_recursion() -> None:
    tree, depth = RadixTree(1), 20_000
    tokens = np.arange(depth, dtype=np.int32)
    tree.insert(NONE, tokens, tokens)
    (node,) = tree.nodes()
    for _ in range(depth - 1):
        tree._split(node, 1)
    assert sum(1 for _ in tree.nodes()) == depth
    assert tree.match(NONE, tokens).device_len == depth
    tree.check()
    acquired = tree.acquire(NONE, tokens)
    tree.release(acquired.device)
    assert sum(e.pages.size for e in tree.evict(DEVICE, depth)) == depth


def lock_a_pending_copy(tree: RadixTree, node: Node) -> None:
    tree.lock(node.parent, HOST)
    leaf(tree, [1, 2, 3, 4, 9, 9]).lock[HOST] = 1


BREAKS: list[tuple[str, Callable[[RadixTree, Node], object]]] = [
    ("empty or ragged key", lambda t, n: setattr(n, "tokens", n.tokens[:0])),
    (
        "child key",
        lambda t, n: n.parent.children.__setitem__(b"", n.parent.children.pop(n.first_page)),
    ),
    ("child key", lambda t, n: n.tokens.__setitem__(0, 77)),
    ("position", lambda t, n: setattr(n, "start", 5)),
    ("rotation", lambda t, n: setattr(n, "rotation", 1)),
    ("hashes", lambda t, n: setattr(n, "hashes", [])),
    ("held nowhere", lambda t, n: setattr(n, "pages", [None, None])),
    ("page twice", lambda t, n: n.pages.__setitem__(DEVICE, n.parent.pages[DEVICE])),
    ("page count", lambda t, n: n.pages.__setitem__(DEVICE, n.pages[DEVICE][:1])),
    ("host hole", lambda t, n: n.parent.pages.__setitem__(HOST, None)),
    ("device hole", lambda t, n: n.parent.pages.__setitem__(DEVICE, None)),
    ("operation", lambda t, n: t.operations.clear()),
    ("operation", lambda t, n: next(iter(t.operations)).nodes.append(n)),
    ("operation", lambda t, n: t.release(next(iter(t.operations)).lock)),
    ("negative lock", lambda t, n: n.lock.__setitem__(HOST, -1)),
    ("lock order", lambda t, n: n.lock.__setitem__(HOST, 1)),
    ("lock on nothing", lock_a_pending_copy),
    ("receipts", lambda t, n: n.parent.lock.__setitem__(HOST, 1)),
    ("below", lambda t, n: n.parent.below.__setitem__(DEVICE, 1)),
    ("evictable", lambda t, n: t.evictable.__setitem__(HOST, 7)),
    ("protected", lambda t, n: t.protected.__setitem__(DEVICE, 7)),
    ("queue", lambda t, n: t.queues[HOST].discard(n)),
    ("queue", lambda t, n: setattr(n, "last_access", 99)),
]


@pytest.mark.parametrize(
    ("name", "damage"), BREAKS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BREAKS)]
)
def test_every_broken_invariant_is_reported_by_name(name: str, damage: Callable) -> None:
    """Two nodes in both tiers, one of them below the other, and a backup under way beside it."""
    tree = build(2, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9])
    node = leaf(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    tree.finish(tree.begin_backup(node.path(), [10, 11, 12, 13]))
    tree.begin_backup([leaf(tree, [1, 2, 3, 4, 9, 9])], [14])
    tree.check()
    damage(tree, node)
    with pytest.raises(InvariantError, match=f"^{name}:"):
        tree.check()
