"""Metrics: the text format parsed back, sums exact under threads. Explanations that add up."""

from __future__ import annotations

import math
import re
import sys
import threading
import time

import pytest

from hikv.cache.explain import REASONS, TTFT_TERMS, Explanation, TtftSplit
from hikv.cache.metrics import HOPS, SECONDS, Counter, Histogram, Metrics
from hikv.errors import ArgumentError

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text)


def parse(text: str) -> tuple[dict, dict]:
    """(name, labels) → value and name → type, by the rules of the text format alone."""
    assert text.endswith("\n")
    samples, kinds, helped = {}, {}, set()
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            assert family not in helped
            helped.add(family)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert name in [family + suffix for suffix in suffixes]
            found = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            key = (name, tuple(sorted((k, unescape(v)) for k, v in found)))
            assert key not in samples
            samples[key] = float(value)
    return samples, kinds


def test_every_series_is_there_from_the_start_with_value_zero():
    samples, kinds = parse(Metrics().render())
    assert set(samples.values()) == {0.0}
    for name, kind in kinds.items():
        assert name.startswith("hikv_")
        assert name.endswith("_total") is (kind == "counter") or name == "hikv_total_pages"
    assert {
        dict(labels)["hop"] for name, labels in samples if name == "hikv_copied_bytes_total"
    } == (set(HOPS))


def test_what_is_counted_is_read_back():
    metrics = Metrics()
    metrics.storage_queried_tokens.add(1024)
    metrics.copied_bytes["backup"].add(2**60 + 1)
    metrics.evicted_pages["host"].add()
    metrics.used_pages["device"].set(17)
    metrics.used_pages["device"].set(16)
    metrics.tpot.observe(0.25)
    text = metrics.render()
    samples, kinds = parse(text)
    assert samples["hikv_storage_queried_tokens_total", ()] == 1024
    assert f'hikv_copied_bytes_total{{hop="backup"}} {2**60 + 1}\n' in text  # no digit lost
    assert samples["hikv_evicted_pages_total", (("tier", "host"),)] == 1
    assert samples["hikv_used_pages", (("tier", "device"),)] == 16
    assert samples["hikv_tpot_seconds_sum", ()] == 0.25
    assert kinds["hikv_used_pages"] == "gauge"
    assert kinds["hikv_tpot_seconds"] == "histogram"


def test_a_value_on_a_bound_is_within_it_and_buckets_are_cumulative():
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        histogram.observe(value)
    assert list(histogram.samples()) == [
        ("_bucket", 'le="1"', 2),
        ("_bucket", 'le="10"', 4),
        ("_bucket", 'le="+Inf"', 5),
        ("_sum", "", 24.0),
        ("_count", "", 5),
    ]
    assert (histogram.count, histogram.sum) == (5, 24.0)


def test_the_time_bounds_print_as_short_decimals():
    assert SECONDS[:4] == (0.0001, 0.00025, 0.0005, 0.001)
    assert SECONDS[-1] == 50
    assert all(len(repr(bound)) <= 7 for bound in SECONDS)
    assert list(SECONDS) == sorted(set(SECONDS))


def test_labels_go_on_every_sample_and_are_escaped():
    value = 'a\\b"c\nd'
    samples, _ = parse(Metrics({"rank": "3", "model": value}).render())
    assert all(("rank", "3") in labels and ("model", value) in labels for _, labels in samples)


def test_what_a_series_cannot_hold_is_refused():
    metrics = Metrics()
    for amount in (-1, math.nan):
        with pytest.raises(ArgumentError, match="amount"):
            metrics.requests.add(amount)
    with pytest.raises(ArgumentError, match="value"):
        metrics.ttft.observe(math.nan)
    with pytest.raises(ArgumentError, match="one of device, host") as refusal:
        metrics.matched_tokens["gpu"].add()
    assert refusal.value.argument == "tier"
    assert set(parse(metrics.render())[0].values()) == {0.0}


