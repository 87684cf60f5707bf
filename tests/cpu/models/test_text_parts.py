"""The text part of multimodal checkpoints against the whole model of transformers, given text alone."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
)

from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from runtime.base.errors import ModelError
from runtime.checkpoint.architectures import TEXT_PARTS
from runtime.checkpoint.model_config import ModelConfig
from runtime.text.tokenizer import load
from tests.harness.models.model_registry import MULTIMODAL, TINY, Case
from tests.harness.models.reference import (
    PAGE_SIZE,
    Pair,
    check_a_prefix_of_another_sequence,
    check_chunks_and_decodes_in_one_forward,
    check_greedy_tokens,
    make_checkpoint,
)

DEMO_MODEL = Path(__file__).parents[3] / "demo" / "model"
WEIGHTS = "model.safetensors"
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA3 = TINY | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_MISTRAL = TINY | {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "rms_norm_eps": 1e-5}
_QWEN = TINY | {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 5000.0},
}


def _gemma3(*, tied: bool) -> PreTrainedConfig:
    return Gemma3Config(
        text_config=_GEMMA3,
        vision_config=_TOWER,
        mm_tokens_per_image=4,
        image_token_index=90,
        tie_word_embeddings=tied,
    )


def _mistral3(*, tied: bool) -> PreTrainedConfig:
    return Mistral3Config(
        text_config=_MISTRAL,
        vision_config=_TOWER | {"model_type": "pixtral"},
        image_token_index=90,
        tie_word_embeddings=tied,
    )


def _qwen2_5_vl(*, tied: bool) -> PreTrainedConfig:
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return Qwen2_5_VLConfig(
        text_config=_QWEN,
        vision_config=tower | {"fullatt_block_indexes": [0]},
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        tie_word_embeddings=tied,
    )


CASES = {
    "gemma3_tied": ("Gemma3ForConditionalGeneration", _gemma3(tied=True)),
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3(tied=False)),
    "mistral3_tied": ("Mistral3ForConditionalGeneration", _mistral3(tied=True)),
    "mistral3": ("Mistral3ForConditionalGeneration", _mistral3(tied=False)),
    "qwen2_5_vl_tied": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl(tied=True)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl(tied=False)),
}


class Made(NamedTuple):
    name: str
    config: PreTrainedConfig
    hf: PreTrainedModel
    path: Path

    def pair(self, path: Path) -> Pair:
        return Pair(Case(self.config), self.hf, _load(path), TorchNativeAttention())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    architecture, config = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    hf = make_checkpoint(Case(config), path, getattr(transformers, architecture))
    return Made(request.param, config, hf, path)


def _load(path: Path) -> CausalLM:
    return load_model(path, ModelConfig.from_path(path), torch.float32, "cpu")


def test_logits_and_greedy_tokens_are_those_of_the_whole_model(made: Made) -> None:
    pair = made.pair(made.path)
    check_chunks_and_decodes_in_one_forward(pair, PAGE_SIZE)
    check_a_prefix_of_another_sequence(pair)
    check_greedy_tokens(pair)


def test_every_multimodal_architecture_has_its_cases() -> None:
    assert {architecture for architecture, _ in CASES.values()} == MULTIMODAL.keys()


@pytest.mark.parametrize("kind", [Gemma3Config, Mistral3Config, Qwen2_5_VLConfig])
def test_an_absent_key_means_what_the_reference_means_by_it(
    kind: type[Gemma3Config | Mistral3Config | Qwen2_5_VLConfig], tmp_path: Path
) -> None:
    """config.json as small as some that are published is the same model."""
    architecture = kind.__name__.removesuffix("Config") + "ForConditionalGeneration"
    given = {"model_type": kind.model_type, "architectures": [architecture]}
    text = {"model_type": TEXT_PARTS[architecture].model_types[0]}
    read = []
    whole: dict[str, Any] = kind(text_config=text).to_dict() | given
    sparse: dict[str, Any] = given | {"text_config": {}}
    for content in (whole, sparse):
        (tmp_path / "config.json").write_text(json.dumps(content))
        read.append(ModelConfig.from_path(tmp_path))
    ids = {"bos_token_id": None, "eos_token_ids": ()}  # which generation_config.json says
    assert msgspec.structs.replace(read[0], **ids) == read[1]


@pytest.mark.parametrize("where", ["chat_template.json", "chat_template.jinja"])
def test_the_tokenizer_of_a_folder_with_a_processor_is_read(where: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    of_processor = {"processor_class": "Qwen2_5_VLProcessor"}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "extra_special_tokens": {"image_token": "<|image|>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(of_processor))
    template = "{{ messages[0]['content'] }}!"
    (tmp_path / where).write_text(json.dumps({"chat_template": template}) if "json" in where else template)
    ours = load(tmp_path)
    text = "def f(x):\n    return"
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode_batch([text])[0].tolist() == reference(text)["input_ids"]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_template_of_a_processor_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(ModelError, match=r"chat_template\.json cannot be read: Expected `str`"):
        load(tmp_path)


def test_it_takes_the_memory_of_the_plain_decoder(made: Made, tmp_path: Path) -> None:
    """The same decoder, saved alone."""
    part = TEXT_PARTS[type(made.hf).__name__]
    raw = json.loads((made.path / "config.json").read_text())
    alone = raw["text_config"] | {
        "architectures": [part.decoder],
        "tie_word_embeddings": made.name.endswith("tied"),
    }
    alone["rope_parameters"].pop("mrope_section", None)
    (tmp_path / "config.json").write_text(json.dumps(alone))
    plain = load_model(tmp_path, ModelConfig.from_path(tmp_path), torch.float32, "cpu", "dummy")
    assert _shapes(_load(made.path)) == _shapes(plain)


def _shapes(model: CausalLM) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters()}


def test_both_spellings_of_the_names_are_read(made: Made, tmp_path: Path) -> None:
    """Names as most are published, and as transformers 5 has them in memory: model.language_model."""
    inner = made.hf.state_dict()
    if made.name.endswith("tied"):
        del inner["lm_head.weight"]
    assert any(name.startswith("model.language_model.") for name in inner)
    assert not any(name.startswith("model.language_model.") for name in load_file(made.path / WEIGHTS))
    save_file(inner, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    published = dict(_load(made.path).named_parameters())
    for name, weight in _load(tmp_path).named_parameters():
        assert torch.equal(weight, published[name]), name


def test_towers_are_left_in_the_files_and_the_log_says_how_large_they_are(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="model_worker"):
        _load(made.path)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    said = {name: float(size) for name, size in re.findall(r"(\w+) \(([\d.,]+) MB\)", line)}
    wanted: dict[str, float] = {}
    for name, weight in made.hf.named_parameters():
        module = name.split(".")[1]
        if name.startswith("model.") and module != "language_model":
            wanted[module] = wanted.get(module, 0.0) + weight.numel() * 4 / 1e6
    assert said == pytest.approx(wanted, abs=0.06)


def test_a_head_in_the_files_counts_whatever_config_json_says_of_it(made: Made, tmp_path: Path) -> None:
    """Published configs often leave it out, and what that means differs between two generations."""
    raw = json.loads((made.path / "config.json").read_text())
    raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / WEIGHTS).write_bytes((made.path / WEIGHTS).read_bytes())
    model = _load(tmp_path)
    assert torch.equal(model.lm_head.weight, made.hf.state_dict()["lm_head.weight"])
    assert ("lm_head.weight" in dict(model.named_parameters())) != made.name.endswith("tied")


def test_a_copy_of_the_embedding_is_no_head_of_its_own(made: Made, tmp_path: Path) -> None:
    tensors = load_file(made.path / WEIGHTS)
    embedding = made.hf.state_dict()["model.language_model.embed_tokens.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / WEIGHTS)
    raw = json.loads((made.path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = _load(tmp_path)
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert torch.equal(model.lm_head.weight, embedding)


def test_scales_of_a_quantised_text_part_are_found_under_its_names(made: Made, tmp_path: Path) -> None:
    tensors = load_file(made.path / WEIGHTS)
    (name,) = (name for name in tensors if re.search(r"(?<!tower)\.layers\.1\.mlp\.up_proj\.weight$", name))
    weight, scale = tensors[name], torch.tensor(0.01)
    tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = scale
    expected = tensors[name].float() * scale
    save_file(tensors, tmp_path / WEIGHTS)
    raw = json.loads((made.path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    packed = dict(_load(tmp_path).named_parameters())["model.layers.1.mlp.gate_up_proj.weight"]
    assert torch.equal(packed[len(packed) // 2 :], expected)


def test_a_tensor_of_neither_is_unexpected(made: Made, tmp_path: Path) -> None:
    tensors = load_file(made.path / WEIGHTS) | {"audio_tower.weight": torch.ones(2)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"unexpected: audio_tower\.weight"):
        _load(tmp_path)
