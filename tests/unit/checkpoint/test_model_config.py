"""ModelConfig: both generations of config.json are understood, and what is not served is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ModelError
from runtime.checkpoint.architectures import ARCHITECTURES
from runtime.checkpoint.checkpoint_config import SamplingDefaults
from runtime.checkpoint.model_config import ExpertsConfig, ModelConfig
from runtime.checkpoint.rope_config import RopeConfig
from tests.harness.cases import for_each

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
    assert (config.max_position_embeddings, config.norm_eps) == (512, 1e-5)
    assert (config.model_type, config.architecture) == ("llama", "LlamaForCausalLM")
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias


def test_absent_keys_mean_what_the_architectures_mean_by_them(tmp_path: Path) -> None:
    config = _read(tmp_path, num_key_value_heads=None, torch_dtype=None, rms_norm_eps=None, eos_token_id=None)
    assert config.num_kv_heads == 8
    assert config.dtype == "float32"
    assert config.norm_eps == 1e-6
    assert config.rope == RopeConfig(10000.0, 8)
    assert config.eos_token_ids == ()
    assert config.sampling == SamplingDefaults()


def test_head_dim_need_not_divide_hidden_size(tmp_path: Path) -> None:
    assert _read(tmp_path, head_dim=32).head_dim == 32


@for_each(
    ("keys", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5, 8)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5, 8)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6, 8)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(1e4, 8, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
            RopeConfig(5e5, 8, "llama3", 8.0, 8192, 1.0, 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3}},
            RopeConfig(5e5, 8, "llama3", 8.0, 8192, 1.0, 4.0),
        ),
    ],
)
def test_rope_is_read_from_both_spellings(tmp_path: Path, keys: dict[str, Any], expected: RopeConfig) -> None:
    assert _read(tmp_path, **keys).rope == expected


@for_each(
    ("rope", "named"),
    [
        ({"rope_type": "yarn"}, "yarn lacks factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "longrope lacks long_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
            "3 factors, not one for each of 4 frequencies",
        ),
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


def _rope(path: Path, **changes: Any) -> RopeConfig:
    """The rotary embedding with heads of 8 dimensions, an original context of 128 and 512 now."""
    return _read(path, rope_theta=1e4, original_max_position_embeddings=128, **changes).rope


def test_yarn_takes_what_is_absent_from_the_paper(tmp_path: Path) -> None:
    rope = _rope(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
    given = _rope(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 0.7})
    assert given.attention_factor == 0.7


@pytest.mark.parametrize("spelling", ["longrope", "su"])
def test_longrope_takes_the_factors_of_the_context_that_is_served(tmp_path: Path, spelling: str) -> None:
    scaling = {"type": spelling, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = _rope(tmp_path, rope_scaling=scaling)
    assert (rope.type, rope.divisors) == ("longrope", (1.0, 2.0, 3.0, 4.0))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
    short = ModelConfig.from_path(tmp_path, context_length=128).rope
    assert short.divisors == (1.0,) * 4
    assert short.attention_factor == rope.attention_factor
    assert ModelConfig.from_path(tmp_path, context_length=129).rope == rope


def test_dynamic_is_relative_to_the_models_own_context(tmp_path: Path) -> None:
    rope = _read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}).rope
    assert rope == RopeConfig(1e4, 8, "dynamic", 2.0, original_max_position_embeddings=512)


_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "rms_norm_eps": None,
    "head_dim": 32,
    "rope_local_base_freq": 5000.0,
    "rope_theta": 2e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
}


def test_layers_with_a_window_may_have_a_rotation_of_their_own(tmp_path: Path) -> None:
    """In the older spelling; the newer one has both under rope_parameters."""
    old = _read(tmp_path, **_GEMMA3)
    assert old.rope == RopeConfig(2e6, 32, "linear", 8.0)
    assert old.window_rope == RopeConfig(5000.0, 32)
    assert old.sliding_windows == (16, 16, None) * 2
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    removed = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    assert _read(tmp_path, **_GEMMA3 | removed, rope_parameters=nested) == old


def test_multipliers_and_caps_are_read_where_the_architecture_has_them(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    granite = _read(tmp_path, architectures=["GraniteForCausalLM"], **keys)
    assert (granite.attention_scale, granite.embedding_multiplier) == (0.25, 12.0)
    assert (granite.residual_multiplier, granite.logits_multiplier) == (0.5, 0.125)
    assert (granite.attention_softcap, granite.logits_softcap) == (None, None)
    gemma = _read(tmp_path, architectures=["Gemma2ForCausalLM"], **keys)
    assert (gemma.attention_scale, gemma.attention_softcap, gemma.logits_softcap) == (0.25, 50.0, 30.0)
    assert (gemma.embedding_multiplier, gemma.residual_multiplier) == (1.0, 1.0)
    llama = _read(tmp_path, **keys)
    assert llama.attention_scale == 8**-0.5
    assert (llama.attention_softcap, llama.logits_softcap, llama.logits_multiplier) == (None, None, 1.0)


def test_a_cap_of_null_is_no_cap_and_an_absent_one_the_families_own(tmp_path: Path) -> None:
    config = _read(tmp_path, architectures=["Gemma2ForCausalLM"])
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"attn_logit_softcapping": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_path(tmp_path).attention_softcap is None


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_layers_have_experts_by_step_and_exception(tmp_path: Path, spelling: str) -> None:
    keys: dict[str, Any] = {
        spelling: 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    config = _read(tmp_path, architectures=["Qwen3MoeForCausalLM"], **keys)
    assert config.experts == ExpertsConfig(8, 2, 32, True)
    assert config.expert_layers == (False, True, False, False)
    dense = _read(tmp_path, **keys)
    assert dense.experts is None
    assert not any(dense.expert_layers)


@for_each(
    ("architecture", "changes", "message"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 1}, r"num_experts_per_tok \(2\) is more than the 1"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("CohereForCausalLM", {"layer_norm_eps": 0}, r"`\$\.layer_norm_eps`"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, "3 of 8 dimensions cannot be rotated"),
    ],
)
def test_what_a_family_has_but_is_not_served_is_refused_by_its_own_word(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, architectures=[architecture], **changes)


@for_each(
    ("architecture", "keys", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 16}, (16,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
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
    generation["max_new_tokens"] = 512
    config = _read(tmp_path, eos_token_id=[2, 3], generation=generation)
    assert config.eos_token_ids == (7, 2, 9, 3)
    assert config.bos_token_id == 5
    assert config.sampling == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, max_tokens=512)


def test_token_id_zero_is_an_id(tmp_path: Path) -> None:
    config = _read(
        tmp_path, bos_token_id=4, eos_token_id=0, generation={"bos_token_id": 0, "eos_token_id": 0}
    )
    assert config.bos_token_id == 0
    assert config.eos_token_ids == (0,)


@for_each(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is not supported.*" + ", ".join(ARCHITECTURES)),
        ({"architectures": None}, "model_type 'llama'.*is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map.*never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'.*silu, gelu, gelu_pytorch_tanh"),
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


def test_code_that_comes_with_a_checkpoint_is_passed_over_where_the_table_says_so(tmp_path: Path) -> None:
    """The config as published: rotary factors for three quarters of a head, a window, code beside the
    weights.
    """
    config = _read(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        partial_rotary_factor=0.75,
        sliding_window=262144,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "long_factor": [1.0, 4.0, 9.0], "short_factor": [1.0] * 3},
    )
    assert (config.rope.rotary_dim, config.rope.divisors) == (6, (1.0, 4.0, 9.0))
    assert config.sliding_windows == (262144,) * 4
    with pytest.raises(ModelError, match=r"auto_map.*never run"):
        _read(tmp_path, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Config"})


def test_missing_directory_and_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_path(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_path(tmp_path)


@for_each("content", [b"", b"{", b"[]", b'{"architectures": ["\xff"]}', b"[" * 100_000])
def test_unreadable_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        ModelConfig.from_path(tmp_path)


def test_unreadable_generation_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        _read(tmp_path, generation={"temperature": "hot"})
