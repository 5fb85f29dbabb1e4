"""SGLang's launch commands read as configurations of the cache."""

from __future__ import annotations

import shlex

import pytest

from hikv.cache.config import HiCacheConfig
from hikv.cache.sglang_args import ENABLE, EXTRA, FLAGS, read_flags
from hikv.errors import ArgumentError

UNIFIED_MOONCAKE = """python3 -m sglang.launch_server \\
    --model-path /model \\
    --host 0.0.0.0 \\
    --port 32140 \\
    --attention-backend fa4 \\
    --page-size 128 \\
    --fp8-gemm-backend flashinfer_trtllm \\
    --enable-hierarchical-cache \\
    --hicache-write-policy write_through \\
    --hicache-io-backend kernel \\
    --hicache-mem-layout page_first \\
    --hicache-size 64 \\
    --hicache-storage-backend mooncake \\
    --hicache-storage-key-scheme unified \\
    --hicache-storage-backend-extra-config \\
      '{"head_group":1,"layer_partition":6,"prefetch_threshold":1}' \\
    --hicache-storage-prefetch-policy wait_complete
"""
UNIFIED_FILE = """--enable-hierarchical-cache \\
--hicache-storage-backend file \\
--hicache-storage-key-scheme unified \\
--hicache-storage-head-partition 2 \\
--hicache-storage-layer-partition 30
"""
VALUES = """
export MODEL=/path/to/GLM-5.2-FP8
export SERVED_MODEL_NAME=your-served-model-name
export IB_DEVICES=your-comma-separated-rdma-device-names
"""
SHARED = """
COMMON="--trust-remote-code --model-path $MODEL \\
  --served-model-name $SERVED_MODEL_NAME --tp-size 8 --ep-size 8 \\
  --context-length 262144 --max-running-requests 64 \\
  --host 0.0.0.0 --port 30000 --schedule-policy fcfs \\
  --reasoning-parser glm45 --kv-cache-dtype fp8_e4m3 \\
  --disaggregation-transfer-backend mooncake \\
  --disaggregation-bootstrap-port 30200 \\
  --disaggregation-decode-retraction-backup cpu_tensor \\
  --disaggregation-ib-device $IB_DEVICES"
HICACHE="--disaggregation-decode-enable-radix-cache \\
  --enable-hierarchical-cache --hicache-host-memory-fraction 1.0"
"""
PREFILL = """
# Prefill host: unchanged for both runs.
python3 -m sglang.launch_server $COMMON \\
  --disaggregation-mode prefill --mem-fraction-static 0.899 \\
  --enable-hierarchical-cache
"""
DECODE_OFF = """
# Decode host: baseline.
# Radix caching is off by default in the tested version.
python3 -m sglang.launch_server $COMMON \\
  --disaggregation-mode decode --mem-fraction-static 0.963
"""
DECODE = """
# Stop baseline services, then restart both hosts.
# Keep prefill unchanged; use this decode command for GPU + host reuse.
python3 -m sglang.launch_server $COMMON $HICACHE \\
  --disaggregation-mode decode --mem-fraction-static 0.963
"""


def test_the_command_of_the_unified_scheme_parses_and_its_layout_is_overridden_aloud():
    with pytest.warns(UserWarning, match="page_first is overridden by page_unified"):
        config = HiCacheConfig.from_sglang_args(UNIFIED_MOONCAKE)
    assert config == HiCacheConfig(
        page_size=128,
        write_policy="write_through",
        io_backend="kernel",
        host_size_gb=64,
        storage="mooncake",
        key_scheme="unified",
        head_group=1,
        layer_partition=6,
        prefetch_threshold=1,
        prefetch_policy="wait_complete",
    )
    assert config.normalized().mem_layout == "page_unified"
    assert "page_first is overridden by page_unified" in config.describe()
    assert "--fp8-gemm-backend" in config.notes[0]
    with pytest.raises(ArgumentError) as refusal:
        HiCacheConfig.from_sglang_args(UNIFIED_MOONCAKE, strict=True)
    assert refusal.value.argument == "mem_layout"
    assert "leave mem_layout unset" in refusal.value.remedy


def test_the_options_of_the_sixty_layer_example_parse():
    config = HiCacheConfig.from_sglang_args(UNIFIED_FILE, strict=True)
    assert config == HiCacheConfig(
        storage="file", key_scheme="unified", head_group=2, layer_partition=30
    )
    assert config.normalized().mem_layout == "page_unified"


