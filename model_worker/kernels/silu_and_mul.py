"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] holding gate, then up -> silu(gate) * up, [T, I] of the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
