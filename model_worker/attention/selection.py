"""Which attention backend a worker takes, from its settings and what the machine can do."""

from __future__ import annotations

import logging

import torch

from model_worker.attention import ATTENTION_BACKENDS
from model_worker.attention.base import AttentionBackend
from model_worker.kernels.native.build import BuildError
from model_worker.kernels.native.library import attention_supports
from runtime.errors import ConfigError
from runtime.registry import resolve

logger = logging.getLogger(__name__)


def make_attention_backend(name: str, *, device: str, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The backend of that name; for "auto", the fastest one that works here, with a line if that is not the
    native one on a CPU.

    Raises: ConfigError for an unknown name, or for cpu_native where it cannot work.
    """
    if name not in ("auto", "cpu_native"):
        return _make(name)
    reason = _reason_against_native(device, dtype, head_dim)
    if reason is None:
        try:
            return _make("cpu_native")
        except BuildError as error:
            reason = str(error)
    if name == "cpu_native":
        raise ConfigError(f"attention_backend: cpu_native cannot be used: {reason}")
    if device == "cpu":
        logger.warning("no native CPU kernels, torch operations are used and are slower: %s", reason)
    return _make("torch_native")


def _make(name: str) -> AttentionBackend:
    backend: AttentionBackend = resolve("attention backend", name, ATTENTION_BACKENDS)()
    return backend


def _reason_against_native(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    if device != "cpu":
        return f"the device is {device}"
    if not attention_supports(dtype, head_dim):
        return f"it has no kernel for {str(dtype).removeprefix('torch.')} with heads of {head_dim}"
    return None
