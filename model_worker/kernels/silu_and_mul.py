"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] holding gate, then up -> silu(gate) * up, [T, I] of the same dtype."""
    if gate_up.is_cuda:
        # Imported where a GPU is used, and only there: a CPU needs no triton.
        from model_worker.kernels.triton import silu_and_mul as triton_kernels

        return triton_kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
