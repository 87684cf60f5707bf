"""A mixture of gated experts: each token through the experts chosen for it, in two grouped products.

    grid      expert                         its pairs of token and expert, in order; how many tiles they are
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
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite

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
    """Compute what model_worker.models.feed_forward.SparseMLP does; [T, H].

    hidden [T, H] of any row stride; gate_up [E, 2 * I, H], down [E, H, I] contiguous; weights [T, K] of
    hidden's dtype, ids [T, K] of an integer dtype. activate: [n, 2 * I] -> [n, I]. With scales,
    [E, 2 * I, 1] and [E, H, 1] float32 contiguous, the matrices are float8_e4m3fn or int8.
    """
    num_experts = gate_up.shape[0]
    num_tokens, per_token = ids.shape
    num_pairs = num_tokens * per_token
    if num_pairs == 0:
        return torch.empty_like(hidden)
    tiles = sorted_by_expert(ids, num_experts, best_block_m(num_pairs, num_experts))
    gated = activate(_grouped(hidden, gate_up, gate_up_scale, tiles, None))
    outputs = _grouped(gated, down, down_scale, tiles, weights.flatten())
    return outputs.view(num_tokens, per_token, -1).sum(1)


class Tiles(NamedTuple):
    """Tiles of P pairs (token, expert) sorted by expert; tensors are int32."""

    order: Tensor  # [P] the pairs
    ends: Tensor  # [E] of the experts' pairs
    tile_ends: Tensor  # [E]
    num_tiles: int  # at most
    block_m: int  # pairs of a tile
    per_token: int


def best_block_m(num_pairs: int, num_experts: int) -> int:
    """Return the number of pairs in a tile."""
    return SMALL_TILE if num_pairs <= SMALL_TILE * num_experts else LARGE_TILE


def sorted_by_expert(ids: Tensor, num_experts: int, block_m: int) -> Tiles:
    """Sort the pairs of ids [T, K], or [T], of an integer dtype, by expert."""
    num_pairs, device = ids.numel(), ids.device
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    ends, tile_ends = torch.empty((2, num_experts), dtype=torch.int32, device=device).unbind(0)
    is_small = block_m == SMALL_TILE and num_pairs <= 128
    site = _sorting(num_experts, block_m, 128 if is_small else 1024)
    site.launch((num_experts, 1, 1), ids.contiguous(), order, ends, tile_ends, num_pairs)
    num_tiles = min(num_experts, num_pairs) + num_pairs // block_m
    return Tiles(order, ends, tile_ends, num_tiles, block_m, num_pairs // len(ids))


@cache
def _sorting(num_experts: int, block_m: int, block_p: int) -> CallSite:
    block_e = triton.next_power_of_2(num_experts)
    return CallSite(_sort, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK_P=block_p, num_warps=4)


def _grouped(
    a: Tensor, matrices: Tensor, scales: Tensor | None, tiles: Tiles, weights: Tensor | None
) -> Tensor:
    """Multiply rows of `a` by the transposed matrix of each pair's expert. Without weights the rows of `a`
    are tokens, and the result's rows are pairs sorted by expert. With weights `a` has the sorted pairs, and
    the result has them in the order of tokens.
    """
    num_experts, width, depth = matrices.shape
    out = a.new_empty((tiles.order.shape[0], width))
    shape = (num_experts, width, depth)
    site = _product(shape, tiles.per_token, tiles.block_m, weights is not None, scales is not None)
    site.launch(
        (tiles.num_tiles, -(-width // BLOCK_N), 1), a, matrices, out, tiles.order, tiles.ends,
        tiles.tile_ends, out if weights is None else weights, out if scales is None else scales, num_experts,
        a.stride()[0],
    )  # fmt: skip
    return out


@cache
def _product(
    shape: tuple[int, int, int], per_token: int, block_m: int, weighted: bool, scaled: bool
) -> CallSite:
    num_experts, width, depth = shape
    return CallSite(
        _grouped_product, WIDTH=width, DEPTH=depth, PER_TOKEN=per_token, WEIGHTED=weighted, SCALED=scaled,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(
    ids, order, ends, tile_ends, num_pairs, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Place one expert's pairs behind those of the experts before it. Each program counts all experts' pairs,
    so that none waits for another; they are few, and in the cache.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    p = tl.arange(0, BLOCK_P)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        inside = start + p < num_pairs
        id = tl.load(ids + start + p, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(id, BLOCK_E, mask=inside)
    end = tl.sum(tl.where(e <= expert, counts, 0), 0)
    tl.store(ends + expert, end)
    tl.store(tile_ends + expert, tl.sum(tl.where(e <= expert, tl.cdiv(counts, BLOCK_M), 0), 0))
    place = tl.sum(tl.where(e < expert, counts, 0), 0)
    for start in range(0, tl.where(end > place, num_pairs, 0), BLOCK_P):
        id = tl.load(ids + start + p, mask=start + p < num_pairs, other=-1).to(tl.int32)
        is_own = (id == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, start + p, mask=id == expert)
        place += tl.sum(is_own, 0)


@triton.jit
def _grouped_product(
    a, matrices, out, order, ends, tile_ends, weights, scales, num_experts, a_stride, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, PER_TOKEN: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    end_of_tiles = tl.load(tile_ends + e, mask=e < num_experts, other=1 << 30)
    # Those whose tiles end before this one.
    expert = tl.sum((end_of_tiles <= tile).to(tl.int32), 0)
    if expert < num_experts:
        is_first = expert == 0
        first_tile = tl.load(tile_ends + expert - 1, mask=is_first == 0, other=0)
        begin = tl.load(ends + expert - 1, mask=is_first == 0, other=0)
        end = tl.load(ends + expert)
        place = begin.to(tl.int64) + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = place < end
        pair = tl.load(order + place, mask=inside, other=0).to(tl.int64)
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