@pytest.mark.parametrize("values", [VALUES, ""], ids=["values given", "values left out"])
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (PREFILL, HiCacheConfig()),
        (DECODE_OFF, HiCacheConfig(enabled=False)),
        (DECODE, HiCacheConfig(host_memory_fraction=1.0)),
    ],
    ids=["prefill", "decode without", "decode"],
)
def test_the_disaggregated_commands_parse_after_their_variables(values, command, expected):
    config = HiCacheConfig.from_sglang_args(values + SHARED + command, strict=True)
    assert config == expected
    assert "--disaggregation-decode-retraction-backup" in config.notes[0]
    assert ("$MODEL" in config.notes[0]) is not bool(values)


def test_a_variable_that_may_hide_flags_is_refused():
    with pytest.raises(ArgumentError, match=r"put COMMON=… in front") as refusal:
        HiCacheConfig.from_sglang_args(DECODE)
    assert refusal.value.argument == "$COMMON"
    with pytest.raises(ArgumentError, match="write it out"):
        HiCacheConfig.from_sglang_args(f"{ENABLE} --hicache-size $SIZE")
    with pytest.raises(ArgumentError, match="write it out"):
        HiCacheConfig.from_sglang_args(f"{ENABLE} --hicache-size ${{SIZE}}")


def test_the_fragments_of_options_parse_with_no_effect_until_the_cache_is_on():
    fragment = '--hicache-storage-backend-extra-config \'{"head_group": 1, "layer_partition": 6}\''
    with pytest.warns(UserWarning, match="have no effect"):
        config = HiCacheConfig.from_sglang_args(fragment)
    assert config == HiCacheConfig(enabled=False)
    with pytest.raises(ArgumentError) as refusal:
        HiCacheConfig.from_sglang_args(fragment, strict=True)
    assert refusal.value.argument == ENABLE
    on = HiCacheConfig.from_sglang_args(f"{ENABLE} {fragment}")
    assert (on.head_group, on.layer_partition, on.storage_options) == (1, 6, {})


