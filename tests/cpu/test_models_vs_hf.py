"""Every family against its transformers implementation: same checkpoint, float32, eager attention.

Each with torch operations and with the C++ kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.kernels.native.library import NativeKernels
from model_worker.loader import load_model
from model_worker.models.transformer import CausalLM
from runtime.model_config import ModelConfig
from tests.cpu.native import native_kernels, needs_compiler
from tests.cpu.paged_forward import PagedForward

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
REL_ERR = 1e-5  # float32; transformers and we add up in different orders

_TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that attention decides the logits
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_TINY),
    "llama_tied_biased": LlamaConfig(**_TINY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_rope_llama3": LlamaConfig(**_TINY, rope_parameters=_LLAMA3_ROPE),
    "llama_rope_linear": LlamaConfig(
        **_TINY, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": MistralConfig(**_TINY, sliding_window=None),
    "mistral_window": MistralConfig(**_TINY, sliding_window=11),
    "qwen2": Qwen2Config(**_TINY),
    "qwen2_window": Qwen2Config(**_TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": Qwen3Config(**_TINY, attention_bias=True),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_compiler)])
def kernels(request: pytest.FixtureRequest) -> NativeKernels | None:
    return native_kernels() if request.param == "native" else None


def paged(model: CausalLM, page_size: int, kernels: NativeKernels | None) -> PagedForward:
    backend = TorchNativeAttention() if kernels is None else CpuNativeAttention(kernels)
    return PagedForward(model, page_size, backend=backend)


def _load(path: Path, dtype: torch.dtype, kernels: NativeKernels | None) -> CausalLM:
    model = load_model(path, ModelConfig.from_path(path), dtype, "cpu")
    if kernels is not None:
        model.use_native(kernels)
    return model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: NativeKernels | None
) -> Any:
    """(the transformers model, ours) from one saved checkpoint with random weights, biases and norms."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp(request.param)
    hf = AutoModelForCausalLM.from_config(FAMILIES[request.param], attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight))
    hf.save_pretrained(path)
    return hf, _load(path, torch.float32, kernels)


def _prompts(num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lens = (53, 4, 31, 1)[:num]
    return [torch.randint(2, 97, (n,), generator=generator).tolist() for n in lens]


@torch.inference_mode()
def _reference(hf: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([ids])).logits[0]
    return logits


def _generate(hf: PreTrainedModel, ids: list[int], num_tokens: int) -> list[int]:
    out = hf.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_and_decodes_in_one_forward_give_the_reference_logits(
    pair: tuple[PreTrainedModel, CausalLM], page_size: int, kernels: NativeKernels | None
) -> None:
    """Four sequences advance by 1 to 17 tokens a step: chunks after a cached prefix beside decodes."""
    hf, model = pair
    prompts = _prompts(4)
    forward = paged(model, page_size, kernels)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    rows = [5, 0, 3, 6]
    sizes = [17, 3, 1, 1]
    done = [0] * len(prompts)
    while any(done[i] < len(ids) for i, ids in enumerate(prompts)):
        active = [i for i, ids in enumerate(prompts) if done[i] < len(ids)]
        work = [(rows[i], prompts[i][done[i] : done[i] + sizes[i]]) for i in active]
        order = sorted(range(len(active)), key=lambda k: len(work[k][1]) > 1)
        logits = forward.step(work).split([len(work[k][1]) for k in order])
        for k, part in zip(order, logits, strict=True):
            parts[active[k]].append(part)
            done[active[k]] += part.shape[0]
        sizes = [sizes[-1], *sizes[:-1]]
    for ids, got in zip(prompts, parts, strict=True):
        expected = _reference(hf, ids)
        error = (torch.cat(got) - expected).abs().max() / expected.abs().max()
        assert error < REL_ERR


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_equal_generate(
    pair: tuple[PreTrainedModel, CausalLM], page_size: int, kernels: NativeKernels | None
) -> None:
    hf, model = pair
    prompts = _prompts(3)
    forward = paged(model, page_size, kernels)
    first = [forward.prefill(row, ids, chunk=9) for row, ids in enumerate(prompts)]
    outputs = forward.decode(range(len(prompts)), first, num_steps=19)
    assert outputs == [_generate(hf, ids, 20) for ids in prompts]


def test_logits_are_those_of_the_sample_indices_and_may_be_none(
    pair: tuple[PreTrainedModel, CausalLM], kernels: NativeKernels | None
) -> None:
    _, model = pair
    ids = _prompts(1)[0]
    every = paged(model, 16, kernels).step([(2, ids)])
    some = paged(model, 16, kernels).step([(2, ids)], sample=[40, 3])
    assert torch.allclose(some, every[[40, 3]], rtol=0, atol=1e-4 * float(every.abs().max()))
    assert some.dtype is torch.float32
    assert paged(model, 16, kernels).step([(2, ids)], sample=[]).shape == (0, 97)


@pytest.fixture(scope="module")
def demo(kernels: NativeKernels | None) -> tuple[PreTrainedModel, CausalLM]:
    hf = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    return hf.eval(), _load(DEMO_MODEL, torch.float32, kernels)


def _demo_prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = ("def add(a, b):\n    return", "import os\nimport sys\n\nclass Path", "for i in range(")
    return [tokenizer.encode(text).ids for text in texts]


def test_demo_model_greedy_tokens_equal_generate(
    demo: tuple[PreTrainedModel, CausalLM], kernels: NativeKernels | None
) -> None:
    hf, model = demo
    prompts = _demo_prompts()
    forward = paged(model, 16, kernels)
    first = [forward.prefill(row, ids, chunk=64) for row, ids in enumerate(prompts)]
    outputs = forward.decode(range(len(prompts)), first, num_steps=31)
    assert outputs == [_generate(hf, ids, 32) for ids in prompts]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_demo_tokens_do_not_depend_on_chunk_page_size_or_batch(
    demo: tuple[PreTrainedModel, CausalLM], page_size: int, chunk: int, kernels: NativeKernels | None
) -> None:
    _, model = demo
    prompts = _demo_prompts()
    solo = []
    for ids in prompts:
        alone = paged(model, 16, kernels)
        solo += alone.decode([0], [alone.prefill(0, ids, chunk=64)], num_steps=15)
    forward = paged(model, page_size, kernels)
    first = [forward.prefill(row, ids, chunk) for row, ids in enumerate(prompts)]
    assert forward.decode(range(len(prompts)), first, num_steps=15) == solo


def test_bfloat16_logits_stay_close_to_float32(
    demo: tuple[PreTrainedModel, CausalLM], kernels: NativeKernels | None
) -> None:
    """The weights are bfloat16 on disk, so only activations are rounded: 8 bits of mantissa over 6 layers."""
    ids = _demo_prompts()[1]
    narrow = _load(DEMO_MODEL, torch.bfloat16, kernels)
    expected = paged(demo[1], 16, kernels).step([(0, ids)])
    error = (paged(narrow, 16, kernels).step([(0, ids)]) - expected).abs().max() / expected.abs().max()
    assert error < 0.05
