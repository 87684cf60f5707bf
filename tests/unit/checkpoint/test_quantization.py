"""quantization_config: what is read of it, and what is refused by its name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ConfigError, ModelError
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.quantization import CheckpointQuantization, read_quantization
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each

_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}


def _changed(where: str, **changes: Any) -> dict[str, Any]:
    """A group's `where` with these changes; of "" the config's own fields."""
    config = copy.deepcopy(_COMPRESSED)
    (config["config_groups"]["group_0"][where] if where else config).update(changes)
    return config


def _fp8(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **fields}


def _modelopt(**fields: Any) -> dict[str, Any]:
    """Return the config as ModelOpt writes it: groups without a strategy, and what they are called."""
    args = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": args, "weights": args, "targets": ["Linear"]}
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": group}}
    return config | {"kv_cache_scheme": args} | fields


_KV_CACHE: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
    "observer": "minmax",
    "group_size": None,
}


_ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": _KV_CACHE}


def _kv_cache(**changes: Any) -> dict[str, Any]:
    return _changed("", kv_cache_scheme=_KV_CACHE | changes)


@for_each(
    ("raw", "expected"),
    [
        (None, None),
        (_fp8(), CheckpointQuantization("float8_e4m3fn")),
        (_fp8(weight_block_size=[128, 64]), CheckpointQuantization("float8_e4m3fn", (128, 64))),
        (_COMPRESSED, CheckpointQuantization("int8")),
        (_changed("weights", strategy="tensor"), CheckpointQuantization("int8")),
        (_changed("weights", type="float"), CheckpointQuantization("float8_e4m3fn")),
        (
            _changed("weights", type="float", strategy="block", block_structure=[128, 128]),
            CheckpointQuantization("float8_e4m3fn", (128, 128)),
        ),
        (_kv_cache(), CheckpointQuantization("int8")),
        (_kv_cache() | {"config_groups": {}, "format": "dense"}, None),
        (_kv_cache() | {"config_groups": {"group_0": _ATTENTION}, "format": "dense"}, None),
        (
            _kv_cache() | {"config_groups": _COMPRESSED["config_groups"] | {"group_1": _ATTENTION}},
            CheckpointQuantization("int8"),
        ),
        (_fp8(kv_cache_scheme="static"), CheckpointQuantization("float8_e4m3fn")),
        (_modelopt(), CheckpointQuantization("float8_e4m3fn")),
        (_modelopt(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), CheckpointQuantization("float8_e4m3fn")),
        (_modelopt(quant_algo=None, kv_cache_scheme="FP8"), None),
    ],
)
def test_formats_that_are_read(raw: Any, expected: CheckpointQuantization | None) -> None:
    assert read_quantization(raw) == expected


@for_each(
    ("raw", "named"),
    [
        *(
            ({"quant_method": name}, f"quant_method '{name}' is not supported")
            for name in ("awq", "gptq", "bitsandbytes", "mxfp4", "torchao", "hqq", "")
        ),
        (_fp8(fmt="e5m2"), "fmt 'e5m2'"),
        (_fp8(weight_block_size=[128]), r"blocks of \[128\]"),
        (_fp8(weight_block_size="x"), "cannot be read"),
        ([1], "cannot be read"),
        (_changed("", format="pack-quantized"), "format 'pack-quantized'"),
        (_kv_cache(num_bits=4), "kv_cache_scheme of 4 bits, type 'float'"),
        (_kv_cache(type="int"), "kv_cache_scheme of 8 bits, type 'int'"),
        (_kv_cache(strategy="attn_head"), "kv_cache_scheme.strategy 'attn_head'"),
        (_kv_cache(dynamic=True), "kv_cache_scheme that is dynamic"),
        (_kv_cache(dynamic="local"), "kv_cache_scheme that is dynamic"),
        (_kv_cache(symmetric=False), "kv_cache_scheme that is not symmetric"),
        (_fp8(kv_cache_scheme="dynamic"), "kv_cache_scheme 'dynamic'"),
        (_changed("", config_groups={"group_0": _ATTENTION}), "config_groups.group_0 without weights"),
        (_modelopt(kv_cache_scheme="NVFP4"), "kv_cache_scheme 'NVFP4'"),
        (_modelopt(quant_algo="NVFP4"), "quant_algo 'NVFP4'"),
        (_modelopt(quant_algo=None, kv_cache_scheme=None), "quant_algo None"),
        (_changed("", config_groups={}), "config_groups with 0 kinds"),
        (_changed("weights", num_bits=4), "weights of 4 bits"),
        (_changed("weights", symmetric=False), "weights that are not symmetric"),
        (_changed("weights", strategy="group", group_size=128), "strategy 'group'"),
        (_changed("input_activations", dynamic=False), "input_activations that are not 8 bits and dynamic"),
    ],
)
def test_other_formats_are_refused_with_what_to_use_instead(raw: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        read_quantization(raw)
    assert "cannot be read" in named or "--quantization int8" in str(caught.value)


@pytest.mark.parametrize("kv_cache", ["FP8", None])
def test_older_modelopt_checkpoints_say_it_in_a_file_of_their_own(
    kv_cache: str | None, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 8, "max_position_embeddings": 8}))
    file = tmp_path / "hf_quant_config.json"
    fields = {"quant_algo": "FP8", "kv_cache_quant_algo": kv_cache, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    assert CheckpointConfig.read(tmp_path).quantization == CheckpointQuantization("float8_e4m3fn")
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"hf_quant_config.json cannot be read"):
        CheckpointConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("device", "has_spec", "says"),
    [("cuda", True, "int8 is for a CPU"), ("cpu", False, "int8 needs a model that has a spec")],
)
def test_int8_is_refused_where_nothing_computes_it(
    device: Any, has_spec: bool, says: str, tmp_path: Path
) -> None:
    wanted = RuntimeConfig(quantization="int8", device=device)
    with pytest.raises(ConfigError, match=f"quantization: {says}"):
        resolve_config(wanted, context_length=64, dtype="bfloat16", model_path=tmp_path, has_spec=has_spec)


@pytest.mark.parametrize(
    ("device", "backend", "says"),
    [
        ("cpu", "auto", "fp8_e4m3 is for CUDA; the device is cpu"),
        ("cuda", "flashinfer", "fp8_e4m3 is read by --attention-backend triton, not by flashinfer"),
        ("cuda", "triton", ""),
    ],
)
def test_a_kv_cache_of_eight_bits_is_refused_where_nothing_reads_it(
    device: Any, backend: str, says: str, tmp_path: Path
) -> None:
    wanted = RuntimeConfig(kv_cache_dtype="fp8_e4m3", device=device, attention_backend=backend)

    def resolved() -> RuntimeConfig:
        return resolve_config(wanted, context_length=64, dtype="bfloat16", model_path=tmp_path)

    if not says:
        assert resolved().kv_cache_dtype == "fp8_e4m3"
        return
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: {says}"):
        resolved()
