"""The FlashInfer backend over a stand-in for the library, which reads its lists as the documentation says."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from model_worker.attention import selection
from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.selection import make_attention_backend
from model_worker.memory.kv_pool import MHATokenToKVPool
from runtime.base.errors import ConfigError
from tests.cpu.triton.test_triton_attention import dense

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper: causal attention by its own lists, in float64. Its arguments, and
    what it refuses, are those of flashinfer-python 0.7.2.
    """

    num_made = 0
    num_plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        Wrapper.num_made += 1

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 for each in lists)
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
        assert causal
        assert sm_scale is not None
        self._lists, self._page_size = [each.tolist() for each in lists], page_size
        self._scale, self._softcap = sm_scale, logits_soft_cap or 0.0
        self._window = None if window_left < 0 else window_left + 1
        self._dtypes = (q_data_type, kv_data_type or q_data_type)
        Wrapper.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        starts, page_starts, indices, last = self._lists
        out = torch.empty_like(q)
        assert len(q) == starts[-1]
        assert (q.dtype, paged_kv_cache[0].dtype) == self._dtypes
        for b, last_len in enumerate(last):
            pages = indices[page_starts[b] : page_starts[b + 1]]
            length = (len(pages) - 1) * self._page_size + last_len
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in paged_kv_cache)
            new = slice(starts[b], starts[b + 1])
            out[new] = dense(q[new], k, v, self._scale, self._window, self._softcap).to(q.dtype)
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(selection, "find_spec", lambda name: module)


@pytest.mark.parametrize("page_size", [1, 4])
def test_decodes_and_chunks_attend_to_the_rows_pages(library: None, page_size: int) -> None:
    """Two kinds of layers, twice each, over two steps: one plan for each kind and step."""
    from model_worker.attention.flashinfer import FlashInferAttention

    generator = torch.Generator().manual_seed(page_size)
    layers = [
        AttentionLayer(n, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 0.3, window, softcap)
        for n, (window, softcap) in enumerate([(None, None), (3, 2.0), (None, None), (3, 2.0)])
    ]
    max_pages = -(-16 // page_size)
    pool = MHATokenToKVPool(4 * max_pages, page_size, 4, NUM_KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    order = 1 + torch.randperm(4 * max_pages, generator=generator)
    page_table = order.view(4, max_pages).int()
    mine = FlashInferAttention()
    made, plans = Wrapper.num_made, Wrapper.num_plans
    keys: dict[tuple[int, int], list[Tensor]] = {}  # (row, layer) -> [k, v]
    for lens, rows in (([5, 9, 1], [2, 0, 3]), ([1, 1, 4], [0, 2, 1])):
        before = [len(keys[row, 0][0]) if (row, 0) in keys else 0 for row in rows]
        positions = torch.cat([torch.arange(n) + old for n, old in zip(lens, before, strict=True)])
        token_rows = torch.tensor(rows).repeat_interleave(torch.tensor(lens))
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        slots = page_table[token_rows, positions // page_size].long() * page_size + positions % page_size
        kv_lens = [n + old for n, old in zip(lens, before, strict=True)]
        batch = ForwardBatch(
            input_ids=positions,
            positions=positions,
            out_slots=slots,
            query_start=starts,
            kv_lens=kv_lens,
            rows=torch.tensor(rows),
            page_table=page_table,
            page_size=page_size,
            num_decodes=0,
            output_indices=positions[:0],
        )
        mine.prepare(batch)
        for layer in layers:
            q = torch.randn(starts[-1], NUM_HEADS, HEAD_DIM, generator=generator)
            kv = torch.randn(2, starts[-1], NUM_KV_HEADS, HEAD_DIM, generator=generator)
            out = mine.forward(layer, AttentionInputs(q, kv[0], kv[1]), batch, pool)
            for b, row in enumerate(rows):
                new = slice(starts[b], starts[b + 1])
                old = keys.get((row, layer.layer_id), [kv[0, :0], kv[1, :0]])
                k, v = (torch.cat([old[i], kv[i, new]]) for i in range(2))
                keys[row, layer.layer_id] = [k, v]
                expected = dense(q[new], k, v, layer.scale, layer.sliding_window, layer.softcap or 0.0)
                torch.testing.assert_close(out[new].double(), expected, atol=1e-5, rtol=1e-5)
    assert Wrapper.num_plans - plans == 2 * 2
    assert Wrapper.num_made - made == 2 * 2


def test_what_it_cannot_do_is_refused_by_name(library: None) -> None:
    def make(device: str, dtype: torch.dtype, head_dim: int) -> str:
        made = make_attention_backend("flashinfer", device=device, dtype=dtype, head_dim=head_dim)
        return type(made).__name__

    assert make("cuda", torch.bfloat16, 128) == "FlashInferAttention"
    with pytest.raises(
        ConfigError, match="flashinfer has no kernel for float32 with heads of 128; use triton"
    ):
        make("cuda", torch.float32, 128)
    with pytest.raises(ConfigError, match="flashinfer has no kernel for float16 with heads of 96"):
        make("cuda", torch.float16, 96)
    with pytest.raises(ConfigError, match="flashinfer cannot be used: the device is cpu"):
        make("cpu", torch.bfloat16, 128)


def test_without_the_library_it_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"flashinfer is not installed; pip install 'carousel\[flashinfer\]'"
    ):
        make_attention_backend("flashinfer", device="cuda", dtype=torch.bfloat16, head_dim=128)
