"""Every family cut for several ranks against the same checkpoint on one: equal logits in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.kernels.native.library import NativeKernels
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import NativeOps
from runtime.base.errors import ConfigError, ModelError
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import DEMO_MODEL
from tests.harness.models.model_registry import CASES, RANK_COUNTS, VOCAB_SIZE
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.rank_threads import on_ranks
from tests.harness.models.reference import vary_norms_and_biases

# Of a logit, float32: what is summed in parts rounds differently. The logits' own spread is about 3.
TOLERANCE = 1e-4

# Into four: a plain case, experts, norms over all heads and per head, an embedding that is the head; the
# others by `make test-all`.
CUT_IN_FOUR = {"llama", "llama_tied_biased", "mixtral", "olmo2", "cohere_qk_norm"}
CUTS = [
    pytest.param(case, size, marks=() if size == 2 or case in CUT_IN_FOUR else pytest.mark.full)
    for case in CASES
    for size in RANK_COUNTS
]

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case with random weights, biases and norms, and logits that spread."""
    torch.manual_seed(11)
    path: Path = tmp_path_factory.mktemp(request.param)
    hf = AutoModelForCausalLM.from_config(CASES[request.param].config).float()
    vary_norms_and_biases(hf)
    hf.save_pretrained(path)
    return path


def load(
    path: Path, group: RankGroup, dtype: torch.dtype = torch.float32, kernels: NativeKernels | None = None
) -> CausalLM:
    model = load_model(path, ModelConfig.from_path(path), dtype, "cpu", group=group)
    if kernels is not None:
        model.bind(NativeOps(kernels))
    return model


def logits_of(model: CausalLM, kernels: NativeKernels | None = None) -> torch.Tensor:
    """Return the logits of two prompts in chunks beside each other, then of three decodes."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (29, 17))
    backend = None if kernels is None else CpuNativeAttention(kernels)
    forward = PagedForward(model, 4, dtype=next(model.parameters()).dtype, backend=backend)
    steps = [
        forward.step([(3, first[:11]), (1, second[:1])]),
        forward.step([(3, first[11:]), (1, second[1:])]),
    ]
    steps += [forward.step([(3, [token]), (1, [token + 1])]) for token in (5, 17, 60)]
    return torch.cat(steps)


@pytest.mark.parametrize(("checkpoint", "size"), CUTS, indirect=["checkpoint"])
def test_a_cut_model_gives_the_logits_of_the_whole_on_rank_0(
    checkpoint: Path, size: int, tmp_path: Path
) -> None:
    """With four ranks and two KV heads each head is on two ranks; 97 words leave the last ranks room."""
    expected = logits_of(load(checkpoint, SOLO))
    assert expected.std() > 0.3
    results = on_ranks(size, tmp_path / "run", lambda group: logits_of(load(checkpoint, group)))
    scale = float(expected.std()) / 3
    assert (results[0] - expected).abs().max() < TOLERANCE * max(1.0, scale)
    assert all(result.shape == (0, VOCAB_SIZE) for result in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_demo_model_cut_in_two_with_the_native_kernels(dtype: torch.dtype, tmp_path: Path) -> None:
    """bfloat16: partial sums are rounded before they are added, 8 bits of mantissa over 6 layers."""
    kernels = native_kernels()
    expected = logits_of(load(DEMO_MODEL, SOLO, dtype, kernels), kernels)
    [first, _] = on_ranks(
        2, tmp_path / "run", lambda group: logits_of(load(DEMO_MODEL, group, dtype, kernels), kernels)
    )
    error = (first - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 0.05)


def test_a_rank_has_its_part_of_the_weights_and_no_more(tmp_path: Path) -> None:
    config = ModelConfig.from_path(DEMO_MODEL)
    whole = sum(weight.numel() for weight in load(DEMO_MODEL, SOLO).parameters())
    sizes = on_ranks(
        2,
        tmp_path / "run",
        lambda group: sum(weight.numel() for weight in load(DEMO_MODEL, group).parameters()),
    )
    norms = (2 * config.num_layers + 1) * config.hidden_size
    padding = 32 * config.hidden_size
    assert all((whole - norms) // 2 + norms <= size <= (whole + norms) // 2 + padding for size in sizes)


def test_random_weights_are_parts_of_the_same_model_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    config = ModelConfig.from_path(DEMO_MODEL)

    def logits(group: RankGroup) -> torch.Tensor:
        return logits_of(load_model(DEMO_MODEL, config, torch.float32, "cpu", "dummy", group=group))

    expected = logits(SOLO)
    [result, _] = on_ranks(2, tmp_path / "run", logits)
    assert (result - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_wrong_checkpoint_is_refused_on_every_rank_with_the_whole_shapes(
    tmp_path: Path,
) -> None:
    """The shapes that are named are the checkpoint's, not a rank's part of them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = list(tensors[name].shape)
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")

    def refused(group: RankGroup) -> str:
        with pytest.raises(ModelError) as caught:
            load(folder, group)
        return str(caught.value)

    for message in on_ranks(2, tmp_path / "run", refused):
        assert f"wrong shape: {name} {[shape[0], shape[1] - 1]} instead of {shape}" in message


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({}, 5, "5 ranks cannot share num_attention_heads 12 evenly"),
        ({"intermediate_size": 90}, 4, "4 ranks cannot share intermediate_size 90 evenly"),
        ({"num_key_value_heads": 6}, 4, "4 ranks cannot share num_key_value_heads 6"),
        ({"num_key_value_heads": 2}, 4, ""),
        ({"vocab_size": 101}, 4, ""),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "intermediate_size": 90}, 4, "90"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(
    changes: dict[str, object], ranks: int, says: str, tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    model = ModelConfig.from_path(tmp_path)
    if not says:
        model.check_ranks(ranks)
        return
    with pytest.raises(ConfigError, match=f"tp_size: .*{says}"):
        model.check_ranks(ranks)
