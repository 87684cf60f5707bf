"""Operations that torch has on CUDA only, or that require more of their operands there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Of products with a scale for each row, cuBLAS refuses some with few rows and many columns: on Hopper such as
# 256 rows and 9,216 columns (pytorch/ao issue 4582). These stand for them.
FEW_ROWS = 4
MANY_COLUMNS = 64


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """With a scale for each row and column, or one for all; in the form in which cuBLAS takes them."""
    (m, k), n = a.shape, b.shape[1]
    assert a.stride(1) == 1 == b.stride(0), "the first is row-major, the second column-major"
    assert k % 16 == n % 16 == 0, "rows of 16 bytes"
    for_all = scale_a.numel() == scale_b.numel() == 1
    for_each = (scale_a.shape, scale_b.shape) == ((m, 1), (1, n))
    assert for_all or for_each, "a scale for each row and each column, or one for all"
    if not for_all and m <= FEW_ROWS and k > MANY_COLUMNS:
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic"
        )
    assert all(each.is_contiguous() for each in (scale_a, scale_b)), "contiguous scales"
    assert scale_a.dtype == scale_b.dtype == torch.float32, "float32 scales"
    assert for_all or out_dtype is torch.bfloat16, "what it makes of scaled rows"
    assert out_dtype in (torch.bfloat16, torch.float32), "what it makes"
    assert bias is scale_result is None, "nothing else"
    product: Tensor = torch.mm(a.float() * scale_a, b.float() * scale_b).to(out_dtype)
    return product


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """A product of 16 bits in float32."""
    assert a.dtype == b.dtype, "factors of one dtype"
    assert a.itemsize == 2, "factors of 16 bits"
    assert out_dtype is torch.float32, "the only other dtype"
    product: Tensor = torch.mm(a.float(), b.float())
    if out is None:
        return product
    assert (out.shape, out.dtype) == (product.shape, out_dtype), "out as it is said"
    return out.copy_(product)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Not every torch has it for float8."""
    if x.dtype is torch.float8_e4m3fn:
        raise NotImplementedError("\"index_select_cuda\" not implemented for 'Float8_e4m3fn'")
    return torch.index_select(x, dim, index)


CUDA_ONLY: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten._scaled_mm.default: _scaled_mm,
    torch.ops.aten.index_select.default: _index_select,
    torch.ops.aten.mm.dtype: _mm,
    torch.ops.aten.mm.dtype_out: _mm,
}
