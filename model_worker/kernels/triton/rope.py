"""Cosines and sines of a step's positions; see model_worker.kernels.rope.rope_cos_sin.

    grid   token

An angle is rounded to float32 as torch does, and may be a million radians. Everything after that is float64,
of which the result keeps half the digits: reduction to a quarter turn, then Taylor's series. The library's
own sine keeps a table on the stack for large angles, and an approximate sine loses their digits.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite

QUARTERS_PER_RADIAN: tl.constexpr = tl.constexpr(2.0 / math.pi)
# A quarter turn as a sum: a product of the first part, which has 33 bits, and of a whole number is exact.
QUARTER: tl.constexpr = tl.constexpr(math.ldexp(math.floor(math.ldexp(math.pi / 2.0, 32)), -32))
REST_OF_QUARTER: tl.constexpr = tl.constexpr(
    math.pi / 2.0 - math.ldexp(math.floor(math.ldexp(math.pi / 2.0, 32)), -32) + 6.123233995736766e-17
)
"""The part of pi / 2 beyond QUARTER. Its last number is the rounding error of math.pi / 2."""


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, amplitude: Tensor | None = None) -> Tensor:
    """Do what model_worker.kernels.rope.rope_cos_sin does; inv_freq is contiguous."""
    num_tokens, half = len(positions), inv_freq.shape[-1]
    out = torch.empty((num_tokens, 2 * half), dtype=torch.float32, device=positions.device)
    if num_tokens:
        _turns(half, amplitude is not None).launch(
            (num_tokens, 1, 1), positions, inv_freq, out if amplitude is None else amplitude, out,
            half if inv_freq.dim() == 2 else 0,
        )  # fmt: skip
    return out


@cache
def _turns(half: int, scales: bool) -> CallSite:
    return CallSite(_cos_sin, HALF=half, BLOCK=triton.next_power_of_2(half), SCALES=scales, num_warps=2)


# Positions are a part of what a step uploads, at any alignment: nothing is compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["positions"])
def _cos_sin(
    positions, inv_freq, amplitude, out, freq_stride, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    position = tl.load(positions + t).to(tl.float32)
    angle = (position * tl.load(inv_freq + t * freq_stride + d, mask=inside, other=0.0)).to(tl.float64)
    quarters = tl.floor(angle * QUARTERS_PER_RADIAN + 0.5)
    x = (angle - quarters * QUARTER) - quarters * REST_OF_QUARTER
    x2 = x * x
    sin = x * _series(x2, 2)
    cos = _series(x2, 1)
    quarter = quarters.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    sin, cos = tl.where(is_odd, cos, sin), tl.where(is_odd, sin, cos)
    sin = tl.where(quarter >= 2, -sin, sin).to(tl.float32)
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos).to(tl.float32)
    if SCALES:
        cos *= tl.load(amplitude + d, mask=inside, other=0.0)
        sin *= tl.load(amplitude + HALF + d, mask=inside, other=0.0)
    tl.store(out + t * (2 * HALF) + d, cos, mask=inside)
    tl.store(out + t * (2 * HALF) + HALF + d, sin, mask=inside)


@triton.jit
def _series(x2, FIRST: tl.constexpr):
    """1 - x2 / (f (f + 1)) (1 - x2 / ((f + 2) (f + 3)) (1 - …)): the cosine for f = 1, of the sine for 2
    what x is multiplied by. Off by less than 2^-45 up to an eighth of a turn.
    """
    total = x2 * 0.0 + 1.0
    for i in tl.static_range(7):
        total = 1.0 - x2 * total * (1.0 / ((FIRST + 12 - 2 * i) * (FIRST + 13 - 2 * i)))
    return total
