"""Tables of kernels without weights, one for each library that has them. This module has torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from model_worker.kernels.activation import activate_and_mul
from model_worker.kernels.combine import CombineLike, combine
from model_worker.kernels.decode_inputs import LayOutDecodesLike, lay_out_decodes
from model_worker.kernels.embedding import embed
from model_worker.kernels.fp8_linear import QuantizeRows, ScaleProduct
from model_worker.kernels.fp8_rows import quantize_rows_fp8, scale_product
from model_worker.kernels.int8_linear import sums_on_cpu
from model_worker.kernels.linear import linear
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.rope import rope_cos_sin
from runtime.checkpoint.model_config import Activation


@dataclass(frozen=True, slots=True)
class Functions:
    """Kernels without weights. They do what the functions of the same names in model_worker.kernels do."""

    name: str = "torch"
    embed: Callable[..., Tensor] = embed
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    fused_add_rms_norm: Callable[..., Tensor] = fused_add_rms_norm
    rope_cos_sin: Callable[[Tensor, Tensor, Tensor | None], Tensor] = rope_cos_sin
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    int8_sums: Callable[[Tensor, Tensor], Tensor] = sums_on_cpu
    quantize_rows_fp8: QuantizeRows = quantize_rows_fp8
    scale_product: ScaleProduct = scale_product
    activate_and_mul: Callable[[Activation, Tensor], Tensor] = activate_and_mul
    combine: CombineLike = combine
    lay_out_decodes: LayOutDecodesLike = lay_out_decodes


BY_TORCH = Functions()
