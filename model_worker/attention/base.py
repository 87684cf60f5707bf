"""The seam between the transformer and attention. Knows shapes and the KV pool; knows no weights, no plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.memory.kv_pool import MHATokenToKVPool


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a backend needs to know about one attention layer.

    sliding_window counts keys: a token sees itself and the sliding_window - 1 tokens before it. None: it sees
    everything before it. softcap: a score s (query times key times scale) counts as
    softcap * tanh(s / softcap). kv_scale: of a KV cache of float8.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None = None
    kv_scale: KVScale = UNSCALED


def widest_window(windows: Iterable[int | None]) -> int:
    """Tokens that the layer which looks back the farthest sees, the newest included; 0: one sees all."""
    widest = 0
    for window in windows:
        if window is None:
            return 0
        widest = max(widest, window)
    return widest


class AttentionBackend(Protocol):
    """Causal attention of new tokens over the paged KV pool. One instance serves all layers and steps."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute what all layers share and keep it in batch.attn_metadata. Once, before the forward."""
        ...

    def forward(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        """Store k and v at batch.out_slots, then attend each query to its sequence's tokens up to itself.

        Before that, q and k are rotated by cos_sin [T, head_dim] float32 as `apply_rope` does; None: they
        have been, or the model has no rotation.
        Shapes: q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], of any row stride; one dtype.
        Returns: [T, num_heads, head_dim] in that dtype, contiguous.
        """
        ...


class NormingBackend(AttentionBackend, Protocol):
    """A backend that norms heads itself, where it reads them to rotate them anyway."""

    norms_heads: bool

    def forward(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        cos_sin: Tensor | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        """See AttentionBackend.forward. First of all the heads of q and k are normed by head_norms; None:
        they have been, or the model has no such norms.
        """
        ...


def norms_heads(backend: AttentionBackend) -> TypeGuard[NormingBackend]:
    """Whether the backend says so; any other is given heads that are normed."""
    return getattr(backend, "norms_heads", False)
