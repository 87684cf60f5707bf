"""ModelConfig: both generations of config.json are understood, and what is not served is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.model_config import ARCHITECTURES, ModelConfig, RopeConfig, SamplingDefaults

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _read(path: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Write config.json with changes (None removes a key) and read it."""
    config = {key: value for key, value in (_LLAMA | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_path(path)


def test_sizes_are_read(tmp_path: Path) -> None:
    config = _read(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (1000, 64, 128)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (512, 1e-5)
    assert (config.model_type, config.architecture) == ("llama", "LlamaForCausalLM")
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias
    assert config.kv_bytes_per_token(2) == 2 * 4 * 2 * 8 * 2


def test_absent_keys_mean_what_the_architectures_mean_by_them(tmp_path: Path) -> None:
    config = _read(tmp_path, num_key_value_heads=None, torch_dtype=None, rms_norm_eps=None, eos_token_id=None)
    assert config.num_kv_heads == 8
    assert config.dtype == "float32"
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(10000.0)
    assert config.eos_token_ids == ()
    assert config.sampling == SamplingDefaults()


def test_head_dim_need_not_divide_hidden_size(tmp_path: Path) -> None:
    assert _read(tmp_path, head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(1e4, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_is_read_from_both_spellings(tmp_path: Path, keys: dict[str, Any], expected: RopeConfig) -> None:
    assert _read(tmp_path, **keys).rope == expected


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn'"),
        ({"type": "dynamic", "factor": 4.0}, "'dynamic'"),
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, "'mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}, "full_attention"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "llama3", **_LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be greater"),
        ({"rope_type": "linear", "factor": "two"}, "rope_parameters: Expected `float"),
    ],
)
def test_rope_that_is_not_served_is_refused_by_name(tmp_path: Path, rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        _read(tmp_path, rope_parameters=rope)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 16}, (16,) * 4),
        ("MistralForCausalLM", {}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "max_window_layers": 2}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "max_window_layers": 2, "use_sliding_window": True},
            (None, None, 16, 16),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (16, None, 16, None),
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (None,) * 4,
        ),
    ],
)
def test_sliding_windows_follow_the_architecture(
    tmp_path: Path, architecture: str, keys: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert _read(tmp_path, architectures=[architecture], **keys).sliding_windows == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "float16", "float16"),
        ("dtype", "torch.float32", "float32"),
        ("torch_dtype", "bfloat16", "bfloat16"),
    ],
)
def test_dtype_is_read_from_both_spellings(tmp_path: Path, key: str, value: str, expected: str) -> None:
    changes: dict[str, Any] = {"torch_dtype": None, key: value}
    assert _read(tmp_path, **changes).dtype == expected


def test_generation_config_goes_first_and_eos_ids_are_united(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2, 9], "bos_token_id": 5, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = _read(tmp_path, eos_token_id=[2, 3], generation=generation)
    assert config.eos_token_ids == (7, 2, 9, 3)
    assert config.bos_token_id == 5
    assert config.sampling == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=None)


def test_token_id_zero_is_an_id(tmp_path: Path) -> None:
    config = _read(
        tmp_path, bos_token_id=4, eos_token_id=0, generation={"bos_token_id": 0, "eos_token_id": 0}
    )
    assert config.bos_token_id == 0
    assert config.eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported.*" + ", ".join(ARCHITECTURES)),
        ({"architectures": None}, "model_type 'llama'.*is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"vocab_size": None}, "missing required field `vocab_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, **changes)


def test_missing_directory_and_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_path(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_path(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"architectures": ["\xff"]}', b"[" * 100_000])
def test_unreadable_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        ModelConfig.from_path(tmp_path)


def test_unreadable_generation_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        _read(tmp_path, generation={"temperature": "hot"})


def test_model_config_and_the_tables_of_the_worker_import_no_torch() -> None:
    code = (
        "import sys, runtime.model_config, model_worker, model_worker.attention, model_worker.models\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
