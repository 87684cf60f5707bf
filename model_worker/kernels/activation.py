"""Activation functions of feed-forward layers, by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoint.model_config import Activation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activate_and_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return activation(gate) * up, [T, I], for gate_up [T, 2 * I], which holds gate and then up, of the same
    dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
