"""Adapters of models that are cut for ranks: each has its part, and together they give what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.ops.native_ops import NativeOps
from tests.cpu.parallel.test_tensor_parallel import TOLERANCE, logits_of
from tests.harness.models.adapted import ADAPTERS, adapted, save_adapter
from tests.harness.models.model_registry import CASES
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.rank_threads import on_ranks
from tests.harness.models.reference import make_checkpoint

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama_tied_biased", "phi3", "starcoder2", "cohere"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(CASES[request.param], path), path


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_parts_of_an_adapter_give_the_logits_of_the_whole(
    checkpoint: tuple[PreTrainedModel, Path], size: int, tmp_path: Path
) -> None:
    """With four ranks and two KV heads the same rows of an adapter's B are on two."""
    hf, path = checkpoint
    save_adapter(hf, ADAPTERS["patterns"], tmp_path / "adapter")

    def logits(group: RankGroup) -> torch.Tensor:
        kernels = native_kernels()
        with adapted(path, NativeOps(kernels, CpuNativeAttention(kernels)), group=group) as served:
            served.load({3: tmp_path / "adapter"})
            served.assign([-1, -1, -1, 3])
            return logits_of(served.model, kernels)

    expected = logits(SOLO)
    results = on_ranks(size, tmp_path / "run", logits)
    scale = float(expected.std()) / 3
    assert (results[0] - expected).abs().max() < TOLERANCE * max(1.0, scale)
