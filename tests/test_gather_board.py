"""What ranks tell each other: one verdict for all, bounded waits, and who is gone."""

from __future__ import annotations

import gc
import os

import pytest

from hikv.cp.board import Board
from hikv.cp.shared_memory import attach, handle_of, shared_host_memory
from hikv.errors import ArgumentError, GatherError


@pytest.fixture
def boards():
    keep, handle = Board.memory(2, 3)
    pair = [Board(handle, rank, 2, 3) for rank in range(2)]
    yield pair
    for board in pair:
        board.close()
    del keep


def test_words_of_one_rank_are_seen_by_the_other(boards):
    boards[0].restored[0, 2] = 5
    boards[1].begun[1] = 7
    assert boards[1].restored.tolist() == [[0, 0, 5], [0, 0, 0]]
    assert boards[0].begun.tolist() == [0, 7]
    assert boards[0].finished.tolist() == boards[1].digest.tolist() == [0, 0]


def test_the_first_verdict_stands_on_every_rank(boards):
    assert boards[0].verdict is boards[1].verdict is None
    boards[1].raise_verdict()
    errors = [str(boards[1].fail("rank 1: paper jam")), str(boards[0].fail("rank 1 is gone"))]
    assert errors[0] == errors[1]
    for board in boards:
        with pytest.raises(GatherError, match=r"^rank 1: paper jam; end the batch"):
            board.raise_verdict()
        with pytest.raises(GatherError, match="paper jam"):
            board.wait(0, lambda: False, "move", 60)


def test_a_long_verdict_is_cut_between_letters(boards):
    boards[0].fail("→" * 5000)
    assert set(boards[1].verdict) == {"→"}


def test_a_wait_is_bounded(boards):
    with pytest.raises(GatherError, match=r"rank 1 did not restore layer 2 within 0\.05 s"):
        boards[0].wait(1, lambda: False, "restore layer 2", 0.05)
    assert boards[1].verdict == "rank 1 did not restore layer 2 within 0.05 s"


def test_what_is_reached_is_no_matter_of_time(boards):
    boards[0].wait(1, lambda: True, "begin", 0.0)
    assert boards[0].verdict is None


def test_a_rank_that_left_is_gone_and_one_that_is_slow_is_not(boards):
    boards[1].close()
    with pytest.raises(GatherError, match=r"^rank 1 is gone"):
        boards[0].wait(1, lambda: False, "begin", 60)


def test_other_descriptors_of_the_memory_do_not_touch_the_locks(boards):
    fd = boards[1]._fd
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    assert boards[0]._alive(1)


def test_shared_memory_is_one_memory_and_leaves_nothing():
    before = len(os.listdir("/proc/self/fd"))
    memory = shared_host_memory(100)
    handle = handle_of(memory[10:])
    other = attach(handle)
    memory[7] = 42
    assert other.data_ptr() != memory.data_ptr()
    assert other[7] == 42
    assert handle_of(other) is None
    del memory
    gc.collect()
    assert other[7] == 42, "the last mapping keeps it"
    with pytest.raises(GatherError, match="out of reach"):
        attach(handle)
    del other
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ArgumentError, match="at least 1"):
        shared_host_memory(0)
