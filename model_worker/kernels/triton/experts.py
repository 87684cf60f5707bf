"""A mixture of gated experts: each token through the experts chosen for it, in two grouped products.

    torch     pairs of token and expert sorted by expert; how many tiles of pairs each expert has
    grid      tile × block of the width      gate and up of each pair, from its token
    torch     the gate
    grid      tile × block of the width      down, back to the pair's place, times its weight
    torch     each token's sum

A program finds its expert among the tiles' ends. How many tiles there are is not known on the host, so as
many are launched as there can be: a whole one for each expert that can have a pair, and those that fill. An
expert's weights are read once for each tile of its pairs, and not at all when it has none. Weights of 8 bits
become hidden's dtype as they are read; their scales, one for each output, are applied to the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 64
BLOCK_K = 64
SMALL_TILE = 16
LARGE_TILE = 64


def fused_experts(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activate: Callable[[Tensor], Tensor],
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """As model_worker.models.feed_forward.SparseMLP computes it; [T, H].

    hidden [T, H] of any row stride; gate_up [E, 2 * I, H], down [E, H, I] contiguous; weights [T, K] of
    hidden's dtype, ids [T, K] int64. activate: [n, 2 * I] -> [n, I]. With scales, [E, 2 * I, 1] and [E, H, 1]
    float32 contiguous, the matrices are float8_e4m3fn or int8.
    """
    num_experts = gate_up.shape[0]
    num_tokens, per_token = ids.shape
    num_pairs = num_tokens * per_token
    if num_pairs == 0:
        return torch.empty_like(hidden)
    order = ids.flatten().argsort(stable=True)
    every = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(ids.flatten()[order], every, right=True)
    block_m = SMALL_TILE if num_pairs <= SMALL_TILE * num_experts else LARGE_TILE
    counts = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    num_tiles = min(num_experts, num_pairs) + num_pairs // block_m
    tiles = _Tiles(order, ends, tile_ends, num_tiles, block_m, per_token)
    gated = activate(_grouped(hidden, gate_up, gate_up_scale, tiles, None))
    outputs = _grouped(gated, down, down_scale, tiles, weights.flatten())
    return outputs.view(num_tokens, per_token, -1).sum(1)


class _Tiles(NamedTuple):
    """Of P pairs sorted by expert."""

    order: Tensor  # [P] the pairs
    ends: Tensor  # [E] of the experts' pairs
    tile_ends: Tensor  # [E]
    num_tiles: int  # at most
    block_m: int  # pairs of a tile
    per_token: int


def _grouped(
    a: Tensor, matrices: Tensor, scales: Tensor | None, tiles: _Tiles, weights: Tensor | None
) -> Tensor:
    """a's rows times their pairs' matrices, transposed. Without weights a has tokens and the result pairs in
    sorted order; with them the other way round: a has sorted pairs, the result is at the pairs' own places.
    """
    num_experts, width, depth = matrices.shape
    out = torch.empty((len(tiles.order), width), dtype=a.dtype, device=a.device)
    _grouped_product[(tiles.num_tiles, triton.cdiv(width, BLOCK_N))](
        a, matrices, out, tiles.order, tiles.ends, tiles.tile_ends, out if weights is None else weights,
        out if scales is None else scales, num_experts, a.stride(0), WIDTH=width, DEPTH=depth,
        PER_TOKEN=tiles.per_token, WEIGHTED=weights is not None, SCALED=scales is not None,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=tiles.block_m, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _grouped_product(
    a, matrices, out, order, ends, tile_ends, weights, scales, num_experts, a_stride, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, PER_TOKEN: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    end_of_tiles = tl.load(tile_ends + e, mask=e < num_experts, other=1 << 40)
    # Those whose tiles end before this one.
    expert = tl.sum((end_of_tiles <= tile).to(tl.int32), 0)
    if expert < num_experts:
        is_first = expert == 0
        first_tile = tl.load(tile_ends + expert - 1, mask=is_first == 0, other=0)
        begin = tl.load(ends + expert - 1, mask=is_first == 0, other=0)
        end = tl.load(ends + expert)
        place = begin + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = place < end
        pair = tl.load(order + place, mask=inside, other=0)
        source = place if WEIGHTED else pair // PER_TOKEN
        target = pair if WEIGHTED else place
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        matrix = matrices + expert.to(tl.int64) * WIDTH * DEPTH
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, DEPTH, BLOCK_K):
            deep = start + k < DEPTH
            rows = tl.load(
                a + source[:, None] * a_stride + start + k[None, :],
                mask=inside[:, None] & deep[None, :],
                other=0.0,
            )
            columns = tl.load(
                matrix + n[None, :].to(tl.int64) * DEPTH + start + k[:, None],
                mask=(n[None, :] < WIDTH) & deep[:, None],
                other=0.0,
            )
            acc = tl.dot(rows, columns.to(rows.dtype), acc, input_precision="ieee")
        if SCALED:
            scale = tl.load(scales + expert * WIDTH + n, mask=n < WIDTH, other=0.0)
            acc *= scale[None, :]
        result = acc.to(out.dtype.element_ty)
        if WEIGHTED:
            # Rounded before it is weighted, as the reference does.
            weight = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) * weight[:, None]).to(out.dtype.element_ty)
        tl.store(
            out + target[:, None] * WIDTH + n[None, :], result, mask=inside[:, None] & (n[None, :] < WIDTH)
        )
