"""What the README and the pages beside it say that a machine can check."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hikv
from hikv.cache.explain import REASONS
from hikv.cache.metrics import Metrics
from hikv.env import KNOWN
from hikv.layout import get_layout, list_layouts
from hikv.transfers import PATHS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(first_title: str, page: str = README) -> list[list[str]]:
    """Cells of the table of `page` whose first column is called `first_title`."""
    table = re.search(rf"\| {first_title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page)
    assert table is not None
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


def examples(page: Path) -> list[str]:
    """Blocks of a page that stand alone; fragments are marked `py`, not `python`."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


EXAMPLES = [
    pytest.param(example, id=f"{page.stem}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, example in enumerate(examples(page))
]


def printed(example: str) -> str:
    """What the example prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", example],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_it_stands(example):
    assert bool(printed(example)) is ("print(" in example)


def test_the_readme_shows_what_ran_and_what_was_reused():
    copy, loop = map(printed, examples(ROOT / "README.md"))
    assert copy.startswith("Transfer(path=")
    assert loop == "[712, 200, 8]\n"


def test_the_table_of_layouts_is_that_of_the_code():
    told = {name: (axes, latent) for name, axes, latent in rows("layout")}
    layouts = {name: get_layout(name) for name in list_layouts()}
    assert told == {
        name: (" ".join(row.axes), " ".join(row.latent_axes) if row.latent_axes else "refused")
        for name, row in layouts.items()
    }


def test_the_table_of_paths_names_every_path():
    assert [row[0] for row in rows("path")] == list(PATHS)
    for name, _, ctas in rows("path"):
        assert ("block_quota" in ctas) == PATHS[name].block_quota


def test_both_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_operations_names_every_series_reason_and_variable():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    told = [name for row in rows("series", page) for name in re.findall(r"hikv_\w+", row[0])]
    rendered = Metrics().render()
    assert len(told) == len(set(told))
    assert set(told) == set(re.findall(r"^# TYPE (\w+)", rendered, re.MULTILINE))
    for series, labels, _ in rows("series", page):
        for label, values in re.findall(r"(\w+)` ([a-z_, ]+)", labels):
            for value in values.split(", "):
                for name in re.findall(r"hikv_\w+", series):
                    assert f'{name}{{{label}="{value}"' in rendered.replace("_bucket", "")
    assert dict(rows("reason", page)) == REASONS
    assert [row[0] for row in rows("variable", page)] == list(KNOWN)
    errors = {row[0] for row in rows("error", page)}
    assert errors == {name for name in hikv.__all__ if name.endswith(("Error", "Unavailable"))} - {
        "HikvError"
    } | {"CopyFailed"}
