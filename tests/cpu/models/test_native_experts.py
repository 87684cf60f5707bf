"""The kernel of a mixture of experts against the torch layer, which knows no kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_worker.kernels.native.experts import CHUNK, NativeExperts
from model_worker.loading.loader import load_model
from model_worker.models.feed_forward import SparseMLP
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import NativeOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.int8 import Int8
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.models.model_registry import CASES
from tests.harness.models.native import native_kernels, needs_compiler

pytestmark = needs_compiler

_ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def _model(name: str, path: Path, quant: QuantMethod) -> CausalLM:
    """A tiny model with random weights, the same each time."""
    config = CASES[name].config
    (path / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": [_ARCHITECTURES[name]]})
    )
    torch.manual_seed(0)
    return load_model(path, ModelConfig.from_path(path), torch.bfloat16, "cpu", "dummy", quant=quant)


@pytest.mark.parametrize("quant", [UNQUANTIZED, Int8(stored=False)], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_native_experts_are_those_of_torch(name: str, quant: QuantMethod, tmp_path: Path) -> None:
    """Five and six experts, whose router's output is padded; more tokens than an expert takes at a time."""
    kernels = native_kernels()
    plain, native = (_model(name, tmp_path, quant) for _ in range(2))
    for weight, value in zip(native.parameters(), plain.parameters(), strict=True):
        weight.data.copy_(value.data)
    native.bind(NativeOps(kernels))
    hidden = torch.randn(3 * CHUNK, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        for ours, theirs in zip(native.model.layers, plain.model.layers, strict=True):
            assert isinstance(ours.mlp, SparseMLP)
            assert isinstance(theirs.mlp, SparseMLP)
            assert isinstance(ours.mlp.mixture, NativeExperts)
            got, expected = ours.mlp(hidden), theirs.mlp(hidden)
            # A router's rounding may decide for another expert: of a few tokens all of it may differ.
            error = (got.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
            assert float(error.median()) < 0.01
            assert float((error > 0.05).float().mean()) < 0.02
            for some in (hidden[:0], hidden[:1], hidden[7:12]):
                assert ours.mlp(some).shape == some.shape
            assert torch.equal(ours.mlp(hidden[7:12]), got[7:12])
    assert native.batch_dependent() in ("lm_head", "")


def test_tokens_with_the_same_scores_go_to_the_first_experts(tmp_path: Path) -> None:
    model = _model("mixtral", tmp_path, UNQUANTIZED)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, SparseMLP)
    mlp.router.weight.data.zero_()
    for expert, weight in enumerate(mlp.experts.down_proj.weight.data):
        if expert > 1:
            weight.fill_(torch.nan)
    model.bind(NativeOps(native_kernels()))
    with torch.inference_mode():
        assert mlp(torch.ones(4, 64, dtype=torch.bfloat16)).isfinite().all()
