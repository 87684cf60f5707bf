"""Every Triton kernel against the torch function that defines it, on odd sizes, strided and empty input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernels.launches import count_launches
from model_worker.kernels import activation as activation_reference
from model_worker.kernels import combine as combine_reference
from model_worker.kernels import decode_inputs as inputs_reference
from model_worker.kernels import embedding as embedding_reference
from model_worker.kernels import fp8_rows as fp8_rows_reference
from model_worker.kernels import rms_norm as norm_reference
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.kernels.rope import apply_rope, rope_cos_sin
from model_worker.kernels.triton import activation, combine, decode_inputs, embedding, fp8_rows, rope
from model_worker.kernels.triton.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.kernels.triton.rope_kv_store import rope_and_store_kv
from runtime.checkpoint.model_config import Activation

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (5, 33), (2, 3, 20), (0, 8)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    assert_close(rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))


def test_norms_of_strided_heads_copy_none() -> None:
    qkv = normal(3, 7, 10, dtype=torch.float32)
    weight = normal(10, dtype=torch.float32, seed=1)
    for heads in (qkv[:, 2:5], qkv[:, ::2], qkv.transpose(0, 1)):
        assert_close(rms_norm(heads, weight, 1e-5), norm_reference.rms_norm(heads, weight, 1e-5))
        with count_launches() as counts:
            rms_norm(heads, weight, 1e-5)
        assert counts.names == ["_norm_row"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (5, 33), (0, 8)])
@pytest.mark.parametrize("norms_update", [None, "narrow", "wide"])
def test_fused_add_rms_norm_changes_the_residual_and_returns_its_norm(
    norms_update: str | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    residual, update = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)
    expected_residual = residual.clone()
    update_weight = None
    if norms_update is not None:
        kept = torch.float32 if norms_update == "wide" else dtype
        update_weight = normal(shape[-1], dtype=kept, seed=3)
    expected = norm_reference.fused_add_rms_norm(expected_residual, update, weight, 1e-6, update_weight)
    assert_close(fused_add_rms_norm(residual, update, weight, 1e-6, update_weight), expected)
    assert_close(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 1030), (4, 37), (0, 8)])
def test_activate_and_mul(tokens: int, width: int, name: Activation, dtype: torch.dtype) -> None:
    gate_up = 3.0 * normal(tokens, 2 * width + 5, dtype=dtype)[:, : 2 * width]
    expected = activation_reference.activate_and_mul(name, gate_up)
    assert_close(activation.activate_and_mul(name, gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "scale"), [(None, 1.0), (40, 0.37), (0, 45.25)])
def test_embed(first: int | None, scale: float, dtype: torch.dtype) -> None:
    """A part of a vocabulary has no rows of other ids, however far they are."""
    weight = normal(60, 1030, dtype=dtype)
    ids = torch.tensor([3, 59, 0, 41] if first is None else [3, 40, 99, 100, 39, 1 << 40])
    expected = embedding_reference.embed(ids, weight, first=first, scale=scale)
    assert_close(embedding.embed(ids, weight, first=first or 0, scale=scale), expected)
    assert embedding.embed(ids[:0], weight, first=0, scale=1.0).shape == (0, 1030)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize(("adds", "in_place"), [(False, False), (True, False), (True, True)])
def test_combine(adds: bool, in_place: bool, cap: float | None, dtype: torch.dtype) -> None:
    """Values from 1e-4 to beyond the cap; the result in the sum's own memory, too."""
    x = 10.0 * normal(3, 401, dtype=dtype) ** 3
    add = normal(3, 401, dtype=dtype, seed=1) if adds else None
    expected = combine_reference.combine(x, scale=0.37, cap=cap, add=add)
    out = add if in_place else None
    got = combine.combine(x, scale=0.37, cap=cap, add=add, out=out)
    assert_close(got, expected)
    assert out is None or got is out
    small = 1e-3 * normal(5, 3, dtype=torch.float32)
    capped = combine.combine(small, scale=1.0, cap=1.0, add=None, out=None)
    torch.testing.assert_close(capped, small.tanh(), atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (6, 6, 8)])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("norms", [None, "narrow", "wide"])
