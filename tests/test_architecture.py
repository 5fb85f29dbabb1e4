"""The house rules that can be read off the sources: floors, sizes, docstrings, quick imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import hikv

ROOT = Path(__file__).parent.parent
PACKAGES = ("hikv", "autotune", "perf")

# Lowest first. A file imports only files of rows above its own in this table, which is the order in
# which to read them.
FLOORS = (
    ("hikv/errors.py", "hikv/assembly.py", "hikv/console.py", "hikv/tuned/__init__.py"),
    ("hikv/env.py", "hikv/picture.py", "hikv/spec.py", "hikv/cp/shard_map.py"),
    ("hikv/layout.py", "hikv/device.py", "hikv/driver.py", "hikv/host_memory.py"),
    ("hikv/pinned.py", "hikv/region.py", "hikv/tables.py"),
    ("hikv/buffer.py",),
    ("hikv/pages.py",),
    (
        "hikv/cp/plan.py",
        "hikv/cp/shared_memory.py",
        "hikv/cp/handles.py",
        "hikv/cp/scratch.py",
        "hikv/cp/report.py",
    ),
    ("hikv/cp/board.py",),
    ("hikv/plan.py",),
    ("hikv/boxes.py", "hikv/shapes.py", "hikv/tuning.py", "hikv/measure.py", "hikv/handle.py"),
    ("hikv/kernels/submit.py", "hikv/kernels/memcpy.py"),
    (
        "hikv/kernels/reference.py",
        "hikv/kernels/relayout.py",
        "hikv/kernels/relayout_tma.py",
        "hikv/kernels/copy_engine.py",
        "hikv/kernels/shard_slots.py",
    ),
    ("hikv/kernels/staged.py", "hikv/kernels/copy_boxes.py"),
    ("hikv/kernels/__init__.py",),
    ("hikv/compiled.py", "hikv/transfers.py"),
    ("hikv/cp/backends.py", "hikv/cp/witness.py"),
    ("hikv/cp/streams.py", "hikv/cp/collective.py"),
    ("hikv/cp/peers.py",),
    ("hikv/cp/nccl.py",),
    ("hikv/cp/group.py",),
    ("hikv/cp/gather.py",),
    ("hikv/cp/copies.py",),
    ("hikv/doctor.py",),
    (
        "hikv/cache/conflicts.py",
        "hikv/cache/explain.py",
        "hikv/cache/options.py",
        "hikv/cache/sglang_args.py",
    ),
    ("hikv/cache/metrics.py",),
    ("hikv/cache/allocator.py",),
    ("hikv/cache/node.py",),
    ("hikv/cache/eviction.py", "hikv/cache/audit.py", "hikv/cache/holding.py"),
    ("hikv/cache/config.py", "hikv/cache/draft.py"),
    ("hikv/cache/structure.py",),
    ("hikv/cache/tiers.py",),
    ("hikv/cache/tree.py",),
    ("hikv/cache/keys.py", "hikv/cache/lanes.py", "hikv/cache/pools.py"),
    ("hikv/cache/components.py", "hikv/cache/convoy.py"),
    ("hikv/cache/trails.py",),
    ("hikv/cache/cargo.py",),
    ("hikv/cache/controller.py", "hikv/cache/events.py"),
    ("hikv/cache/hybrid.py", "hikv/cache/requests.py"),
    ("hikv/cache/placement.py", "hikv/cache/trail_audit.py"),
    ("hikv/cache/shares.py",),
    ("hikv/cache/ledger.py",),
    ("hikv/cache/loading.py",),
    ("hikv/cache/hiradix.py",),
    ("hikv/cache/__init__.py", "hikv/cp/__init__.py"),
    ("hikv/__init__.py",),
    ("hikv/cli.py",),
    ("hikv/__main__.py",),
)
FLOOR = {file: floor for floor, files in enumerate(FLOORS) for file in files}
# The side folders stand beside the house: they may look into every room but the command line, which
# alone looks into them.
SIDES = ("autotune", "perf")


def sources(*folders: str) -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for f in folders for path in (ROOT / f).rglob("*.py")
    )


def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def imports(file: str) -> Iterator[str]:
    """Dotted names that `file` imports when it runs; what type checkers alone see is left out."""
    package = file.split("/")[:-1]
    pending: list[ast.AST] = [parse(file)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def home(name: str) -> str | None:
    """The file of this repository that holds the dotted `name`, if any."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    while parts:
        path = "/".join(parts)
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if (ROOT / file).exists():
                return file
        parts.pop()
    return None


