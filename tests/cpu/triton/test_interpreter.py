"""A kernel whose programs need each other's results is found, whoever interprets it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.harness.pretended_gpu import pretended_gpu


@triton.jit
def _count(out, runs):
    """Each program adds 1 to what the one before it has stored: 1, 2, 3 and so on, if they run in order."""
    i = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(out + i, tl.load(out + i - 1, mask=i > 0, other=0) + 1)
    tl.atomic_add(runs + i, 1)


def count(grid: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    num = torch.Size(grid).numel()
    out, runs = torch.zeros(2, num, dtype=torch.int32, device=device)
    _count[grid](out, runs)
    return out.cpu(), runs.cpu()


@pytest.mark.parametrize("grid", [(2,), (3,), (1, 8), (3, 2, 4)])
def test_the_programs_of_a_launch_run_in_no_order(grid: tuple[int, ...]) -> None:
    """Each of them once, and the next time as before."""
    on_cpu, again = (count(grid, "cpu") for _ in range(2))
    with torch.inference_mode(), pretended_gpu():
        on_gpu = count(grid, "cuda")
    for out, runs in (on_cpu, again, on_gpu):
        assert runs.tolist() == [1] * len(runs)
        assert out.tolist() != list(range(1, len(out) + 1))
        assert torch.equal(out, on_cpu[0])
