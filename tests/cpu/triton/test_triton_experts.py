"""The grouped products against the module that takes one expert after the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from model_worker.kernels.activation import activate_and_mul
from model_worker.kernels.expert_choice import choose_experts
from model_worker.kernels.triton import expert_choice
from model_worker.kernels.triton.experts import fused_experts, sorted_by_expert
from model_worker.loading.loader import load_model
from model_worker.models.feed_forward import SparseMLP
from model_worker.ops.triton_ops import TritonOps
from runtime.checkpoint.model_config import ModelConfig

silu_and_mul = partial(activate_and_mul, "silu")


def reference(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gated = silu_and_mul(hidden[token : token + 1].float() @ gate_up[expert].float().T)
            out[token] += share * (gated @ down[expert].float().T)[0]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "per_token", "hidden_size", "width"),
    [(1, 8, 2, 24, 40), (5, 3, 1, 70, 33), (37, 4, 2, 16, 72), (90, 2, 2, 20, 24), (0, 4, 2, 16, 16)],
)
def test_fused_experts(
    tokens: int, num_experts: int, per_token: int, hidden_size: int, width: int, dtype: torch.dtype
) -> None:
    """Experts with no pair, tiles that are not full, and more than one tile of an expert."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    hidden = normal(tokens, hidden_size + 3)[:, :hidden_size]
    gate_up = normal(num_experts, 2 * width, hidden_size, scale=hidden_size**-0.5)
    down = normal(num_experts, hidden_size, width, scale=width**-0.5)
    scores = torch.randn(tokens, num_experts, generator=generator)
    scores[:, 0] -= 9.0  # nobody's, or the last choice
    chosen, ids = scores.softmax(1).topk(per_token, dim=1)
    weights = chosen.to(dtype)
    got = fused_experts(hidden, gate_up, down, weights, ids, silu_and_mul)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    expected = reference(hidden, gate_up, down, weights, ids)
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_experts_of_eight_bits_are_those_of_the_weights_they_stand_for(stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)

    def weight(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """(as stored, its scales, what it stands for)."""
        values = (20.0 * torch.randn(*shape, generator=generator)).to(stored)
        scale = 0.02 * torch.rand(*shape[:2], 1, generator=generator)
        return values, scale, values.float() * scale

    gate_up, gate_up_scale, wide_gate_up = weight(3, 66, 40)
    down, down_scale, wide_down = weight(3, 40, 33)
    hidden = torch.randn(9, 40, generator=generator)
    weights, ids = torch.randn(9, 3, generator=generator).softmax(1).topk(2, dim=1)
    got = fused_experts(
        hidden, gate_up, down, weights, ids, silu_and_mul, gate_up_scale=gate_up_scale, down_scale=down_scale
    )
    expected = reference(hidden, wide_gate_up, wide_down, weights, ids)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_the_layer_gives_the_same_both_ways(tmp_path: Path) -> None:
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.3,
        )
    ).float().save_pretrained(tmp_path)
    model = load_model(tmp_path, ModelConfig.from_path(tmp_path), torch.float32, "cpu")
    (layer,) = [module for module in model.modules() if isinstance(module, SparseMLP)]
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        one_by_one = layer(hidden)
        layer.bind(TritonOps())
        torch.testing.assert_close(layer(hidden), one_by_one, atol=1e-5, rtol=1e-5)


def test_any_gate_of_two_halves_will_do() -> None:
    hidden, ids = torch.randn(3, 8), torch.tensor([[0, 1], [1, 0], [1, 0]])
    gate_up, down, weights = torch.randn(2, 12, 8), torch.randn(2, 8, 6), torch.rand(3, 2)
    gelu = partial(activate_and_mul, "gelu_pytorch_tanh")
    got = fused_experts(hidden, gate_up, down, weights, ids, gelu)
    each = torch.stack([gelu(hidden @ gate_up[e].T) @ down[e].T for e in (0, 1)], dim=1)
    expected = (each * torch.zeros(3, 2).scatter(1, ids, weights)[:, :, None]).sum(1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "per_token"), [(1, 128, 8), (9, 5, 3), (3, 60, 4), (0, 8, 2)]
)
def test_the_choice_of_experts(
    tokens: int, num_experts: int, per_token: int, renormalizes: bool, dtype: torch.dtype
) -> None:
    """Scores that differ, of which rows are longer than there are experts."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.stack(
        [torch.randperm(num_experts + 3, generator=generator) for _ in range(tokens)]
        or [torch.zeros(num_experts + 3)]
    )
    scores = (order / 8).to(dtype)[:tokens, :num_experts]
    expected_weights, expected_ids = choose_experts(scores, per_token, renormalizes=renormalizes)
    weights, ids = expert_choice.choose_experts(scores, per_token, renormalizes=renormalizes)
    assert torch.equal(ids.long(), expected_ids)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(weights, expected_weights, atol=0.0, rtol=tolerance)


def test_of_equal_scores_the_first_are_chosen_and_none_that_is_not_there() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, *[torch.nan] * 4]])
    weights, ids = expert_choice.choose_experts(scores, 3, renormalizes=True)
    assert ids[0].tolist() == [1, 3, 0]
    torch.testing.assert_close(weights[0].sum(), torch.tensor(1.0))
    assert (ids < 5).all()


@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(1, 128, 8), (3, 5, 2), (700, 6, 3)])
def test_pairs_are_sorted_by_expert(tokens: int, num_experts: int, per_token: int) -> None:
    """Experts with no pair, and more pairs than a program reads at a time."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, num_experts, generator=generator) - 9.0 * (torch.arange(num_experts) == 2)
    ids = scores.topk(per_token, dim=1).indices
    tiles = sorted_by_expert(ids, num_experts, 16)
    assert torch.equal(tiles.order.long(), ids.flatten().argsort(stable=True))
    counts = ids.flatten().bincount(minlength=num_experts)
    assert torch.equal(tiles.ends.long(), counts.cumsum(0))
    assert torch.equal(tiles.tile_ends.long(), (-(-counts // 16)).cumsum(0))
    assert tiles.tile_ends[-1] <= tiles.num_tiles
