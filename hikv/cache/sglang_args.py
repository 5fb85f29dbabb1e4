"""SGLang's launch flags as cache options: what a server's command line says about the cache.

Flags of the server that do not concern the cache are skipped and reported by name; an unknown flag
of the cache itself (`--hicache-…`) is refused, since a skipped one would change what is cached.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hikv.errors import ArgumentError

ENABLE = "--enable-hierarchical-cache"
EXTRA = "--hicache-storage-backend-extra-config"
_RADIX_ON_DECODE = "--disaggregation-decode-enable-radix-cache"
_MODE = "--disaggregation-mode"
_EXCLUSIVE = {
    "--disable-radix-cache": "the cache is the radix tree",
    "--enable-unified-cache-external-linker": "an external linker owns the same pages",
}

FLAGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--page-size": ("page_size", int),
    "--radix-eviction-policy": ("eviction", lambda name: {"tlru": "length_aware"}.get(name, name)),
    "--dcp-size": ("dcp_size", int),
    "--decode-context-parallel-size": ("dcp_size", int),
    "--hicache-host-memory-mode": ("host_mode", str),
    "--hicache-ratio": ("host_ratio", float),
    "--hicache-size": ("host_size_gb", lambda text: float(text) or None),
    "--hicache-host-memory-fraction": ("host_memory_fraction", float),
    "--hicache-mem-layout": ("mem_layout", str),
    "--hicache-io-backend": ("io_backend", str),
    "--hicache-write-policy": ("write_policy", str),
    "--hicache-storage-backend": ("storage", str),
    "--hicache-storage-key-scheme": ("key_scheme", str),
    "--hicache-storage-head-partition": ("head_group", int),
    "--hicache-storage-layer-partition": ("layer_partition", int),
    "--hicache-storage-prefetch-policy": ("prefetch_policy", str),
    "--hicache-storage-prefetch-retry-poll-interval": ("prefetch_retry_interval", int),
    "--hicache-storage-prefetch-retry-max-attempts": ("prefetch_retry_attempts", int),
}
"""Flag → option of `HiCacheConfig` and how its word is read. 0 GB means unset, as it does there."""

EXTRA_OPTIONS = (
    "head_group",
    "layer_partition",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
)
"""Entries of the extra config that are options of the cache; the others go to the adapter."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


class Flags(NamedTuple):
    """What a command line says.

    Attributes:
        enabled: whether it turns the hierarchical cache on.
        options: option of `HiCacheConfig` → value, of every flag given.
        cache_flags: the `--hicache-…` flags given.
        skipped: the server's other flags, and shell variables taken for the values of such flags.
    """

    enabled: bool
    options: dict[str, Any]
    cache_flags: tuple[str, ...]
    skipped: tuple[str, ...]


def read_flags(command: str | Iterable[str]) -> Flags:
    """Read a launch command.

    Args:
        command: the words of a command, or shell text: one launch command, with continued lines,
            comments and, in front of it, assignments of the variables that it uses.

    Raises:
        ArgumentError: an unknown `--hicache-…` flag, a value that does not parse or is missing, a
            variable that may hide flags, or switches that contradict each other.
    """
    words = list(_words(command))
    if sum(word.endswith("launch_server") for word in words) > 1:
        raise ArgumentError(
            "command", expected="one launch command", got="several", remedy="pass one at a time"
        )
    given: dict[str, str | None] = {}
    for flag, value in _pairs(words):
        if flag.startswith("--hicache-") and flag not in FLAGS and flag != EXTRA:
            raise ArgumentError(
                flag,
                expected="a flag of the cache that hikv knows",
                got=flag,
                remedy=f"use one of {', '.join(f for f in FLAGS if f.startswith('--hicache-'))}, "
                f"{EXTRA}; hikv skips no flag of the cache",
            )
        given[flag] = value
    _check_switches(given)
    known = [flag for flag in given if flag in FLAGS or flag == EXTRA]
    used = {ENABLE, _RADIX_ON_DECODE, _MODE, *known}
    values = [v for f, v in given.items() if f not in used and v and _VARIABLE.search(v)]
    return Flags(
        ENABLE in given,
        _options({flag: given[flag] for flag in known}),
        tuple(flag for flag in known if flag.startswith("--hicache-")),
        (*(flag for flag in given if flag not in used), *values),
    )


