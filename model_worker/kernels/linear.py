"""Linear layers by torch, for weights that no C++ kernel accepts, and the addition of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_WIDE_ROWS = 8
"""Number of rows from which on it is faster to widen the weight first: 1.5 to 2 times for 8 rows, 3 to 4.7
times from 64 on (EPYC held back to AVX2, bfloat16, one thread, 2026-11).
"""
WIDE_ELEMENTS = 1 << 19
"""Elements of a weight that are widened at a time: 2 MiB, which fits into caches. 16 MiB took up to twice as
long.
"""


class LoraPart(NamedTuple):
    """Addition of an adapter to some outputs of a linear layer: scaling * (x @ a.T) @ b.T."""

    column: int  # first of the outputs
    a: Tensor  # [rank, K]
    b: Tensor  # [outputs, rank]
    scaling: float


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [T, N], for x [T, K], weight [N, K], bias [N], all of one dtype.

    Torch multiplies a 16-bit dtype number by number if it has no matrix product of it for this CPU. With many
    rows the product is then computed in float32, and each result is rounded once.
    """
    if len(x) < MIN_WIDE_ROWS or _has_product(x.dtype):
        return F.linear(x, weight, bias)
    wide = x.float()
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(weight), step := max(1, WIDE_ELEMENTS // weight.shape[1])):
        part = slice(start, start + step)
        own = None if bias is None else bias[part].float()
        out[:, part] = F.linear(wide, weight[part].float(), own)
    return out


def add_lora(x: Tensor, y: Tensor, rows: Tensor, parts: Iterable[LoraPart]) -> None:
    """Add an adapter's output for the rows `rows` [R] int64 of x [T, K] to the same rows of y [T, N], in
    place.
    """
    taken = x[rows]
    for part in parts:
        hidden = linear(taken, part.a.to(x.dtype))
        columns = slice(part.column, part.column + len(part.b))
        y[rows, columns] = (y[rows, columns] + part.scaling * linear(hidden, part.b.to(x.dtype))).to(y.dtype)


@cache
def _has_product(dtype: torch.dtype) -> bool:
    """Return True if torch has a matrix product of this dtype for this CPU."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
