"""Rotary position embedding with half-split pairs: dimension i is rotated together with dimension i + D
/ 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, amplitude: Tensor | None = None) -> Tensor:
    """Return [T, D] float32: D / 2 cosines and then D / 2 sines, times amplitude [D] if given. positions [T]
    int64; inv_freq [D / 2], or [T, D / 2] for each token. Angles are float32.
    """
    angles = positions.to(inv_freq.dtype).unsqueeze(1) * inv_freq
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return cos_sin if amplitude is None else cos_sin * amplitude


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, num_heads, D] and k [T, num_kv_heads, D] by cos_sin [T, D] float32. Returns new contiguous
    tensors of the inputs' dtype; the arithmetic is float32.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
