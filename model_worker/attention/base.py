"""AttentionBackend: interface between the transformer and attention. Knows shapes and the KV pool; knows no
weights and no plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.memory.kv_pool import MHATokenToKVPool


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Facts about one attention layer that a backend needs.

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
    """Return how many of a sequence's last tokens the widest layer sees, the newest included; 0: one sees
    all.
    """
    widest = 0
    for window in windows:
        if window is None:
            return 0
        widest = max(widest, window)
    return widest


class AttentionInputs(NamedTuple):
    """New tokens of a step in one layer, and the preparation of their queries and keys. Tensors have one
    dtype and any row stride. In this order: heads of q and k are normed, they are rotated as `apply_rope`
    does, k and v are stored, and queries attend.
    """

    q: Tensor  # [T, num_heads, head_dim]
    k: Tensor  # [T, num_kv_heads, head_dim]
    v: Tensor  # [T, num_kv_heads, head_dim]
    cos_sin: Tensor | None = None  # [T, head_dim] float32; None: there is nothing to rotate any more
    head_norms: HeadNorms | None = None  # None: there is nothing to norm any more


class AttentionBackend(Protocol):
    """Causal attention of new tokens over the paged KV pool. One instance serves all layers and steps."""

    norms_heads: bool
    """True if the backend norms heads itself while it rotates them. Other backends get heads that are already
    normed.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute what all layers share, and keep it in batch.attn_metadata. Called once, before
        the forward.
        """
        ...

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        """Do what `AttentionInputs` says, storing keys and values at batch.out_slots; each query attends to
        its sequence's tokens up to itself. Returns [T, num_heads, head_dim] in the inputs' dtype, contiguous.
        """
        ...
