"""`perf replay` and `perf matrix`: known answers, verified bytes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hikv.cli import main as hikv
from hikv.errors import ArgumentError, CapacityError, HikvError
from perf.__main__ import main
from perf.player import Player
from perf.replay import replay
from perf.sharded import compare, scratch_pages
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


def test_an_id_behind_another_prefix_is_another_page() -> None:
    made = workload([1, 1], [2, 1], [1, 1], [2, 1])
    assert made.blocks == 4
    assert replay(made, 0)["hits"] == 4


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
    player._rows[0][1, 0] ^= 1
    with pytest.raises(HikvError, match="rank 0: 1 of 2 reused pages hold other bytes"):
        player.play()
    player.caches[0].close()


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
        (b"\xff\xfe\n", "line 1"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [1e9]}\n', "line 1.*is no id"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": "12"}\n', "line 1.*is no id"),
        (
            '{"timestamp": 0, "input_length": 9, "hash_ids": [9223372036854775808]}\n',
            "line 1.*is no id",
        ),
        ('{"timestamp": 0, "input_length": Infinity, "hash_ids": [1]}\n', "line 1.*infinity"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}\n', "one size"),
        ("", "one size"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text: str | bytes, message: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=message):
        read_trace(trace)


BACK_AND_FORTH = workload([1, 2, 3], [4, 5, 6], [1, 2, 3])
SETTINGS = {"eviction": "lru", "granularity": "segment", "write_policy": "write_through"}


def test_sharding_turns_hits_of_the_host_into_hits_of_the_gpu() -> None:
    """Three pages a GPU. Replicated, the second prompt pushes out the first, which comes back from
    the host; sharded, two GPUs hold both. Either way three of nine pages are reused."""
    row = compare(BACK_AND_FORTH, 3, 2, 1.0, SETTINGS)
    replicated, sharded = row["replicated"], row["sharded"]
    figures = ("gpu_hit_tokens", "host_served_tokens", "hit_tokens", "backed_up_tokens")
    assert [replicated[name] for name in figures] == [0, 3 * 64, 3 * 64, 6 * 64]
    assert [sharded[name] for name in figures] == [3 * 64, 0, 3 * 64, 6 * 64]
    assert (row["ranks"], row["capacity"], row["host_pages"]) == (2, 3, 3)
    assert row["difference"] == {
        "gpu_hit_rate_points": pytest.approx(100 / 3),
        "hit_rate_points": 0.0,
        "gpu_hit_tokens_percent": None,
        "host_served_tokens_percent": -100.0,
        "hit_tokens_percent": 0.0,
    }


def test_both_ways_have_the_same_host_memory() -> None:
    """Four prompts of three pages, one GPU's worth each; hosts of two ranks hold two prompts."""
    made = workload([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [7, 8, 9])
    row = compare(made, 3, 2, 1.0, SETTINGS)
    assert row["replicated"]["host_served_tokens"] == 3 * 64
    assert row["sharded"]["gpu_hit_tokens"] == 3 * 64
    row = compare(workload([1, 2, 3], *([n, n, n] for n in range(4, 9)), [1, 2, 3]), 3, 2, 1.0, {})
    assert row["replicated"]["hit_tokens"] == row["sharded"]["hit_tokens"] == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_ranks_in_lock_step_keep_the_same_books(policy: str, num_ranks: int) -> None:
    """Under pressure, with splits, and every reused byte compared on its owner."""
    made = workload(*([n % 5, 10 + n % 3, 20 + n % 7, 30 + n] for n in range(60)))
    settings = SETTINGS | {"write_policy": policy}
    for capacity, ratio in ((2, 0.5), (3, 2.0), (2, 4.0)):
        row = compare(made, capacity * num_ranks, num_ranks, ratio, settings)
        again = compare(made, capacity * num_ranks, num_ranks, ratio, settings)
        assert row == again, "hits depend on no timing"
        assert row["sharded"]["gpu_hit_tokens"] >= row["replicated"]["gpu_hit_tokens"]
        player = Player(made, 4, ratio, settings, num_ranks=num_ranks)
        found = player.play()
        player.finish()
        assert found["hits"] == found["device_hits"] + found["loaded"]
        assert found["evicted_device"] > 0


def test_a_sharded_rank_pays_for_its_scratch_and_keeps_its_host_memory() -> None:
    """With one page less on each GPU the two prompts of three pages no longer fit side by side."""
    row = compare(BACK_AND_FORTH, 3, 2, 1.0, SETTINGS, scratch=1)
    assert (row["scratch_pages"], row["host_pages"]) == (1, 3)
    assert row["sharded"]["gpu_hit_tokens"] == 0
    assert row["sharded"]["host_served_tokens"] == 3 * 64
    assert scratch_pages(make_workload("A"), 61) == 2, "2 of 61 layers of 38 pages"
    with pytest.raises(CapacityError, match="the longest request and the scratch: needs 5"):
        compare(BACK_AND_FORTH, 3, 2, 1.0, SETTINGS, scratch=3)


def test_one_rank_is_the_same_both_ways() -> None:
    row = compare(BACK_AND_FORTH, 3, 1, 2.0, SETTINGS)
    assert row["replicated"] == row["sharded"]


def test_a_rank_that_differs_is_named() -> None:
    player = Player(BACK_AND_FORTH, 3, 0.0, {}, num_ranks=2)
    player.caches[1].acquire("stranger", [])
    player.caches[1].allocate("stranger", 1)
    with pytest.raises(HikvError, match="request 0: the page table on rank 1 is not that on rank"):
        player.play()


def test_a_wrong_byte_is_found_on_its_owner() -> None:
    player = Player(workload([1, 2]), 4, 0.0, {}, num_ranks=2)
    player.play()
    player._rows[1][0, 0] ^= 1
    with pytest.raises(HikvError, match=r"rank 1: 1 of 2 .* the first is page 1 of the prompt"):
        player.play()


def test_the_comparison_as_json_and_as_tables_that_say_what_is_simulated(tmp_path, capsys) -> None:
    options = ["replay", "A", "--capacity", "100,300", "--host-ratio", "1", "--cp", "4"]
    assert main([*options, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["capacity"], row["host_pages"]) for row in rows] == [(100, 100), (300, 300)]
    for row in rows:
        for kind in ("replicated", "sharded"):
            assert row[kind]["requests"] == 400
            assert row[kind]["prompt_tokens"] == 400 * 36 * 64
            assert row[kind]["hit_tokens"] == 399 * 32 * 64
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "A on 4 ranks: 400 requests" in out
    assert "one process" in out
    assert "nothing is timed" in out
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cp.png"
    assert main([*options, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_request_that_does_not_fit_is_refused_before_the_first_is_played() -> None:
    made = workload([1], [1, 2, 3])
    with pytest.raises(CapacityError, match=r"longest request .*: needs 3 pages, 2 available"):
        Player(made, 2, 0.0, {})
    Player(made, 2, 0.0, {}, num_ranks=2).finish()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "A", "--capacity", "-5"], "argument --capacity: expected whole numbers from 0"),
        (["replay", "A", "--capacity", "nan"], "argument --capacity: expected whole numbers from"),
        (["replay", "A", "--capacity", "1" * 20], "host memory: needs"),
        (["replay", "A", "--capacity", "20", "--cp", "2"], "needs 38 pages, 20 available; raise"),
        (["replay", "A", "--prefill-rate", "0"], "argument --prefill-rate: expected a finite num"),
        (["replay", "A", "--h2d-gbps", "nan"], "argument --h2d-gbps: expected a finite number"),
        (["replay", "A", "--plot", "/nowhere/a.png"], "--plot: expected a file in a folder that"),
        (["replay", "A", "--plot", "a.jpog"], "--plot: expected a name that ends in one of"),
        (["replay", "A", "--plot", "picture"], "--plot: expected a name that ends in one of"),
        (["matrix", "--sets", "A,X"], "argument --sets: expected shared-prefix, A, B, C, E, got"),
        (["matrix", "--gpu-share", "inf"], "argument --gpu-share: expected a finite number"),
    ],
)
def test_what_could_not_be_played_is_refused_first(arguments, words, capsys) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    try:
        code = main(arguments)
    except SystemExit as refusal:  # as argparse ends a program
        code = refusal.code
    printed = capsys.readouterr()
    assert code == 2
    assert words in printed.err
    assert printed.out == ""


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
    titles, (*_, backed_up, loaded, _, _, _, _) = (line.split() for line in out.splitlines()[3:5])
    assert titles[-9:-4] == ["backed", "up", "loaded", "L1", "L2"]
    row = replay(make_workload("C"), 2000, host_ratio=2.0)
    assert (backed_up, loaded) == (f"{row['backed_up']:,}", f"{row['loaded']:,}")
    assert row["loaded"] > 0
    assert main(["replay", "no such file"]) == 2


def test_the_help_shows_a_trace_and_each_made_workload(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        hikv(["replay", "--help"])
    told = capsys.readouterr().out
    (example,) = (line for line in told.splitlines() if line.startswith('  {"timestamp"'))
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{example}\n")
    read = read_trace(file)
    assert (read.block_tokens, read.arrivals) == (512, [Arrival([46, 47, 2353], (), 27482.0)])
    for name, what in WORKLOADS.items():
        assert f"\n  {name:<15}{what}\n" in told
    words = " ".join(told.split())
    assert "host pages a GPU page; default 0: no host tier, where a cache's own is 2" in words


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
