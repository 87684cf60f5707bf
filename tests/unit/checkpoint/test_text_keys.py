"""config.json of multimodal checkpoints, as they are published, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ModelError
from runtime.checkpoint.architectures import TEXT_PARTS
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from runtime.checkpoint.rope_config import RopeConfig
from tests.harness.cases import for_each

_GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
_MISTRAL_SMALL_3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}
_QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_token_id": 151654,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
_PUBLISHED = {"gemma3": _GEMMA3_4B, "mistral3": _MISTRAL_SMALL_3, "qwen2_5_vl": _QWEN2_5_VL_7B}


def _read(path: Path, raw: dict[str, Any], **text: Any) -> ModelConfig:
    changed = raw | {"text_config": raw["text_config"] | text} if text else raw
    (path / "config.json").write_text(json.dumps(changed))
    return ModelConfig.from_path(path)


def test_what_gemma_leaves_out_is_what_its_class_says(tmp_path: Path) -> None:
    config = _read(tmp_path, _GEMMA3_4B)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2560, 34, 262208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.rope == RopeConfig(1e6, 256, "linear", 8.0)
    assert config.window_rope == RopeConfig(1e4, 256)
    assert [window is None for window in config.sliding_windows[:7]] == [False] * 5 + [True, False]
    assert (config.max_position_embeddings, config.dtype) == (131072, "bfloat16")
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((1, 106), True)


def test_mistral_has_its_numbers_below_text_config(tmp_path: Path) -> None:
    config = _read(tmp_path, _MISTRAL_SMALL_3)
    assert (config.hidden_size, config.num_heads, config.head_dim) == (5120, 32, 128)
    assert (config.rope.theta, config.norm_eps, config.vocab_size) == (1e9, 1e-5, 131072)
    assert set(config.sliding_windows) == {None}


def test_qwen_has_its_numbers_beside_those_of_its_tower(tmp_path: Path) -> None:
    config = _read(tmp_path, _QWEN2_5_VL_7B)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (3584, 28, 4)
    assert config.rope == RopeConfig(1e6, 128)
    assert (config.tie_word_embeddings, config.norm_eps) == (False, 1e-6)


def test_axes_of_an_image_may_stand_beside_a_longer_context(tmp_path: Path) -> None:
    """The authors of the model say it so, to reach 128 K tokens."""
    scaling = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4}
    scaling |= {"original_max_position_embeddings": 32768}
    rope = _read(tmp_path, _QWEN2_5_VL_7B | {"rope_scaling": scaling}).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32768)


@pytest.mark.parametrize("name", _PUBLISHED)
def test_every_process_reads_the_same_of_it(name: str, tmp_path: Path) -> None:
    config = _read(tmp_path, _PUBLISHED[name])
    shared = CheckpointConfig.read(tmp_path)
    names = CheckpointConfig.__struct_fields__
    assert {name: getattr(shared, name) for name in names} == {name: getattr(config, name) for name in names}
    assert config.model_type == _PUBLISHED[name]["model_type"]
    assert read_model_config(tmp_path, "auto") == config


@for_each("beside", [True, False, None])
@for_each("below", [True, False, None])
@for_each("name", ["gemma3", "mistral3"])
def test_a_head_is_tied_where_either_says_so(
    name: str, beside: bool | None, below: bool | None, tmp_path: Path
) -> None:
    raw = _PUBLISHED[name]
    if beside is not None:
        raw = raw | {"tie_word_embeddings": beside}
    text = {} if below is None else {"tie_word_embeddings": below}
    config = _read(tmp_path, raw, head_dim=128, **text)
    assert config.tie_word_embeddings == (beside is not False or below is True)


@for_each(
    ("name", "changes", "says"),
    [
        ("mistral3", {"text_config": {"model_type": "ministral3"}}, "'ministral3' is not supported in this"),
        ("gemma3", {"text_config": {"model_type": "gemma3n_text"}}, "Supported: gemma3_text"),
        ("gemma3", {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ("gemma3", {"text_config": [1]}, r"Expected `object` - at `\$.text_config`"),
        ("gemma3", {"text_config": {"hidden_size": "a"}}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ("gemma3", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("qwen2_5_vl", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "40 pairs .* has 64"),
        ("qwen2_5_vl", {"rope_scaling": {"type": "mrope", "mrope_section": 5}}, "mrope_section: Expected"),
        ("qwen2_5_vl", {"rope_scaling": {"type": "mrope", "mrope_interleaved": True}}, "mrope_interleaved"),
        ("qwen2_5_vl", {"architectures": ["Qwen3VLForConditionalGeneration"]}, "is not a decoder of text"),
    ],
)
def test_what_is_another_model_is_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_PUBLISHED[name] | changes))
    with pytest.raises(ModelError, match=says):
        read_model_config(tmp_path, "auto")


def test_the_library_is_not_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_GEMMA3_4B))
    with pytest.raises(ModelError, match="its text part has a spec; leave the flag out"):
        read_model_config(tmp_path, "transformers")


@for_each(
    ("name", "ours"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_are_those_of_the_decoder_alone(name: str, ours: str) -> None:
    for part in TEXT_PARTS.values():
        assert part.decoder_name(name) == ours
        for tower in part.towers:
            assert part.decoder_name(f"{tower}layers.0.weight") is None
            assert part.decoder_name(f"model.{tower}layers.0.weight") is None
