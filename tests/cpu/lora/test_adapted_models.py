"""Every family with adapters that the PEFT library made, against what it merges, in float32.

Each with torch operations and with the C++ kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from model_worker.kernels.native.library import NativeKernels
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from tests.harness.models.adapted import ADAPTERS, adapted, merged, save_adapter, save_peft_adapter
from tests.harness.models.model_registry import CASES, FAMILIES, Case
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.reference import (
    Pair,
    check_chunks_and_decodes_in_one_forward,
    check_greedy_tokens,
    make_checkpoint,
)

ONE_OF_EACH = [next(iter(family.cases)) for family in FAMILIES.values()]
KERNELS = ("torch", "native")
NUM_ROWS = 8


def combinations() -> Iterator[Any]:
    """Each family with every second adapter, on torch and on the kernels by turns; with `full` each with each
    on both.
    """
    for (n, family), (m, adapter) in product(enumerate(ONE_OF_EACH), enumerate(ADAPTERS)):
        for kernels in KERNELS:
            is_turn = (n + m) % 2 == 0 and kernels == KERNELS[(n + m) // 2 % 2]
            marks = [needs_compiler] * (kernels == "native") + [pytest.mark.full] * (not is_turn)
            yield pytest.param(family, kernels, adapter, marks=marks, id=f"{family}-{kernels}-{adapter}")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> NativeKernels | None:
    return native_kernels() if request.param == "native" else None


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, PreTrainedModel, Path]:
    """A case's transformers model, and where it is saved."""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return case, make_checkpoint(case, path), path


@pytest.mark.parametrize(
    ("checkpoint", "kernels", "name"), list(combinations()), indirect=["checkpoint", "kernels"]
)
def test_an_adapter_computes_what_its_merged_weights_do(
    name: str,
    checkpoint: tuple[Case, PreTrainedModel, Path],
    kernels: NativeKernels | None,
    tmp_path: Path,
) -> None:
    case, hf, path = checkpoint
    save_peft_adapter(hf, ADAPTERS[name], tmp_path / "adapter")
    ops = TorchOps() if kernels is None else NativeOps(kernels)
    with adapted(path, ops, max_rows=NUM_ROWS) as served:
        served.load({2: tmp_path / "adapter"})
        served.assign([2] * NUM_ROWS)
        pair = Pair(case, merged(hf, tmp_path / "adapter"), served.model, ops.attention)
        check_greedy_tokens(pair)
        check_chunks_and_decodes_in_one_forward(pair, page_size=4)
        served.assign([-1] * NUM_ROWS)
        check_chunks_and_decodes_in_one_forward(Pair(case, hf, served.model, ops.attention), page_size=4)


def test_an_adapter_changes_the_logits(
    checkpoint: tuple[Case, PreTrainedModel, Path], tmp_path: Path
) -> None:
    """So that what the test above compares are not twice those of the base."""
    _, hf, path = checkpoint
    save_adapter(hf, ADAPTERS["attention_alone"], tmp_path / "adapter")
    ops = TorchOps()
    with adapted(path, ops, max_rows=NUM_ROWS) as served:
        served.load({0: tmp_path / "adapter"})
        served.assign([-1, 0])
        forward = PagedForward(served.model, 16, backend=ops.attention)
        base, other = forward.step([(0, [3, 4, 5]), (1, [3, 4, 5])]).split(3)
        assert (base - other).abs().max() > 0.1
