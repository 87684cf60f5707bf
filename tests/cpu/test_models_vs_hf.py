"""Every family against its transformers implementation: same checkpoint, float32, eager attention.

Each with torch operations and with the C++ kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.kernels.native.library import NativeKernels
from model_worker.loader import load_model
from model_worker.models.transformer import CausalLM
from runtime.model_config import ModelConfig
from tests.cpu.native import native_kernels, needs_compiler
from tests.cpu.paged_forward import PagedForward
from tests.model_registry import CASES, FAMILIES, TINY, VOCAB_SIZE, Case

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
TOLERANCE = 1e-4  # of a logit, float32; transformers and we add up in different orders
SPREAD = 3.0  # the least standard deviation of a reference's logits
NEAR_TIE = 1e-3  # two logits of the reference so close that either token is right
NUM_GREEDY = 64
PAGE_SIZE = 16


class Pair(NamedTuple):
    case: Case
    hf: PreTrainedModel
    model: CausalLM


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


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, PreTrainedModel, Path]:
    """A case's transformers model with random weights, biases and norms, and where it is saved."""
    torch.manual_seed(7)
    case = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    hf = AutoModelForCausalLM.from_config(case.config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.add_(0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.5 * torch.randn_like(weight))
        _spread_logits(hf)
    hf.save_pretrained(path)
    return case, hf, path


def _spread_logits(hf: PreTrainedModel) -> None:
    """Scale the head until logits differ as those of a trained model do, so that a token is a statement."""
    for _ in range(20):
        if _reference(hf, _prompts()[0]).std() >= SPREAD:
            return
        hf.get_output_embeddings().weight.mul_(1.3)
    raise AssertionError("the logits cannot be spread")


@pytest.fixture(scope="module")
def pair(checkpoint: tuple[Case, PreTrainedModel, Path], kernels: NativeKernels | None) -> Pair:
    case, hf, path = checkpoint
    return Pair(case, hf, _load(path, torch.float32, kernels))


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (53, 7, 31, 6)]


@torch.inference_mode()
def _reference(hf: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([ids])).logits[0]
    return logits


@torch.inference_mode()
def _reference_by_token(hf: PreTrainedModel, ids: list[int], num_prompt: int) -> torch.Tensor:
    out = hf(torch.tensor([ids[:num_prompt]]), use_cache=True)
    logits = [out.logits[0]]
    for position in range(num_prompt, len(ids)):
        out = hf(
            torch.tensor([[ids[position]]]),
            position_ids=torch.tensor([[position]]),
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("page_size", [1, PAGE_SIZE])
def test_chunks_and_decodes_in_one_forward_give_the_reference_logits(
    pair: Pair, page_size: int, kernels: NativeKernels | None
) -> None:
    """Four sequences advance by 1 to 17 tokens a step: chunks after a cached prefix beside decodes."""
    prompts = _prompts()
    forward = paged(pair.model, page_size, kernels)
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
        expected = _reference(pair.hf, ids)
        assert expected.std() > SPREAD / 2
        assert (torch.cat(got) - expected).abs().max() < TOLERANCE


def test_a_prefix_of_another_sequence_gives_the_reference_logits(
    pair: Pair, kernels: NativeKernels | None
) -> None:
    """Two sequences continue after pages that a third one computed."""
    first, _, tail, _ = _prompts()
    forward = paged(pair.model, PAGE_SIZE, kernels)
    forward.prefill(0, first, chunk=20)
    shared = 2 * PAGE_SIZE
    for row in (1, 2):
        forward.share_prefix(0, row, shared)
    got = forward.step([(1, tail[:20]), (2, tail[7:])]).split([20, len(tail) - 7])
    for part, ids in zip(got, (tail[:20], tail[7:]), strict=True):
        expected = _reference(pair.hf, first[:shared] + ids)[shared:]
        assert (part - expected).abs().max() < TOLERANCE


def test_greedy_tokens_are_the_references(pair: Pair, kernels: NativeKernels | None) -> None:
    """Our tokens, given back to the reference: its own choice at every position, or one as good."""
    prompts = _prompts()[:3]
    forward = paged(pair.model, PAGE_SIZE, kernels)
    first = [forward.prefill(row, ids, chunk=9) for row, ids in enumerate(prompts)]
    outputs = forward.decode(range(len(prompts)), first, num_steps=NUM_GREEDY - 1)
    for ids, output in zip(prompts, outputs, strict=True):
        all_ids = ids + output[:-1]
        if pair.case.by_token:
            logits = _reference_by_token(pair.hf, all_ids, len(ids))
        else:
            logits = _reference(pair.hf, all_ids)
        logits = logits[len(ids) - 1 :]
        ours = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert len(ours) == NUM_GREEDY
        assert (logits.max(-1).values - ours).max() < NEAR_TIE


def test_logits_are_those_of_the_output_indices_and_may_be_none(
    pair: Pair, kernels: NativeKernels | None
) -> None:
    ids = _prompts()[0]
    every = paged(pair.model, PAGE_SIZE, kernels).step([(2, ids)])
    some = paged(pair.model, PAGE_SIZE, kernels).step([(2, ids)], sample=[40, 3])
    assert torch.allclose(some, every[[40, 3]], rtol=0, atol=TOLERANCE)
    assert some.dtype is torch.float32
    none = paged(pair.model, PAGE_SIZE, kernels).step([(2, ids)], sample=[])
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
def demo(kernels: NativeKernels | None) -> tuple[PreTrainedModel, CausalLM]:
    hf = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager")
    return hf.eval(), _load(DEMO_MODEL, torch.float32, kernels)


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
