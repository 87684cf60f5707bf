"""SelfAttention: projections, norms of queries and keys, and the properties of the layer that a backend
needs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.distributed.cut import Cut
from model_worker.kernels.kv_scale import KVScale
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.layers.norm import LayerNorm, RMSNorm
from model_worker.layers.rotary import reorder_rows, reorder_scales, rotary_order
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.models.parts import Parts
from model_worker.models.spec import has_bias


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer, for this rank's heads."""

    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__()
        config, spec = parts.config, parts.spec
        head_dim = config.head_dim
        self.layer = AttentionLayer(
            layer_id=layer_id,
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=head_dim,
            scale=config.attention_scale,
            sliding_window=config.attention_window(layer_id),
            softcap=config.attention_softcap,
        )
        queries, keys = parts.heads(config.num_heads), parts.heads(config.num_kv_heads)
        self.split = (queries.length, keys.length, keys.length)
        adjacent = spec.rotary_pairs == "adjacent"
        self._order = rotary_order(head_dim, config.rope.rotary_dim, adjacent=adjacent)
        num_turned = parts.num_heads + parts.num_kv_heads
        self.qkv_proj = parts.linear(
            config.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=has_bias(spec.qkv_bias, config.attention_bias),
            changes=() if self._order is None else (reorder_rows(self._order, num_turned),),
        )
        self.o_proj = parts.joining_linear(
            queries, config.hidden_size, bias=has_bias(spec.o_bias, config.attention_bias)
        )
        self.q_norm = self._head_norm(parts, queries)
        self.k_norm = self._head_norm(parts, keys)
        self._norms_projections = spec.qk_norm == "projection"
        self._head_norms: HeadNorms | None = None
        """Head norms that a backend can compute itself."""
        if spec.qk_norm == "head" and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            self._head_norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.norm_eps)

    def scale_kv(self, kv_scale: KVScale) -> None:
        """Store keys and values divided by these scales in the KV cache, which is float8."""
        self.layer = replace(self.layer, kv_scale=kv_scale)

    def _head_norm(self, parts: Parts, features: Cut) -> RMSNorm | LayerNorm | None:
        if not parts.config.qk_norm:
            return None
        changes = () if self._order is None else (reorder_scales(self._order),)
        head_dim = parts.config.head_dim
        match parts.spec.qk_norm:
            case "none":
                return None
            case "head":
                return parts.norm(head_dim, changes)
            case "each_head":
                return parts.norm((features.in_units_of(head_dim), head_dim), changes)
            case "projection":
                return parts.split_norm(features, changes)

    def forward(
        self,
        hidden: Tensor,
        cos_sin: Tensor,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        backend: AttentionBackend,
    ) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size]."""
        q, k, v = self.qkv_proj(hidden).split(self.split, dim=-1)
        if self._norms_projections:
            q, k = self._normed(q, k)
        heads = (-1, self.layer.head_dim)
        q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
        head_norms = self._head_norms if backend.norms_heads else None
        if head_norms is None and not self._norms_projections:
            q, k = self._normed(q, k)
        inputs = AttentionInputs(q, k, v, cos_sin, head_norms)
        attended = backend.forward(self.layer, inputs, batch, kv_pool)
        projected: Tensor = self.o_proj(attended.flatten(1))
        return projected

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)
