"""Attention of one new token a sequence over the paged pool, split over the keys (flash decoding).

    grid   sequence × key head × split      partial results, one a split
    grid   sequence × query head            their sum, weighted by what each split has seen

The new token's key and value, and the queries, come as the projections gave them: the first launch norms and
rotates them, stores key and value, and attends to them from its registers. So nothing is read that the same
launch writes, and there is none before it.

All query heads of a key head are rows of one matrix product, so keys and values are read once. Splitting the
keys keeps all multiprocessors busy when there are few sequences (Dao et al., 2023, "Flash-Decoding").
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.triton.call_site import CallSite
from model_worker.kernels.triton.new_tokens import NewTokens, _store_new, _turned_heads
from model_worker.kernels.triton.tiles import DecodeTile, Heads, decode_tile, gpu_of, group_rows, padded

KEYS_PER_SPLIT = 256
"""Least number of keys in a split. A shorter split costs more in the merge than it gains."""
MAX_SPLITS = 32
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    scale: float,
    num_splits: int,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    kv_scale: KVScale = UNSCALED,
    new: NewTokens | None = None,
    tile: DecodeTile | None = None,
    out: Tensor,
) -> None:
    """Attend q[b] to the first kv_lens[b] tokens of row rows[b], into out[b], for each b of kv_lens; rows of
    the other tensors beyond that number are left alone. With `new` the last token of a sequence is not in the
    pools yet: it is stored as `rope_and_store_kv` stores it, and q is normed and rotated, but only for this
    launch.

    q, out [B, num_heads, D], the last two dimensions contiguous; k_pool, v_pool [slots, num_kv_heads, D]
    contiguous, of q's dtype, or of float8_e4m3fn and divided by kv_scale; page_table [max_rows, max_pages]
    int32; rows, kv_lens [B] of any integer dtype. softcap 0.0 means none. num_splits: `choose_num_splits`.
    tile: other launch parameters than `decode_tile` gives. Raises ConfigError when it has none.
    """
    batch, (_, num_heads, head_dim), num_kv_heads = kv_lens.shape[0], q.shape, k_pool.shape[1]
    if batch == 0:
        return
    k, v, slots, cos_sin, norms = new or (q, q, rows, None, None)
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    if num_splits > 1:
        partial = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
    else:
        partial = lse = _no_part(q.device)
    site = _attending(
        q.device, q.dtype, k_pool.dtype, (num_heads, num_kv_heads, head_dim, page_size), tile,
        (new is not None, norms is not None, cos_sin is not None, sliding_window is not None, softcap > 0.0),
    )  # fmt: skip
    site.launch(
        (batch, num_kv_heads, num_splits), q, k, v, slots, q if cos_sin is None else cos_sin, q_weight,
        k_weight, k_pool, v_pool, page_table, rows, kv_lens, out, partial, lse, q.stride()[0], k.stride()[0],
        v.stride()[0], out.stride()[0], page_table.stride()[0], k_pool.stride()[0], scale * kv_scale.key,
        sliding_window or 0, softcap, kv_scale.value, 1.0 / kv_scale.key, 1.0 / kv_scale.value, eps,
    )  # fmt: skip
    if num_splits > 1:
        _merging(head_dim).launch((batch, num_heads, 1), partial, lse, out, num_splits, out.stride()[0])


@cache
def _no_part(device: torch.device) -> Tensor:
    """Return a placeholder for the partial results when there is only one split. It has their type, since
    another type would be another kernel.
    """
    return torch.empty(0, dtype=torch.float32, device=device)


@cache
def _attending(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    tile: DecodeTile | None,
    does: tuple[bool, bool, bool, bool, bool],
) -> CallSite:
    num_heads, num_kv_heads, head_dim, page_size = shape
    has_new, norms, rotates, has_window, has_softcap = does
    group = num_heads // num_kv_heads
    tile = tile or decode_tile(gpu_of(device), Heads(group, head_dim, dtype, kv_dtype))
    return CallSite(
        _attend_split, HAS_NEW=has_new, NORMS=norms, ROTATES=rotates, GROUP=group, BLOCK_G=group_rows(group),
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), PAGE_SIZE=page_size, BLOCK_N=tile.block_n,
        HAS_WINDOW=has_window, HAS_SOFTCAP=has_softcap, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@cache
def _merging(head_dim: int) -> CallSite:
    return CallSite(
        _merge_splits, BLOCK_S=MAX_SPLITS, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), num_warps=4
    )


def choose_num_splits(batch: int, num_kv_heads: int, max_kv_len: int, num_multiprocessors: int) -> int:
    """Return the number of splits that fills the device twice, with no split too short."""
    wanted = -(-2 * num_multiprocessors // max(1, batch * num_kv_heads))
    useful = -(-max_kv_len // KEYS_PER_SPLIT)
    return max(1, min(wanted, useful, MAX_SPLITS))


# Rows are a part of what a step uploads, at any alignment, and there may be any number of splits: nothing is
# compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["rows", "slots"])
def _attend_split(
    q, k, v, slots, cos_sin, q_weight, k_weight, k_pool, v_pool, page_table, rows, kv_lens, out, partial, lse,
    q_stride, k_stride, v_stride, out_stride, table_stride, slot_stride, scale, window, softcap, v_scale,
    k_inverse, v_inverse, eps, HAS_NEW: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    row = tl.load(rows + b).to(tl.int64)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - window, 0)
    if HAS_NEW:
        kv_len -= 1  # from here on what is in the pools
    per_split = tl.cdiv(tl.cdiv(kv_len - first, num_splits), BLOCK_N) * BLOCK_N
    start = first + split * per_split
    end = tl.minimum(start + per_split, kv_len)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    at = head[:, None] * HEAD_DIM + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    angles = cos_sin + b * HEAD_DIM
    queries = _turned_heads(
        q + b * q_stride + head[:, None] * HEAD_DIM, q_weight, angles, inside, eps, HEAD_DIM, BLOCK_D, NORMS,
        ROTATES,
    )  # fmt: skip
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if HAS_NEW:
        at_slot = tl.load(slots + b) * slot_stride + kv_head * HEAD_DIM
        is_own = split == num_splits - 1  # which has the fewest keys
        key, value = _store_new(
            k + b * k_stride + kv_head * HEAD_DIM, v + b * v_stride + kv_head * HEAD_DIM, k_weight, angles,
            k_pool + at_slot, v_pool + at_slot, k_inverse, v_inverse, is_own, eps, HEAD_DIM, BLOCK_D, NORMS,
            ROTATES,
        )  # fmt: skip
        score = _score(tl.sum(queries.to(tl.float32) * key, 1), scale, softcap, HAS_SOFTCAP)
        best = tl.where(is_own, score, best)
        total += tl.where(is_own, 1.0, 0.0)
        acc += tl.where(is_own, value, 0.0)
    best, total, acc = _attend_pages(
        queries, best, total, acc, page_table + row * table_stride, k_pool + kv_head * HEAD_DIM,
        v_pool + kv_head * HEAD_DIM, start, end, slot_stride, scale, softcap, HEAD_DIM, BLOCK_D, PAGE_SIZE,
        BLOCK_N, HAS_SOFTCAP,
    )  # fmt: skip
    acc *= v_scale
    if num_splits > 1:
        place = (b * (tl.num_programs(1) * GROUP) + head) * num_splits + split
        _store_part(partial, lse, place, acc, best, total, g < GROUP, HEAD_DIM, BLOCK_D)
    else:
        at_token = out + b * out_stride + at
        tl.store(at_token, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_pages(
    queries, best, total, acc, pages, k_pool, v_pool, start, end, slot_stride, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add keys start to end of one head to the running state: largest score, sum of weights, weighted values.
    pages: row of the page table; k_pool, v_pool: the head in the first slot.
    """
    d = tl.arange(0, BLOCK_D)
    for n in range(start, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        seen = position < end
        page = tl.load(pages + position // PAGE_SIZE, mask=seen, other=0)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        keys = tl.load(
            k_pool + slot[None, :].to(tl.int64) * slot_stride + d[:, None],
            mask=seen[None, :] & (d[:, None] < HEAD_DIM),
            other=0.0,
        )
        products = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee")
        scores = tl.where(seen[None, :], _score(products, scale, softcap, HAS_SOFTCAP), float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            v_pool + slot[:, None].to(tl.int64) * slot_stride + d[None, :],
            mask=seen[:, None] & (d[None, :] < HEAD_DIM),
            other=0.0,
        ).to(queries.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit
def _score(product, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores as exponents of two."""
    score = product * scale
    if HAS_SOFTCAP:
        score = softcap * _tanh(score / softcap)
    return score * LOG2_E


@triton.jit
def _store_part(
    partial, lse, place, acc, best, total, is_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Store the result of one split. A split without keys gets weight 0 in the merge, and its division is
    avoided here.
    """
    d = tl.arange(0, BLOCK_D)
    divisor = tl.where(total > 0.0, total, 1.0)
    inside = is_head[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc / divisor[:, None], mask=inside)
    tl.store(lse + place, tl.where(total > 0.0, best + tl.log2(divisor), float("-inf")), mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial, lse, out, num_splits, out_stride, BLOCK_S: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = (b * tl.num_programs(1) + head) * num_splits
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    scores = tl.load(lse + place + s, mask=s < num_splits, other=float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 0))
    parts = tl.load(
        partial + (place + s[:, None]) * HEAD_DIM + d[None, :],
        mask=(s[:, None] < num_splits) & (d[None, :] < HEAD_DIM),
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + b * out_stride + head * HEAD_DIM + d, merged.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _tanh(x):
    """Return tanh(x) by exp2, which every Triton has: 1 - 2 / (e^2x + 1)."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