def test_heads_are_normed_and_rotated_and_written_to_scattered_slots(
    heads: int, kv_heads: int, head_dim: int, rotates: bool, norms: str | None, dtype: torch.dtype
) -> None:
    tokens = 5
    qkv = normal(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    inverse = 1.0 / 100 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos_sin = rope_cos_sin(torch.tensor([7, 0, 3, 100, 1]), inverse) if rotates else None
    slots = torch.tensor([9, 2, 11, 3, 0])
    pools = torch.zeros(2, 12, kv_heads, head_dim, dtype=dtype)
    expected_q, expected_k, head_norms = q.clone(), k.clone(), None
    if norms is not None:
        kept = torch.float32 if norms == "wide" else dtype
        head_norms = HeadNorms(*(normal(head_dim, dtype=kept, seed=seed) for seed in (1, 2)), 1e-3)
        expected_q = norm_reference.rms_norm(q, head_norms.q_weight, 1e-3)
        expected_k = norm_reference.rms_norm(k, head_norms.k_weight, 1e-3)
    if cos_sin is not None:
        expected_q, expected_k = apply_rope(expected_q, expected_k, cos_sin)
    rope_and_store_kv(q, k, v, cos_sin, pools[0], pools[1], slots, head_norms)
    assert_close(q, expected_q)
    assert_close(pools[0][slots], expected_k)
    assert torch.equal(pools[1][slots], v)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not pools[:, untouched].any()


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 33), (0, 8)])
def test_rows_of_eight_bits(rows: int, width: int) -> None:
    """Values need no rounding (see below), on scales that are powers of two; and a row of zeros."""
    values = (100.0 * normal(rows, width + 3, dtype=torch.float32)).to(torch.float8_e4m3fn).float()
    values[:, :1] = 448.0
    values *= 2.0 ** torch.arange(-2, rows - 2).unsqueeze(1)
    values[1:2] = 0.0
    strided = values[:, :width]
    quantized, scales = fp8_rows.quantize_rows_fp8(strided)
    expected, expected_scales = fp8_rows_reference.quantize_rows_fp8(strided)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.float() * scales, strided)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1300), (0, 8)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_of_a_product(rows: int, width: int, has_bias: bool) -> None:
    sums = 100.0 * normal(rows, width, dtype=torch.float32)
    bias = normal(width, dtype=torch.float16, seed=1) if has_bias else None
    scales = normal(rows, 1, dtype=torch.float32, seed=2), normal(width, 1, dtype=torch.float32, seed=3)
    got = fp8_rows.scale_product(sums, *scales, bias, torch.float16)
    assert_close(got, fp8_rows_reference.scale_product(sums, *scales, bias, torch.float16))


@pytest.mark.parametrize("scale", [UNSCALED, KVScale(0.25, 8.0)])
def test_a_pool_of_eight_bits_keeps_what_it_can_hold_and_no_more(scale: KVScale) -> None:
    """Values need no rounding: next to a power of two the interpreter rounds to half of it."""
    q = torch.zeros(3, 2, 8)
    k, v = (
        (100.0 * normal(3, 2, 8, dtype=torch.float32, seed=seed)).to(torch.float8_e4m3fn).float()
        for seed in (1, 2)
    )
    v[0, 0, 0], k[1, 1, 1] = 1e6, -1e6
    pools = torch.zeros(2, 5, 2, 8, dtype=torch.float8_e4m3fn)
    slots = torch.tensor([4, 1, 2])
    rope_and_store_kv(q, k * scale.key, v * scale.value, None, pools[0], pools[1], slots, None, scale)
    for pool, expected in zip(pools, (k, v), strict=True):
        assert torch.equal(pool.float()[slots], expected.clamp(-448, 448))
    assert not pools.float()[:, [0, 3]].any()


@pytest.mark.parametrize(
    ("rows", "num_entries", "page_size"), [(0, 0, 16), (1, 1, 1), (5, 5, 16), (130, 7, 3), (300, 300, 4)]
)
def test_decodes_are_laid_out_over_the_new_pages(rows: int, num_entries: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def numbers(high: int) -> Tensor:
        return torch.randint(0, high, (rows,), generator=generator)

    pages_of_a_row = 7
    table = torch.randint(0, 99, (310, pages_of_a_row), generator=generator, dtype=torch.int32)
    which, positions = torch.randperm(310, generator=generator)[:rows], numbers(pages_of_a_row * page_size)
    # Those that the tokens go to, of other rows than their own number.
    entries = (which * pages_of_a_row + positions // page_size).flip(0)[:num_entries]
    pages, ids = 100 + numbers(99)[:num_entries], torch.where(numbers(2) > 0, numbers(50), -1)
    last_token = 100 + torch.arange(310)
    results = []
    for lay_out in (inputs_reference.lay_out_decodes, decode_inputs.lay_out_decodes):
        own_ids, own_table, lens = ids.clone(), table.clone(), torch.zeros_like(positions)
        slots = lay_out(
            own_ids, which, positions, entries, pages, last_token, own_table, page_size, lens=lens
        )
        results.append((own_ids, own_table, lens, slots))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
    own_ids, own_table, lens, slots = results[1]
    assert own_table.view(-1)[entries].tolist() == pages.tolist()
    assert (own_ids >= 0).all()
    assert torch.equal(lens, positions + 1)
    assert (slots[rows - num_entries :] >= 100 * page_size).all()


@pytest.mark.parametrize("half", [64, 12])
def test_angles_of_a_million_radians_are_right_to_the_last_bit(half: int) -> None:
    positions = torch.tensor([0, 1, 2, 7, 1000, 103_993, 131_071, 710_000, 999_983, (1 << 20) - 1])
    inv_freq = 10000.0 ** (-torch.arange(half) / half)
    angles = (positions.float().unsqueeze(1) * inv_freq).double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=1)
    got = rope.rope_cos_sin(positions, inv_freq)
    assert ((got - expected).abs() <= 1.0001 * 2.0**-24 * expected.abs()).all()
    torch.testing.assert_close(got, rope_cos_sin(positions, inv_freq), atol=1.2e-7, rtol=0.0)


def test_frequencies_of_each_token_and_amplitudes_of_each_dimension() -> None:
    positions, inv_freq = torch.tensor([3, 40_000, 9]), torch.rand(3, 6)
    amplitude = 1.0 + torch.rand(12)
    got = rope.rope_cos_sin(positions, inv_freq, amplitude)
    assert_close(got, rope_cos_sin(positions, inv_freq, amplitude))
    assert rope.rope_cos_sin(positions[:0], inv_freq[:0]).shape == (0, 12)
