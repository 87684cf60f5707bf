"""Table of the Triton kernels without weights. Matrix products are cuBLAS's."""

from __future__ import annotations

import torch.nn.functional as F

from model_worker.kernels.int8_linear import sums
from model_worker.kernels.triton.activation import activate_and_mul
from model_worker.kernels.triton.combine import combine
from model_worker.kernels.triton.decode_inputs import lay_out_decodes
from model_worker.kernels.triton.embedding import embed
from model_worker.kernels.triton.fp8_rows import quantize_rows_fp8, scale_product
from model_worker.kernels.triton.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.triton.rope import rope_cos_sin
from model_worker.ops.functions import Functions

BY_TRITON = Functions(
    name="Triton",
    embed=embed,
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    rope_cos_sin=rope_cos_sin,
    linear=F.linear,
    int8_sums=sums,
    quantize_rows_fp8=quantize_rows_fp8,
    scale_product=scale_product,
    activate_and_mul=activate_and_mul,
    combine=combine,
    lay_out_decodes=lay_out_decodes,
)
