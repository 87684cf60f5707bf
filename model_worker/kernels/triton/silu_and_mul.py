"""The gate of a SwiGLU feed-forward layer.

grid   token × block of the width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As model_worker.kernels.silu_and_mul.silu_and_mul, for gate_up [T, 2 * I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _gate[(num_tokens, triton.cdiv(width, BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _gate(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    # The torch function rounds silu(gate) before it multiplies; so do we.
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + i, (silu * up).to(dtype), mask=inside)
