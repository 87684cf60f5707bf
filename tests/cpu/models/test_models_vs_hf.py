"""Every family against its transformers implementation: same checkpoint, float32, eager attention.

Each with torch operations and with the C++ kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model_worker.attention.base import AttentionBackend
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.kernels.native.library import NativeKernels
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import NativeOps
from model_worker.transformers_backend.load import load_transformers_model
from runtime.base.cpu_isa import CpuIsa, usable_isas
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.overrides import with_overrides
from runtime.settings.config import RuntimeConfig
from tests.harness.models.model_registry import CASES, FAMILIES, TINY, VOCAB_SIZE, Case
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.reference import (
    PAGE_SIZE,
    TOLERANCE,
    Pair,
    check_a_prefix_of_another_sequence,
    check_chunks_and_decodes_in_one_forward,
    check_greedy_tokens,
    generated,
    make_checkpoint,
    prompts,
)

DEMO_MODEL = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_compiler)])
def kernels(request: pytest.FixtureRequest) -> NativeKernels | None:
    return native_kernels() if request.param == "native" else None


def _backend(kernels: NativeKernels | None) -> AttentionBackend:
    return TorchNativeAttention() if kernels is None else CpuNativeAttention(kernels)


def paged(model: CausalLM, page_size: int, kernels: NativeKernels | None) -> PagedForward:
    dtype = model.lm_head.weight.dtype
    return PagedForward(model, page_size, backend=_backend(kernels), dtype=dtype)


def _load(path: Path, dtype: torch.dtype, kernels: NativeKernels | None) -> CausalLM:
    model = load_model(path, ModelConfig.from_path(path), dtype, "cpu")
    if kernels is not None:
        model.bind(NativeOps(kernels))
    return model


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, PreTrainedModel, Path]:
    """A case's transformers model, and where it is saved."""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return case, make_checkpoint(case, path), path


@pytest.fixture(scope="module")
def pair(checkpoint: tuple[Case, PreTrainedModel, Path], kernels: NativeKernels | None) -> Pair:
    case, hf, path = checkpoint
    return Pair(case, hf, _load(path, torch.float32, kernels), _backend(kernels))


@pytest.mark.parametrize("page_size", [1, PAGE_SIZE])
def test_chunks_and_decodes_in_one_forward_give_the_reference_logits(pair: Pair, page_size: int) -> None:
    check_chunks_and_decodes_in_one_forward(pair, page_size)


def test_a_prefix_of_another_sequence_gives_the_reference_logits(pair: Pair) -> None:
    check_a_prefix_of_another_sequence(pair)


def test_greedy_tokens_are_the_references(pair: Pair) -> None:
    check_greedy_tokens(pair)


def test_logits_are_those_of_the_output_indices_and_may_be_none(pair: Pair) -> None:
    ids = prompts()[0]
    every = pair.paged().step([(2, ids)])
    some = pair.paged().step([(2, ids)], sample=[40, 3])
    assert torch.allclose(some, every[[40, 3]], rtol=0, atol=TOLERANCE)
    assert some.dtype is torch.float32
    none = pair.paged().step([(2, ids)], sample=[])
    assert none.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_absent_key_means_what_the_reference_means_by_it(architecture: str, tmp_path: Path) -> None:
    """config.json without all that equals its class's default is the same model."""
    kind = type(next(iter(FAMILIES[architecture].cases.values())).config)
    raw = kind(**TINY, architectures=[architecture]).to_dict()
    defaults = kind().to_dict()
    kept_anyway = {"architectures", "model_type", *TINY}
    sparse = {
        key: value
        for key, value in raw.items()
        if key in kept_anyway or key not in defaults or value != defaults[key]
    }
    assert len(sparse) < len(raw)
    read = []
    for content in (raw, sparse):
        (tmp_path / "config.json").write_text(json.dumps(content))
        read.append(ModelConfig.from_path(tmp_path))
    assert read[0] == read[1]


@pytest.fixture(scope="module")
def demo_reference() -> PreTrainedModel:
    hf = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    model: PreTrainedModel = hf.eval()
    return model


@pytest.fixture(scope="module")
def demo(demo_reference: PreTrainedModel, kernels: NativeKernels | None) -> tuple[PreTrainedModel, CausalLM]:
    return demo_reference, _load(DEMO_MODEL, torch.float32, kernels)


def _demo_prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = ("def add(a, b):\n    return", "import os\nimport sys\n\nclass Path", "for i in range(")
    return [tokenizer.encode(text).ids for text in texts]


