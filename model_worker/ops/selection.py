"""Choice of a worker's Ops, from its settings and what the machine can do. No other module chooses one."""

from __future__ import annotations

import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.selection import make_attention_backend
from model_worker.ops.base import Ops
from model_worker.ops.linear_cost import linear_costs
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from runtime.base.environment import kernel_cache_dir
from runtime.base.errors import ConfigError


def make_ops(
    attention_backend: str, *, device: str, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> Ops:
    """Return the Ops for that attention backend; for "auto", of the fastest one that works here. Raises
    ConfigError as make_attention_backend does, and if deterministic results are not possible.
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

    def on_cpu() -> Ops:
        return TorchOps(attention) if kernels is None else NativeOps(kernels, attention)

    ops = on_cpu()
    costs = linear_costs(on_cpu(), dtype, kernel_cache_dir(), "" if kernels is None else kernels.name)
    if kernels is None:
        ops.table.slow.append(costs.torch_instead())
    else:
        kernels.weights.start_over()  # or the measurements would stay as long as the model
        ops.table.cost_of_torch = costs.torch_for_some()
    if slower := costs.slower_than_float32(dtype):
        ops.table.slow.append(slower)
    return ops
