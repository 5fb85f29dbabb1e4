"""What the doctor says of tuned tables: which are used here, and why others are not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_machine import GPU

from hikv import doctor, tuning
from hikv.tables import Entry, Key, Table, file_name, identity, write_table


@pytest.fixture
def tuned_dir(tmp_path, monkeypatch):
    """A folder of tables of one's own, on a machine with the fake GPU."""
    monkeypatch.setattr(doctor, "device_info", lambda: GPU)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("HIKV_TUNED_DIR", str(tmp_path))
    return tmp_path


def write(folder, **header):
    entry = Entry(Key("h2d", 1024, 64, 1024, 16), "sm", 2, {})
    file = folder / file_name(GPU.name, GPU.num_sms)
    write_table(file, Table({**identity(GPU), "date": "2026-05-01"} | header, {entry.key: entry}))
    return file


def told(facts):
    lines = doctor.describe(facts).splitlines()
    return [line for line in lines if line.startswith(("tuned", "warning"))]


def test_without_a_table_it_says_what_kernels_get(tuned_dir):
    facts = doctor.examine()
    assert facts["tuned"] == {"tables": [], "notes": []}
    assert told(facts) == ["tuned     none: kernels get 2 CTAs; hikv tune finds better"]


def test_the_table_in_use_is_named_with_its_date(tuned_dir):
    file = write(tuned_dir)
    facts = json.loads(json.dumps(doctor.examine()))
    assert told(facts) == [f"tuned     1 choice of 2026-05-01, {file}"]


def test_a_doubtful_table_is_used_with_a_warning(tuned_dir):
    file = write(tuned_dir, driver="of old")
    (line, warning) = told(doctor.examine())
    assert line == f"tuned     1 choice of 2026-05-01, {file}"
    assert warning.startswith("warning   tuned table")
    assert "may be stale: it is for driver 'of old'" in warning


def test_a_table_of_other_sources_is_not_used_and_told(tuned_dir):
    write(tuned_dir, source="another")
    (line, warning) = told(doctor.examine())
    assert line.startswith("tuned     none")
    assert "ignored: it is for source 'another'" in warning


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({}, "link      PCIe 5 x16, 63.0 GB/s in theory, each way"),
        (
            {"pcie_generation": 7, "link_gbps": None},
            "link      PCIe 7 x16, of a generation whose rate is not known here",
        ),
        ({"link": None, "unanswered": "no NVML"}, "link      unknown: no NVML"),
        ({"link": None}, "link      unknown: the GPU does not tell"),
    ],
)
def test_the_link_is_told_as_far_as_it_is_known(tuned_dir, monkeypatch, known, line):
    monkeypatch.setattr(doctor, "device_info", lambda: replace(GPU, **known))
    assert line in doctor.describe(doctor.examine()).splitlines()


def test_a_host_without_a_gpu_has_no_line_for_tables(monkeypatch):
    monkeypatch.setattr(doctor, "device_info", lambda: None)
    facts = doctor.examine()
    assert facts["tuned"] is None
    assert told(facts) == []
