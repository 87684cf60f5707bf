"""A model's rotary frequencies, and the angles of a step, computed once for all layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_worker.kernels.rope import rope_cos_sin
from runtime.model_config import RopeConfig


class RotaryEmbedding:
    """Positions to cosines and sines. Computed per step: a table would grow with the context length."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self._inv_freq = _inverse_frequencies(rope, head_dim).to(device)

    def cos_sin(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> [T, head_dim] float32, as apply_rope takes it."""
        return rope_cos_sin(positions, self._inv_freq)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, in radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    match rope.type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _llama3_frequencies(inv_freq, rope)


def _llama3_frequencies(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / rope.factor + blend * inv_freq