def _words(command: str | Iterable[str]) -> Iterator[str]:
    """The words of a command, with the variables replaced that the text itself assigns."""
    if not isinstance(command, str):
        yield from command
        return
    text = re.sub(r"(?m)^\s*#.*$", "", command).replace("\\\n", " ")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError(
            "command", expected="shell text", got=error, remedy="close the quotes"
        ) from error
    variables: dict[str, str] = {}

    def expand(text: str) -> str:
        return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), text)

    for word in words:
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment:
            variables[assignment[1]] = expand(assignment[2])
        elif _VARIABLE.fullmatch(word):
            yield from shlex.split(expand(word))
        elif word != "export":
            yield expand(word)


def _pairs(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Every flag with the word after it, or `None` where another flag or nothing follows."""
    flag: str | None = None
    for word in words:
        if word.startswith("--"):
            if flag is not None:
                yield flag, None
            flag, separator, value = word.partition("=")
            if separator:
                yield flag, value
                flag = None
        elif flag is not None:
            yield flag, word
            flag = None
        elif _VARIABLE.fullmatch(word):
            raise ArgumentError(
                word,
                expected="a variable that the text assigns",
                got="one that may stand for flags of the cache",
                remedy=f"put {word.strip('${}')}=… in front of the command, or pass its words",
            )
    if flag is not None:
        yield flag, None


def _check_switches(given: dict[str, str | None]) -> None:
    if ENABLE not in given:
        return
    for switch, why in _EXCLUSIVE.items():
        if switch in given:
            raise ArgumentError(
                switch, expected=f"to be absent, for {why}", got=ENABLE, remedy="drop one of them"
            )
    if given.get(_MODE) == "decode" and _RADIX_ON_DECODE not in given:
        raise ArgumentError(
            _MODE,
            expected=f"{_RADIX_ON_DECODE}, since a decode worker matches no prefix without it",
            got=f"decode with {ENABLE} alone",
            remedy=f"add {_RADIX_ON_DECODE}, or drop {ENABLE}",
        )


def _options(given: dict[str, str | None]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for flag, text in given.items():
        if text is None or _VARIABLE.search(text):
            raise ArgumentError(flag, expected="a value", got=text, remedy="write it out")
        if flag == EXTRA:
            found = _extra_config(text)
        else:
            option, read = FLAGS[flag]
            try:
                found = {option: read(text)}
            except ValueError as error:
                kind = "a whole number" if read is int else "a number"
                raise ArgumentError(
                    flag, expected=kind, got=repr(text), remedy=f"it sets {option}"
                ) from error
        for option, value in found.items():
            if options.setdefault(option, value) != value:
                raise ArgumentError(
                    flag,
                    expected=f"{option} = {options[option]!r}, as another flag says",
                    got=repr(value),
                    remedy="say it once",
                )
    return options


def _extra_config(text: str) -> dict[str, Any]:
    """The extra config, JSON or `@file.json`: options of the cache, the rest for the adapter."""
    try:
        entries = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            EXTRA, expected="JSON, or @ and a JSON file", got=error, remedy="convert it to JSON"
        ) from error
    if not isinstance(entries, dict):
        raise ArgumentError(
            EXTRA, expected="a JSON object", got=text, remedy="write {…} around the entries"
        )
    if "tp_lcm_size" in entries:
        raise ArgumentError(
            EXTRA,
            expected="head_group for what tp_lcm_size says",
            got=f"tp_lcm_size = {entries['tp_lcm_size']}",
            remedy="set head_group to the model's KV heads divided by tp_lcm_size",
        )
    found = {name: entries.pop(name) for name in EXTRA_OPTIONS if name in entries}
    return {**found, "storage_options": entries}
