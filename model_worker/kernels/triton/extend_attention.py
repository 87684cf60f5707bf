"""Causal attention of chunks of new tokens over the paged pool: cached prefix and the chunk itself alike.

    grid   tile of BLOCK_M new tokens of one sequence × query head

The chunk's own keys are in the pool already when it runs, so a tile reads everything by page. Blocks of keys
that a whole tile sees go without a mask; those at the diagonal and at the edge of a window have one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.decode_attention import LOG2_E, _tanh

BLOCK_M = 64
BLOCK_N = 64


def extend_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    query_start: Tensor,
    tiles: Tensor,
    *,
    page_size: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    out: Tensor,
) -> None:
    """Attend the new tokens of each sequence to its tokens up to themselves, into out.

    q, out [T, num_heads, D], the last two dimensions contiguous; sequence b owns the tokens query_start[b] to
    query_start[b + 1] and has kv_lens[b] tokens in all, on the pages of row rows[b]. tiles [N, 2] int32:
    (sequence, its first new token of the tile); a tile covers BLOCK_M tokens. Pools and table as in
    decode_attention.
    """
    num_heads, head_dim = q.shape[1:]
    if len(tiles) == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    _attend_tile[(len(tiles), num_heads)](
        q, k_pool, v_pool, page_table, rows, kv_lens, query_start, tiles, out, q.stride(0),
        out.stride(0), page_table.stride(0), k_pool.stride(0), scale, sliding_window or 0, softcap,
        GROUP=num_heads // k_pool.shape[1], HEAD_DIM=head_dim, BLOCK_D=block_d, PAGE_SIZE=page_size,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap > 0.0, num_warps=4 if block_d <= 128 else 8, num_stages=2,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    q, k_pool, v_pool, page_table, rows, kv_lens, query_start, tiles, out, q_stride, out_stride,
    table_stride, slot_stride, scale, window, softcap, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    # The last tiles of a long prompt have the most keys: they go first, so that none of them is left alone
    # at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.load(tiles + 2 * tile)
    begin = tl.load(tiles + 2 * tile + 1)
    token = tl.load(query_start + b).to(tl.int32)
    num_new = tl.load(query_start + b + 1).to(tl.int32) - token
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
        # No multiple of BLOCK_N: what lies before may be another sequence's, and its NaN is NaN times 0, too.
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
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out + place * out_stride + head * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _attend_block(
    queries, keys, values, table, position, n, last, slot_stride, scale, window, softcap, best, total,
    acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running sums of the softmax."""
    key = n + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    present = key < last
    page = tl.load(table + key // PAGE_SIZE, mask=present, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    k = tl.load(
        keys + slot[None, :] * slot_stride + d[:, None],
        mask=present[None, :] & (d[:, None] < HEAD_DIM),
        other=0.0,
    )
    scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    scores = scores * LOG2_E
    if MASKED:
        visible = present[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen no key yet: -inf minus -inf would be no number.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    v = tl.load(
        values + slot[:, None] * slot_stride + d[None, :],
        mask=present[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    ).to(queries.dtype)
    acc = acc * shrink[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total * shrink + tl.sum(weights, 1), acc
