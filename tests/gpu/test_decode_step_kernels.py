"""The small kernels of a decode step on the hardware, each against its torch reference on the CPU."""

from __future__ import annotations

import pytest
import torch

from model_worker.device.cuda import has_fp8
from model_worker.kernels.activation import activate_and_mul
from model_worker.kernels.combine import combine
from model_worker.kernels.embedding import embed
from model_worker.kernels.expert_choice import choose_experts
from model_worker.kernels.fp8_rows import FP8
from model_worker.kernels.rms_norm import HeadNorms, rms_norm
from model_worker.kernels.rope import apply_rope, rope_cos_sin
from model_worker.kernels.triton.expert_choice import choose_experts as triton_choose_experts
from model_worker.layers.embedding import LMHead
from model_worker.layers.weight import Weight
from model_worker.ops.functions import BY_TORCH
from model_worker.ops.triton_functions import BY_TRITON
from model_worker.ops.triton_ops import TritonOps
from runtime.checkpoint.model_config import Activation
from tests.cpu.triton.test_triton_attention import dense, paged
from tests.gpu.test_cuda_kernels import NEAREST, TOLERANCE, assert_close, normal
from tests.harness.pretended_gpu import is_pretended

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("rows", "num_entries"), [(1, 1), (8, 3), (256, 256), (700, 700)])
def test_decodes_are_laid_out_over_the_new_pages(rows: int, num_entries: int) -> None:
    """The new pages are those of other tokens than their number, and of several programs."""
    generator = torch.Generator().manual_seed(rows)
    page_size, pages_of_a_row = 16, 9
    table = torch.randint(0, 99, (rows + 1, pages_of_a_row), generator=generator, dtype=torch.int32)
    which = torch.randperm(rows, generator=generator)
    positions = torch.randint(0, page_size * pages_of_a_row, (rows,), generator=generator)
    entries = (which * pages_of_a_row + positions // page_size).flip(0)[:num_entries].contiguous()
    pages = 100 + torch.arange(num_entries)
    ids = torch.where(torch.randint(0, 2, (rows,), generator=generator) > 0, 7, -1)
    results = []
    for at, by in ((torch.device("cpu"), BY_TORCH), (CUDA, BY_TRITON)):
        own_ids, own_table = ids.to(at, copy=True), table.to(at, copy=True)
        lens = torch.zeros(rows, dtype=torch.int64, device=at)
        last_token = 1000 + torch.arange(rows + 1)
        slots = by.lay_out_decodes(
            own_ids, which.to(at), positions.to(at), entries.to(at), pages.to(at), last_token.to(at),
            own_table, page_size, lens=lens,
        )  # fmt: skip
        results.append([each.cpu() for each in (own_ids, own_table, lens, slots)])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_angles_of_a_million_radians() -> None:
    positions = torch.tensor([0, 1, 7, 103_993, 131_071, 710_000, 999_983, (1 << 20) - 1])
    inv_freq = 10000.0 ** (-torch.arange(64) / 64)
    angles = (positions.float().unsqueeze(1) * inv_freq).double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=1)
    got = BY_TRITON.rope_cos_sin(positions.to(CUDA), inv_freq.to(CUDA), None).cpu()
    assert ((got - expected).abs() <= 1.0001 * 2.0**-24 * expected.abs()).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (4, 1, 256), (3, 1, 80)])
