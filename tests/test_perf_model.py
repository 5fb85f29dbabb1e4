"""The model against the figures it is fitted to, and against those it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_machine import GPU

from perf.case import HEADS, head_grids
from perf.model import (
    BASELINE_IN_FLIGHT,
    C2C,
    LAUNCH_SECONDS,
    PCIE5,
    engine_seconds,
    kernel_seconds,
    link_of,
    predict,
)
from perf.published import published, published_case

ROWS = [
    (heads, groups, direction, quota)
    for heads, groups in head_grids(HEADS)
    for direction in ("h2d", "d2h")
    for quota in (2, 32)
]


def test_two_ctas_with_16_kib_each_and_a_round_trip_of_2400_ns_give_13_7_gbps():
    assert BASELINE_IN_FLIGHT == 16384
    assert predict(PCIE5, "h2d", 2, 16384) == pytest.approx(2 * 16384 / 2.4e-6 / 1e9)
    assert predict(PCIE5, "h2d", 2, 16384) == pytest.approx(13.6, rel=0.01)
    assert predict(PCIE5, "d2h", 2, 16384) == pytest.approx(34.2, rel=0.01)
    assert predict(C2C, "h2d", 2, 65536) == pytest.approx(97, rel=0.01)
    assert predict(C2C, "d2h", 2, 65536) == pytest.approx(93, rel=0.01)


@pytest.mark.parametrize(("heads", "groups", "direction", "quota"), ROWS)
def test_every_published_figure_lies_within_15_percent_of_the_model(
    heads, groups, direction, quota
):
    figure = published(published_case(heads, groups), direction, quota)
    model = predict(PCIE5, direction, quota, BASELINE_IN_FLIGHT)
    assert 0.85 * model < figure < 1.05 * model


def test_the_link_is_the_bound_once_enough_bytes_are_in_flight():
    assert predict(PCIE5, "h2d", 32, 16384) == 50.6
    assert predict(PCIE5, "h2d", 2, 131072) == 50.6
    assert predict(PCIE5, "d2h", 2, 131072) == 52.5
    assert predict(PCIE5, "h2d", 32, 16384, ceiling=55.0) == 55.0
    assert predict(PCIE5, "h2d", 1, 16384, ceiling=5.0) == 5.0


def test_no_ceiling_exceeds_what_the_link_can_carry():
    assert PCIE5.theoretical == pytest.approx(63.0, abs=0.1)
    assert max(PCIE5.ceiling.values()) < PCIE5.theoretical


def test_the_link_follows_the_device():
    assert link_of(None) is PCIE5
    assert link_of(GPU) is PCIE5
    assert link_of(replace(GPU, link="c2c")) is C2C
    assert link_of(replace(GPU, link=None)) is None


def test_a_published_figure_belongs_to_exactly_its_case():
    case = published_case(8, 2)
    assert published(case, "h2d", 2) == 13.6
    assert published(case, "h2d", 4) is None
    assert published(replace(case, num_pages=31), "h2d", 2) is None
    assert published(replace(case, host_layout="page_first"), "h2d", 2) is None
    assert published(replace(case, spec=replace(case.spec, num_layers=60)), "h2d", 2) is None
    assert published(published_case(4, 2), "h2d", 2) is None


def test_short_copies_cost_a_descriptor_each_and_long_ones_the_link():
    # vLLM #48434, H100: 12,288 copies of 8 KiB at 15.0 GB/s, joined by 16 at 54.1 GB/s.
    nbytes = 12_288 * 8192
    apart, joined = (engine_seconds(PCIE5, "h2d", n, nbytes) for n in (12_288, 768))
    assert nbytes / apart / 1e9 == pytest.approx(15.0, rel=0.07)
    assert nbytes / joined / 1e9 == PCIE5.ceiling["h2d"]
    assert engine_seconds(PCIE5, "h2d", 1, 54_100_000, ceiling=54.1) == pytest.approx(1e-3)


def test_a_kernel_pays_once_for_its_launch():
    link = PCIE5.ceiling["d2h"] * 1e9
    assert kernel_seconds(PCIE5, "d2h", 32, 16384, 0) == LAUNCH_SECONDS
    assert kernel_seconds(PCIE5, "d2h", 32, 16384, int(link)) == pytest.approx(1 + LAUNCH_SECONDS)
    assert kernel_seconds(PCIE5, "h2d", 1, 2400, 10**9) == pytest.approx(1 + LAUNCH_SECONDS)


def test_many_copies_are_better_off_with_a_kernel_below_the_size_that_others_found():
    # vLLM hands copies of less than 28 KiB to a kernel from 16 on (H100, swap_blocks_triton.py).
    def faster(nbytes, count):
        engine = engine_seconds(PCIE5, "h2d", count, count * nbytes)
        return kernel_seconds(PCIE5, "h2d", 12, 16384, count * nbytes) < engine

    assert faster(20 << 10, 10_000)
    assert not faster(28 << 10, 10_000)
    assert not faster(1 << 10, 16)
    assert faster(1 << 10, 64)
