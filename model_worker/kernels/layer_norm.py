"""Layer norm over the last dimension, of all heads with one weight or of each with its own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / deviation(x) * weight + bias; x [..., N], weight and bias of its last dimensions."""
    if weight.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
