"""The attention function that transformers' modules call. The forward that runs decides which
object answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from model_worker.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.memory.kv_pool import MHATokenToKVPool

ATTENTION_NAME = "carousel"


class Attention(Protocol):
    """Answers the attention calls of one forward."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Return [1, T, num_heads, width of a value] for query [1, num_heads, T, head_dim], and key and value
        likewise with their own heads. arguments: all other arguments of the module, by name.
        """
        ...


class PagedAttention:
    """Attention of one step's tokens over the paged KV cache."""

    def __init__(
        self,
        layers: Mapping[nn.Module, AttentionLayer],
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        backend: AttentionBackend,
    ) -> None:
        self._layers = layers
        self._batch = batch
        self._kv_pool = kv_pool
        self._backend = backend

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        layer = self._layers[module]
        width = value.shape[-1]
        if width < layer.head_dim:
            # The cache has one width for keys and values. The added columns are zero in the output, too.
            value = F.pad(value, (0, layer.head_dim - width))
        inputs = AttentionInputs(_by_token(query), _by_token(key), _by_token(value))
        attended = self._backend.forward(layer, inputs, self._batch, self._kv_pool)
        return attended.unsqueeze(0)[..., :width]


@contextmanager
def answering(attention: Attention) -> Iterator[None]:
    """Context manager under which `attention` answers the calls of the forward."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def _by_token(states: Tensor) -> Tensor:
    """Rearrange [1, heads, T, head_dim] to [T, heads, head_dim], with the heads of a token adjacent in
    memory.
    """
    by_token = states[0].transpose(0, 1)
    heads_adjoin = by_token.stride()[1:] == (states.shape[-1], 1)
    return by_token if heads_adjoin else by_token.contiguous()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    arguments["attention_mask"] = attention_mask
    return _current.get()(module, query, key, value, arguments), None


_current: ContextVar[Attention] = ContextVar("attention")
# No mask function is registered under this name, so transformers builds no mask.
AttentionInterface.register(ATTENTION_NAME, _attend)
