"""Attention by the Triton kernels, which read keys and values directly from pages: the CUDA path.

    decodes              norm, rotate, store and attend, split over the keys; then merge the splits
    decodes of which     norm, rotate and store all of them first, because a token attends to what another
    rows repeat          one of its row stores; then attend and merge as for others
    chunks of prompts    norm, rotate and store; then attend by tiles of new tokens

A step of decodes alone needs nothing from the host that is not on the device already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.triton.decode_attention import choose_num_splits, decode_attention
from model_worker.kernels.triton.extend_attention import extend_attention
from model_worker.kernels.triton.new_tokens import NewTokens
from model_worker.kernels.triton.rope_kv_store import rope_and_store_kv
from model_worker.memory.kv_pool import MHATokenToKVPool


@dataclass(frozen=True, slots=True)
class _Step:
    """Inputs of a step that all layers share."""

    decode_lens: Tensor  # [num_decodes] int64
    max_decode_len: int
    chunks: _Chunks | None = None


@dataclass(frozen=True, slots=True)
class _Chunks:
    rows: Tensor  # [num_chunks] int64
    query_start: Tensor  # [num_chunks + 1] int32
    kv_lens: Tensor  # [num_chunks] int32


class TritonAttention:
    """AttentionBackend for any float dtype and head size, on one NVIDIA GPU."""

    stays_on_device = True
    """True: decodes read their lengths from the device, and batch.kv_lens may be upper bounds."""
    norms_heads = True
    repeats_rows = True
    """True: several decodes may be tokens of the same row."""

    def __init__(self, num_multiprocessors: int = 0) -> None:
        """num_multiprocessors: number of multiprocessors that the keys of few decodes are divided among; 0:
        that of this process's GPU.
        """
        if not num_multiprocessors and torch.cuda.is_available():
            num_multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self._num_multiprocessors = num_multiprocessors or 1  # 1: Triton's interpreter, in tests

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare lengths once for all layers, with at most one copy to the device."""
        num_decodes = batch.num_decodes
        # A decode is the last token of its sequence.
        decode_lens = batch.decode_lens
        if decode_lens is None:
            decode_lens = batch.positions[:num_decodes] + 1
        max_decode_len = max(batch.kv_lens[:num_decodes], default=0)
        if num_decodes == batch.batch_size:
            batch.attn_metadata = _Step(decode_lens, max_decode_len)
            return
        starts, lens = batch.query_start[num_decodes:], batch.kv_lens[num_decodes:]
        query_start, kv_lens = _upload(np.array([*starts, *lens], np.int32), batch.positions.device).split(
            [len(starts), len(lens)]
        )
        chunks = _Chunks(batch.rows[num_decodes:], query_start, kv_lens)
        batch.attn_metadata = _Step(decode_lens, max_decode_len, chunks)

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        """Attend as in AttentionBackend.forward. Norms and rotates chunks' queries in place."""
        step = batch.attn_metadata
        assert isinstance(step, _Step), "prepare(batch) runs before the forward"
        q, k, v, cos_sin, head_norms = inputs
        k_pool, v_pool = kv_pool.layer(layer.layer_id)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decodes, chunks = batch.num_decodes, step.chunks
        # Decodes come first. Kernels are given all tokens and the range that they compute, because making
        # views would take the host as long as the launches.
        new: NewTokens | None = NewTokens(k, v, batch.out_slots, cos_sin, head_norms)
        if batch.rows_repeat:
            assert chunks is None, "rows repeat in batches of decodes alone"
            rope_and_store_kv(q, k, v, cos_sin, k_pool, v_pool, batch.out_slots, head_norms, layer.kv_scale)
            new = None
        if num_decodes:
            decode_attention(
                q,
                k_pool,
                v_pool,
                batch.page_table,
                batch.rows,
                step.decode_lens,
                page_size=batch.page_size,
                scale=layer.scale,
                num_splits=choose_num_splits(
                    num_decodes, layer.num_kv_heads, step.max_decode_len, self._num_multiprocessors
                ),
                sliding_window=layer.sliding_window,
                softcap=layer.softcap or 0.0,
                kv_scale=layer.kv_scale,
                new=new,
                out=out,
            )
        if chunks is not None:
            slots = batch.out_slots
            rope_and_store_kv(
                q, k, v, cos_sin, k_pool, v_pool, slots, head_norms, layer.kv_scale, first=num_decodes
            )
            extend_attention(
                q,
                k_pool,
                v_pool,
                batch.page_table,
                chunks.rows,
                chunks.kv_lens,
                chunks.query_start,
                page_size=batch.page_size,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                softcap=layer.softcap or 0.0,
                kv_scale=layer.kv_scale,
                out=out,
            )
        return out


def _upload(host: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(host)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
