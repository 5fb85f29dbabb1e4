"""`perf gather`: real ranks, verified bytes, a ratio."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import ProcessContext

from hikv.errors import CapacityError, GatherError, Unavailable
from hikv.spec import KVSpec
from perf import gather, gather_ranks
from perf.gather_places import Host, Work, filled_pool, pattern
from perf.gather_ranks import beside, rank_row, summary
from perf.ranks import run_ranks


def parsed(*options):
    parser = argparse.ArgumentParser()
    gather.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    ("rows", "nbytes", "tokens", "pages"),
    [(("--mla", "576"), 576, "100", 7), (("--heads", "2"), 1024, "10", 1)],
    ids=["mla", "one page, so one rank has none"],
)
def test_a_small_run(tmp_path, capsys, rows, nbytes, tokens, pages):
    sizes = ("--ranks", "2", "--tokens", tokens, "--page", "16", "--layers", "3", "--rounds", "2")
    file = tmp_path / "gather.json"
    assert gather.run(parsed(*rows, *sizes, "--json", str(file))) == 0
    assert "host back end beside gloo" in capsys.readouterr().out
    result = json.loads(file.read_text())
    (row,) = result["tables"][0]["rows"]
    assert (row["ranks"], row["wrong bytes"], row["engine"]) == (2, 0, "CPU threads")
    assert row["ratio"] > 0
    assert row["layer MiB"] == pytest.approx(pages * 16 * nbytes / 2**20)


ROW = {
    "ranks": 2,
    "layer MiB": 1.0,
    "copies": 1,
    "backend": "host",
    "engine": "CPU threads",
    "own shard": None,
    "rival": "gloo",
    "waived": None,
    "kernels": None,
    "ratio": 1.0,
    "by owner": [[1.0, 2.0], [3.0, 4.0]],
    "wrong bytes": 0,
} | {f"{way}{part}": 1.0 for way in ("hikv", "gloo") for part in (" p10", "", " p90")}
ON_GPUS = ROW | {
    "backend": "p2p",
    "engine": "copy engine",
    "own shard": "in the peers' batch",
    "own shard gbps": {"in the peers' batch": 90.0, "in a batch beside it": 80.0},
    "rival": "nccl",
    "waived": "NCCL takes one GPU a rank",
    "kernels": [],
    "hikv gemm": 1.02,
}


def test_what_this_host_cannot_hold_is_refused_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr(gather, "run_ranks", lambda *started: pytest.fail("ranks were started"))
    with pytest.raises(CapacityError, match=r"host memory: needs .* pass fewer --tokens"):
        gather.run(parsed("--backend", "host", "--tokens", str(1 << 50)))


def told(monkeypatch, row):
    monkeypatch.setattr(gather, "measure_ranks", lambda work, n: row | {"ranks": n})


def test_a_wrong_byte_is_counted_and_fails_the_run(capsys, monkeypatch):
    told(monkeypatch, ROW | {"wrong bytes": 3})
    assert gather.run(parsed("--ranks", "2")) == 1
    assert "wrong bytes" in capsys.readouterr().out


def test_gpus_show_kernels_the_gemm_and_why_there_is_no_nccl(capsys, monkeypatch):
    told(monkeypatch, ON_GPUS)
    spec = KVSpec(1, 1, 8, 4, torch.uint8, latent=True)
    monkeypatch.setattr(gather, "work_of", lambda args, n: Work(spec, 64, 1, "p2p", (0, 0), 8))
    assert gather.run(parsed("--ranks", "2")) == 0
    out = capsys.readouterr().out
    for text in (
        "p2p back end beside nccl's all-gather, measured between GPUs",
        "waived, nccl with 2 ranks: NCCL takes one GPU a rank",
        "rank 0's own pages go in the peers' batch (GB/s: in the peers' batch 90.0, in a batch",
        "SM kernels",
        "1.020",
        "2 ranks, GB/s from each owner",
    ):
        assert " ".join(text.split()) in " ".join(out.split()), text
    told(monkeypatch, ON_GPUS | {"kernels": ["a_kernel"]})
    assert gather.run(parsed("--ranks", "2")) == 1
    assert "SM KERNELS, 2 ranks: a_kernel" in capsys.readouterr().out


def test_ranks_that_were_refused_have_a_reason_and_no_figure(capsys, monkeypatch):
    told(monkeypatch, {"refused": "rank 0: no peers"})
    assert gather.run(parsed("--ranks", "2")) == 1
    assert "waived, 2 ranks: rank 0: no peers" in capsys.readouterr().out


def test_a_back_end_of_gpus_needs_one(monkeypatch):
    monkeypatch.setattr(gather, "device_info", lambda: None)
    monkeypatch.setattr(gather, "probe_failure", lambda: "no GPU")
    with pytest.raises(Unavailable, match=r"^back end 'p2p' is unavailable: no GPU"):
        gather.run(parsed("--backend", "p2p"))


def test_a_picture_can_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    told(monkeypatch, ROW)
    file = tmp_path / "gather.svg"
    assert gather.run(parsed("--plot", str(file))) == 0
    assert "gloo, GB/s a rank" in file.read_text()


class Watched(Host):
    """A CPU that passes for a GPU: it tells of kernels, and its GEMMs take told times."""

    rival, why, seen = "nccl", None, ()

    def __init__(self, rank, work):
        pass

    def obstacle(self):
        return self.why

    def kernels(self, run):
        run()
        return list(self.seen)

    def compute(self, repeats, run):
        if run is None:
            return 0.01 * repeats
        run()
        return 0.015 * repeats


class OneGpu(Watched):
    why, seen = "NCCL takes one GPU a rank", ("a_kernel",)


SPEC = KVSpec(3, 1, 40, 4, torch.uint8, latent=True)
WORK = Work(SPEC, tokens=90, rounds=2, gpus=(0, 0), gemm=8, seconds=120.0)


def on_two_kinds(rank, num_ranks):
    """The rows of two ranks, where there is a rival and where there is none."""
    rows = []
    for kind in (Watched, OneGpu):
        gather_ranks.Gpu = kind
        rows.append(rank_row(rank, num_ranks, WORK))
    rows.append(rank_row(rank, num_ranks, replace(WORK, backend="p2p")))
    return rows


def test_what_ranks_on_gpus_do_but_for_the_gpu():
    free, shared, refused = run_ranks(on_two_kinds, 2, 120.0)
    assert free["wrong bytes"] == shared["wrong bytes"] == 0
    assert (free["kernels"], shared["kernels"]) == ([], ["a_kernel"])
    assert free["layer MiB"] == 23 * 160 / 2**20
    for row in (free, shared):
        assert row["hikv gemm"] == pytest.approx(1.5)
        assert np.shape(row["by owner"]) == (2, 2)
    assert free["nccl gemm"] == pytest.approx(1.5)
    assert free["ratio"] > 0
    assert shared["waived"] == "NCCL takes one GPU a rank"
    assert not {"nccl", "nccl gemm", "ratio"} & shared.keys()
    assert refused["refused"].startswith("back end 'p2p' cannot serve the group (rank 0: its pool")


def sleep(rank, num_ranks):
    time.sleep(60)


def test_ranks_do_not_outlive_their_time():
    with pytest.raises(GatherError, match="the ranks did not end within 1 s"):
        run_ranks(sleep, 2, 1.0)
    assert multiprocessing.active_children() == []


def test_ranks_do_not_outlive_an_interrupt(monkeypatch):
    def interrupt(self, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessContext, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(sleep, 1, 60.0)
    assert multiprocessing.active_children() == []


def test_pages_differ_by_owner_number_layer_and_kind():
    device = torch.device("cpu")
    told = {
        (owner, page, layer, kv): bytes(pattern(owner, [page], layer, kv, 37, device)[0])
        for owner in range(3)
        for page in (0, 1, 70_000)
        for layer in range(3)
        for kv in range(2)
    }
    assert len(set(told.values())) == len(told)
    assert {len(text) for text in told.values()} == {37}


def test_a_wrong_byte_of_a_batch_is_seen():
    place = Host()
    pool = filled_pool(SPEC, 5, 1, place)
    expected = pattern(1, np.arange(5), 2, 0, 160, place.device)
    assert torch.equal(pool.logical(range(5))[:, 2].reshape(5, -1), expected)


def test_the_slowest_rank_and_the_slowest_gemm_count():
    mine = {"wrong": 1, "kernels": ["b"], "seconds": {"hikv": [1.0, 1.0], "nccl": [4.0, 4.0]}}
    mine |= {"by owner": [1.0, 2.0], "gemm": {"hikv": 1.1, "nccl": 1.2}}
    other = {"wrong": 2, "kernels": ["a", "b"], "seconds": {"hikv": [2.0, 2.0], "nccl": [1.0, 1.0]}}
    other |= {"by owner": [4.0, 1.0], "gemm": {"hikv": 1.3, "nccl": 1.0}}
    plans = [type("Plan", (), {"gathered_pages": pages}) for pages in (2, 3)]
    row = summary([mine, other], 8 * 10**9, "nccl", plans, SPEC)
    assert (row["wrong bytes"], row["kernels"]) == (3, ["a", "b"])
    assert (row["hikv"], row["nccl"], row["ratio"]) == (4.0, 2.0, 2.0)
    assert (row["hikv gemm"], row["nccl gemm"]) == (1.3, 1.2)
    page = SPEC.bytes_per_page / 1e9
    assert row["by owner"] == [
        [pytest.approx(2 * page), pytest.approx(1.5 * page)],
        [pytest.approx(0.5 * page), pytest.approx(3 * page)],
    ]


def test_every_rank_makes_as_many_batches_beside_the_gemm():
    made = []

    class Alone:
        def exchange(self, value):
            return [value, value and {name: count + 2 for name, count in value.items()}]

    class Place(Watched):
        def compute(self, repeats, run):
            made.clear()
            return super().compute(repeats, run)

    place = Place(0, WORK)
    ways = {"hikv": lambda: made.append(1)}
    assert beside(place, Alone(), ways, {"hikv": 0.01}) == {"hikv": pytest.approx(1.5)}
    # Five GEMMs of 10 ms; as long and a quarter more take seven batches, one to spare, two more.
    assert len(made) == 7 + 1 + 2


def test_ranks_are_whole_numbers():
    with pytest.raises(SystemExit):
        parsed("--ranks", "2,x")
