"""The gate of a feed-forward layer; see model_worker.kernels.activation.activate_and_mul.

grid   token × block of the width
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite
from runtime.checkpoint.model_config import Activation

BLOCK = 1024


def activate_and_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """Do what model_worker.kernels.activation.activate_and_mul does, for gate_up [T, 2 * I] of any row
    stride.
    """
    num_tokens, twice = gate_up.shape
    width = twice // 2
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        grid = (num_tokens, -(-width // BLOCK), 1)
        _gates(activation, width).launch(grid, gate_up, out, gate_up.stride()[0])
    return out


@cache
def _gates(activation: Activation, width: int) -> CallSite:
    return CallSite(_gate, ACTIVATION=activation, WIDTH=width, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _gate(gate_up, out, stride, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    # The torch function rounds the activated values before it multiplies; so do we.
    activated = _activated(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + i, (activated * up).to(dtype), mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # (1 + tanh(u)) / 2 is the logistic function of 2u, here without an overflow.
        twice_u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        t = tl.exp(-tl.abs(twice_u))
        y = x * tl.where(twice_u < 0.0, t, 1.0) / (1.0 + t)
    return y
