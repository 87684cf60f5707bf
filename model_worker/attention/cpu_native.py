"""Attention by the C++ kernels, which read keys and values directly from pages: one call a layer for the
whole batch.

The result of a sequence has the same bits in any batch and with any number of threads; if it is
deterministic, also in any chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.native.calls import AttentionCall
from model_worker.kernels.native.library import DTYPES, NativeKernels, heads_pointer, load_kernels
from model_worker.memory.kv_pool import MHATokenToKVPool
from runtime.base.environment import kernel_cache_dir


class NativeStep:
    """Arguments of the kernel call that a step's layers share, and the tensors that its pointers refer to."""

    __slots__ = ("call", "kv_lens", "query_start")

    def __init__(self, batch: ForwardBatch, **settings: int) -> None:
        """Prepare the call for a batch. settings: fields of the call that are the same for every step."""
        self.kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int64)
        self.query_start = torch.tensor(batch.query_start, dtype=torch.int64)
        assert batch.page_table.dtype is torch.int32
        self.call = AttentionCall(
            out_slots=batch.out_slots.data_ptr(),
            page_table=batch.page_table.data_ptr(),
            rows=batch.rows.data_ptr(),
            kv_lens=self.kv_lens.data_ptr(),
            query_start=self.query_start.data_ptr(),
            page_table_stride=batch.page_table.stride(0),
            num_tokens=batch.query_start[-1],
            num_seqs=batch.batch_size,
            page_size=batch.page_size,
            num_threads=torch.get_num_threads(),
            **settings,
        )

    def read_from(self, kv_lens: Tensor, query_start: Tensor) -> None:
        """Read the sequences' lengths [B] and ends [B + 1], int64, from these tensors instead."""
        self.kv_lens, self.query_start = kv_lens, query_start
        self.call.kv_lens, self.call.query_start = kv_lens.data_ptr(), query_start.data_ptr()


class CpuNativeAttention:
    """AttentionBackend for the dtypes and head sizes that `attention_supports` accepts."""

    norms_heads = False

    def __init__(
        self,
        kernels: NativeKernels | None = None,
        *,
        dtype: torch.dtype | None = None,
        deterministic: bool = False,
        force_float_math: bool = False,
    ) -> None:
        """kernels: None: those in the user's cache, and BuildError is raised if they cannot be built. dtype:
        the only dtype that will be used; None: any. deterministic: a token's result has the same bits in a
        decode, in a chunk and in a whole prompt. force_float_math: multiply in float32 even if the CPU can
        multiply bfloat16.
        """
        self.kernels = load_kernels(kernel_cache_dir(), dtype=dtype) if kernels is None else kernels
        self._settings = {"deterministic": deterministic, "force_float_math": force_float_math}

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the kernel's arguments for the batch, once for all layers."""
        batch.attn_metadata = NativeStep(batch, **self._settings)

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        """Attend as in AttentionBackend.forward."""
        assert isinstance(batch.attn_metadata, NativeStep), "prepare(batch) runs before the forward"
        call = batch.attn_metadata.call
        q, k, v, cos_sin, _ = inputs
        k_pool, v_pool = kv_pool.layer(layer.layer_id)
        assert q.dtype is k.dtype is v.dtype is k_pool.dtype
        assert self.kernels.dtype in (None, q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        head_dim = layer.head_dim
        call.q = heads_pointer(q, head_dim)
        call.k = heads_pointer(k, head_dim)
        call.v = heads_pointer(v, head_dim)
        call.out = out.data_ptr()
        call.k_pool = k_pool.data_ptr()
        call.v_pool = v_pool.data_ptr()
        call.cos_sin = None if cos_sin is None else cos_sin.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.num_heads = layer.num_heads
        call.num_kv_heads = layer.num_kv_heads
        call.head_dim = head_dim
        call.window = layer.sliding_window or 0
        call.dtype = DTYPES[q.dtype]
        call.scale = layer.scale
        call.softcap = layer.softcap or 0.0
        self.kernels.attention(call)
        return out
