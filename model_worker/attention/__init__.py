"""Attention backends by name. The table has import strings; nothing is imported until it is chosen."""

from __future__ import annotations

ATTENTION_BACKENDS: dict[str, str] = {
    "cpu_native": "model_worker.attention.cpu_native:CpuNativeAttention",
    "flashinfer": "model_worker.attention.flashinfer:FlashInferAttention",
    "torch_native": "model_worker.attention.torch_native:TorchNativeAttention",
    "triton": "model_worker.attention.triton:TritonAttention",
}
