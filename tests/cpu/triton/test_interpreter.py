"""Triton's interpreter as tests run it: what it finds, what it computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.harness.pretended_gpu import pretended_gpu
from tests.harness.pretended_gpu.interpreter import _convert_float


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
    """Each of them once, and the next time as before: a kernel whose programs need each other's results is
    found, whoever interprets it.
    """
    on_cpu, again = (count(grid, "cpu") for _ in range(2))
    with torch.inference_mode(), pretended_gpu():
        on_gpu = count(grid, "cuda")
    for out, runs in (on_cpu, again, on_gpu):
        assert runs.tolist() == [1] * len(runs)
        assert out.tolist() != list(range(1, len(out) + 1))
        assert torch.equal(out, on_cpu[0])


@triton.jit
def _add(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, 2), tl.zeros((2,), tl.int32) + tl.zeros((size,), tl.int32))


def test_blocks_that_do_not_match_are_refused() -> None:
    """Also after others that did."""
    out = torch.ones(2, dtype=torch.int32)
    for size in (1, 2):
        _add[(1,)](out, size)
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        _add[(1,)](out, 4)
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_floats_are_rounded_to_bfloat16_as_torch_rounds_them(low: int) -> None:
    """Convert every value that bfloat16 can hold, with `low` as the bits below; and back."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    floats = (halves << 16 | low).view(np.float32)
    got = _convert_float(floats, tl.float32, tl.bfloat16, None).reshape(-1)
    expected = torch.from_numpy(floats).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(got).view(torch.bfloat16).nan_to_num(7), expected.nan_to_num(7))
    wide = _convert_float(halves.astype(np.uint16), tl.bfloat16, tl.float32, None)
    assert np.array_equal(wide, halves << 16)