@pytest.fixture
def eager_switching():
    """Threads that give way to each other every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Slow(float):
    """An amount whose addition lets other threads run in its middle."""

    def __radd__(self, other):
        time.sleep(0)
        return other + float(self)


def test_no_count_is_lost_between_threads_and_every_scrape_is_whole(eager_switching):
    counter, histogram, each, threads = Counter(), Histogram((1, 2)), 1_000, 4
    finished = threading.Event()
    torn: list[list] = []

    def count() -> None:
        for i in range(each):
            counter.add(Slow(2))
            histogram.observe(Slow(i % 3 + 0.5))

    def scrape() -> None:
        while not finished.wait(0.0001):
            samples = list(histogram.samples())
            low, middle, high, total, number = (value for _, _, value in samples)
            # Of n values so far, their sum is fixed by the buckets they fell into.
            whole = 0.5 * low + 1.5 * (middle - low) + 2.5 * (high - middle)
            if number != high or total != whole:
                torn.append(samples)

    workers = [threading.Thread(target=count) for _ in range(threads)]
    scraper = threading.Thread(target=scrape)
    for thread in (scraper, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    finished.set()
    scraper.join()
    assert counter.value == 2 * each * threads
    assert histogram.count == each * threads
    assert not torn


# Explanations -------------------------------------------------------------------------------------

# 4096 tokens: 1024 on the GPU, 2048 on the host, 1024 in storage, room to load back 1536.
WORKED = {
    "rid": "r7",
    "page_size": 64,
    "prompt_len": 4096,
    "device_len": 1024,
    "host_len": 2048,
    "storage_len": 1024,
    "loaded_len": 1536,
    "reasons": ("gpu_quota",),
    "last_device_node": 3,
    "last_host_node": 9,
    "write_policy": "write_through",
    "prefetch_policy": "timeout",
}
MEASURED = TtftSplit(0.1, 0.02, 0.2, 0.03, 0.5, 0.01)


def test_the_worked_example_says_what_is_computed_and_why():
    explanation = Explanation(**WORKED, ttft=MEASURED)
    assert (explanation.extend_len, explanation.left_len) == (1536, 1536)
    text = str(explanation)
    for line in (
        r"request r7: 4096 tokens, page 64",
        r"L1 device_len +1024$",
        r"L2 host_len +2048$",
        r"L3 storage_len +1024$",
        r"loaded_len +1536$",
        r"extend_len +1536  1536 of them held below: this step's GPU quota is used up$",
        r"nodes +device 3, host 9$",
        r"policies +write write_through, prefetch timeout$",
        r"first token +0\.8600 s measured = scheduler_wait 0\.1000 \+ storage_query 0\.0200",
    ):
        assert re.search(line, text, re.MULTILINE), line


def test_the_six_terms_add_up_once_all_are_known():
    assert TTFT_TERMS == (
        "scheduler_wait", "storage_query", "prefetch", "load_back", "prefill", "sampling",
    )  # fmt: skip
    assert MEASURED.total == pytest.approx(0.86)
    assert MEASURED._replace(prefill=None).total is None
    text = str(Explanation(**WORKED, ttft=MEASURED._replace(prefill=None), estimated=True))
    assert "first token      ? s estimated" in text
    assert "prefill ?" in text
    assert "first token" not in str(Explanation(**WORKED))


def test_storage_that_nobody_asked_is_not_storage_that_holds_nothing():
    unasked = Explanation("r", 4, 48, 16, 16, loaded_len=16)
    assert unasked.storage_len is None
    assert "not asked" in str(unasked)
    assert unasked.extend_len == 16
    assert "no tier holds them" in str(unasked)
    assert "compare namespace, salt and page size" in str(Explanation("r", 4, 48, 0, storage_len=0))
    assert "compare namespace" not in str(Explanation("r", 64, 48, 0))  # less than a page


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"device_len": 4097}, "device_len"),
        ({"device_len": -1}, "device_len"),
        ({"host_len": 3073}, "host_len"),
        ({"storage_len": 1025}, "storage_len"),
        ({"loaded_len": 3073}, "loaded_len"),
        ({"loaded_len": -1}, "loaded_len"),
        ({"reasons": ()}, "reasons"),
        ({"reasons": ("bad_luck",)}, "reasons"),
        ({"loaded_len": 3072}, "reasons"),
    ],
)
def test_lengths_that_cannot_be_and_missing_reasons_are_refused(change, argument):
    with pytest.raises(ArgumentError) as refusal:
        Explanation(**{**WORKED, **change})
    assert refusal.value.argument == argument


def test_each_reason_is_said_in_words():
    for reason, words in REASONS.items():
        assert words in str(Explanation(**{**WORKED, "reasons": (reason,)}))


def test_a_request_is_counted_once_by_tier_and_term():
    metrics = Metrics()
    metrics.record(Explanation(**WORKED, ttft=MEASURED))
    metrics.record(Explanation(**WORKED, ttft=MEASURED._replace(storage_query=None)))
    metrics.record(Explanation(**WORKED, ttft=MEASURED, estimated=True))
    samples, _ = parse(metrics.render())
    assert samples["hikv_requests_total", ()] == 3
    assert samples["hikv_prompt_tokens_total", ()] == 3 * 4096
    assert samples["hikv_matched_tokens_total", (("tier", "device"),)] == 3 * 1024
    assert samples["hikv_matched_tokens_total", (("tier", "host"),)] == 3 * 2048
    assert samples["hikv_loaded_tokens_total", ()] == 3 * 1536
    assert samples["hikv_extend_tokens_total", ()] == 3 * 1536
    counts = {
        term: samples["hikv_ttft_term_seconds_count", (("term", term),)] for term in TTFT_TERMS
    }
    assert counts == {term: 1 if term == "storage_query" else 2 for term in TTFT_TERMS}
    assert samples["hikv_ttft_seconds_count", ()] == 1  # a sum with an unknown part is no sum
