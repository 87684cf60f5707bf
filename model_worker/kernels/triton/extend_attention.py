"""Causal attention of chunks of new tokens over the paged pool: cached prefix and the chunk itself alike.

    grid   tile of new tokens of one sequence × query head

A program finds its sequence by itself: with tiles of M tokens, those of sequence b begin at number
query_start[b] // M + b, which leaves room for all of them. At most one number a sequence stands for no tile,
and those before the first.

The chunk's own keys are in the pool already when it runs, so a tile reads everything by page. Blocks of keys
that a whole tile sees go without a mask; those at the diagonal and at the edge of a window have one.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.triton.call_site import CallSite
from model_worker.kernels.triton.decode_attention import LOG2_E, _tanh
from model_worker.kernels.triton.tiles import ExtendTile, Heads, extend_tile, gpu_of, padded


def extend_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    query_start: Tensor,
    *,
    page_size: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    kv_scale: KVScale = UNSCALED,
    tile: ExtendTile | None = None,
    out: Tensor,
) -> None:
    """Attend the new tokens of each sequence to its tokens up to themselves, into out.

    q, out [T, num_heads, D], the last two dimensions contiguous; sequence b of B owns the tokens
    query_start[b] to query_start[b + 1] and has kv_lens[b] tokens in all, on the pages of row rows[b]; tokens
    before query_start[0] are left alone. query_start [B + 1], ending with T, and kv_lens [B] int32, rows [B]
    int64; pools, table and scales as in decode_attention, and positive. tile: other launch parameters than
    `extend_tile` gives. Raises ConfigError when it has none.
    """
    num_seqs, (num_tokens, num_heads, head_dim) = kv_lens.shape[0], q.shape
    if num_seqs == 0:
        return
    block_m, site = _attending(
        q.device, q.dtype, k_pool.dtype, (num_heads, k_pool.shape[1], head_dim, page_size), tile,
        sliding_window is not None, softcap > 0.0,
    )  # fmt: skip
    site.launch(
        (num_tokens // block_m + num_seqs, num_heads, 1), q, k_pool, v_pool, page_table, rows, kv_lens,
        query_start, out, num_seqs, q.stride()[0], out.stride()[0], page_table.stride()[0],
        k_pool.stride()[0], scale * kv_scale.key, sliding_window or 0, softcap, kv_scale.value,
    )  # fmt: skip


@cache
def _attending(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    tile: ExtendTile | None,
    has_window: bool,
    has_softcap: bool,
) -> tuple[int, CallSite]:
    """Return the number of queries in a tile, and the kernel's call site for these properties."""
    num_heads, num_kv_heads, head_dim, page_size = shape
    group = num_heads // num_kv_heads
    tile = tile or extend_tile(gpu_of(device), Heads(group, head_dim, dtype, kv_dtype))
    return tile.block_m, CallSite(
        _attend_tile, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), PAGE_SIZE=page_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HAS_WINDOW=has_window, HAS_SOFTCAP=has_softcap,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


# A chunk's place in a batch decides these, and another alignment or a 1 would be compiled anew while serving.
@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["rows", "kv_lens", "query_start"])
def _attend_tile(
    q, k_pool, v_pool, page_table, rows, kv_lens, query_start, out, num_seqs, q_stride, out_stride,
    table_stride, slot_stride, scale, window, softcap, v_scale, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    # The last tiles of a long prompt have the most keys: they go first, so that none of them is left alone
    # at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = _sequence_of(tile, query_start, num_seqs, BLOCK_M)
    token = tl.load(query_start + b).to(tl.int32)
    num_new = tl.load(query_start + b + 1).to(tl.int32) - token
    begin = (tile - token // BLOCK_M - b) * BLOCK_M
    if (begin < 0) | (begin >= num_new):
        return
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    num_cached = kv_len - num_new
    table = page_table + tl.load(rows + b).to(tl.int64) * table_stride
    keys = k_pool + (head // GROUP) * HEAD_DIM
    values = v_pool + (head // GROUP) * HEAD_DIM

    m = begin + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < num_new) & (d[None, :] < HEAD_DIM)
    place = (token + m).to(tl.int64)[:, None]
    queries = tl.load(q + place * q_stride + head * HEAD_DIM + d[None, :], mask=inside, other=0.0)

    position = num_cached + m
    first = 0
    if HAS_WINDOW:
        # No multiple of BLOCK_N: positions before it may belong to another sequence, and their NaN is NaN
        # also times 0.
        first = tl.maximum(num_cached + begin - window + 1, 0)
    last = tl.minimum(num_cached + begin + BLOCK_M, kv_len)
    # Every query of the tile sees what lies before its first one; a window takes from the other side.
    whole = (num_cached + begin + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        whole = first

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(first, whole, BLOCK_N):
        best, total, acc = _attend_block(
            queries, keys, values, table, position, n, last, slot_stride, scale, window, softcap,
            best, total, acc, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, False, False, HAS_SOFTCAP,
        )  # fmt: skip
    for n in range(whole, last, BLOCK_N):
        best, total, acc = _attend_block(
            queries, keys, values, table, position, n, last, slot_stride, scale, window, softcap,
            best, total, acc, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    acc *= (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(
        out + place * out_stride + head * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _sequence_of(tile, query_start, num_seqs, BLOCK_M: tl.constexpr):
    """Return the last sequence whose tiles begin at `tile` or before, by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_start + middle).to(tl.int32) // BLOCK_M + middle > tile
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    return low


@triton.jit
def _attend_block(
    queries, keys, values, table, position, n, last, slot_stride, scale, window, softcap, best, total,
    acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running sums of the softmax."""
    key = n + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    present = tl.full([BLOCK_N], True, tl.int1)
    if MASKED:
        present = key < last
    page = tl.load(table + key // PAGE_SIZE, mask=present, other=0)
    slot = page * PAGE_SIZE + key % PAGE_SIZE
    k = tl.load(
        keys + slot[None, :].to(tl.int64) * slot_stride + d[:, None],
        mask=present[None, :] & (d[:, None] < HEAD_DIM),
        other=0.0,
    )
    scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee")
    # Scores are unit times these: one multiplication and subtraction of each on its way to the exponential.
    unit = scale * LOG2_E
    if HAS_SOFTCAP:
        scores = _tanh(scores * (scale / softcap))
        unit = softcap * LOG2_E
    if MASKED:
        visible = present[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * unit)
    # A row that has seen no key yet: -inf minus -inf would be no number.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(tl.fma(scores, unit, -base[:, None]))
    shrink = tl.exp2(best - base)
    v = tl.load(
        values + slot[:, None].to(tl.int64) * slot_stride + d[None, :],
        mask=present[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    ).to(queries.dtype)
    acc = acc * shrink[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total * shrink + tl.sum(weights, 1), acc
