"""Choice of the attention backend, from the settings and what the machine can do."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from model_worker.attention import ATTENTION_BACKENDS
from model_worker.attention.base import AttentionBackend
from model_worker.kernels.native.build import BuildError
from model_worker.kernels.native.library import attention_supports
from runtime.base.errors import ConfigError
from runtime.base.registry import resolve

logger = logging.getLogger(__name__)


def make_attention_backend(
    name: str, *, device: str, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> AttentionBackend:
    """Return the backend of that name; for "auto" the fastest one that works here, with a log line if that is
    not the native one on a CPU. deterministic: as in CpuNativeAttention; other backends guarantee nothing.
    Raises ConfigError for an unknown name, for a backend that cannot work here, and for CUDA without triton.
    """
    if device == "cuda":
        return _make_for_cuda(name, dtype, head_dim)
    if name in ("triton", "flashinfer"):
        raise ConfigError(f"attention_backend: {name} cannot be used: the device is cpu")
    if name not in ("auto", "cpu_native"):
        return _make(name)
    if not attention_supports(dtype, head_dim):
        reason = f"it has no kernel for {str(dtype).removeprefix('torch.')} with heads of {head_dim}"
    else:
        try:
            return _make("cpu_native", dtype=dtype, deterministic=deterministic)
        except BuildError as error:
            reason = str(error)
    if name == "cpu_native":
        raise ConfigError(f"attention_backend: cpu_native cannot be used: {reason}")
    logger.warning("no native CPU kernels, torch operations are used and are slower: %s", reason)
    return _make("torch_native")


def _make_for_cuda(name: str, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    if name == "cpu_native":
        raise ConfigError("attention_backend: cpu_native cannot be used: the device is cuda")
    if find_spec("triton") is None:
        raise ConfigError("device: cuda needs triton; pip install 'carousel[cuda]'")
    if name == "flashinfer":
        _check_flashinfer(dtype, head_dim)
    return _make("triton" if name == "auto" else name)


def _check_flashinfer(dtype: torch.dtype, head_dim: int) -> None:
    if find_spec("flashinfer") is None:
        raise ConfigError(
            "attention_backend: flashinfer is not installed; pip install 'carousel[flashinfer]', "
            "or use triton"
        )
    from model_worker.attention.flashinfer import DTYPES, HEAD_DIMS

    if dtype not in DTYPES or head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"attention_backend: flashinfer has no kernel for {str(dtype).removeprefix('torch.')} with heads "
            f"of {head_dim}; use triton"
        )


def _make(name: str, **settings: Any) -> AttentionBackend:
    backend: AttentionBackend = resolve("attention backend", name, ATTENTION_BACKENDS)(**settings)
    return backend