@pytest.mark.parametrize("file", sources("hikv"))
def test_a_file_imports_only_lower_floors(file):
    assert file in FLOOR, (
        f"{file} stands on no floor: add it to FLOORS in tests/test_architecture.py, "
        "in a row below everything it imports"
    )
    for name in imports(file):
        target = home(name)
        if target is not None and file not in ("hikv/cli.py", "hikv/__main__.py"):
            assert not name.startswith(("hikv.autotune", "hikv.perf")), f"{file} imports {name}"
            assert target in FLOOR, f"{file} imports {name}, which only the command line may"
            assert FLOOR[target] < FLOOR[file], f"{file} imports {name} of a floor not below it"


@pytest.mark.parametrize("file", sources(*SIDES))
def test_side_folders_import_the_house_absolutely_and_their_own_relatively(file):
    folder = file.split("/")[0]
    absolute = {
        node.module or ""
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ImportFrom) and not node.level
    } | {a.name for n in ast.walk(parse(file)) if isinstance(n, ast.Import) for a in n.names}
    assert "hikv.cli" not in absolute
    # The folder has two names, perf in a checkout and hikv.perf installed.
    assert not {name for name in absolute if name.startswith((folder, f"hikv.{folder}"))}


@pytest.mark.parametrize("file", sources(*PACKAGES, "tests"))
def test_a_file_is_at_most_500_lines(file):
    lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{file} has {lines} lines: split it by the ideas in it"


def undocumented(node: ast.AST, path: str) -> Iterator[str]:
    """Public modules, classes, functions, methods and properties under `node` that say nothing."""
    if not ast.get_docstring(node):
        yield path
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                again = {ast.unparse(d).rpartition(".")[2] for d in child.decorator_list}
                if not child.name.startswith(("_", "test_")) and not again & {"setter", "overload"}:
                    yield from undocumented(child, f"{path}:{child.lineno}:{child.name}")


@pytest.mark.parametrize("file", sources(*PACKAGES))
def test_every_public_name_has_a_docstring(file):
    missing = list(undocumented(parse(file), file))
    assert not missing, f"without a docstring: {', '.join(missing)}"


def test_only_the_table_of_layouts_knows_their_names():
    names = set(hikv.list_layouts())
    for file in sources("hikv"):
        if file != "hikv/layout.py":
            constants = {n.value for n in ast.walk(parse(file)) if isinstance(n, ast.Constant)}
            assert not constants & names, f"{file} names layouts: ask hikv.layout instead"


def test_importing_hikv_loads_neither_torch_nor_triton():
    code = "import sys, hikv; print(*sorted({'torch', 'triton'} & {*sys.modules}))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == []


@pytest.mark.parametrize("name", hikv.__all__)
def test_every_exported_name_can_be_imported(name):
    # An import of the home binds a submodule to the package, which must not hide an equal name.
    source = import_module(hikv._HOMES[name])
    scope: dict[str, object] = {}
    exec(f"from hikv import {name}", scope)
    assert scope[name] is getattr(source, name)
    assert name in dir(hikv)


def test_exports_homes_and_what_type_checkers_see_are_one_list():
    assert sorted(hikv.__all__) == sorted(hikv._HOMES)
    (block,) = (n for n in parse("hikv/__init__.py").body if isinstance(n, ast.If))
    seen = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == hikv._HOMES
    with pytest.raises(AttributeError, match="no_such_name"):
        hikv.no_such_name  # noqa: B018