def test_heads_are_normed_rotated_and_stored(heads: int, kv_heads: int, head_dim: int, wide: bool) -> None:
    from model_worker.kernels.triton.rope_kv_store import rope_and_store_kv

    dtype, tokens, sizes = torch.bfloat16, 37, [heads, kv_heads, kv_heads]
    qkv = normal(tokens, sum(sizes), head_dim, seed=1).to(dtype)
    kept = torch.float32 if wide else dtype
    q_weight, k_weight = (normal(head_dim, seed=seed).to(kept) for seed in (2, 3))
    cos_sin = rope_cos_sin(torch.arange(tokens) * 1000, 1e-4 ** (torch.arange(head_dim // 2) / head_dim))
    q, k, v = qkv.split(sizes, dim=1)
    expected_q, expected_k = apply_rope(rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6), cos_sin)
    pools = torch.zeros(2, 50, kv_heads, head_dim, dtype=dtype, device=CUDA)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(4))[:tokens]
    q_there, k_there, v_there = qkv.to(CUDA).split(sizes, dim=1)
    norms = HeadNorms(q_weight.to(CUDA), k_weight.to(CUDA), 1e-6)
    rope_and_store_kv(q_there, k_there, v_there, cos_sin.to(CUDA), pools[0], pools[1], slots.to(CUDA), norms)
    assert_close(q_there, expected_q, TOLERANCE[dtype])
    assert_close(pools[0].cpu()[slots], expected_k, TOLERANCE[dtype])
    assert torch.equal(pools[1].cpu()[slots], v)
    got = BY_TRITON.rms_norm(qkv.to(CUDA)[:, :heads], norms.q_weight, 1e-6)
    assert_close(got, rms_norm(q, q_weight, 1e-6), 3e-2)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(4, 1, 256, 100), *([] if is_pretended() else [(16, 8, 128, None), (32, 8, 128, None)])],
)
def test_new_tokens_are_normed_rotated_stored_and_attended_to(
    heads: int, kv_heads: int, head_dim: int, window: int | None, num_splits: int, kept: torch.dtype
) -> None:
    from model_worker.kernels.triton.decode_attention import decode_attention
    from model_worker.kernels.triton.new_tokens import NewTokens

    if kept is FP8 and not has_fp8():
        pytest.skip("float8 needs compute capability 8.9")
    dtype, page_size = torch.bfloat16, 16
    cache = paged([1, 700, 64, 1300], kv_heads, head_dim, page_size, dtype, num_new=[1] * 4, window=window)
    last = cache.kv_lens - 1
    slots = cache.page_table[cache.rows, last // page_size].long() * page_size + last % page_size
    qkv = normal(4, heads + 2 * kv_heads, head_dim, seed=3).to(dtype)
    q_weight, k_weight = (1.0 + normal(2, head_dim, seed=4)).to(dtype).unbind(0)
    cos_sin = rope_cos_sin(last, 1e-4 ** (torch.arange(head_dim // 2) / head_dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    turned_q, turned_k = apply_rope(rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6), cos_sin)
    pools = torch.stack([cache.k_pool, cache.v_pool]).to(kept)
    pools[:, slots] = torch.zeros((), dtype=kept)
    pools, out = pools.to(CUDA), torch.empty(4, heads, head_dim, dtype=dtype, device=CUDA)
    q_there, k_there, v_there = qkv.to(CUDA).split([heads, kv_heads, kv_heads], dim=1)
    norms = HeadNorms(q_weight.to(CUDA), k_weight.to(CUDA), 1e-6)
    decode_attention(
        q_there, pools[0], pools[1], cache.page_table.to(CUDA), cache.rows.to(CUDA), cache.kv_lens.to(CUDA),
        page_size=page_size, scale=head_dim**-0.5, num_splits=num_splits, sliding_window=window,
        new=NewTokens(k_there, v_there, slots.to(CUDA), cos_sin.to(CUDA), norms), out=out,
    )  # fmt: skip
    stored = pools.float().cpu()[:, slots]
    assert_close(stored[0], turned_k.float(), NEAREST[kept])
    assert_close(stored[1], v.float(), NEAREST[kept])
    for b in range(4):
        keys = torch.cat([cache.k[b][:-1].to(kept).float(), stored[0, b : b + 1]])
        values = torch.cat([cache.v[b][:-1].to(kept).float(), stored[1, b : b + 1]])
        expected = dense(turned_q[b : b + 1], keys, values, head_dim**-0.5, window, 0.0)
        assert_close(out[b : b + 1], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "per_token"), [(128, 8), (8, 2), (60, 4), (256, 8)])
def test_the_choice_of_experts(num_experts: int, per_token: int, renormalizes: bool) -> None:
    """Scores differ; then many are equal, of which the lowest numbers are chosen."""
    generator = torch.Generator().manual_seed(num_experts)
    order = torch.stack([torch.randperm(num_experts + 3, generator=generator) for _ in range(70)])
    scores = ((order[:, :num_experts] - 3) / 32).bfloat16()  # all that bfloat16 can tell apart
    expected_weights, expected_ids = choose_experts(scores, per_token, renormalizes=renormalizes)
    weights, ids = triton_choose_experts(scores.to(CUDA), per_token, renormalizes=renormalizes)
    assert torch.equal(ids.cpu().long(), expected_ids)
    assert_close(weights, expected_weights, 1e-2)
    scores = (order[:, :num_experts] % 3).bfloat16()
    _, ids = triton_choose_experts(scores.to(CUDA), per_token, renormalizes=renormalizes)
    first = scores.float().sort(dim=1, descending=True, stable=True).indices[:, :per_token]
    assert torch.equal(ids.cpu().long(), first)


@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(1, 128, 8), (3, 8, 2), (1500, 128, 8)])
def test_pairs_are_sorted_by_expert(tokens: int, num_experts: int, per_token: int) -> None:
    from model_worker.kernels.triton.experts import sorted_by_expert

    ids = normal(tokens, num_experts, seed=tokens).topk(per_token, dim=1).indices
    tiles = sorted_by_expert(ids.int().to(CUDA), num_experts, 16)
    counts = ids.flatten().bincount(minlength=num_experts)
    assert torch.equal(tiles.order.cpu().long(), ids.flatten().argsort(stable=True))
    assert torch.equal(tiles.ends.cpu().long(), counts.cumsum(0))
    assert torch.equal(tiles.tile_ends.cpu().long(), (-(-counts // 16)).cumsum(0))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gates(name: Activation) -> None:
    gate_up = (4.0 * normal(5, 2 * 1030, seed=1)).bfloat16()
    assert_close(BY_TRITON.activate_and_mul(name, gate_up.to(CUDA)), activate_and_mul(name, gate_up), 3e-2)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_scaled_capped_and_added(dtype: torch.dtype, cap: float | None) -> None:
    x, add = (20.0 * normal(3, 4097, seed=1)).to(dtype), normal(3, 4097, seed=2).to(dtype)

    got = BY_TRITON.combine(x.to(CUDA), scale=0.37, cap=cap, add=add.to(CUDA))
    assert_close(got, combine(x, scale=0.37, cap=cap, add=add), TOLERANCE[dtype])


@pytest.mark.parametrize("first", [None, 40])
def test_embeddings(first: int | None) -> None:
    weight, ids = normal(60, 1030, seed=1).bfloat16(), torch.tensor([3, 40, 59, 41])
    if first is not None:
        ids = torch.tensor([3, 40, 99, 100, 39, 1 << 40])
    expected = embed(ids, weight, first=first, scale=0.37)
    got = BY_TRITON.embed(ids.to(CUDA), weight.to(CUDA), first=first, scale=0.37)
    assert_close(got, expected, 1e-2)


def test_logits_are_sums_that_nobody_rounded() -> None:
    weight = Weight(1003, 256, dtype=torch.bfloat16, device=CUDA)
    weight.data.copy_(normal(1003, 256, seed=1))
    hidden = normal(5, 256, seed=2).bfloat16()
    head, out = LMHead(weight), torch.empty(5, 1003, device=CUDA)
    head.bind(TritonOps())
    with torch.inference_mode():
        logits = head(hidden.to(CUDA), out)
        assert logits is out
        assert_close(logits, hidden.float() @ weight.float().cpu().T, 1e-4)
        assert torch.equal(head(hidden.to(CUDA)), out)
