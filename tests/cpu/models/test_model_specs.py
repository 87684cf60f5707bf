"""The specs of docs/adding_a_model.md, given by import string, compute what transformers computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import Ernie4_5Config, PreTrainedModel, SeedOssConfig

from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.device import make_device
from model_worker.loading.loader import load_model
from model_worker.served_model import load_served_model
from runtime.checkpoint.architectures import ARCHITECTURES
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import RuntimeConfig
from tests.harness.models.model_registry import TINY, Case
from tests.harness.models.reference import (
    PAGE_SIZE,
    Pair,
    check_chunks_and_decodes_in_one_forward,
    check_greedy_tokens,
    make_checkpoint,
)

DOC = Path(__file__).resolve().parents[3] / "docs" / "adding_a_model.md"
CASES = {
    "SEED_OSS": Case(SeedOssConfig(**TINY, head_dim=16, attention_bias=True)),
    "ERNIE": Case(Ernie4_5Config(**TINY, head_dim=16, use_bias=True, tie_word_embeddings=False)),
}


@pytest.fixture(autouse=True)
def my_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python of the page, in the module that it names."""
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "my_models.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    torch.set_num_threads(1)


def _made(name: str, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    path = tmp_path / name
    hf = make_checkpoint(CASES[name], path)
    assert type(hf).__name__ not in ARCHITECTURES
    return hf, path


@pytest.mark.parametrize("name", CASES)
def test_a_spec_of_the_page_gives_the_reference_logits_and_tokens(name: str, tmp_path: Path) -> None:
    hf, path = _made(name, tmp_path)
    config = ModelConfig.from_path(path, model_spec=f"my_models:{name}")
    model = load_model(path, config, torch.float32, "cpu")
    pair = Pair(CASES[name], hf, model, TorchNativeAttention())
    check_chunks_and_decodes_in_one_forward(pair, PAGE_SIZE)
    check_greedy_tokens(pair)


def test_a_worker_takes_the_spec_of_its_settings(tmp_path: Path) -> None:
    """Code beside the checkpoint does not matter: it is not run."""
    hf, path = _made("ERNIE", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoModel": "own.Model"}}))
    settings = RuntimeConfig(
        model=str(path),
        model_spec="my_models:ERNIE",
        model_impl="native",
        dtype="float32",
        device="cpu",
        context_length=256,
    )
    served = load_served_model(settings, make_device("cpu", threaded=False), lambda done, total: None)
    check_greedy_tokens(Pair(CASES["ERNIE"], hf, served.model, served.ops.attention))


def test_absent_keys_mean_what_the_row_of_the_page_says(tmp_path: Path) -> None:
    whole = Ernie4_5Config(**TINY, architectures=["Ernie4_5ForCausalLM"]).to_dict()
    defaults = Ernie4_5Config().to_dict()
    sparse = {key: value for key, value in whole.items() if key in TINY or value != defaults.get(key)}
    sparse |= {"architectures": whole["architectures"], "model_type": whole["model_type"]}
    read = []
    for content in (whole, {key: value for key, value in sparse.items() if key != "num_key_value_heads"}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        read.append(ModelConfig.from_path(tmp_path, model_spec="my_models:ERNIE"))
    assert read[0] == read[1]
