"""Launches of a decode step on a GPU, counted without one: no more than was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernels.launches import BATCHES, MODELS, Step, count_launches
from model_worker.kernels.triton.activation import activate_and_mul

RECORDED = json.loads(Path(__file__).with_name("launches.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_launches_no_more_than_was_recorded(name: str) -> None:
    """To record anew: python -m benchmarks.gpu.kernels.launches --record
    tests/cpu/triton/compiled/launches.json.
    """
    for batch in BATCHES:
        recorded = RECORDED[name][f"batch {batch}"]
        for part, count in Step(name, batch).counts().items():
            assert count <= recorded[part], f"batch {batch}, {part}: {count}, recorded were {recorded[part]}"


def test_views_are_no_launches_and_what_an_operation_is_made_of_is() -> None:
    x = torch.randn(4, 6)
    with count_launches() as counts:
        x[:, :3].unflatten(1, (3, 1)).reshape(-1).sum()  # the rows are apart, and are copied
        torch.empty_like(x).copy_(x.t().contiguous().view(4, 6))
        x.softmax(1, dtype=torch.float64)
        torch.nn.functional.linear(x, x, x[:, 0])
        activate_and_mul("silu", x)
    assert counts.names == ["clone", "sum", "clone", "copy_", "_to_copy", "_softmax", "addmm", "_gate"]
