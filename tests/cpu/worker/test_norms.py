"""Norms in bfloat16: each rounds where its reference rounds, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from model_worker.distributed.cut import whole
from model_worker.layers.norm import LayerNorm, RMSNorm
from model_worker.layers.weight import Weight
from model_worker.ops.torch_ops import TorchOps

SIZE = 48
EPS = 1e-5
MAKE: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}


def _plus_one(weight: Tensor) -> Tensor:
    return weight + 1.0


NORMS: dict[str, tuple[nn.Module, RMSNorm | LayerNorm]] = {
    "rms": (LlamaRMSNorm(SIZE, EPS), RMSNorm(SIZE, EPS, **MAKE)),
    "wide": (Olmo2RMSNorm(SIZE, EPS), RMSNorm(SIZE, EPS, **MAKE, wide=True)),
    "offset": (Gemma2RMSNorm(SIZE, EPS), RMSNorm(SIZE, EPS, **MAKE, wide=True, changes=(_plus_one,))),
    "each head": (CohereLayerNorm((3, SIZE), EPS), LayerNorm((whole(3), SIZE), EPS, bias=False, **MAKE)),
    "biased": (nn.LayerNorm(SIZE, EPS), LayerNorm(SIZE, EPS, bias=True, **MAKE)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_bit_equal_to_its_reference_in_bfloat16(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    reference, norm = NORMS[name]
    reference = reference.bfloat16()
    with torch.inference_mode():
        for theirs, ours in zip(reference.parameters(), norm.parameters(), strict=True):
            theirs.copy_(1.0 + 0.4 * torch.randn(theirs.shape, generator=generator))
            assert isinstance(ours, Weight)
            ours.copy_(theirs)
            ours.finish()
        norm.bind(TorchOps())
        x = (3.0 * torch.randn(20, 3, SIZE, generator=generator)).bfloat16()
        assert torch.equal(norm(x), reference(x))
        if name != "each head":
            residual, update = x[:, 0].clone(), x[:, 1]
            expected = residual + update
            assert torch.equal(norm.add_and_norm(residual, update), reference(expected))
            assert torch.equal(residual, expected)
