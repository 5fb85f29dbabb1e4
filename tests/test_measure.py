"""The timing protocol on clocks that tell scripted times, and the check that gates it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases import (
    engine_forms,
    head_specs,
    latent_specs,
    random_rows,
    stay,
    wide_specs,
)

from hikv.buffer import KVBuffer
from hikv.errors import ArgumentError
from hikv.kernels.reference import launch
from hikv.measure import (
    Candidate,
    HostClock,
    Sample,
    Timing,
    cold_sets,
    fill_random,
    measure,
    wrong_bytes,
)
from hikv.plan import plan_transfer
from hikv.spec import KVSpec


class Script:
    """A clock on which the runs of each candidate take the seconds that its list says."""

    def __init__(self, **seconds: list[float]) -> None:
        self.seconds = {name: iter(times) for name, times in seconds.items()}
        self.runs: list[tuple[str, int]] = []

    def candidate(self, name: str, wrong: str | None = None, nbytes: int = 10**9) -> Candidate:
        return Candidate(name, nbytes, lambda turn: (name, turn), lambda: wrong)

    def time(self, run):
        name, turn = run()
        self.runs.append((name, turn))
        return Sample(next(self.seconds[name]), 0.25)


def test_rates_are_decimal_payload_bytes_a_second_with_their_spread():
    timing = Timing(2 * 10**9, tuple(Sample(s, s / 10) for s in (1.0, 2.0, 4.0, 8.0, 16.0)))
    assert [timing.gbps(p) for p in (0, 20, 50, 80, 100)] == pytest.approx(
        [0.125, 0.225, 0.5, 1.2, 2.0]
    )
    assert timing.spread == pytest.approx((1.2 - 0.225) / 0.5)
    assert timing.submit_seconds == pytest.approx(0.4)
    assert timing.summary() == {
        "gbps_p20": timing.gbps(20),
        "gbps_p50": 0.5,
        "gbps_p80": timing.gbps(80),
        "submit_seconds": timing.submit_seconds,
        "rounds": 5,
    }


def test_warm_up_runs_do_not_count():
    clock = Script(a=[100.0, 100.0, 1.0, 2.0, 4.0])
    (result,) = measure([clock.candidate("a")], clock, rounds=3, warmup=2)
    assert [sample.seconds for sample in result.timing.samples] == [1.0, 2.0, 4.0]
    assert [turn for _, turn in clock.runs] == [0, 1, 2, 3, 4]


def test_candidates_take_turns_in_changing_order_and_no_two_runs_share_a_turn():
    clock = Script(**{name: itertools.repeat(1.0) for name in "abc"})
    results = measure([clock.candidate(name) for name in "abc"], clock, rounds=8, warmup=2)
    rounds = [tuple(name for name, _ in clock.runs[i : i + 3]) for i in range(0, 30, 3)]
    assert all(set(names) == set("abc") for names in rounds)
    assert len(set(rounds)) > 2
    assert [turn for _, turn in clock.runs] == list(range(30))
    assert [(r.name, len(r.timing.samples)) for r in results] == [("a", 8), ("b", 8), ("c", 8)]


def test_the_order_follows_the_seed():
    def order(seed):
        clock = Script(**{name: itertools.repeat(1.0) for name in "abcd"})
        measure([clock.candidate(name) for name in "abcd"], clock, rounds=5, seed=seed)
        return clock.runs

    assert order(1) == order(1) != order(2)


def test_a_candidate_with_wrong_bytes_is_never_timed():
    clock = Script(right=itertools.repeat(1.0))
    candidates = [clock.candidate("spoilt", wrong="page 3"), clock.candidate("right")]
    spoilt, right = measure(candidates, clock, rounds=2, warmup=1)
    assert (spoilt.wrong, spoilt.timing) == ("page 3", None)
    assert right.wrong is None
    assert len(right.timing.samples) == 2
    assert {name for name, _ in clock.runs} == {"right"}


def test_every_candidate_is_checked_before_anything_is_timed():
    order = []
    clock = Script(a=itertools.repeat(1.0), b=itertools.repeat(1.0))
    candidates = [
        Candidate(
            name,
            1,
            lambda turn, name=name: order.append(f"run {name}") or (name, turn),
            lambda name=name: order.append(f"check {name}"),
        )
        for name in "ab"
    ]
    measure(candidates, clock, rounds=1, warmup=0)
    assert order[:2] == ["check a", "check b"]
    assert sorted(order[2:]) == ["run a", "run b"]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (9.0, 3), (10.5, 4), (1000.0, 20)])
def test_a_time_limit_ends_after_a_whole_round_and_three_at_least(seconds, rounds):
    clock = Script(a=itertools.repeat(1.0), b=itertools.repeat(2.0))
    results = measure([clock.candidate(n) for n in "ab"], clock, seconds=seconds)
    assert [len(result.timing.samples) for result in results] == [rounds, rounds]


def test_no_round_and_a_name_given_twice_are_refused():
    clock = Script()
    with pytest.raises(ArgumentError, match="names of their own"):
        measure([clock.candidate("a"), clock.candidate("a")], clock)
    with pytest.raises(ArgumentError, match="rounds: expected at least 1, got 0"):
        measure([clock.candidate("a")], clock, rounds=0)


def test_the_host_clock_runs_once_and_time_passes():
    runs = []
    sample = HostClock().time(lambda: runs.append(1))
    assert runs == [1]
    assert sample.seconds == sample.submit_seconds > 0


def test_turns_cover_the_cold_bytes():
    assert [cold_sets(n, cold_bytes=100) for n in (10, 30, 50, 99, 100, 1000)] == [
        10,
        4,
        2,
        2,
        1,
        1,
    ]
    assert cold_sets(10, cold_bytes=0) == 1
    assert cold_sets(488 << 20) == 2


SPEC = KVSpec(3, 4, 16, 4, torch.bfloat16, head_group=2)


def pools(spec=SPEC, src="layer_first", dst="page_first_direct_group", dst_spec=None):
    src, dst = KVBuffer.empty(spec, src, 6), KVBuffer.empty(dst_spec or spec, dst, 5)
    fill_random(src)
    fill_random(dst, seed=1)
    return src, dst


def check(plan, run=None):
    return wrong_bytes(plan, (lambda: launch(plan)) if run is None else run, lambda: None)


def byte(buffer, page, layer=0, region=0):
    """A one-element view of the first byte of `page` in `layer`."""
    (_, _, view), *_ = buffer.regions[region].tensors(torch.uint8)
    return view[page, layer, 0, 0, 0, 0, :1]


@pytest.mark.parametrize(
    "spec", [*head_specs(torch.bfloat16), *latent_specs(torch.uint8), *wide_specs(torch.float16)]
)
def test_a_right_copy_passes_whatever_the_rows_and_the_form_of_the_pool(spec):
    rng = np.random.default_rng(0)
    for form in engine_forms(spec).values():
        src = form(spec, random_rows(spec, 6, rng), stay).buffer
        dst = KVBuffer.empty(spec, "page_unified", 5)
        fill_random(dst)
        assert check(plan_transfer(src, dst, [5, 0, 3], [1, 4, 2])) is None


def test_head_grids_may_differ():
    other = KVSpec(3, 4, 16, 4, torch.bfloat16, head_group=1)
    assert check(plan_transfer(*pools(dst_spec=other), [5, 0], [1, 4])) is None


def test_a_copy_that_does_nothing_fails_even_where_the_bytes_were_right_before():
    plan = plan_transfer(*pools(), [5, 0], [1, 4])
    launch(plan)
    assert (
        check(plan, lambda: None)
        == "page 1, layer 0 of the destination is not page 5 of the source"
    )


def test_waiting_comes_between_the_copy_and_the_comparison():
    plan = plan_transfer(*pools(), [5], [1])
    assert wrong_bytes(plan, lambda: None, lambda: launch(plan)) is None


@pytest.mark.parametrize("layer", range(3))
def test_one_wrong_byte_is_found_and_placed(layer):
    plan = plan_transfer(*pools(), [5, 0], [1, 4])

    def run():
        launch(plan)
        byte(plan.dst, 4, layer).bitwise_xor_(1)

    want = f"page 4, layer {layer} of the destination is not page 0 of the source"
    assert check(plan, run) == want


def test_a_wrong_byte_of_a_second_component_is_found():
    spec = next(iter(wide_specs(torch.float16)))
    plan = plan_transfer(*pools(spec, "layer_first", "page_head"), [5, 0], [1, 4])

    def run():
        launch(plan)
        byte(plan.dst, 1, 2, region=1).bitwise_xor_(1)

    assert check(plan, run) == "page 1, layer 2 of the destination is not page 5 of the source"


def test_a_page_that_was_not_named_must_stay():
    plan = plan_transfer(*pools(), [5, 0], [1, 4])

    def run():
        launch(plan)
        byte(plan.dst, 3).bitwise_xor_(1)

    assert check(plan, run) == "page 3 of the destination was not to be written"


def test_a_layer_outside_the_span_must_stay():
    plan = plan_transfer(*pools(), [5, 0], [1, 4], layers=(1, 2))
    assert check(plan) is None

    def run():
        launch(plan)
        byte(plan.dst, 1, layer=2).copy_(byte(plan.src, 5, layer=2))

    assert check(plan, run) == "page 1, layer 2 of the destination was not to be written"


@pytest.mark.parametrize("form", ["gaps", "per_layer"])
def test_random_filling_reaches_every_row_and_no_gap(form):
    rows = random_rows(SPEC, 6, np.random.default_rng(0))
    for array in rows:
        array[:] = 7
    pool = engine_forms(SPEC)[form](SPEC, rows, stay)
    before = pool.bytes()
    fill_random(pool.buffer)
    changed = pool.bytes() != before
    assert changed[before == 7].mean() > 0.98  # one byte in 256 draws the value it had
    assert not changed[before != 7].any()
    words = pool.buffer.logical(range(6)).view(torch.int64).flatten()
    assert len(words.unique()) == len(words)
