"""The torch attention backend and the KV pool against dense attention computed token by token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from model_worker.attention import ATTENTION_BACKENDS
from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.memory.kv_pool import DUMMY_PAGE, MHATokenToKVPool
from runtime.base.registry import resolve

HEAD_DIM = 16


@dataclass
class Sequence:
    """A sequence whose first num_cached tokens are in the pool and whose others are new."""

    q: Tensor  # [new, heads, HEAD_DIM]
    k: Tensor  # [cached + new, kv_heads, HEAD_DIM]
    v: Tensor

    @property
    def num_new(self) -> int:
        return self.q.shape[0]

    @property
    def num_cached(self) -> int:
        return self.k.shape[0] - self.num_new


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _layer(heads: int, kv_heads: int, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(0, heads, kv_heads, HEAD_DIM, HEAD_DIM**-0.5, window)


def _sequences(layer: AttentionLayer, shapes: list[tuple[int, int]], seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator)

    return [
        Sequence(
            normal(new, layer.num_heads),
            normal(cached + new, layer.num_kv_heads),
            normal(cached + new, layer.num_kv_heads),
        )
        for cached, new in shapes
    ]


def _attend(layer: AttentionLayer, sequences: list[Sequence], page_size: int, seed: int = 0) -> list[Tensor]:
    """Put the cached tokens on scattered pages and run the backend over all sequences in one batch."""
    num_tokens = [seq.num_new for seq in sequences]
    kv_lens = [seq.k.shape[0] for seq in sequences]
    max_pages = -(-max(kv_lens) // page_size)
    num_pages = max_pages * len(sequences)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)) + 1
    page_table = torch.zeros(len(sequences) + 2, max_pages + 1, dtype=torch.int32)
    rows = torch.arange(len(sequences)).flip(0) + 1
    page_table[rows, :max_pages] = pages.to(torch.int32).view(len(sequences), max_pages)
    pool = MHATokenToKVPool(num_pages, page_size, 1, layer.num_kv_heads, HEAD_DIM, torch.float32, "cpu")

    new_slots = []
    for row, seq in zip(rows.tolist(), sequences, strict=True):
        token = torch.arange(seq.k.shape[0])
        slots = page_table[row, token // page_size].long() * page_size + token % page_size
        pool.store(0, seq.k[: seq.num_cached], seq.v[: seq.num_cached], slots[: seq.num_cached])
        new_slots.append(slots[seq.num_cached :])
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(num_tokens), dtype=torch.int64),
        positions=torch.cat([torch.arange(seq.num_cached, seq.k.shape[0]) for seq in sequences]),
        out_slots=torch.cat(new_slots),
        query_start=[0, *accumulate(num_tokens)],
        kv_lens=kv_lens,
        rows=rows,
        page_table=page_table,
        page_size=page_size,
        num_decodes=0,
        output_indices=torch.zeros(0, dtype=torch.int64),
    )
    backend = TorchNativeAttention()
    backend.prepare(batch)
    inputs = AttentionInputs(
        torch.cat([seq.q for seq in sequences]),
        torch.cat([seq.k[seq.num_cached :] for seq in sequences]),
        torch.cat([seq.v[seq.num_cached :] for seq in sequences]),
    )
    out = backend.forward(layer, inputs, batch, pool)
    assert out.is_contiguous()
    return list(out.split(num_tokens))


def _dense(layer: AttentionLayer, seq: Sequence) -> Tensor:
    """One query at a time over the keys it may see, in float64."""
    group = layer.num_heads // layer.num_kv_heads
    k = seq.k.double().repeat_interleave(group, dim=1)
    v = seq.v.double().repeat_interleave(group, dim=1)
    out = []
    for i, q in enumerate(seq.q.double()):
        stop = seq.num_cached + i + 1
        start = 0 if layer.sliding_window is None else max(0, stop - layer.sliding_window)
        scores = torch.einsum("hd,khd->hk", q, k[start:stop]) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * (scores / layer.softcap).tanh()
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[start:stop]))
    return torch.stack(out)


# (cached tokens, new tokens): decodes, chunks after a prefix, whole prompts; tiles full, cut and one over.
MIXED = [(0, 1), (40, 1), (7, 1), (0, 20), (33, 9), (16, 16), (5, 128), (300, 129), (0, 257)]


@pytest.mark.parametrize("window", [None, 1, 8, 100, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_mixed_batch_equals_dense_attention(
    heads: int, kv_heads: int, page_size: int, window: int | None
) -> None:
    layer = _layer(heads, kv_heads, window)
    sequences = _sequences(layer, MIXED)
    for seq, got in zip(sequences, _attend(layer, sequences, page_size), strict=True):
        torch.testing.assert_close(got.double(), _dense(layer, seq), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_a_soft_cap_bends_the_scores_before_the_softmax(window: int | None) -> None:
    layer = AttentionLayer(0, 6, 2, HEAD_DIM, 1.0, window, softcap=2.5)
    sequences = _sequences(layer, MIXED)
    for seq, got in zip(sequences, _attend(layer, sequences, 4), strict=True):
        torch.testing.assert_close(got.double(), _dense(layer, seq), rtol=0, atol=5e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_a_sequence_is_bit_equal_alone_and_in_any_batch_and_page_size(window: int | None) -> None:
    layer = _layer(6, 2, window)
    sequences = _sequences(layer, MIXED)
    batched = _attend(layer, sequences, page_size=16)
    reversed_order = _attend(layer, sequences[::-1], page_size=1, seed=5)[::-1]
    for seq, together, backwards in zip(sequences, batched, reversed_order, strict=True):
        (alone,) = _attend(layer, [seq], page_size=4)
        assert torch.equal(alone, together)
        assert torch.equal(alone, backwards)


def test_an_empty_batch_attends_to_nothing() -> None:
    layer = _layer(4, 2)
    pool = MHATokenToKVPool(1, 4, 1, 2, HEAD_DIM, torch.float32, "cpu")
    none = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(none, none, none, [0], [], none, torch.zeros(1, 1, dtype=torch.int32), 4, 0, none)
    backend = TorchNativeAttention()
    backend.prepare(batch)
    empty = torch.zeros(0, 2, HEAD_DIM)
    out = backend.forward(layer, AttentionInputs(torch.zeros(0, 4, HEAD_DIM), empty, empty), batch, pool)
    assert out.shape == (0, 4, HEAD_DIM)


def test_backends_are_found_by_name() -> None:
    assert resolve("attention backend", "torch_native", ATTENTION_BACKENDS) is TorchNativeAttention


def test_store_writes_the_slots_of_one_layer_only() -> None:
    pool = MHATokenToKVPool(3, 4, 2, 2, HEAD_DIM, torch.float32, "cpu")
    for layer_id in range(2):
        for buffer in pool.layer(layer_id):
            buffer.zero_()
    wide = torch.randn(2, 3, 2, HEAD_DIM)  # rows of a fused projection are not contiguous
    k, v = wide.transpose(0, 1).unbind(1)
    slots = torch.tensor([5, 12, 4])
    pool.store(1, k, v, slots)
    k_buffer, v_buffer = pool.layer(1)
    assert torch.equal(k_buffer[slots], k)
    assert torch.equal(v_buffer[slots], v)
    assert k_buffer.count_nonzero() == k.numel()
    assert not any(buffer.any() for buffer in pool.layer(0))


def test_copy_pages_copies_keys_and_values_of_every_layer() -> None:
    pool = MHATokenToKVPool(5, 4, 3, 2, HEAD_DIM, torch.float32, "cpu")
    slots = torch.arange(4, 24)
    for layer_id in range(3):
        k, v = torch.randn(2, 20, 2, HEAD_DIM).unbind()
        pool.store(layer_id, k, v, slots)
    before = [buffer.clone() for layer_id in range(3) for buffer in pool.layer(layer_id)]
    pool.copy_pages(torch.tensor([1, 2]), torch.tensor([5, 3]))
    after = [buffer for layer_id in range(3) for buffer in pool.layer(layer_id)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[20:24], old[4:8])
        assert torch.equal(new[12:16], old[8:12])
        assert torch.equal(new[:12], old[:12])
        assert torch.equal(new[16:20], old[16:20])


def test_the_dummy_page_is_zero_and_comes_on_top_of_the_pages() -> None:
    pool = MHATokenToKVPool(3, 4, 2, 2, HEAD_DIM, torch.bfloat16, "cpu")
    k, v = pool.layer(1)
    assert k.shape == v.shape == (16, 2, HEAD_DIM)
    assert not k[DUMMY_PAGE * 4 : DUMMY_PAGE * 4 + 4].any()
    assert not v[DUMMY_PAGE * 4 : DUMMY_PAGE * 4 + 4].any()
    assert pool.bytes_per_page() == 2 * 2 * 4 * 2 * HEAD_DIM * 2
