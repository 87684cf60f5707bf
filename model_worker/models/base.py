"""Model: interface between models of all kinds and the runner."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.ops.base import Ops


class Model(Protocol):
    def __call__(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Return the final hidden states [W, hidden_size] at the batch's output_indices, and store the new
        tokens' KV.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] float32 for hidden [n, hidden_size]; on ranks other than 0 without
        rows.
        """


class LoadedModel(Model, Protocol):
    """A model whose weights are loaded."""

    @property
    def kv_layout(self) -> KVLayout:
        """Layers, heads and widths of the KV cache that it writes."""
        ...

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on."""
