"""A whole model on the Triton kernels against the same model on torch's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.attention.triton import TritonAttention
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.torch_ops import TorchOps
from model_worker.ops.triton_ops import TritonOps
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.models.paged_forward import PagedForward

_TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
_CONFIGS: dict[str, PreTrainedConfig] = {
    "plain": MistralConfig(**_TINY, sliding_window=None),
    "window": MistralConfig(**_TINY, sliding_window=9),
    "soft_cap": Gemma2Config(**_TINY, sliding_window=9, query_pre_attn_scalar=4, attn_logit_softcapping=3.0),
    "multipliers": GraniteConfig(
        **_TINY, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=2.0
    ),
    "experts": Qwen3MoeConfig(**_TINY, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24),
    "norms": Qwen3Config(**_TINY),
    "wide_norms": Gemma3TextConfig(**_TINY, sliding_window=9, query_pre_attn_scalar=4),
}


@pytest.fixture(scope="module", params=_CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    torch.manual_seed(3)
    path: Path = tmp_path_factory.mktemp("model")
    reference = AutoModelForCausalLM.from_config(_CONFIGS[request.param]).float()
    for name, weight in reference.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.uniform_(0.5, 2.0)
    reference.save_pretrained(path)
    return load_model(path, ModelConfig.from_path(path), torch.float32, "cpu")


def test_chunks_decodes_and_both_in_one_batch_have_the_logits_of_torch(
    model: CausalLM,
) -> None:
    generator = torch.Generator().manual_seed(1)
    page_size = 1 if model.config.attention_softcap else 16

    def ids(count: int) -> list[int]:
        return torch.randint(0, 61, (count,), generator=generator).tolist()

    steps = [
        [(0, ids(70)), (1, ids(1))],  # a prompt of two tiles, and one of one token
        [(0, ids(5)), (2, ids(3)), (1, ids(1))],  # a second chunk, a prompt, a decode
        [(0, ids(1)), (1, ids(1)), (2, ids(1))],  # decodes alone
    ]
    mine = PagedForward(model, page_size, backend=TritonAttention())
    reference = PagedForward(model, page_size, backend=TorchNativeAttention())
    for work in steps:
        model.bind(TritonOps())  # norms, gates, angles and experts by their kernels, too
        got = mine.step(work)
        model.bind(TorchOps())
        torch.testing.assert_close(got, reference.step(work), atol=2e-4, rtol=2e-4)
