"""`perf replay` and `perf matrix`: known answers, verified bytes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hikv.cli import main as hikv
from hikv.errors import ArgumentError, CapacityError, HikvError
from perf.__main__ import main
from perf.replay import Player, replay
from perf.traces import WORKLOADS, Arrival, Workload, make_workload, read_trace

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
PUBLISHED = {
    "conversation_trace": [
        (0, "segment", 105_710),
        (1_000, "segment", 12_831),
        (1_000, "page", 12_847),
        (10_000, "segment", 60_921),
        (10_000, "page", 61_046),
        (30_000, "segment", 93_967),
        (30_000, "page", 93_978),
        (50_000, "segment", 102_290),
        (100_000, "segment", 104_924),
    ],
    "agentic_coding_trace": [
        (0, "segment", 460_358),
        (10_000, "page", 427_431),
        (30_000, "page", 455_718),
        (50_000, "page", 460_102),
    ],
}
"""Hits of three separately written programs on two public traces."""


def workload(*prompts: list[int], block_tokens: int = 64) -> Workload:
    return Workload("made", block_tokens, [Arrival(prompt) for prompt in prompts])


QUICK = {("conversation_trace", 0), ("conversation_trace", 1_000), ("agentic_coding_trace", 10_000)}


@pytest.mark.parametrize(
    ("name", "capacity", "granularity", "hits"),
    [
        pytest.param(name, *row, marks=[] if (name, row[0]) in QUICK else pytest.mark.full)
        for name, rows in PUBLISHED.items()
        for row in rows
    ],
)
def test_the_hits_of_public_traces(name: str, capacity: int, granularity: str, hits: int) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("the traces are not shipped with this repository")
    row = replay(read_trace(path), capacity, granularity=granularity)
    assert row["hits"] == hits
    assert row["touches"] == {"c": 288_500, "a": 522_502}[name[0]]


def test_hits_of_a_trace_worked_out_by_hand() -> None:
    """Three pages: the second request reuses two, the third evicts, the fourth finds nothing."""
    made = workload([1, 2], [1, 2, 3], [7, 8], [1, 2, 3])
    row = replay(made, 3)
    assert (row["touches"], row["hits"], row["requests"]) == (10, 2, 4)
    assert row["dropped"] == row["evicted_device"] == 5
    assert replay(made, 0)["hits"] == 5
    assert replay(made, 3, granularity="page")["hits"] == 3, "only page 3 and 2 made room"


def test_the_host_brings_back_what_the_gpu_lost() -> None:
    row = replay(workload([1, 2, 3], [4, 5, 6], [1, 2, 3]), 3, host_ratio=2.0)
    assert (row["hits"], row["device_hits"], row["loaded"]) == (3, 0, 3)
    assert (row["backed_up"], row["evicted_device"], row["dropped"]) == (6, 6, 0)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_any_policy_and_any_size_reuses_right_bytes(policy: str) -> None:
    made = workload(*([n % 5, 10 + n % 3, 20 + n % 7, 30 + n] for n in range(60)))
    most = replay(made, 0)["hits"]
    for capacity, ratio in ((4, 0.5), (6, 2.0), (9, 4.0)):
        row = replay(made, capacity, host_ratio=ratio, write_policy=policy)
        assert 0 <= row["device_hits"] <= row["hits"] <= most
        assert row["hits"] == row["device_hits"] + row["loaded"]


def test_a_wrong_byte_is_found() -> None:
    player = Player(workload([1, 2]), 4, 0.0, {})
    player.play()
    player._rows[1, 0] ^= 1
    with pytest.raises(HikvError, match="1 of 2 reused pages hold other bytes"):
        player.play()
    player.cache.close()


def test_outputs_are_cached_with_their_prompts() -> None:
    made = Workload("made", 64, [Arrival([1, 2], [3]), Arrival([1, 2, 3, 4])])
    assert replay(made, 8)["hits"] == 3


def test_made_workloads_have_the_shapes_they_promise() -> None:
    shared = make_workload("shared-prefix")
    assert len(shared.arrivals) == 32 * 86
    final = shared.arrivals[-1]
    assert (len(final.prompt) + len(final.output)) * 64 == 32_768 + 86 * 1_536
    assert {len(a.output) * 64 for a in shared.arrivals} == {512}
    # Four prefixes of 512 blocks are shared; all else is new once.
    assert shared.blocks == 4 * 512 + 32 * 86 * 24
    for name in WORKLOADS:
        assert make_workload(name) == make_workload(name)


@pytest.mark.parametrize(
    ("lengths", "block"),
    [([(1000, 2), (512, 1), (513, 2)], 512), ([(130, 2), (191, 2), (640, 10)], 64)],
)
def test_the_size_of_a_block_follows_from_the_lengths(tmp_path, lengths, block) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": n, "hash_ids": list(range(ids))}) + "\n"
            for n, ids in lengths
        )
    )
    assert read_trace(trace).block_tokens == block


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "line 1"),
        ("not json\n", "line 1"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}\n', "one size"),
        ("", "one size"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text: str, message: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_trace(trace)


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError):
        replay(workload([1, 2, 3]), 2)


def test_json_is_one_object_a_capacity(capsys) -> None:
    assert main(["replay", "A", "--capacity", "500,0", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["capacity"] for row in rows] == [500, 0]
    assert rows[1]["hits"] == 399 * 32
    assert {row["requests"] for row in rows} == {400}
    assert {row["touches"] for row in rows} == {400 * 36}
    # 4 blocks of 64 tokens to compute, and once the 32 shared ones, at 20,000 tokens a second.
    assert rows[1]["estimated_ttft_ms"] == pytest.approx(1e3 * (400 * 4 + 32) * 64 / 2e4 / 400)


def test_the_console_script_replays(capsys) -> None:
    assert hikv(["replay", "C", "--capacity", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == 0


def test_the_table_says_that_times_are_estimates(capsys) -> None:
    assert main(["replay", "C", "--capacity", "2000", "--host-ratio", "2"]) == 0
    out = capsys.readouterr().out
    assert "Estimated, not measured" in out
    assert "write_through" in out
    assert main(["replay", "no such file"]) == 2


def test_the_matrix_has_two_rounds_of_each_configuration(capsys) -> None:
    assert main(["matrix", "--sets", "C", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["round"] for row in rows] == [1, 2] * 4
    off, tiered = rows[1], rows[7]
    assert off["configuration"] == "off"
    assert (off["loaded"], off["backed_up"]) == (0, 0)
    assert tiered["loaded"] > 0, "two groups in turn: what L1 lost comes back from L2"
    assert tiered["hits"] > off["hits"]


def test_a_picture_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    assert main(["replay", "A", "--capacity", "500,1000,0", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
