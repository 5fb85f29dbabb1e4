"""Copies between the tiers: what acknowledgement, failure, split and eviction do to them."""

from __future__ import annotations

import pytest

from hikv.cache.node import DEVICE, HOST, Namespace, Node, Operation
from hikv.cache.tree import RadixTree
from hikv.errors import ArgumentError

NONE = Namespace()


def cached(page: int, tokens: list[int], **options) -> RadixTree:
    tree = RadixTree(page, **options)
    tree.insert(NONE, tokens, range(len(tokens) // page))
    return tree


def on_host(page: int, tokens: list[int], **options) -> RadixTree:
    """A prompt that the host alone holds, in pages 100, 101, …"""
    tree = cached(page, tokens, **options)
    pages = range(100, 100 + len(tokens) // page)
    tree.finish(tree.begin_backup([leaf(tree, tokens)], pages))
    tree.evict(DEVICE, len(pages))
    return tree


def leaf(tree: RadixTree, tokens: list[int]) -> Node:
    return tree.match(NONE, tokens).nodes[-1]


def lengths(tree: RadixTree, tokens: list[int]) -> tuple[int, int]:
    match = tree.match(NONE, tokens)
    return match.device_len, match.host_len


def pairs(operation: Operation) -> tuple[list[int], list[int]]:
    source, target = operation.pairs
    return source.tolist(), target.tolist()


def test_a_backup_is_visible_and_its_source_free_only_after_the_acknowledgement() -> None:
    tree = cached(2, [1, 2, 3, 4])
    operation = tree.begin_backup([leaf(tree, [1, 2, 3, 4])], [8, 9])
    assert pairs(operation) == ([0, 1], [8, 9])
    assert leaf(tree, [1, 2, 3, 4]).pages[HOST] is None
    assert tree.evict(DEVICE, 1) == []
    landed = tree.finish(operation)
    assert [node.pages[HOST].tolist() for node in landed.nodes] == [[8, 9]]
    assert landed.surplus.size == 0
    assert lengths(tree, [1, 2, 3, 4]) == (4, 0)
    victim = tree.evict(DEVICE, 2)[0]
    assert (victim.pages.tolist(), victim.node.gone) == ([0, 1], False)
    assert lengths(tree, [1, 2, 3, 4]) == (0, 4)
    assert tree.match(NONE, [1, 2, 3, 4]).pages(HOST).tolist() == [8, 9]
    assert tree.evict(HOST, 2)[0].node.gone
    tree.check()


@pytest.mark.parametrize("cuts", [[374], [374, 100], [100, 374]])
def test_splits_while_a_backup_is_pending_store_every_half(cuts: list[int]) -> None:
    """375 pages on their way, inserts split the node, the acknowledgement reaches every half."""
    tokens = list(range(375))
    tree = cached(1, tokens)
    operation = tree.begin_backup([leaf(tree, tokens)], range(1000, 1375))
    for at, cut in enumerate(cuts):
        tree.insert(NONE, [*tokens[:cut], -1 - at], [*range(cut), 400 + at])
        tree.check()
    assert pairs(operation) == (list(range(375)), list(range(1000, 1375)))
    assert tree.evict(HOST, 1) == [], "no host page is free to take before the acknowledgement"
    landed = tree.finish(operation)
    assert sum(node.num_pages for node in landed.nodes) == 375
    assert len(landed.nodes) == len(cuts) + 1
    assert tree.locks == set()
    assert tree.match(NONE, tokens).pages(HOST).tolist() == list(range(1000, 1375))
    with pytest.raises(ArgumentError, match="acknowledged before"):
        tree.finish(operation)
    tree.check()


def test_a_failed_copy_keeps_what_arrived_and_returns_the_rest() -> None:
    """A load of 160 pages fails at page 87; another request matches meanwhile."""
    tokens = list(range(160))
    tree = on_host(1, tokens)
    operation = tree.begin_load_back([leaf(tree, tokens)], range(160))
    assert lengths(tree, tokens) == (0, 160), "nothing is readable before its bytes are there"
    other = tree.acquire(NONE, tokens)
    assert other.match.device_len == 0
    landed = tree.finish(operation, arrived=87)
    assert landed.surplus.tolist() == list(range(87, 160))
    assert lengths(tree, tokens) == (87, 73)
    assert tree.owned(DEVICE).tolist() == list(range(87))
    tree.check()


def test_an_aborted_copy_leaves_nothing_behind() -> None:
    tree = on_host(1, [1, 2, 3])
    landed = tree.finish(tree.begin_load_back([leaf(tree, [1, 2, 3])], [0, 1, 2]), arrived=0)
    assert (landed.nodes, landed.surplus.tolist()) == ([], [0, 1, 2])
    assert (tree.locks, tree.operations) == (set(), set())
    assert lengths(tree, [1, 2, 3]) == (0, 3)
    tree.check()


def test_a_quota_loads_the_beginning() -> None:
    """Prompt of 64 pages: 16 on the GPU, 32 on the host, a quota of 24."""
    tokens = list(range(64))
    tree = on_host(1, tokens[:48])
    tree.insert(NONE, tokens[:16], range(16))
    match = tree.match(NONE, tokens)
    assert (match.device_len, match.host_len) == (16, 32)
    waiting = [node for node in match.nodes if node.pages[DEVICE] is None]
    operation = tree.begin_load_back(waiting, range(200, 224))
    assert pairs(operation) == (list(range(116, 140)), list(range(200, 224)))
    tree.finish(operation)
    assert lengths(tree, tokens) == (40, 8)
    tree.check()


def test_the_host_cannot_take_pages_that_are_being_loaded() -> None:
    tree = on_host(1, [1, 2])
    operation = tree.begin_load_back([leaf(tree, [1, 2])], [0, 1])
    assert tree.evict(HOST, 2) == []
    tree.finish(operation, arrived=0)
    assert tree.locks == set()
    assert tree.evict(HOST, 2)[0].pages.tolist() == [100, 101]


def test_a_backup_needs_its_parent_on_the_host_or_on_its_way() -> None:
    """The parent's backup fails: the child's is refused, so no hole opens above a host page."""
    tree = cached(1, [1])
    tree.insert(NONE, [1, 2], [0, 1])
    parent, child = tree.match(NONE, [1, 2]).nodes
    with pytest.raises(ArgumentError, match="move parents first"):
        tree.begin_backup([child], [8])
    upper = tree.begin_backup([parent], [8])
    lower = tree.begin_backup([child], [9])
    with pytest.raises(ArgumentError, match="too early"):
        tree.finish(lower)
    assert tree.finish(upper, arrived=0).surplus.tolist() == [8]
    retry = tree.begin_backup([parent], [8])
    assert tree.finish(lower).surplus.tolist() == [9], "its parent never arrived"
    tree.check()
    tree.finish(retry)
    assert [node.pages[HOST] is None for node in (parent, child)] == [False, True]
    assert [v.node.gone for v in tree.evict(DEVICE, 2)] == [True, False]
    tree.check()


@pytest.mark.parametrize("pages", [[], [1, 2, 3]])
def test_a_copy_needs_pages_for_its_nodes(pages: list[int]) -> None:
    tree = cached(1, [1, 2])
    with pytest.raises(ArgumentError, match="1 … 2 pages"):
        tree.begin_backup([leaf(tree, [1, 2])], pages)
    with pytest.raises(ArgumentError, match="a path held on the host"):
        tree.begin_load_back([leaf(tree, [1, 2])], [1])


def test_a_backup_begins_once() -> None:
    tree = cached(1, [1, 2])
    operation = tree.begin_backup([leaf(tree, [1, 2])], [8, 9])
    with pytest.raises(ArgumentError, match="each node once"):
        tree.begin_backup([leaf(tree, [1, 2])], [5, 6])
    with pytest.raises(ArgumentError, match="0 … 2 pages"):
        tree.finish(operation, arrived=3)
    tree.finish(operation)
    with pytest.raises(ArgumentError, match="each node once"):
        tree.begin_backup([leaf(tree, [1, 2])], [5, 6])


def test_a_split_before_the_eviction_leaves_both_halves_restorable() -> None:
    tree = cached(1, [1, 2, 3, 4])
    operation = tree.begin_backup([leaf(tree, [1, 2, 3, 4])], [10, 11, 12, 13])
    created = tree.insert(NONE, [1, 2, 8], [0, 1, 4]).created
    tree.finish(operation)
    tree.finish(tree.begin_backup([created], [14]))
    tree.evict(DEVICE, 5)
    assert lengths(tree, [1, 2, 3, 4]) == (0, 4)
    assert lengths(tree, [1, 2, 8]) == (0, 3)


def test_an_evicted_node_is_revived_by_a_request_that_computed_it() -> None:
    tree = on_host(1, [1, 2, 3, 4])
    done = tree.insert(NONE, [1, 2, 3], [20, 21, 22])
    assert [node.pages[DEVICE].tolist() for node in done.revived] == [[20, 21, 22]]
    assert (done.pages.tolist(), done.duplicates.size, done.created) == ([20, 21, 22], 0, None)
    assert lengths(tree, [1, 2, 3, 4]) == (3, 1)
    assert tree.match(NONE, [1, 2, 3, 4]).pages(HOST).tolist() == [100, 101, 102, 103]
    tree.check()


def test_a_load_back_that_a_request_overtook_returns_its_pages() -> None:
    tree = on_host(1, [1, 2, 3, 4])
    operation = tree.begin_load_back([leaf(tree, [1, 2, 3, 4])], [50, 51, 52, 53])
    tree.insert(NONE, [1, 2, 9], [20, 21, 22])
    tree.check()
    landed = tree.finish(operation)
    assert landed.surplus.tolist() == [50, 51]
    assert tree.match(NONE, [1, 2, 3, 4]).pages(DEVICE).tolist() == [20, 21, 52, 53]
    tree.check()


def test_host_copies_of_gpu_pages_make_room_in_a_host_smaller_than_the_gpu() -> None:
    """GPU 8 pages, host 4: all four host pages mirror GPU pages, then a prefetch needs two."""
    tree = cached(1, list(range(8)))
    tree.finish(tree.begin_backup([leaf(tree, list(range(8)))], [0, 1, 2, 3]))
    freed = [page for victim in tree.evict(HOST, 2) for page in victim.pages.tolist()]
    assert sorted(freed) == [0, 1, 2, 3]
    assert lengths(tree, list(range(8))) == (8, 0)
    assert tree.insert_host(NONE, [70, 71], freed[:2], start=0).created is not None
    assert lengths(tree, [70, 71]) == (0, 2)
    tree.check()


def test_a_host_copy_goes_only_after_the_copies_below_it() -> None:
    tree = cached(1, [1])
    tree.insert(NONE, [1, 2], [0, 1])
    path = tree.match(NONE, [1, 2]).nodes
    tree.finish(tree.begin_backup(path, [8, 9]))
    with pytest.raises(ArgumentError, match="unlocked leaf of the host tier"):
        tree.drop(path[0], HOST)
    assert [victim.pages.tolist() for victim in tree.evict(HOST, 2)] == [[9], [8]]
    assert lengths(tree, [1, 2]) == (2, 0)


def test_a_prefetch_below_a_gpu_only_parent_is_dropped() -> None:
    tree = cached(1, [1, 2])
    done = tree.insert_host(NONE, [1, 2, 3], [7, 8, 9], start=0)
    assert (done.created, done.duplicates.tolist(), done.pages.size) == (None, [7, 8, 9], 0)
    tree.finish(tree.begin_backup([leaf(tree, [1, 2])], [5, 6]))
    done = tree.insert_host(NONE, [1, 2, 3], [7, 8, 9], start=0)
    assert (done.duplicates.tolist(), done.pages.tolist()) == ([7, 8], [9])
    assert lengths(tree, [1, 2, 3]) == (2, 1)
    tree.check()


def test_a_prefetch_whose_anchor_was_evicted_is_dropped() -> None:
    tree = on_host(1, [1, 2, 3])
    tree.evict(HOST, 3)
    done = tree.insert_host(NONE, [1, 2, 3, 4, 5], [8, 9], start=3)
    assert (done.created, done.duplicates.tolist()) == (None, [8, 9])
    assert list(tree.nodes()) == []


def test_a_prefetch_extends_what_the_host_holds() -> None:
    tree = on_host(2, [1, 2, 3, 4])
    done = tree.insert_host(NONE, [1, 2, 5, 6, 7], [9], start=2)
    assert (done.pages.tolist(), done.duplicates.size) == ([9], 0)
    assert tree.match(NONE, [1, 2, 5, 6]).pages(HOST).tolist() == [100, 9]
    assert lengths(tree, [1, 2, 3, 4]) == (0, 4)
    with pytest.raises(ArgumentError, match="whole pages"):
        tree.insert_host(NONE, [1, 2, 5, 6], [9], start=3)
    tree.check()


def test_a_write_back_victim_without_room_on_the_host_is_dropped_outright() -> None:
    """No node is ever called backed up without host pages: the abort comes before the drop."""
    tree = cached(1, [1, 2])
    node = tree.victim(DEVICE)
    tree.finish(tree.begin_backup([node], [8, 9]), arrived=0)
    assert tree.drop(node, DEVICE).tolist() == [0, 1]
    assert node.gone
    assert (tree.evictable, tree.protected) == ([0, 0], [0, 0])
    tree.check()


def test_page_granularity_demotes_just_the_end() -> None:
    tree = cached(1, [1, 2, 3, 4], granularity="page")
    tree.finish(tree.begin_backup([leaf(tree, [1, 2, 3, 4])], [10, 11, 12, 13]))
    assert [victim.pages.tolist() for victim in tree.evict(DEVICE, 1)] == [[3]]
    assert lengths(tree, [1, 2, 3, 4]) == (3, 1)
    assert [victim.pages.tolist() for victim in tree.evict(HOST, 2)] == [[13], [12]]
    assert lengths(tree, [1, 2, 3, 4]) == (3, 0)
    tree.check()
