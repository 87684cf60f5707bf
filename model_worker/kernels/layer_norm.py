"""Layer norm over the last dimension, with one weight for all heads or one for each."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean(x)) / deviation(x) * weight + bias for x [..., N]; weight and bias have x's last
    dimensions.
    """
    if weight.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