@pytest.fixture(scope="module")
def demo_tokens(demo_reference: PreTrainedModel) -> list[list[int]]:
    """Return what the reference generates."""
    return [generated(demo_reference, ids, 32) for ids in _demo_prompts()]


@pytest.mark.parametrize("isa", [None, *(pytest.param(isa, marks=needs_compiler) for isa in usable_isas())])
def test_demo_model_greedy_tokens_equal_generate(isa: CpuIsa | None, demo_tokens: list[list[int]]) -> None:
    """By torch (None), and by the kernels for each set of instructions."""
    prompts = _demo_prompts()
    kernels = None if isa is None else native_kernels(isa)
    forward = paged(_load(DEMO_MODEL, torch.float32, kernels), 16, kernels)
    first = [forward.prefill(row, ids, chunk=64) for row, ids in enumerate(prompts)]
    outputs = forward.decode(range(len(prompts)), first, num_steps=31)
    assert outputs == demo_tokens


@pytest.fixture(scope="module")
def demo_alone(demo: tuple[PreTrainedModel, CausalLM], kernels: NativeKernels | None) -> list[list[int]]:
    """Tokens of each prompt by itself."""
    outputs = []
    for ids in _demo_prompts():
        alone = paged(demo[1], 16, kernels)
        outputs += alone.decode([0], [alone.prefill(0, ids, chunk=64)], num_steps=15)
    return outputs


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_demo_tokens_do_not_depend_on_chunk_page_size_or_batch(
    demo: tuple[PreTrainedModel, CausalLM],
    demo_alone: list[list[int]],
    page_size: int,
    chunk: int,
    kernels: NativeKernels | None,
) -> None:
    _, model = demo
    prompts = _demo_prompts()
    forward = paged(model, page_size, kernels)
    first = [forward.prefill(row, ids, chunk) for row, ids in enumerate(prompts)]
    assert forward.decode(range(len(prompts)), first, num_steps=15) == demo_alone


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
def test_logits_of_16_bits_stay_close_to_float32(
    demo: tuple[PreTrainedModel, CausalLM], kernels: NativeKernels | None, dtype: torch.dtype, bound: float
) -> None:
    """The weights are bfloat16 on disk, so it is mostly activations that are rounded: 8 bits of mantissa over
    6 layers, or 11.
    """
    ids = _demo_prompts()[1]
    narrow = _load(DEMO_MODEL, dtype, kernels)
    expected = paged(demo[1], 16, kernels).step([(0, ids)])
    error = (paged(narrow, 16, kernels).step([(0, ids)]) - expected).abs().max() / expected.abs().max()
    assert error < bound


OVERRIDES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "yarn": (
        {},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "max_position_embeddings": 4 * TINY["max_position_embeddings"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": TINY["max_position_embeddings"],
            },
        },
    ),
    "linear": (
        {"rms_norm_eps": 0.25},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rms_norm_eps": 0.25,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        },
    ),
    "theta": (
        {"rope_theta": 37.0},
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 37.0}},
    ),
}
"""Cases: --hf-overrides, --rope-scaling, and what transformers is told instead."""


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_give_what_transformers_gives_with_the_same(name: str, tmp_path: Path) -> None:
    case = CASES["llama"]
    plain = make_checkpoint(case, tmp_path)
    hf_overrides, rope_scaling, theirs = OVERRIDES[name]
    settings = RuntimeConfig(
        hf_overrides=json.dumps(hf_overrides), rope_scaling=json.dumps(rope_scaling) if rope_scaling else ""
    )
    overrides = with_overrides(settings, tmp_path).hf_overrides
    config = AutoConfig.from_pretrained(tmp_path, **theirs)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation="eager").float()
    model = load_model(tmp_path, ModelConfig.from_path(tmp_path, overrides=overrides), torch.float32, "cpu")
    pair = Pair(case, hf.eval(), model, TorchNativeAttention())
    check_greedy_tokens(pair)
    ids = torch.tensor([prompts()[0]])
    assert not torch.allclose(hf(ids).logits, plain(ids).logits, atol=TOLERANCE), "they change nothing"
    by_library = load_transformers_model(
        tmp_path,
        CheckpointConfig.read(tmp_path, overrides),
        torch.float32,
        torch.device("cpu"),
        overrides=overrides,
    )
    assert by_library.config.to_dict()["rope_parameters"] == config.to_dict()["rope_parameters"]
    assert by_library.config.rms_norm_eps == config.rms_norm_eps
