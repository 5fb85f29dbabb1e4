"""The cases of a search and its space: what a case copies, and what is never timed."""

from __future__ import annotations

import numpy as np
import pytest
from fake_machine import GPU

from autotune.cases import MAX_NARROW_RUN, Case, full_cases, parse_cases, quick_cases
from autotune.link import chain
from autotune.space import Point, bytes_in_flight, littles_law, points, prune, target_of
from hikv import ArgumentError, KVBuffer, PathUnavailable
from hikv.compiled import Report
from hikv.tables import SPACE
from hikv.tuning import MAX_COPY_BYTES, distance, key_of


def test_the_grid_spans_the_sizes_of_tables():
    cases = full_cases()
    assert len({case.key for case in cases}) == len(cases)
    assert {case.run_bytes for case in cases} == {1 << shift for shift in range(6, 22)}
    assert max(case.num_runs for case in cases) == 65536
    assert min(case.num_runs for case in cases) == 1
    assert max(case.run_bytes * case.num_runs for case in cases) == MAX_COPY_BYTES
    assert {case.direction for case in cases} == {"h2d", "d2h"}
    assert {c.vector_bytes for c in cases if c.run_bytes <= MAX_NARROW_RUN} == {4, 16}
    assert {case.latent for case in cases if case.num_runs > 1} == {True, False}


@pytest.mark.parametrize("case", full_cases(), ids=str)
def test_a_case_is_what_its_key_says(case):
    plan = case.part_plan()
    assert plan.direction == case.direction
    assert plan.vector_bytes == case.vector_bytes
    assert case.num_pages * plan.num_descriptors == case.num_runs * plan.num_pages
    if plan.num_pages == case.num_pages:
        assert key_of(plan) == case.key
    assert case.nbytes == case.num_runs * plan.run_bytes


def test_a_look_up_reaches_every_case_from_the_quick_ones():
    quick = [case.key for case in quick_cases()]
    assert set(quick) <= {case.key for case in full_cases()}
    assert len(quick) < len(full_cases()) / 2
    for case in full_cases():
        assert any(distance(key, case.key) is not None for key in quick), case


def test_turns_share_no_page_and_leave_some_alone():
    def pool(side, spec, layout, num_pages):
        return KVBuffer.empty(spec, layout, num_pages, device="meta" if side == "gpu" else "cpu")

    plans = Case("d2h", 1024, 256).plans(pool, turns=5)
    assert len(plans) == 5
    for side in ("src", "dst"):
        ids = [page for plan in plans for page in getattr(plan, f"{side}_pages").tolist()]
        assert len(set(ids)) == len(ids) < getattr(plans[0], side).num_pages


@pytest.mark.parametrize("text", ["h2d:1024x4096", "d2h:64x256:4,h2d:2097152x16"])
def test_cases_are_read_as_they_are_written(text):
    assert ",".join(map(str, parse_cases(text))) == text


@pytest.mark.parametrize(
    "text", ["", "h2d", "up:64x1", "h2d:1000x1", "h2d:64", "h2d:64x3", "h2d:64x1:5", "h2d:-64x1"]
)
def test_a_case_outside_the_grid_is_refused(text):
    with pytest.raises(ArgumentError, match="--cases"):
        parse_cases(text)


def test_the_space_holds_every_choice_that_a_table_may_make():
    every = points(132, lambda path: True)
    assert len(set(every)) == len(every)
    assert [point.block_quota for point in every] == sorted(p.block_quota for p in every)
    assert {point.path for point in every} == set(SPACE)
    for point in every:
        allowed = SPACE[point.path]
        for name, value in (("block_quota", point.block_quota), *point.config):
            assert value in allowed[name]
    assert Point("ce", 0) in every
    assert Point("sm", 2) in every  # the default configuration is one of them
    quick = points(132, lambda path: path != "tma", quick=True)
    assert set(quick) < set(every)
    assert {point.path for point in quick} == set(SPACE) - {"tma"}
    assert max(point.block_quota for point in points(6, lambda path: True)) == 6


def report(registers: int = 64, spills: int = 0, shared: int = 0) -> Report:
    return Report("k", "sm_90", registers, spills, shared, {}, {}, True, 0, {})


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (report(), True),
        (None, True),
        (report(spills=8), False),
        (report(registers=129), False),  # of 512 threads
        (report(registers=128), True),
        (report(shared=228 << 10), False),
        (PathUnavailable("tma", "no box", remedy="none"), False),
    ],
)
def test_what_the_compiler_rules_out_is_never_timed(told, kept):
    compiled = []

    def compile_point(point, part, target):
        compiled.append((point, target))
        if isinstance(told, Exception):
            raise told
        return told

    parts = Case("h2d", 1024, 256).part_plan().parts
    candidates = [Point("sm", quota, (("num_warps", 16), ("loads", 8))) for quota in (1, 2, 4)]
    assert prune(candidates, parts, "sm_90", compile_point) == (candidates if kept else [])
    assert compiled == [(candidates[0], "sm_90")]  # once for all quotas


@pytest.mark.aot
def test_the_compilers_report_decides_for_real():
    parts = Case("h2d", 1024, 256).part_plan().parts
    fits, spills = (Point("sm", 2, (("num_warps", n), ("loads", 32))) for n in (8, 32))
    assert prune([fits, spills, Point("ce", 0)], parts, "sm_90") == [fits, Point("ce", 0)]
    ring = Point("tma", 2, (("buffers", 12),))
    assert prune([ring], parts, "sm_90") == [ring]
    assert prune([ring], parts, "sm_80") == []


def test_in_flight_bytes_bound_the_prediction():
    point = Point("sm", 2, (("num_warps", 16), ("loads", 16)))
    in_flight = bytes_in_flight(point, 16)
    assert in_flight == bytes_in_flight(Point("sm", 2), 16) == 128 << 10
    assert bytes_in_flight(point, 16, warp_size=64) == 256 << 10
    assert bytes_in_flight(Point("tma", 1, (("buffers", 4),)), 16) == 64 << 10
    assert bytes_in_flight(Point("ce", 0), 16) is None
    rate = littles_law(point, 1 << 30, in_flight, 2.4e-6, 1000.0)
    assert rate == pytest.approx(2 * 131072 / 2.4e-6 / 1e9)
    assert littles_law(point, 1 << 30, in_flight, 2.4e-6, 55.0) == 55.0
    assert littles_law(point, 64, in_flight, 1e-6, 55.0) == pytest.approx(0.064)
    assert littles_law(point, 64, None, 1e-6, 55.0) is None


def test_the_target_is_the_gpus_own():
    assert target_of(GPU) == "sm_90"


def test_a_chain_visits_every_link_once_and_returns():
    links = chain(4096, 32, np.random.default_rng(0))
    at, seen = 0, []
    for _ in range(128):
        seen.append(at)
        at = int(links[at])
    assert at == 0
    assert sorted(seen) == list(range(0, 4096, 32))
    steps = np.diff(seen)
    assert np.unique(steps).size > 32  # not a stride that a prefetcher could guess
    assert links.dtype == np.int64
