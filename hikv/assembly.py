"""What assembly says of a kernel: widths of its accesses, their order, registers and spills.

Three dialects: PTX, SASS as `cuobjdump -sass` prints it, and AMD assembly with its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

WIDE = 16
"""Bytes of the widest access of a thread, whose order matters."""

Widths = dict[int, int]
"""Bytes of an access → how many a thread makes."""


class Access(NamedTuple):
    """One access of a thread to global memory."""

    kind: str  # "load" or "store"
    nbytes: int


class Step(NamedTuple):
    """One instruction, as far as order is concerned.

    `label` names it as a target of branches; `target` is where it may branch to; `falls` says
    whether the next step in the text may follow.
    """

    label: str = ""
    access: Access | None = None
    target: str = ""
    falls: bool = True


class Resources(NamedTuple):
    """Registers per thread, and bytes that a thread spills to memory (scratch on AMD)."""

    registers: int
    spill_bytes: int


def widths(accesses: Iterable[Access]) -> tuple[Widths, Widths]:
    """Counts of loads and of stores by width."""
    counts: dict[str, Widths] = {"load": {}, "store": {}}
    for kind, nbytes in accesses:
        counts[kind][nbytes] = counts[kind].get(nbytes, 0) + 1
    return counts["load"], counts["store"]


def accesses(steps: Iterable[Step]) -> Iterator[Access]:
    """The accesses of machine code, in the order of its text."""
    return (step.access for step in steps if step.access is not None)


_PTX_ACCESS = re.compile(
    r"\b(ld|st)\.(?:\w+\.)*?global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bsuf](\d+)\b"
)


def ptx_accesses(ptx: str) -> Iterator[Access]:
    """Every load and store of global memory in `ptx`."""
    for kind, vector, bits in _PTX_ACCESS.findall(ptx):
        yield Access("load" if kind == "ld" else "store", int(vector or 1) * int(bits) // 8)


_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_SASS_KINDS = {"LDG": "load", "LD": "load", "STG": "store", "ST": "store"}
_SASS_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_SASS_BRANCHES = ("BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU")


def sass_steps(sass: str) -> list[Step]:
    """The instructions of the one kernel in `sass`.

    A call to a computed address is one to a routine of the driver: what that does is not seen.

    Raises `ValueError` on more kernels than one, and on a branch to a computed address.
    """
    if sass.count("Function :") > 1:
        raise ValueError("more than one function in the SASS: labels would be ambiguous")
    return [_sass_step(*line) for line in _SASS_LINE.findall(sass)]


def _sass_step(address: str, predicate: str, opcode: str, operands: str) -> Step:
    name, *modifiers = opcode.split(".")
    label = hex(int(address, 16))
    if name in _SASS_KINDS:
        found = [_SASS_WIDTHS[m] for m in modifiers if m in _SASS_WIDTHS]
        return Step(label, Access(_SASS_KINDS[name], found[0] if found else 4))
    # BRA.U names its predicate among the operands; a CALL may come back to the next step.
    falls = bool(predicate) or bool(re.search(r"\bU?P\d", operands)) or name == "CALL"
    if name in _SASS_BRANCHES:
        targets = re.findall(r"\b0x[0-9a-f]+", operands)
        if name == "CALL" and not targets:
            return Step(label)  # leaves this text and comes back
        if len(targets) != 1 or "X" in name:
            raise ValueError(f"{opcode}{operands} branches to a computed address")
        return Step(label, None, hex(int(targets[0], 16)), falls)
    return Step(label, falls=falls or name not in ("EXIT", "RET"))


_AMD_LINE = re.compile(r"^(?:([\w.$]+):|\s+([a-z]\w*)\s*([^;\n]*))", re.MULTILINE)
_AMD_ACCESS = re.compile(r"(?:global|flat|buffer)_(load|store)_([a-z]+?)(?:x(\d))?(?:_|$)")
_AMD_UNITS = {"dword": 4, "short": 2, "sshort": 2, "ushort": 2, "byte": 1, "sbyte": 1, "ubyte": 1}


def amd_steps(assembly: str) -> list[Step]:
    """The instructions of the one kernel in AMD `assembly`.

    Raises `ValueError` on an access of unknown width, and on a branch to a computed address.
    """
    return [_amd_step(*line) for line in _AMD_LINE.findall(assembly)]


def _amd_step(label: str, opcode: str, operands: str) -> Step:
    if label:
        return Step(label)
    if match := _AMD_ACCESS.match(opcode):
        kind, unit, count = match.groups()
        if unit not in _AMD_UNITS:
            raise ValueError(f"{opcode} has no known width")
        return Step(access=Access(kind, _AMD_UNITS[unit] * int(count or 1)))
    if opcode.startswith(("s_setpc", "s_swappc")):
        raise ValueError(f"{opcode} {operands} branches to a computed address")
    if opcode.startswith(("s_branch", "s_cbranch")):
        return Step(target=operands.strip(), falls=opcode != "s_branch")
    return Step(falls=opcode != "s_endpgm")


def loads_first(steps: Sequence[Step]) -> bool:
    """Whether, in one pass of a loop, no wide load can follow a wide store.

    Along the control flow, not the text: compilers move blocks about. The edges that close a loop
    are left out, so every pass stands for itself.
    """
    edges = _forward_edges(steps)
    pending = [i for i in edges if steps[i].access == ("store", WIDE)]
    seen = set(pending)
    while pending:
        for i in edges[pending.pop()]:
            if steps[i].access == ("load", WIDE):
                return False
            if i not in seen:
                seen.add(i)
                pending.append(i)
    return True


def _forward_edges(steps: Sequence[Step]) -> dict[int, list[int]]:
    """For every step that the first one reaches, the steps that may follow it.

    A step that is still on the path to the present one heads a loop; the edge to it is left out.
    """
    labels = {step.label: i for i, step in enumerate(steps) if step.label}

    def following(i: int) -> Iterator[int]:
        if steps[i].target:
            yield labels[steps[i].target]
        if steps[i].falls and i + 1 < len(steps):
            yield i + 1

    edges: dict[int, list[int]] = {0: []}
    path, on_path = [(0, following(0))], {0}
    while path:
        here, rest = path[-1]
        there = next(rest, None)
        if there is None:
            path.pop()
            on_path.remove(here)
        elif there not in on_path:
            edges[here].append(there)
            if there not in edges:
                edges[there] = []
                path.append((there, following(there)))
                on_path.add(there)
    return edges


def ptxas_resources(log: str) -> Resources:
    """What `ptxas -v` reports on the one kernel it assembled.

    Raises `ValueError` where the log reports on none, or on several.
    """
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = _only("registers in the log of ptxas", re.findall(r"Used (\d+) registers", log))
    stores, loads = _only("spills in the log of ptxas", spills)
    return Resources(int(registers), int(stores) + int(loads))


def amd_resources(assembly: str) -> Resources:
    """What the metadata of AMD `assembly` says of its one kernel.

    Raises `ValueError` where they speak of none, or of several.
    """
    registers, spilled, scratch = (
        int(_only(field, re.findall(rf"\.{field}:\s*(\d+)", assembly)))
        for field in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    return Resources(registers, max(4 * spilled, scratch))


def _only(what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        raise ValueError(f"expected one report of {what}, got {len(found)}: {found}")
    return found[0]
