"""The transformers backend: what it serves computes as the library does, what it cannot serve is refused.

The same comparisons as those of the specs (tests/harness/models/reference.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from model_worker.device import make_device
from model_worker.served_model import WorkerModel, load_served_model
from runtime.base.errors import ModelError
from runtime.settings.config import RuntimeConfig
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.model_registry import VOCAB_SIZE
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.reference import (
    PAGE_SIZE,
    Pair,
    check_a_prefix_of_another_sequence,
    check_chunks_and_decodes_in_one_forward,
    check_greedy_tokens,
    make_checkpoint,
    prompts,
    reference_logits,
)
from tests.harness.models.transformers_registry import REFUSED, SERVED, Recipe, is_served_by_now
from tests.harness.ring.serving_ring import Ring, Setting

DEMO_MODEL = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, **changes: object) -> WorkerModel:
    settings = {"dtype": "float32", "context_length": 128, "model_impl": "transformers"} | changes
    config = RuntimeConfig(model=str(path), device="cpu", **settings)  # type: ignore[arg-type]
    return load_served_model(config, make_device("cpu", threaded=False), lambda loaded, total: None)


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    case = SERVED[request.param].recipe.case()
    path = tmp_path_factory.mktemp(request.param)
    hf = make_checkpoint(case, path)
    model, ops, _, _ = load(path)
    return Pair(case, hf, model, ops.attention)


def test_chunks_and_decodes_in_one_forward_give_the_reference_logits(pair: Pair) -> None:
    check_chunks_and_decodes_in_one_forward(pair, PAGE_SIZE)


def test_a_prefix_of_another_sequence_gives_the_reference_logits(pair: Pair) -> None:
    check_a_prefix_of_another_sequence(pair)


def test_greedy_tokens_are_the_references(pair: Pair) -> None:
    check_greedy_tokens(pair)


def test_no_logits_may_be_asked_for(pair: Pair) -> None:
    assert pair.paged().step([(2, prompts()[0])], sample=[]).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """Where the installed library serves it by now, it has the reference's tokens instead."""
    recipe, reason = REFUSED[name]
    if is_served_by_now(name):
        case = recipe.case()
        hf = make_checkpoint(case, tmp_path)
        model, ops, _, _ = load(tmp_path)
        check_greedy_tokens(Pair(case, hf, model, ops.attention))
        return
    _save(recipe, tmp_path)
    with pytest.raises(ModelError, match=f"--model-impl transformers cannot serve.*{reason}"):
        load(tmp_path)


def _save(recipe: Recipe, path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(recipe.case().config).save_pretrained(path)


def test_a_model_that_its_own_library_cannot_compute_is_refused(tmp_path: Path) -> None:
    """Settings that contradict each other are such a model."""
    _save(Recipe("llama", {}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE + 1}))
    with pytest.raises(ModelError, match=r"wrong shape: .*\[97, 64\] instead of \[98, 64\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up"),
        (lambda weights: weights.update(extra=torch.ones(3)), "unexpected: extra"),
    ],
)
def test_weights_that_do_not_match_are_listed(
    change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    _save(Recipe("llama", {}), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    _save(Recipe("llama", {}), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map.*never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForCond.* is not a decoder of text"),
        ({"architectures": ["GhostForCausalLM"]}, "GhostForCausalLM: transformers .* has no such decoder"),
        ({"model_type": "ghost"}, "cannot read .*config.json"),
        ({"max_position_embeddings": None}, "no `max_position_embeddings`.*n_positions"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    keys: dict[str, object], words: str, tmp_path: Path
) -> None:
    _save(Recipe("gpt_neox", {}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def _mixes_neighbours(hidden: Tensor) -> Tensor:
    """A state beside the KV cache: what the token before had counts, too."""
    return hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1]


def _sees_the_batch(hidden: Tensor) -> Tensor:
    return hidden + hidden.mean(dim=1, keepdim=True)


def _breaks(hidden: Tensor) -> Tensor:
    return hidden * float("nan") if hidden.shape[1] == 2 else hidden


@pytest.mark.parametrize(
    ("fault", "phase"),
    [(_mixes_neighbours, "later chunk"), (_sees_the_batch, "chunk"), (_breaks, "decode")],
)
def test_a_model_that_computes_otherwise_in_pieces_is_refused(
    fault: Callable[[Tensor], Tensor], phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(Recipe("llama", {"initializer_range": 0.2}), tmp_path)
    load(tmp_path)
    compute: Callable[..., Tensor] = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: compute(self, fault(hidden)))
    with pytest.raises(ModelError, match=f"in the {phase} phase, by .* at most"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "GPT2LMHeadModel", "OlmoeForCausalLM"])
def test_sixteen_bits_stay_close_to_the_reference(name: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 linear layers, tied heads too, run in the C++ kernel where the CPU has one."""
    hf = make_checkpoint(SERVED[name].recipe.case(), tmp_path)
    model, ops, _, _ = load(tmp_path, dtype=dtype)
    paged = PagedForward(model, PAGE_SIZE, backend=ops.attention, dtype=getattr(torch, dtype))
    ids = prompts()[0]
    expected = reference_logits(hf, ids)
    got = torch.cat([paged.step([(1, ids[:20])]), paged.step([(1, ids[20:])])])
    assert (got - expected).norm() / expected.norm() < (0.15 if dtype == "bfloat16" else 0.02)


def test_the_ring_serves_the_same_tokens_as_a_spec() -> None:
    """Chunks, shared prefixes, overlap and paused requests, over the library's modules."""
    texts = [[*range(300, 340)], [*range(300, 332), 7, 8, 9], [*range(50, 59)], [*range(400, 470)]]
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, seed=1)
    outputs = []
    for model_impl in ("native", "transformers"):
        setting = Setting(model_impl=model_impl, chunk=16, page_size=4, pool_tokens=160, max_rows=8)
        ring = Ring(DEMO_MODEL, setting)
        handles = [ring.submit(ids, sampling) for ids in texts]
        generated = ring.run()
        outputs.append([generated[handle].tokens for handle in handles])
        ring.close()
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 24 for tokens in outputs[0])


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    _save(Recipe("gpt_neox", {}), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    ids = prompts()[1]
    logits = [
        PagedForward(m.model, PAGE_SIZE, backend=m.ops.attention).step([(0, ids)]) for m in (first, second)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("context_length", [1, 4])
def test_sequences_that_end_before_the_first_decode_are_served(tmp_path: Path, context_length: int) -> None:
    _save(Recipe("gpt_neox", {}), tmp_path)
    served = load(tmp_path, context_length=context_length)
    ids = prompts()[1][:context_length]
    assert (
        len(PagedForward(served.model, PAGE_SIZE, backend=served.ops.attention).step([(0, ids)]))
        == context_length
    )


def test_progress_is_shown(tmp_path: Path) -> None:
    _save(Recipe("gpt_neox", {}), tmp_path)
    seen: list[tuple[int, int]] = []
    config = RuntimeConfig(model=str(tmp_path), device="cpu", dtype="float32", context_length=128)
    load_served_model(config, make_device("cpu", threaded=False), lambda *at: seen.append(at))
    assert seen
    assert [loaded for loaded, _ in seen] == list(range(1, seen[-1][1] + 1))
