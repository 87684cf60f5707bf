"""The one place that chooses a worker's Ops, from its settings and what the machine can do."""

from __future__ import annotations

import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.selection import make_attention_backend
from model_worker.ops.base import Ops
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from runtime.base.errors import ConfigError


def make_ops(
    attention_backend: str, *, device: str, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> Ops:
    """The Ops of that attention backend, or, for "auto", of the fastest that works here.

    Raises: ConfigError as make_attention_backend does, and where the same bits in any batch cannot be had.
    """
    attention = make_attention_backend(
        attention_backend, device=device, dtype=dtype, head_dim=head_dim, deterministic=deterministic
    )
    kernels = attention.kernels if isinstance(attention, CpuNativeAttention) else None
    if deterministic and kernels is None:
        raise ConfigError(
            "deterministic: needs the C++ attention (a compiler, and --attention-backend auto or cpu_native)"
        )
    if device == "cuda":
        # Imported where a GPU is used, and only there: a CPU needs no triton.
        from model_worker.ops.triton_ops import TritonOps

        return TritonOps(attention)
    if kernels is None:
        return TorchOps(attention)
    return NativeOps(kernels, attention)
