"""The Triton attention kernels against dense attention in float64, over scattered pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import HeadNorms, rms_norm
from model_worker.kernels.rope import apply_rope, rope_cos_sin
from model_worker.kernels.triton.decode_attention import choose_num_splits, decode_attention
from model_worker.kernels.triton.extend_attention import extend_attention
from model_worker.kernels.triton.new_tokens import NewTokens
from model_worker.kernels.triton.tiles import ExtendTile

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@dataclass
class Paged:
    """Sequences whose keys and values lie on scattered pages; what no new token sees is NaN."""

    k: list[Tensor]  # [len, kv_heads, D]
    v: list[Tensor]
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    rows: Tensor
    kv_lens: Tensor


def paged(
    lens: list[int],
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    num_new: list[int],
    window: int | None,
) -> Paged:
    generator = torch.Generator().manual_seed(len(lens) + page_size)
    max_pages = -(-max(lens) // page_size)
    num_pages = len(lens) * max_pages
    order = torch.randperm(num_pages, generator=generator) + 1
    page_table = torch.zeros(len(lens) + 3, max_pages + 1, dtype=torch.int32)
    rows = torch.arange(len(lens)).flip(0) + 2
    page_table[rows, :max_pages] = order.view(len(lens), max_pages).int()
    pools = torch.full((2, (num_pages + 1) * page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    k = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in lens]
    v = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in lens]
    for row, new, keys, values in zip(rows.tolist(), num_new, k, v, strict=True):
        at = torch.arange(max(0, len(keys) - new + 1 - (window or len(keys))), len(keys))
        slots = page_table[row, at // page_size].long() * page_size + at % page_size
        pools[0, slots], pools[1, slots] = keys[at], values[at]
    return Paged(k, v, pools[0], pools[1], page_table, rows, torch.tensor(lens))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float) -> Tensor:
    """q [new, heads, D] of the last tokens of a sequence with k, v [len, kv_heads, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    [
        (4, 2, 16, 16, None, 0.0, torch.float32),
        (3, 1, 24, 1, None, 0.0, torch.float32),
        (32, 1, 16, 5, None, 0.0, torch.float16),
        (4, 4, 16, 16, 20, 0.0, torch.float32),
        (4, 2, 16, 16, None, 3.0, torch.float32),
        (2, 1, 16, 32, 1, 5.0, torch.float16),
    ],
)
def test_decode_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float,
    dtype: torch.dtype,
    num_splits: int,
) -> None:
    cache = paged([1, 70, 64, 131], kv_heads, head_dim, page_size, dtype, num_new=[1] * 4, window=window)
    q = torch.randn(4, heads + 1, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)[:, :heads]
    out = torch.empty(4, heads, head_dim, dtype=dtype)
    decode_attention(
        q,
        cache.k_pool,
        cache.v_pool,
        cache.page_table,
        cache.rows,
        cache.kv_lens,
        page_size=page_size,
        scale=head_dim**-0.5,
        num_splits=num_splits,
        sliding_window=window,
        softcap=softcap,
        out=out,
    )
    for b in range(4):
        expected = dense(q[b : b + 1], cache.k[b], cache.v[b], head_dim**-0.5, window, softcap)
        assert_close(out[b : b + 1], expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("norms", "rotates"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "window", "dtype"),
    [(4, 2, 16, 16, None, torch.float32), (3, 1, 24, 1, 20, torch.float16), (2, 2, 8, 5, 1, torch.float32)],
)
def test_a_new_token_is_normed_rotated_stored_and_attended_to(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    norms: bool,
    rotates: bool,
    num_splits: int,
) -> None:
    """In the pools there is NaN where it goes; what the projections gave stays as it is."""
    cache = paged([1, 70, 64, 131], kv_heads, head_dim, page_size, dtype, num_new=[1] * 4, window=window)
    last = cache.kv_lens - 1
    slots = cache.page_table[cache.rows, last // page_size].long() * page_size + last % page_size
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(4, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    turned_q, turned_k, head_norms, cos_sin = q, k, None, None
    if norms:
        weights = torch.rand(2, head_dim, generator=generator)
        head_norms = HeadNorms(weights[0].to(dtype), weights[1].to(dtype), 1e-3)
        turned_q = rms_norm(q, head_norms.q_weight, 1e-3)
        turned_k = rms_norm(k, head_norms.k_weight, 1e-3)
    if rotates:
        cos_sin = rope_cos_sin(last, 100.0 ** (-torch.arange(head_dim // 2) / head_dim))
        turned_q, turned_k = apply_rope(turned_q, turned_k, cos_sin)
    cache.k_pool[slots], cache.v_pool[slots] = torch.nan, torch.nan
    pools = torch.stack([cache.k_pool, cache.v_pool])
    before, out = qkv.clone(), torch.empty(4, heads, head_dim, dtype=dtype)
    decode_attention(
        q,
        pools[0],
        pools[1],
        cache.page_table,
        cache.rows,
        cache.kv_lens,
        page_size=page_size,
        scale=head_dim**-0.5,
        num_splits=num_splits,
        sliding_window=window,
        new=NewTokens(k, v, slots, cos_sin, head_norms),
        out=out,
    )
    assert torch.equal(qkv, before)
    assert_close(pools[0, slots], turned_k.double())
    assert torch.equal(pools[1, slots], v)
    pools[:, slots] = torch.nan
    assert torch.equal(pools.isnan(), torch.stack([cache.k_pool, cache.v_pool]).isnan())
    for b in range(4):
        keys, values = (
            torch.cat([old[b][:-1], new[b : b + 1]]) for old, new in ((cache.k, turned_k), (cache.v, v))
        )
        expected = dense(turned_q[b : b + 1], keys, values, head_dim**-0.5, window, 0.0)
        assert_close(out[b : b + 1], expected)


@pytest.mark.parametrize("scale", [UNSCALED, KVScale(0.25, 8.0)])
def test_a_new_token_counts_as_a_pool_of_eight_bits_keeps_it(scale: KVScale) -> None:
    """Values need no rounding, but one is more than it can hold."""
    kept, generator = torch.float8_e4m3fn, torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, 1, 16, generator=generator).to(kept).float().unbind(0)
    v[1, 0, 3] = 1e6
    k, v = scale.key * k, scale.value * v
    pools = torch.zeros(2, 9, 1, 16, dtype=kept)
    out, slots, rows = torch.empty(2, 1, 16), torch.tensor([5, 2]), torch.arange(2)
    decode_attention(
        torch.ones(2, 1, 16),
        pools[0],
        pools[1],
        slots.unsqueeze(1).int(),
        rows,
        torch.ones(2, dtype=torch.int64),
        page_size=1,
        scale=0.25,
        num_splits=2,
        kv_scale=scale,
        new=NewTokens(k, v, slots, None, None),
        out=out,
    )
    held = (v / scale.value).clamp(-448, 448)
    assert torch.equal(pools[0, slots].float(), k / scale.key)
    assert torch.equal(pools[1, slots].float(), held)
    assert torch.equal(out, held * scale.value)


@pytest.mark.parametrize("tile", [None, ExtendTile(64, 32), ExtendTile(16, 64)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    [
        (4, 2, 16, 16, None, 0.0, torch.float32),
        (3, 1, 24, 1, None, 0.0, torch.float32),
        (2, 1, 16, 5, 40, 0.0, torch.float16),
        (2, 2, 8, 16, 7, 4.0, torch.float32),
    ],
)
def test_extend_attention_of_chunks_behind_cached_prefixes(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float,
    dtype: torch.dtype,
    tile: ExtendTile | None,
) -> None:
    """Behind 35 decodes, whose tokens are others' business."""
    num_new, lens = [1, 100, 3, 65], [1, 150, 130, 65]
    cache = paged(lens, kv_heads, head_dim, page_size, dtype, num_new=num_new, window=window)
    starts = [35, 36, 136, 139, 204]
    q = torch.randn(204, heads, head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = torch.full_like(q, 7.0)
    extend_attention(
        q,
        cache.k_pool,
        cache.v_pool,
        cache.page_table,
        cache.rows,
        cache.kv_lens,
        torch.tensor(starts),
        page_size=page_size,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        tile=tile,
        out=out,
    )
    assert (out[: starts[0]] == 7.0).all()
    for b in range(4):
        new = slice(starts[b], starts[b + 1])
        assert_close(out[new], dense(q[new], cache.k[b], cache.v[b], head_dim**-0.5, window, softcap))


@pytest.mark.parametrize(
    ("num_new", "scale", "softcap"),
    [(1, UNSCALED, 0.0), (1, KVScale(3.1, 0.2), 2.0), (70, UNSCALED, 0.0), (70, KVScale(0.3, 7.0), 2.0)],
)
def test_keys_and_values_of_eight_bits_are_read_as_what_they_stand_for(
    num_new: int, scale: KVScale, softcap: float
) -> None:
    cache = paged([131], 2, 16, 16, torch.float16, num_new=[num_new], window=None)
    k_pool, v_pool = (pool.to(torch.float8_e4m3fn) for pool in (cache.k_pool, cache.v_pool))
    q = torch.randn(num_new, 4, 16, generator=torch.Generator().manual_seed(5)).half()
    out = torch.empty_like(q)
    if num_new == 1:
        decode_attention(
            q,
            k_pool,
            v_pool,
            cache.page_table,
            cache.rows,
            cache.kv_lens,
            page_size=16,
            scale=0.25,
            num_splits=2,
            softcap=softcap,
            kv_scale=scale,
            out=out,
        )
    else:
        extend_attention(
            q,
            k_pool,
            v_pool,
            cache.page_table,
            cache.rows,
            cache.kv_lens,
            torch.tensor([0, num_new]),
            page_size=16,
            scale=0.25,
            softcap=softcap,
            kv_scale=scale,
            out=out,
        )
    k, v = (each[0].to(torch.float8_e4m3fn).double() for each in (cache.k, cache.v))
    expected = dense(q, scale.key * k, scale.value * v, 0.25, None, softcap)
    assert_close(out / scale.value, expected / scale.value)


def test_splits_fill_the_device_and_none_is_short() -> None:
    assert choose_num_splits(1, 8, 8192, 132) == 32
    assert choose_num_splits(1, 8, 300, 132) == 2
    assert choose_num_splits(64, 8, 8192, 132) == 1
    assert choose_num_splits(1, 1, 1, 132) == 1
