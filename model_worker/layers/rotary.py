"""Rotary embedding: a model's frequencies, and the angles of a step, computed once for all layers. Angles
depend on a token's position only, so its key is rotated once, cached and shared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_worker.layers.weight import Change
from model_worker.ops.base import Frequencies, Map, Ops
from runtime.checkpoint.rope_config import RopeConfig


class RotaryEmbedding:
    """Computes cosines and sines of positions, in each step: a table would grow with the context length.
    Dimensions that the model does not rotate have angle 0; see `rotary_order`.
    """

    _angles: Map

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self._rope = rope
        self._num_still = (head_dim - rope.rotary_dim) // 2
        self._inv_freq = self._padded(inverse_frequencies(rope)).to(device)
        self._amplitude: Tensor | None = None
        if rope.attention_factor != 1.0:
            turned = torch.full((rope.rotary_dim // 2,), rope.attention_factor)
            self._amplitude = self._padded(turned, 1.0).repeat(2).to(device)
        self._exponents = _exponents(rope).to(device)

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on."""
        frequencies: Tensor | Frequencies = self._inv_freq
        if self._rope.type == "dynamic":
            frequencies = self._frequencies_at
        self._angles = ops.rotary_angles(frequencies, self._amplitude)

    def cos_sin(self, positions: Tensor) -> Tensor:
        """Return [T, head_dim] float32 for positions [T] int64, in the form that apply_rope takes."""
        return self._angles(positions)

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        return self._padded(_dynamic_frequencies(positions, self._rope, self._exponents))

    def _padded(self, values: Tensor, still: float = 0.0) -> Tensor:
        """Extend values [..., rotary_dim / 2] to [..., head_dim / 2]."""
        return torch.nn.functional.pad(values, (0, self._num_still), value=still)


def rotary_order(head_dim: int, rotary_dim: int, *, adjacent: bool) -> list[int] | None:
    """The order of a head's dimensions in which i turns with i + head_dim / 2; None: it is the checkpoint's.

    Checkpoints pair dimension 2i with 2i + 1 (`adjacent`) or i with i + rotary_dim / 2, and leave those from
    rotary_dim on as they are. Queries and keys only meet in a product, so any order that they share will do,
    and one order makes one rotation serve all:

        left of the pairs | half of the rest | right of the pairs | the other half
    """
    if rotary_dim == head_dim and not adjacent:
        return None
    turned = list(range(rotary_dim))
    left = turned[::2] if adjacent else turned[: rotary_dim // 2]
    right = turned[1::2] if adjacent else turned[rotary_dim // 2 :]
    middle = (rotary_dim + head_dim) // 2
    return [*left, *range(rotary_dim, middle), *right, *range(middle, head_dim)]


def reorder_rows(order: list[int], num_heads: int) -> Change:
    """Return the change that reorders the first num_heads heads of a projection's outputs by `order`, and
    leaves the other rows.
    """

    def change(weight: Tensor) -> Tensor:
        heads = torch.arange(num_heads).unsqueeze(1) * len(order)
        index = torch.arange(weight.shape[0])
        index[: num_heads * len(order)] = (heads + torch.tensor(order)).flatten()
        # Float8 as bytes: not every torch selects among it on CUDA.
        rows = weight.view(torch.uint8) if weight.itemsize == 1 else weight
        return rows.index_select(0, index.to(weight.device)).view(weight.dtype)

    return change


def reorder_scales(order: list[int]) -> Change:
    """Return the change that reorders a norm's scales, of one head or several, head by head."""

    def change(weight: Tensor) -> Tensor:
        heads = weight.view(*weight.shape[:-1], -1, len(order))
        return heads[..., order].flatten(-2)

    return change


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return [rotary_dim / 2] float32, in radians per position, for the original context length."""
    exponents = _exponents(rope)
    inv_freq = 1.0 / (rope.theta**exponents)
    match rope.type:
        case "default" | "dynamic":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _llama3_frequencies(inv_freq, rope)
        case "yarn":
            return _yarn_frequencies(inv_freq, rope)
        case "longrope":
            return inv_freq / torch.tensor(rope.divisors)


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _llama3_frequencies(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies by the method llama3: divide long wavelengths by the factor, keep short ones, and
    interpolate between.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn_frequencies(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as YaRN (Peng et al., 2023): like llama3, but the blend is linear in
    the dimension.
    """

    def dimension_of(turns: float) -> float:
        """Return the pair that makes this many turns over the original context."""
        context = rope.original_max_position_embeddings
        return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    ramp = ramp.clamp(0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1.0 - ramp)


def _dynamic_frequencies(positions: Tensor, rope: RopeConfig, exponents: Tensor) -> Tensor:
    """Return [T, rotary_dim / 2]: the base grows with the length of the sequence up to the token (dynamic
    NTK).
    """
    original = rope.original_max_position_embeddings
    lengths = (positions + 1).clamp(min=original).to(torch.float32)
    stretch = rope.factor * lengths / original - (rope.factor - 1.0)
    base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / (base.unsqueeze(1) ** exponents)
