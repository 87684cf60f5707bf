"""Attention in plain torch over the paged pool: the reference, and the CPU path where nothing faster exists.

Every sequence is computed by itself, so a sequence's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.rope import apply_rope
from model_worker.memory.kv_pool import MHATokenToKVPool

# Queries per call: keys beyond the tile's last query are not even multiplied, so small tiles save up to half
# of a prompt's work. 64 to 256 measured within 15% of each other, for 512 and 2,048 tokens (one x86 core).
_QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a step: its new tokens, and the KV slots of all its tokens so far."""

    tokens: slice  # rows of q
    num_cached: int
    slots: Tensor  # [num_cached + new tokens] int32


class TorchNativeAttention:
    """AttentionBackend on scaled_dot_product_attention: gather a sequence's keys and values, then attend.

    One new token attends with its GQA group as query rows (one pass over the keys, no mask). More tokens go
    in tiles under an additive mask; the key heads are broadcast over the group by stride, not copied.
    """

    norms_heads = False

    def __init__(self) -> None:
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], Tensor] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute the KV slots of every sequence, once for all layers."""
        if batch.batch_size == 0:
            batch.attn_metadata = []
            return
        page_size = batch.page_size
        num_pages = -(-max(batch.kv_lens) // page_size)
        pages = batch.page_table[:, :num_pages].index_select(0, batch.rows)
        offsets = torch.arange(page_size, dtype=pages.dtype, device=pages.device)
        slots = (pages.unsqueeze(-1) * page_size + offsets).flatten(1)  # [B, num_pages * page_size] int32
        sequences = []
        for b, kv_len in enumerate(batch.kv_lens):
            tokens = slice(batch.query_start[b], batch.query_start[b + 1])
            num_cached = kv_len - (tokens.stop - tokens.start)
            sequences.append(_Sequence(tokens, num_cached, slots[b, :kv_len]))
        batch.attn_metadata = sequences

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        """Attend as in AttentionBackend.forward."""
        assert isinstance(batch.attn_metadata, list), "prepare(batch) runs before the forward"
        q, k, v, cos_sin, _ = inputs
        if cos_sin is not None:
            q, k = apply_rope(q, k, cos_sin)
        kv_pool.store(layer.layer_id, k, v, batch.out_slots)
        k_buffer, v_buffer = kv_pool.layer(layer.layer_id)
        group = layer.num_heads // layer.num_kv_heads
        q = q.reshape(-1, layer.num_kv_heads, group, layer.head_dim)
        out = q.new_empty(q.shape)
        for seq in batch.attn_metadata:
            first = _first_visible(seq.num_cached, layer.sliding_window)
            slots = seq.slots[first:]
            keys = k_buffer.index_select(0, slots).transpose(0, 1)  # [num_kv_heads, kv_len - first, head_dim]
            values = v_buffer.index_select(0, slots).transpose(0, 1)
            if seq.tokens.stop - seq.tokens.start == 1:
                out[seq.tokens] = _attend(layer, q[seq.tokens], keys.unsqueeze(0), values.unsqueeze(0))
            else:
                self._extend(layer, q[seq.tokens], keys, values, seq.num_cached, out[seq.tokens])
        return out.flatten(1, 2)

    def _extend(
        self, layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, num_cached: int, out: Tensor
    ) -> None:
        """Attend the new tokens q [N, num_kv_heads, group, head_dim] of one sequence, tile by tile, into
        `out`.
        """
        window = layer.sliding_window
        base = _first_visible(num_cached, window)  # position of keys[:, 0]
        for start in range(0, q.shape[0], _QUERY_TILE):
            tile = q[start : start + _QUERY_TILE]
            position = num_cached + start
            first = _first_visible(position, window)
            visible = slice(first - base, position + tile.shape[0] - base)
            shape = (-1, tile.shape[2], -1, -1)
            attended = _attend(
                layer,
                tile.permute(1, 2, 0, 3),
                keys[:, visible].unsqueeze(1).expand(shape),
                values[:, visible].unsqueeze(1).expand(shape),
                self._mask(tile, position - first, window),
            )  # [num_kv_heads, group, tile, head_dim]
            out[start : start + _QUERY_TILE] = attended.permute(2, 0, 1, 3)

    def _mask(self, tile: Tensor, num_before: int, window: int | None) -> Tensor:
        """Additive mask [tokens, num_before + tokens] of a tile whose keys begin num_before tokens before it.

        Every tile's mask is a view of one template per window, because only distances matter:

            template columns:   -capacity ...... -1 | 0 .......... _QUERY_TILE - 1     key minus tile start
            a tile takes:             [ num_before  |  its own tokens ]
        """
        key = (window, tile.dtype, tile.device)
        template = self._masks.get(key)
        if template is None or template.shape[1] < num_before + _QUERY_TILE:
            template = _mask_template(1 << max(num_before - 1, 1).bit_length(), window, tile)
            self._masks[key] = template
        tokens = tile.shape[0]
        start = template.shape[1] - _QUERY_TILE
        return template[:tokens, start - num_before : start + tokens]


def _attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend over the last two dimensions. With a soft-cap, which torch's operator does not have,
    in float32.
    """
    if layer.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scores = q.float() @ k.float().transpose(-1, -2)
    scores.mul_(layer.scale / layer.softcap).tanh_().mul_(layer.softcap)
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _first_visible(position: int, window: int | None) -> int:
    """Return the first key position that a query at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def _mask_template(capacity: int, window: int | None, like: Tensor) -> Tensor:
    """Return [_QUERY_TILE, capacity + _QUERY_TILE]: 0 where query r sees key c - capacity, -inf elsewhere."""
    query = torch.arange(_QUERY_TILE, device=like.device).unsqueeze(1)
    key = torch.arange(-capacity, _QUERY_TILE, device=like.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))
