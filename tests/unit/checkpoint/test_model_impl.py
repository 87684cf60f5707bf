"""Choice of who computes a model, and what every process reads of a checkpoint whoever does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ModelError
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from tests.harness.cases import for_each

_GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50, "n_positions": 64}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def _write(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config))


def test_auto_takes_a_spec_where_there_is_one_and_the_library_otherwise(tmp_path: Path) -> None:
    _write(tmp_path, _LLAMA)
    assert isinstance(read_model_config(tmp_path, "auto"), ModelConfig)
    shared = read_model_config(tmp_path, "transformers")
    assert not isinstance(shared, ModelConfig)
    assert (shared.vocab_size, shared.max_position_embeddings, shared.eos_token_ids) == (1000, 512, (2,))
    _write(tmp_path, _GPT2)
    other = read_model_config(tmp_path, "auto")
    assert (other.architecture, other.max_position_embeddings, other.dtype) == (
        "GPT2LMHeadModel",
        64,
        "float32",
    )
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported.*--model-impl transformers"):
        read_model_config(tmp_path, "native")


def test_what_every_process_reads_is_what_the_spec_reads(tmp_path: Path) -> None:
    _write(tmp_path, _LLAMA)
    generation = {"eos_token_id": [7, 2], "temperature": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = ModelConfig.from_path(tmp_path)
    shared = CheckpointConfig.read(tmp_path)
    names = CheckpointConfig.__struct_fields__
    assert {name: getattr(shared, name) for name in names} == {name: getattr(config, name) for name in names}


@for_each(
    ("keys", "message"),
    [
        ({"architectures": ["LlavaForConditionalGeneration"]}, "is not a decoder of text"),
        ({"architectures": None}, "none .model_type 'gpt2'. is not a decoder of text"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map.*never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoints are not supported"),
        ({"n_positions": None}, "no `max_position_embeddings`, and no n_positions, .*sequence.*ALiBi"),
        ({"n_positions": -1}, r"Expected `int` >= 1 - at `\$.n_positions`"),
    ],
)
def test_what_the_library_is_not_asked_to_compute_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, _GPT2 | keys)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path, "auto")
