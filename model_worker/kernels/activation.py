"""The non-linearities of feed-forward layers, by the names of config.json."""

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
    """[T, 2 * I] holding gate, then up -> activation(gate) * up, [T, I] of the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
