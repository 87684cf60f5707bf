"""--hf-overrides and --rope-scaling: one JSON object over config.json, refused where nothing reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ConfigError, ModelError
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from runtime.checkpoint.overrides import read_overridden
from runtime.launcher.command_line import parse_args
from runtime.settings.config import RuntimeConfig
from runtime.settings.keywords import flags_of_keywords
from tests.harness.cases import for_each

OLD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rope_theta": 500.0,
    "eos_token_id": 2,
}
NEW = {key: value for key, value in OLD.items() if key != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(raw: dict[str, Any], path: Path, hf: Any = None, rope: Any = None) -> ModelConfig:
    """The model of a launch with these overrides."""
    (path / "config.json").write_text(json.dumps(raw))
    settings = {"hf_overrides": hf, "rope_scaling": rope}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.items()
        if value is not None
    }
    config, model = read_overridden(RuntimeConfig(**texts), path)  # type: ignore[arg-type]
    assert config.rope_scaling == ""
    assert isinstance(model, ModelConfig)
    assert read_model_config(path, "auto", overrides=config.hf_overrides) == model
    return model


def test_without_overrides_the_settings_are_the_same(tmp_path: Path) -> None:
    config = RuntimeConfig()
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    assert read_overridden(config, tmp_path)[0] is config


DEEP = '{"a":' * 200_000 + "1" + "}" * 200_000
"""Deeper than any release of Python goes."""


@pytest.mark.parametrize("raw", [OLD, NEW])
def test_keys_take_the_place_of_the_files(raw: dict[str, Any], tmp_path: Path) -> None:
    overrides = {"rms_norm_eps": 0.5, "eos_token_id": [7, 8], "rope_theta": 77, "max_position_embeddings": 64}
    model = read(raw, tmp_path, overrides)
    assert (model.norm_eps, model.eos_token_ids, model.rope.theta) == (0.5, (7, 8), 77.0)
    assert model.max_position_embeddings == 64
    assert read(raw, tmp_path).rope.theta == 500.0


@pytest.mark.parametrize("raw", [OLD, NEW])
@pytest.mark.parametrize("named", ["rope_scaling", "hf_overrides"])
def test_the_rope_of_either_generation_is_replaced_and_its_base_stays(
    raw: dict[str, Any], named: str, tmp_path: Path
) -> None:
    if named == "rope_scaling":
        model = read(raw, tmp_path, rope=YARN)
    else:
        model = read(raw, tmp_path, {"rope_scaling": YARN, "max_position_embeddings": 512})
    assert (model.rope.type, model.rope.factor, model.rope.theta) == ("yarn", 4.0, 500.0)
    assert model.max_position_embeddings == 512
    # hf_overrides is taken at its word, as transformers takes it.
    assert model.rope.original_max_position_embeddings == (128 if named == "rope_scaling" else 512)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 100}, 250),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "default"}, 128),
    ],
)
def test_the_context_is_as_long_as_the_scaling_is_for(
    scaling: dict[str, Any], context: int, tmp_path: Path
) -> None:
    assert read(NEW, tmp_path, rope=scaling).max_position_embeddings == context
    assert read(NEW, tmp_path, {"max_position_embeddings": 99}, scaling).max_position_embeddings == 99


@for_each(
    ("hf", "rope", "said"),
    [
        ({"rms_norm_epsilon": 1}, None, "hf_overrides: .*no 'rms_norm_epsilon', and nothing would read it"),
        ({"auto_map": None}, None, "hf_overrides: .*no 'auto_map'"),
        ("{", None, "hf_overrides: a JSON object"),
        ("[1]", None, "hf_overrides: a JSON object"),
        (None, "yarn", "rope_scaling: a JSON object"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, None, "hf_overrides: rope_scaling is another name"),
        ({"rope_parameters": YARN}, YARN, "rope_scaling: hf_overrides says rope_parameters as well"),
        ({"hidden_size": "big"}, None, "hf_overrides: what --hf-overrides says .*hidden_size"),
        (None, {"rope_type": "yarn"}, "rope_scaling: what --rope-scaling says .*yarn lacks factor"),
        (None, {"rope_type": "spiral"}, "rope_scaling: .*rope type 'spiral' is not supported"),
        (None, {"rope_type": ["yarn"]}, "rope_scaling: .*rope type"),
        (None, {"rope_type": "yarn", "factor": 2, "faktor": 2}, "rope_scaling: .*keys: faktor"),
        ({"hidden_size": "big"}, YARN, "hf_overrides: .*hidden_size"),
        ({"rms_norm_eps": 0.5}, {"rope_type": "spiral"}, "rope_scaling: .*rope type 'spiral'"),
        ({"num_hidden_layers": 2**31 - 1}, None, "hf_overrides: .*num_hidden_layers"),
        *(
            ({"rope_scaling": value}, None, "hf_overrides: rope_scaling: an object or null")
            for value in (5, "yarn", [1])
        ),
        ({"rope_parameters": "x", "rope_theta": 5}, None, "hf_overrides: rope_parameters: an object or null"),
        (
            '{"rope_scaling": ' + '{"a":' * 200_000 + "1" + "}" * 200_001,
            None,
            "hf_overrides: .* nested too deeply",
        ),
        (None, '{"a":' * 200_000 + "1" + "}" * 200_000, "rope_scaling: .* nested too deeply"),
        (None, {"rope_type": "linear", "factor": 1e308}, "rope_scaling: no context is 1e.308 times as long"),
        (None, {"rope_type": "linear", "factor": 1e9}, "rope_scaling: what --rope-scaling says"),
        (None, {}, "rope_scaling: the object is empty"),
    ],
)
def test_what_will_not_do_is_refused_by_name(hf: Any, rope: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^" + said):
        read(NEW, tmp_path, hf, rope)


@pytest.mark.parametrize("raw", [{"rope_parameters": "x"}, {"num_hidden_layers": "two"}])
def test_what_is_wrong_in_the_file_is_not_blamed_on_an_override(raw: dict[str, Any], tmp_path: Path) -> None:
    for hf, rope in ((None, None), ({"rope_theta": 5}, None), (None, YARN)):
        with pytest.raises(ModelError, match=r"config\.json"):
            read(OLD | raw, tmp_path, hf, rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"full_attention": 5},
        {"full_attention": {"rope_type": [1]}},
        {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1}
        | dict.fromkeys(("short_factor", "long_factor"), [1.0] * 4),
    ],
)
def test_rotary_parameters_of_the_wrong_kind_are_no_traceback(rope: dict[str, Any], tmp_path: Path) -> None:
    raw = OLD | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8}
    with pytest.raises(ModelError, match=r"config\.json"):
        read(raw | {"rope_parameters": rope}, tmp_path)
    with pytest.raises(ConfigError, match="hf_overrides: "):
        read(raw, tmp_path, {"rope_parameters": rope})


def test_the_keys_of_a_multimodal_checkpoint_are_its_decoders(tmp_path: Path) -> None:
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**OLD, "model_type": "mistral", "num_key_value_heads": 4},
        "vision_config": {"hidden_size": 8},
    }
    model = read(raw, tmp_path, {"rms_norm_eps": 0.5}, YARN)
    assert (model.norm_eps, model.max_position_embeddings, model.rope.factor) == (0.5, 512, 4.0)
    with pytest.raises(ConfigError, match="hf_overrides: text_config: give the decoder's keys themselves"):
        read(raw, tmp_path, {"text_config": {"rms_norm_eps": 0.5}})


def test_ropes_of_several_kinds_are_all_given_or_none(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}
    for hf, rope in (({"rope_theta": 1}, None), (None, YARN), ({"rope_scaling": YARN}, None)):
        with pytest.raises(ConfigError, match=r"several kinds.*--hf-overrides"):
            read(NEW | {"rope_parameters": kinds}, tmp_path, hf, rope)


def test_the_library_takes_objects(tmp_path: Path) -> None:
    config = parse_args(flags_of_keywords({"rope_scaling": YARN, "hf_overrides": {"rope_theta": 1}}))
    assert json.loads(config.rope_scaling) == YARN
    assert json.loads(config.hf_overrides) == {"rope_theta": 1}
