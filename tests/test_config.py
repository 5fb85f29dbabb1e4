"""The configuration against its page in the docs: options, combinations, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from hikv import KVSpec, list_layouts
from hikv.cache import conflicts, sglang_args
from hikv.cache.config import HOST_RATIO, HiCacheConfig, options
from hikv.errors import ArgumentError, CapacityError
from hikv.transfers import PATHS

DOC = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
SPEC = KVSpec(4, 8, 16, 64, torch.bfloat16)
LATENT = KVSpec(4, 1, 576, 64, torch.bfloat16, latent=True)


def rows(header: str) -> list[list[str]]:
    """Cells of the docs' table whose first line is `header`."""
    lines = DOC[DOC.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


# Options ------------------------------------------------------------------------------------------


def documented_options() -> list[str]:
    flags: dict[str, list[str]] = {}
    for flag, (option, _) in sglang_args.FLAGS.items():
        flags.setdefault(option, []).append(f"`{flag}`")
    flags["enabled"] = [f"`{sglang_args.ENABLE}`"]
    lines = []
    for option in options():
        default = {dataclasses.MISSING: "{}", None: "unset"}.get(option.default, option.default)
        takes, meaning = option.metadata["allowed"].text, option.metadata["meaning"]
        names = ", ".join(flags.pop(option.name, []))
        lines.append(f"| `{option.name}` | {default} | {takes} | {names} | {meaning} |")
    assert not flags, "a flag sets an option that is not there"
    return lines


def test_the_documented_options_are_those_of_the_code():
    table = DOC[DOC.index("| option | default |") :].split("\n\n")[0].splitlines()[2:]
    assert table == documented_options()


def test_every_default_is_allowed_and_every_default_configuration_is_served():
    config = HiCacheConfig()
    assert config.normalized().normalized() == config.normalized()
    assert config.host_ratio is None
    assert config.normalized().host_ratio == HOST_RATIO == 2.0


WRONG = {"True, False": 1, "a name": " ", "a mapping": [], "number > 0": 0.0, "seconds ≥ 0": -0.1,
         "0 < share ≤ 1": 1.5, "int ≥ 1": 0, "int ≥ 0": -1}  # fmt: skip


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_a_value_out_of_range_is_refused_by_name(option):
    text = option.metadata["allowed"].text
    number = any(kind in text for kind in ("int", "number", "seconds", "share"))
    values = [WRONG.get(text, "nonsense"), *([True, "8", float("nan")] if number else [])]
    values += [2.0] if "int" in text else []
    values += [None] if option.default is not None else []
    for value in values:
        with pytest.raises(ArgumentError) as refusal:
            HiCacheConfig(**{option.name: value})
        assert refusal.value.argument == option.name
        assert refusal.value.got == repr(value)
        assert option.metadata["meaning"] in refusal.value.remedy


# Combinations -------------------------------------------------------------------------------------

VALUES = {
    "enabled": [True, False],
    "host_mode": ["cache", "buffer_only"],
    "storage": [None, "file"],
    "storage_options": [{}, {"path": "pool"}],
    "key_scheme": [None, "unified"],
    "head_group": [None, 2],
    "split_kv": [False, True],
    "dcp_size": [1, 2],
    "mem_layout": [None, *list_layouts()],
    "io_backend": [None, "kernel", "direct"],
    "block_quota": [None, 0, 4],
    "host_ratio": [None, 1.5],
    "host_size_gb": [None, 64],
    "host_memory_fraction": [None, 0.5],
    "write_policy": ["write_through", "write_through_selective", "write_back"],
    "prefetch_policy": ["best_effort", "wait_complete", "timeout"],
    "layer_partition": [None, 2],
    "granularity": ["segment", "page"],
}


def condition(text: str):
    """`a` set, `b` = x, y → a function of the options."""
    found = re.findall(r"`(\w+)` (set|unset|= [^`]+?)(?=, `|$)", text)
    assert found, text

    def holds(name: str, what: str, given: dict) -> bool:
        value = given.get(name)
        if what in ("set", "unset"):
            return (value not in (None, {})) is (what == "set")
        if what.endswith(" or more"):
            return value is not None and value >= int(what.split()[1])
        return str(value) in what[2:].split(", ")

    return lambda given: all(holds(name, what, given) for name, what in found)


TABLE = [(condition(when), verdict, what) for when, verdict, what in rows("when")[:-1]]


def verdict_of_the_docs(given: dict) -> tuple[set[str], dict]:
    """Options to blame, and what is filled in."""
    blamed, fills = set(), {}
    for holds, verdict, what in TABLE:
        if holds(given):
            if verdict == "refused":
                blamed.add(re.match(r"\*\*(\w+)\*\*", what)[1])
            else:
                assert verdict == "filled in"
                name, value = re.fullmatch(r"`(\w+)` = (.+)", what).groups()
                fills[name] = {"2.0": 2.0, "0": 0}.get(value, value)
    return blamed, fills


def check_combination(given: dict) -> bool:
    """Whether it is served; the docs and the code agree."""
    blamed, fills = verdict_of_the_docs(given)
    if blamed:
        with pytest.raises(ArgumentError) as refusal:
            HiCacheConfig(**given)
        assert refusal.value.argument in blamed, given
        return False
    config = HiCacheConfig(**given)
    effective = config.normalized()
    expected = dataclasses.asdict(config) | fills
    assert dataclasses.asdict(effective) == expected, given
    assert effective.normalized() == effective
    return True


DEFAULTS = {
    o.name: {} if o.default is dataclasses.MISSING else o.default
    for o in options()
    if o.name in VALUES
}
STORAGE = ("enabled", "host_mode", "storage", "storage_options", "key_scheme", "head_group",
           "split_kv", "dcp_size", "mem_layout")  # fmt: skip
COPIES = ("storage", "split_kv", "io_backend", "block_quota", "host_ratio", "host_size_gb",
          "host_memory_fraction", "write_policy", "prefetch_policy")  # fmt: skip


@pytest.mark.parametrize("names", [STORAGE, COPIES], ids=["storage", "copies"])
def test_the_docs_give_the_verdict_of_every_combination(names):
    served = [
        check_combination(DEFAULTS | dict(zip(names, values, strict=True)))
        for values in itertools.product(*(VALUES[name] for name in names))
    ]
    assert 0 < sum(served) < len(served)


def test_the_docs_give_the_verdict_of_combinations_of_everything():
    draw = random.Random(0)
    drawn = [{n: draw.choice(values) for n, values in VALUES.items()} for _ in range(1500)]
    assert 0 < sum(check_combination(given) for given in drawn) < len(drawn)


def test_every_row_of_the_docs_holds_for_some_combination():
    for holds, _, what in TABLE:
        assert any(
            holds(DEFAULTS | dict(zip(names, values, strict=True)))
            for names in (STORAGE, COPIES)
            for values in itertools.product(*(VALUES[name] for name in names))
        ), what


CONTRADICTIONS = [
    {"host_mode": "buffer_only"},
    {"storage": "file", "enabled": False},
    {"storage": "file", "dcp_size": 2},
    {"storage_options": {"path": "pool"}},
    {"storage": "mooncake", "mem_layout": list_layouts()[0]},
    {"io_backend": "direct", "block_quota": 2},
    {"io_backend": "kernel", "block_quota": 0},
    {"host_memory_fraction": 0.5, "host_ratio": 2.0},
]


def test_each_contradiction_is_triggered_alone_and_says_what_to_do():
    assert len(CONTRADICTIONS) == len(conflicts.CONFLICTS)
    for given, conflict in zip(CONTRADICTIONS, conflicts.CONFLICTS, strict=True):
        with pytest.raises(ArgumentError) as refusal:
            HiCacheConfig(**given)
        assert refusal.value.argument == conflict.argument
        assert refusal.value.got == repr(given[conflict.argument])
        assert refusal.value.remedy == conflict.remedy
        assert "{" not in str(refusal.value).replace(refusal.value.got, "")


def test_an_explicit_layout_is_refused_not_replaced():
    with pytest.raises(ArgumentError, match="page_unified") as refusal:
        HiCacheConfig(storage="mooncake", mem_layout="layer_first")
    assert "leave mem_layout unset" in refusal.value.remedy
    assert HiCacheConfig(mem_layout="layer_first").normalized().mem_layout == "layer_first"


# Geometry, sizes, limits --------------------------------------------------------------------------


def test_the_pools_geometry_is_compared():
    HiCacheConfig(page_size=64).check(SPEC)
    HiCacheConfig(head_group=2).check(dataclasses.replace(SPEC, head_group=2))
    HiCacheConfig(storage="file").check(LATENT)
    for config, spec, argument in (
        (HiCacheConfig(page_size=32), SPEC, "page_size"),
        (HiCacheConfig(head_group=2), SPEC, "head_group"),
        (HiCacheConfig(mem_layout="page_head"), LATENT, "layout"),
        (HiCacheConfig(split_kv=True), LATENT, "split_kv"),
    ):
        with pytest.raises(ArgumentError) as refusal:
            config.check(spec)
        assert refusal.value.argument == argument


@pytest.mark.parametrize(
    ("given", "pages"),
    [
        ({}, 200),
        ({"host_ratio": 0.5}, 50),  # smaller than the GPU's
        ({"host_ratio": 1.15}, 115),  # 1.15 × 100 is 114.99… in binary
        ({"host_size_gb": 0.001}, 10),  # 10⁶ bytes in pages of 10⁵
        ({"host_size_gb": 0.00199999, "host_ratio": 2.0}, 19),
        ({"host_memory_fraction": 1.0}, 500),
        ({"host_memory_fraction": 0.333}, 166),
        ({"enabled": False}, 0),
    ],
)
def test_pages_of_the_host_pool(given, pages):
    assert HiCacheConfig(**given).host_pages(100, 100_000, 50_000_000) == pages
    assert HiCacheConfig(**given).normalized().host_pages(100, 100_000, 50_000_000) == pages


def test_stages_of_unequal_width_get_different_pages_from_one_size():
    # 100 GB over 12,464 and 13,120 bytes a token, pages of 64: the ranks must take the minimum.
    config = HiCacheConfig(host_size_gb=100)
    pages = [config.host_pages(1, 64 * token, 10**12) for token in (12_464, 13_120)]
    assert [64 * count for count in pages] == [8_023_104, 7_621_888]


def test_a_host_pool_that_does_not_fit_names_required_and_available_bytes():
    with pytest.raises(CapacityError, match="lower host_ratio") as refusal:
        HiCacheConfig().host_pages(100, 1000, 199_999)
    assert (refusal.value.required, refusal.value.available) == (200_000, 199_999)
    with pytest.raises(CapacityError, match="raise host_size_gb") as refusal:
        HiCacheConfig(host_size_gb=0.000000999).host_pages(100, 1000, 10**9)
    assert (refusal.value.required, refusal.value.available) == (1000, 999)
    with pytest.raises(CapacityError, match="raise host_memory_fraction"):
        HiCacheConfig(host_memory_fraction=0.5).host_pages(100, 1000, 0)


def test_the_time_that_a_prefetch_may_take():
    config = HiCacheConfig()
    assert [config.prefetch_timeout(n) for n in (0, 1024, 32_768, 286_720, 10**6)] == [
        2.0, 2.1, pytest.approx(5.2), 30.0, 30.0,
    ]  # fmt: skip
    short = HiCacheConfig(
        prefetch_timeout_base=1, prefetch_timeout_per_ki_token=0.5, prefetch_timeout_max=3
    )
    assert [short.prefetch_timeout(n) for n in (512, 2048, 8192)] == [1.25, 2.0, 3]


def test_the_numbers_that_the_cache_starts_from():
    config = HiCacheConfig()
    assert (config.prefetch_threshold, config.load_back_threshold) == (256, 10)
    assert [
        HiCacheConfig(write_policy=policy).backup_after_uses
        for policy in ("write_through", "write_through_selective", "write_back")
    ] == [1, 2, None]


def test_the_io_backend_names_a_path_and_a_quota_of_transfers():
    wanted = [
        ({}, {"path": None, "block_quota": None}),
        ({"block_quota": 0}, {"path": "ce", "block_quota": 0}),
        ({"block_quota": 4}, {"path": None, "block_quota": 4}),
        ({"io_backend": "kernel", "block_quota": 8}, {"path": "sm", "block_quota": 8}),
        ({"io_backend": "direct"}, {"path": "ce", "block_quota": 0}),
    ]
    for given, expected in wanted:
        assert HiCacheConfig(**given).copy_options == expected
        assert HiCacheConfig(**given).normalized().copy_options == expected
        assert expected["path"] in (None, *PATHS)


def test_the_effective_configuration_is_printed_with_the_source_of_each_value():
    lines = HiCacheConfig(storage="file", page_size=64, write_policy="write_back").describe()
    shown = {line.split()[0]: line.split()[1:] for line in lines.splitlines()[1:]}
    assert list(shown) == [option.name for option in options()]
    assert shown["page_size"] == ["64", "given"]
    assert shown["write_policy"] == ["write_back", "given"]
    assert shown["mem_layout"] == ["page_unified", "filled", "in"]
    assert shown["key_scheme"] == ["unified", "filled", "in"]
    assert shown["prefetch_threshold"] == ["256", "default"]


def test_a_configuration_can_be_hashed_and_keeps_its_own_options():
    entries = {"path": "pool"}
    config = HiCacheConfig(storage="file", storage_options=entries)
    entries["path"] = "elsewhere"
    assert config.storage_options == {"path": "pool"}
    assert len({config, HiCacheConfig(storage="file", storage_options={"path": "pool"})}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.storage = None
