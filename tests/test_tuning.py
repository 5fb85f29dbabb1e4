"""Tuned tables: which entry speaks for a plan, which tables are believed, what is never done."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_machine import GPU
from hypothesis import given
from hypothesis import strategies as st

from hikv import ArgumentError, KVBuffer, KVSpec, device, plan_transfer, tables, transfers, tuning
from hikv.kernels.relayout import PATH as REGISTERS
from hikv.kernels.relayout import default_config
from hikv.tables import HARD, SOFT, Entry, Key, Table, identity, read_table, write_table
from hikv.tuning import Choice, Tuned, choose, key_of, load, rounded_key

KEY = Key("h2d", 1024, 4096, 1024, 16)
CONFIG = {"num_warps": 8, "loads": 16, "streaming": 0}
ENTRY = Entry(KEY, "sm", 4, CONFIG, {"gbps": {"p50": 50.0}})


def table(*entries: Entry, **header) -> Table:
    return Table({**identity(GPU), **header}, {entry.key: entry for entry in entries or (ENTRY,)})


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / tables.file_name(GPU.name, GPU.num_sms)
    write_table(path, table())
    return path


def meta_plan(head_group: int | None = 4, pages=range(0, 64, 2)):
    """A plan from pinned memory to a GPU: 1 KiB runs with two groups of heads."""
    spec = KVSpec(6, 8, 128, 64, torch.bfloat16, head_group=head_group)
    host = torch.empty(64 * spec.bytes_per_page, dtype=torch.uint8)
    src = KVBuffer.from_tensor(host, spec, "page_first_direct_group", pinned=True)
    dst = KVBuffer.empty(spec, "layer_first", 64, device="meta")
    return plan_transfer(src, dst, np.arange(len(pages)), np.array(pages))


def chosen(
    plan,
    tuned,
    block_quota=None,
    path=None,
    serves=lambda path: True,
    piece_bytes=lambda path: None,
) -> Choice:
    return choose(
        plan,
        block_quota=block_quota,
        link_gbps=63.0,
        serves=serves,
        path=path,
        table=tuned,
        piece_bytes=piece_bytes,
    )


def test_a_table_survives_its_file_and_is_the_same_text_in_any_order(tmp_path):
    other = Entry(KEY._replace(num_runs=16), "ce", 0, {})
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_table(first, table(ENTRY, other))
    write_table(second, table(other, ENTRY))
    assert first.read_bytes() == second.read_bytes()
    assert read_table(first) == table(ENTRY, other)
    rows = [line for line in first.read_text().splitlines() if '"run_bytes"' in line]
    assert len(rows) == 2


@pytest.mark.parametrize("cut", [0, 1, 40, 400, -40, -3])
def test_a_half_written_table_is_reported_and_never_used(file, cut):
    file.write_bytes(file.read_bytes()[:cut])
    found = load([file], identity(GPU))
    assert found.tables == ()
    assert found.find(KEY) is None
    assert str(file) in found.notes[0]
    with pytest.raises(ArgumentError, match="tuned table"):
        read_table(file)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        '{"entries": []}',
        '{"header": 3, "entries": []}',
        '{"header": {}, "entries": [{}]}',
        "\xff",
    ],
)
def test_a_foreign_file_is_reported_and_never_used(file, text):
    file.write_bytes(text.encode("latin-1"))
    found = load([file], identity(GPU))
    assert found.tables == ()
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("direction", 3),
        ("run_bytes", "1024"),
        ("run_bytes", 0),
        ("layout_run", -64),
        ("num_runs", 3),
        ("num_runs", 1.5),
        ("vector_bytes", True),
        ("path", "warp"),
        ("block_quota", 5000),
        ("block_quota", 0),
        ("block_quota", True),
        ("block_quota", 8.0),
        ("config", {**CONFIG, "num_warps": 7}),
        ("config", {"num_warps": 8}),
        ("config", {**CONFIG, "block_quota": 4}),
        ("piece_bytes", "1 KiB"),
        ("config", {"stages": 3}),
        ("config", 5),
    ],
)
def test_a_choice_that_the_tuner_cannot_make_spoils_its_table(file, field, value):
    document = json.loads(file.read_text())
    document["entries"][0][field] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="tuned table"):
        read_table(file)


@pytest.mark.parametrize("name", HARD)
def test_another_machine_or_other_sources_are_a_miss(file, name):
    found = load([file], {**identity(GPU), name: "another"})
    assert found.find(KEY) is None
    assert f"{name} " in found.notes[0]
    assert "ignored" in found.notes[0]


@pytest.mark.parametrize("name", SOFT)
def test_another_driver_or_link_is_only_doubtful(file, name):
    found = load([file], {**identity(GPU), name: "another"})
    assert found.find(KEY) == (ENTRY, str(file))
    assert f"{name} " in found.notes[0]
    assert "stale" in found.notes[0]


def test_the_identity_follows_gpu_sources_and_space(monkeypatch, tmp_path):
    before = identity(GPU)
    assert identity(dataclasses.replace(GPU, name="other"))["name"] == "other"
    assert identity(dataclasses.replace(GPU, num_sms=16))["num_sms"] == 16
    monkeypatch.setitem(tables.SPACE, "ce", {"block_quota": (0, 1)})
    assert identity(GPU)["space"] != before["space"]
    sources = ("plan.py", "boxes.py", "shapes.py", "kernels/a.py")
    for name in sources:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    hashes = {tables.source_hash(tmp_path)}
    for name in sources:
        (tmp_path / name).write_text("2")
        hashes.add(tables.source_hash(tmp_path))
    assert len(hashes) == 5


SOURCE = '''"""A module
of two lines."""

import math  # for π

SIZE = 1
"""What a reader wants to know."""


class Way:
    """Empty but for this."""

    def go(self):
        # Why.
        return "# no comment" + f"{math.pi}#"  # in radians
'''


def test_words_about_the_code_do_not_make_it_another():
    code = tables.code_alone(SOURCE)
    assert code.splitlines() == [
        "import math",
        "SIZE = 1",
        "class Way:",
        "    def go(self):",
        '        return "# no comment" + f"{math.pi}#"',
    ]
    assert tables.code_alone(SOURCE.replace("Why.", "Because.").replace("two", "2")) == code
    assert tables.code_alone(SOURCE.replace("SIZE = 1", "SIZE = 2")) != code
    assert tables.code_alone(SOURCE.replace("# no comment", "# a comment")) != code


def test_a_form_feed_ends_no_line_of_code():
    source = "SIZE = 1\n\f\n# Why.\nWIDTH = 2\n"
    assert tables.code_alone(source).splitlines() == ["SIZE = 1", "WIDTH = 2"]


@pytest.mark.parametrize("file", sorted(Path(tables.__file__).parent.glob("kernels/*.py")))
def test_the_code_of_every_kernel_is_found(file):
    source = file.read_text(encoding="utf-8")
    code = tables.code_alone(source)
    assert tables.code_alone("# A remark.\n" + source) == code
    for line in code.splitlines():
        assert line in source
    assert code.count("def ") >= source.count("\ndef ")


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "d2h"},
        {"run_bytes": 4096},
        {"run_bytes": 256},
        {"num_runs": 32768},
        {"num_runs": 512},
        {"layout_run": 256},
        {"vector_bytes": 8},
        {"index_dtype": "int64"},
    ],
)
def test_a_change_of_any_key_field_misses(change):
    found = Tuned([(Path("t"), table())])
    assert found.find(KEY) == (ENTRY, "t")
    assert found.find(KEY._replace(**change)) is None


def test_the_nearest_entry_speaks_and_the_larger_copy_of_two_as_near():
    small, large = KEY._replace(num_runs=1024), KEY._replace(num_runs=16384)
    entries = [Entry(key, "sm", quota, {}) for key, quota in ((small, 1), (large, 8))]
    found = Tuned([(Path("t"), table(*entries))])
    assert found.find(KEY._replace(num_runs=2048))[0].block_quota == 1
    assert found.find(KEY)[0].block_quota == 8


def test_the_users_table_is_heard_before_the_shipped_one(tmp_path):
    own, shipped = tmp_path / "own.json", tmp_path / "shipped.json"
    far = Entry(Key("d2h", 64, 1, 64, 4), "ce", 0, {})
    write_table(own, table(dataclasses.replace(ENTRY, block_quota=8)))
    write_table(shipped, table(ENTRY, far))
    found = load([own, tmp_path / "none.json", shipped], identity(GPU))
    assert found.find(KEY)[0].block_quota == 8
    assert found.find(far.key) == (far, str(shipped))
    assert found.notes == ()


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 26))
def test_keys_are_powers_of_two_next_to_the_sizes(run, count):
    key = rounded_key("h2d", run, count, run, 16)
    assert key.run_bytes.bit_count() == key.num_runs.bit_count() == 1
    assert tuning.MIN_RUN_BYTES <= key.run_bytes <= tuning.MAX_RUN_BYTES
    assert key.run_bytes * key.num_runs <= tuning.MAX_COPY_BYTES
    if tuning.MIN_RUN_BYTES <= run <= tuning.MAX_RUN_BYTES:
        assert run * run <= 2 * key.run_bytes**2 <= 4 * run * run
    assert rounded_key(*key[:2], key.num_runs, key.layout_run, 16) == key


def test_a_plan_is_known_by_what_it_submits():
    assert key_of(meta_plan()) == Key("h2d", 1024, 65536, 1024, 16)
    # Whole layers of a page: scattered they are 128 KiB each; side by side they do not join,
    # since other layers lie between.
    assert key_of(meta_plan(None)).run_bytes == key_of(meta_plan(None)).layout_run == 131072
    spec = KVSpec(1, 1, 64, 16, torch.uint8, latent=True)
    src, dst = (KVBuffer.empty(spec, "layer_first", 16, device=d) for d in ("cpu", "meta"))
    joined = plan_transfer(src, dst, range(16), range(16))
    assert key_of(joined) == Key("h2d", 16384, 1, 1024, 16)


def test_a_tuned_plan_runs_as_the_table_says():
    plan = meta_plan()
    entry = dataclasses.replace(ENTRY, key=key_of(plan))
    found = Tuned([(Path("t.json"), table(entry))])
    assert chosen(plan, found) == Choice("sm", 4, "t.json", dict(ENTRY.config))
    assert chosen(plan, found, block_quota=7).block_quota == 7
    assert chosen(plan, found, path="sm") == chosen(plan, found)
    # What the table does not decide, or this machine cannot run.
    assert chosen(plan, found, path="tma") == Choice("tma", 2, "caller")
    assert chosen(plan, found, block_quota=0) == Choice("ce", 0, "caller")
    assert chosen(plan, found, serves=lambda path: path != "sm").source == "default"
    assert chosen(meta_plan(None), found).source == "default"
    assert chosen(plan, Tuned([])) == Choice("sm", 2, "default")


def test_a_bound_does_not_give_ctas_to_the_copy_engine():
    plan = meta_plan()
    found = Tuned([(Path("t"), table(Entry(key_of(plan), "ce", 0, {})))])
    assert chosen(plan, found, block_quota=7) == Choice("ce", 0, "t")


def test_without_a_kernel_a_table_still_says_which_way():
    plan = meta_plan()
    found = Tuned([(Path("t"), table(Entry(key_of(plan), "ce3d", 0, {})))])
    assert chosen(plan, found) == chosen(plan, found, block_quota=0) == Choice("ce3d", 0, "t")
    elsewhere = chosen(plan, found, block_quota=0, serves=lambda path: path != "ce3d")
    assert elsewhere == Choice("ce", 0, "caller")
    assert chosen(plan, Tuned([]), block_quota=0) == Choice("ce", 0, "caller")


def test_an_entry_does_not_speak_for_pieces_much_smaller_than_it_was_timed_with():
    plan = meta_plan()
    entry = Entry(key_of(plan), "ce3d", 0, {}, {"piece_bytes": 65536})
    found = Tuned([(Path("t"), table(entry))])
    for nbytes, path in ((65536, "ce3d"), (1 << 20, "ce3d"), (32768, "ce3d"), (32767, "sm")):
        assert chosen(plan, found, piece_bytes=lambda name, n=nbytes: n).path == path
    assert chosen(plan, found, piece_bytes=lambda name: None).path == "ce3d"
    staged = Entry(key_of(plan), "staged", 4, {}, {"piece_bytes": 65536})
    found = Tuned([(Path("t"), table(staged))])
    few = chosen(plan, found, path="staged", piece_bytes=lambda name: 1)
    assert (few.path, few.block_quota) == ("staged", 4)  # the caller's own choice stands


def test_the_fields_of_an_entry_make_the_kernels_config():
    config = REGISTERS.config(**{"num_warps": 8, "loads": 16})
    assert (config.num_warps, config.loads) == (8, 16)
    assert config.warp_size == default_config(16, warp_size=config.warp_size).warp_size
    for path, fields in tables.SPACE.items():
        names = {name: values[0] for name, values in fields.items() if name != "block_quota"}
        make = transfers.PATHS[path].config
        assert (make is not None) == bool(names)
        assert make is None or all(
            getattr(make(**names), name) == value for name, value in names.items()
        )


class FakeStream:
    """A stream on which everything is done at once."""

    def record_event(self):
        return SimpleNamespace(query=lambda: True)


@pytest.mark.parametrize("config", [{"num_warps": 8, "loads": 32}, None])
def test_the_chosen_config_and_ctas_reach_the_launcher(monkeypatch, config):
    launched = []
    path = dataclasses.replace(
        REGISTERS, launch=lambda plan, **options: launched.append(options), shares_pages=False
    )
    monkeypatch.setitem(transfers.PATHS, "sm", path)
    choice = Choice("sm", 4, "t.json", config)
    handle = transfers.Transfer(meta_plan(), choice.path, choice.block_quota, choice.source)
    stream = FakeStream()
    transfers._launch_on_gpu([(handle, choice)], [], stream, None)
    assert handle.done()
    (options,) = launched
    assert (options["stream"], options["block_quota"]) == (stream, 4)
    told = options.get("config")
    assert told == (config and REGISTERS.config(**config))


def test_tables_are_read_once_and_reported_once(tmp_path, monkeypatch, file):
    monkeypatch.setenv("HIKV_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    write_table(file, table(driver="of old"))
    tuning.tuned.cache_clear()
    with pytest.warns(UserWarning, match="may be stale: it is for driver 'of old'"):
        found = tuning.tuned(GPU)
    assert found.find(KEY) == (ENTRY, str(file))

    def refuse(*arguments, **options):
        raise AssertionError("a look-up opened a file")

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "exists", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.tuned(GPU).find(KEY._replace(num_runs=2048))[0] == ENTRY
        assert tuning.tuned(GPU).find(KEY._replace(direction="d2h")) is None
    tuning.tuned.cache_clear()


def test_two_writers_at_once_leave_one_whole_table(file):
    stop, seen = threading.Event(), set()

    def write(quota: int) -> None:
        entries = [
            dataclasses.replace(ENTRY, key=KEY._replace(num_runs=1 << i), block_quota=quota)
            for i in range(17)
        ]
        while not stop.is_set():
            write_table(file, table(*entries))

    writers = [threading.Thread(target=write, args=(quota,)) for quota in (1, 8)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):
            quotas = {entry.block_quota for entry in read_table(file).entries.values()}
            assert len(quotas) == 1
            seen |= quotas
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen <= {1, 4, 8}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_failed_write_leaves_the_old_table_and_no_scratch(file, monkeypatch):
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_table(file, table(Entry(KEY, "ce", 0, {})))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


class FakeNvml:
    NVMLError = RuntimeError

    def __init__(self, pids=(), reasons: int = 0) -> None:
        self.pids, self.reasons = pids, reasons

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlShutdown(self):
        pass


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (FakeNvml(), []),
        (FakeNvml(reasons=0x1 | 0x4), []),  # idle, and the GPU's own power cap
        (FakeNvml(reasons=0x40), ["hardware thermal slowdown"]),
        (FakeNvml(reasons=0x28), ["hardware slowdown", "software thermal slowdown"]),
        (FakeNvml(pids=[1]), ["process 1 is on NVIDIA Fake 100 too"]),
    ],
)
def test_what_would_spoil_a_timing_is_told(monkeypatch, nvml, words):
    monkeypatch.setattr(device, "device_info", lambda index: GPU)
    monkeypatch.setattr(device, "_start_nvml", lambda: nvml)
    told = device.disturbances(0)
    assert len(told) == len(words)
    assert all(word in sentence for word, sentence in zip(words, told, strict=True))


def test_this_process_is_not_a_neighbour_also_under_a_number_of_outside(tmp_path):
    own = device.os.getpid()
    (tmp_path / "77").mkdir()
    assert device._other_processes({own}, tmp_path) == []
    assert device._other_processes({own, 77, 88}, tmp_path) == [77, 88]
    assert device._other_processes({88}, tmp_path) == []
    assert device._other_processes({77, 88, 99}, tmp_path) == [77, 99]