EXAMPLES = {int: ("2", 2), float: ("0.5", 0.5)}
NAMES = {
    "eviction": ("tlru", "length_aware"),
    "host_mode": ("cache", "cache"),
    "host_size_gb": ("12.5", 12.5),
    "io_backend": ("direct", "direct"),
    "key_scheme": ("unified", "unified"),
    "mem_layout": ("page_head", "page_head"),
    "prefetch_policy": ("best_effort", "best_effort"),
    "storage": ("nixl", "nixl"),
    "write_policy": ("write_back", "write_back"),
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("joint", [" ", "="])
def test_every_flag_sets_its_option(flag, joint):
    option, read = FLAGS[flag]
    text, value = NAMES.get(option) or EXAMPLES[read]
    config = HiCacheConfig.from_sglang_args(f"{ENABLE} {flag}{joint}{text}", strict=True)
    assert getattr(config, option) == value
    assert config == HiCacheConfig(**{option: value})
    words = HiCacheConfig.from_sglang_args(shlex.split(f"{ENABLE} {flag}{joint}{text}"))
    assert words == config


def test_what_sglang_pairs_otherwise_is_served_as_given():
    for layout, backend in (
        ("page_first_direct", "kernel"),
        ("page_first", "direct"),
        ("layer_first", "direct"),
        ("page_head", "kernel"),
    ):
        config = HiCacheConfig.from_sglang_args(
            f"{ENABLE} --hicache-mem-layout {layout} --hicache-io-backend {backend}", strict=True
        )
        assert (config.mem_layout, config.io_backend) == (layout, backend)
        assert (config.normalized().mem_layout, config.normalized().io_backend) == (layout, backend)


def test_a_size_of_zero_is_unset_and_the_last_of_equal_flags_counts():
    config = HiCacheConfig.from_sglang_args(f"{ENABLE} --hicache-size 0 --hicache-ratio 3")
    assert (config.host_size_gb, config.host_ratio) == (None, 3.0)
    twice = HiCacheConfig.from_sglang_args(f"{ENABLE} --hicache-ratio 2 --hicache-ratio 3")
    assert twice.host_ratio == 3.0


def test_the_extra_config_is_shared_between_the_cache_and_the_adapter(tmp_path):
    entries = (
        '{"prefetch_threshold": 512, "prefetch_timeout_base": 1, "prefetch_timeout_per_ki_token":'
        ' 0.25, "prefetch_timeout_max": 9, "head_group": 4, "master_server_address": "h:1"}'
    )
    (tmp_path / "extra.json").write_text(entries)
    wanted = HiCacheConfig(
        storage="mooncake",
        prefetch_threshold=512,
        prefetch_timeout_base=1,
        prefetch_timeout_per_ki_token=0.25,
        prefetch_timeout_max=9,
        head_group=4,
        storage_options={"master_server_address": "h:1"},
    )
    for text in (entries, f"@{tmp_path / 'extra.json'}"):
        words = [ENABLE, "--hicache-storage-backend", "mooncake", EXTRA, text]
        assert HiCacheConfig.from_sglang_args(words) == wanted


REFUSED = [
    (f"{ENABLE} --hicache-sizes 4", "--hicache-sizes", "--hicache-size"),
    (f"{ENABLE} --hicache-storage-backend-extra x", "--hicache-storage-backend-extra", EXTRA),
    (f"{ENABLE} --hicache-size", "--hicache-size", "a value"),
    (f"{ENABLE} --hicache-size --hicache-ratio 2", "--hicache-size", "a value"),
    (f"{ENABLE} --hicache-size much", "--hicache-size", "'much'"),
    (f"{ENABLE} --page-size 6.4", "--page-size", "a whole number"),
    (f"{ENABLE} --disable-radix-cache", "--disable-radix-cache", ENABLE),
    (
        f"{ENABLE} --enable-unified-cache-external-linker",
        "--enable-unified-cache-external-linker",
        ENABLE,
    ),
    (f"{ENABLE} --disaggregation-mode decode", "--disaggregation-mode", "decode-enable-radix"),
    (f"{ENABLE} {EXTRA} '{{'", EXTRA, "JSON"),
    (f"{ENABLE} {EXTRA} '[1]'", EXTRA, "JSON object"),
    (f"{ENABLE} {EXTRA} @missing.yaml", EXTRA, "missing.yaml"),
    (f"{ENABLE} {EXTRA} '{{\"tp_lcm_size\": 8}}'", EXTRA, "head_group"),
    (
        f"{ENABLE} --hicache-storage-head-partition 2 {EXTRA} '{{\"head_group\": 4}}'",
        EXTRA,
        "head_group = 2",
    ),
    ("'unclosed", "command", "quot"),
    (f"sglang.launch_server {ENABLE}\nsglang.launch_server {ENABLE}", "command", "several"),
    (f"{ENABLE} --hicache-mem-layout page_first_kv_split", "layout", "page_first_kv_split"),
    (f"{ENABLE} --hicache-io-backend kernel_ascend", "io_backend", "kernel_ascend"),
    (f"{ENABLE} --radix-eviction-policy filo", "eviction", "filo"),
    (f"{ENABLE} --hicache-host-memory-mode buffer_only", "host_mode", "buffer_only"),
    (f"{ENABLE} --hicache-host-memory-fraction 1.5", "host_memory_fraction", "1.5"),
    (f"{ENABLE} --hicache-storage-key-scheme suffixed", "key_scheme", "suffixed"),
    (f"{ENABLE} --dcp-size 2 --hicache-storage-backend file", "storage", "dcp_size > 1"),
    (f"{ENABLE} {EXTRA} '{{\"prefetch_threshold\": -1}}'", "prefetch_threshold", "-1"),
]


@pytest.mark.parametrize("command, argument, said", REFUSED)  # noqa: PT006
def test_a_refusal_names_the_flag_and_what_is_wrong(command, argument, said):
    with pytest.raises(ArgumentError) as refusal:
        HiCacheConfig.from_sglang_args(command)
    assert refusal.value.argument == argument
    assert said in str(refusal.value)
    assert refusal.value.remedy


def test_switches_conflict_only_while_the_cache_is_on():
    for command in (
        "--disable-radix-cache",
        "--disaggregation-mode decode",
        "--enable-unified-cache-external-linker --page-size 16",
    ):
        assert not HiCacheConfig.from_sglang_args(command, strict=True).enabled


def test_variables_expand_where_the_text_assigns_them():
    text = 'SIZE=32\nA="--hicache-size $SIZE"\nserve $A --hicache-ratio=${SIZE} --model-path $M\n'
    flags = read_flags(text)
    assert flags.options == {"host_size_gb": 32.0, "host_ratio": 32.0}
    assert flags.skipped == ("--model-path", "$M")
    assert flags.cache_flags == ("--hicache-size", "--hicache-ratio")
    assert not flags.enabled
