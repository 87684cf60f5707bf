"""Linear layer over int8: weights with a scale for each output, activations quantised by rows (W8A8).

The C++ version is kernels/native/int8_linear.py. A scale is a row's largest magnitude / 127, so zero stays
zero and nothing is clipped. Sums of products are int32 and exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.base.cpu_isa import cpu_isa, machine_isa

LARGEST = 127


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [N, K], scale [N] float32), whose product approximates x [N, K]."""
    wide = x.float()
    most = wide.abs().amax(-1)
    inverse = torch.where(most > 0, LARGEST / most, torch.zeros_like(most))
    return (wide * inverse.unsqueeze(-1)).round_().to(torch.int8), most / LARGEST


def sums_on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """Return the exact sums of products [T, N] for x [T, K] and weight [N, K], both int8."""
    if cpu_isa() != machine_isa():
        # Torch selects oneDNN's product by the CPU. Limited to a lower level, that product saturates sums of
        # pairs.
        return x.double() @ weight.t().double()
    return sums(x, weight)


def sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return the same as `sums_on_cpu` by torch's own int8 product."""
    return torch._int_mm(x, weight.t())


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Tensor], Tensor] = sums_on_cpu,
) -> Tensor:
    """Return [T, N] of x's dtype for x [T, K] of any float dtype, weight [N, K] int8, scale [N] float32 and
    bias [N].
    """
    quantized, x_scale = quantize_rows(x)
    y = multiply(quantized, weight).float() * (x_scale.unsqueeze(1) * scale)
    return (y if bias is None else y + bias.float()).to(x.dtype)
