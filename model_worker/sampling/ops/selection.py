"""Choice of the kernels for sampling. No other module chooses them."""

from __future__ import annotations

from model_worker.device.base import Device
from model_worker.kernels.native.library import NativeKernels
from model_worker.sampling.columns import SamplingColumns
from model_worker.sampling.ops.base import SamplingOps
from model_worker.sampling.ops.native_ops import NativeSampling
from runtime.base.registry import resolve

# By the name of a device. Triton is imported where a GPU is used, and only there.
SAMPLING_OPS = {
    "cpu": "model_worker.sampling.ops.torch_ops:TorchSampling",
    "cuda": "model_worker.sampling.ops.triton_ops:TritonSampling",
}


def make_sampling_ops(columns: SamplingColumns, device: Device, kernels: NativeKernels | None) -> SamplingOps:
    """Return the operations for that device. kernels: C++ kernels, which are preferred; None: none."""
    if kernels is not None:
        return NativeSampling(columns, device, kernels)
    ops: SamplingOps = resolve("device", device.name, SAMPLING_OPS)(columns, device)
    return ops
