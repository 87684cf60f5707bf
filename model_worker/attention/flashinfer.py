"""Attention by the FlashInfer library's paged kernels; norms, rotation and storing before it use Triton
kernels.

    prepare                  lists the batch's pages in the library's format
    first layer of a kind    plan: the host divides the work for the lengths of this step
    each layer               run

Decodes and chunks use the same kernel. A plan depends on lengths, so a step cannot be recorded as a CUDA
graph. Written for flashinfer-python 0.7. NOTE: no test has run this on a GPU yet.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.triton.rope_kv_store import rope_and_store_kv
from model_worker.memory.kv_pool import MHATokenToKVPool

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
# The size that the library's documentation recommends.
WORKSPACE_BYTES = 128 << 20
# A plan is copied to the device from memory that the next plan overwrites, and two steps are in flight.
NUM_PLANS = 2


class _Kind(NamedTuple):
    """Properties of layers that can share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None


@dataclass(slots=True)
class _Step:
    """A batch in the library's format: int32, on the host except for the indices."""

    query_start: Tensor  # [B + 1]
    page_start: Tensor  # [B + 1]
    page_indices: Tensor  # [page_start[B]] on the device
    last_page_len: Tensor  # [B] tokens
    planned: dict[_Kind, Any] = field(default_factory=dict)


class _Planned:
    """One of the library's wrappers, and the event after which its last plan has left the host."""

    def __init__(self, workspace: Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._left = torch.cuda.Event() if workspace.is_cuda else None

    def plan(self, kind: _Kind, step: _Step, page_size: int, dtype: torch.dtype) -> None:
        if self._left is not None:
            self._left.synchronize()  # the step before the last, which has finished with it
        self.wrapper.plan(
            step.query_start,
            step.page_start,
            step.page_indices,
            step.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            page_size,
            causal=True,
            sm_scale=kind.scale,
            # The library's window does not count the token itself.
            window_left=-1 if kind.sliding_window is None else kind.sliding_window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        if self._left is not None:
            self._left.record()


class FlashInferAttention:
    """AttentionBackend for float16 and bfloat16 with heads of 64, 128 or 256, on one NVIDIA GPU."""

    norms_heads = True

    def __init__(self) -> None:
        self._workspace: Tensor | None = None
        self._plans: defaultdict[_Kind, list[_Planned]] = defaultdict(list)

    def prepare(self, batch: ForwardBatch) -> None:
        """List the batch's pages. The page table is read on the device."""
        kv_lens = np.array(batch.kv_lens)
        page_start = np.concatenate([[0], np.cumsum(-(-kv_lens // batch.page_size))])
        device = batch.page_table.device
        starts = _host(page_start, device).to(device, non_blocking=True)
        place = torch.arange(int(page_start[-1]), device=device, dtype=torch.int32)
        sequence = torch.searchsorted(starts, place, right=True) - 1
        batch.attn_metadata = _Step(
            query_start=_host(np.array(batch.query_start), device),
            page_start=_host(page_start, device),
            page_indices=batch.page_table[batch.rows[sequence], place - starts[sequence]],
            last_page_len=_host((kv_lens - 1) % batch.page_size + 1, device),
        )

    def forward(
        self,
        layer: AttentionLayer,
        inputs: AttentionInputs,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
    ) -> Tensor:
        """Attend as in AttentionBackend.forward. Norms and rotates q in place."""
        step = batch.attn_metadata
        assert isinstance(step, _Step), "prepare(batch) runs before the forward"
        q, k, v, cos_sin, head_norms = inputs
        k_pool, v_pool = kv_pool.layer(layer.layer_id)
        rope_and_store_kv(q, k, v, cos_sin, k_pool, v_pool, batch.out_slots, head_norms)
        kind = _Kind(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.scale,
            layer.sliding_window,
            layer.softcap,
        )
        if kind not in step.planned:
            step.planned[kind] = self._plan(kind, step, batch.page_size, q.dtype)
        by_page = (-1, batch.page_size, layer.num_kv_heads, layer.head_dim)
        out: Tensor = step.planned[kind].run(q.contiguous(), (k_pool.view(by_page), v_pool.view(by_page)))
        return out

    def _plan(self, kind: _Kind, step: _Step, page_size: int, dtype: torch.dtype) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=step.page_indices.device)
        plans = self._plans[kind]
        # Wrappers of one stream share their working memory, because they run one after the other.
        planned = _Planned(self._workspace) if len(plans) < NUM_PLANS else plans.pop(0)
        plans.append(planned)
        planned.plan(kind, step, page_size, dtype)
        return planned.wrapper


def _host(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as int32 in host memory from which the library can copy without waiting."""
    tensor = torch.from_numpy(array.astype(np.int32))
    return tensor if device.type == "cpu" else tensor.pin_memory()
