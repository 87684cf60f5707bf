"""LoRA adapters of a step's tokens: y += scale * (x @ a.T) @ b.T, each token by the adapter of its slot.

    grid   slot                                     its tokens, in order; how many tiles they are
    grid   tile × block of ranks × part of x        shrink: x @ a.T
    grid   tile × block of outputs × module         expand: what is added to y

The tokens are sorted once a step; a layer is two launches, whatever slots and ranks are in it. Tokens without
an adapter are sorted behind the last slot, where no tile is. A program whose slot has nothing here ends at
once. With few tokens x is divided along its width, so that there are enough programs; the sums of the parts
are added in one order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite
from model_worker.kernels.triton.experts import SMALL_TILE, Tiles, best_block_m, sorted_by_expert

BLOCK_R = 16
"""Ranks computed by one program. The room of a module is a multiple of it."""
BLOCK_N = 64
BLOCK_K = 64
SPLIT_K = 512
"""Width of x from which on two programs divide it between them, if there are few tokens."""
MAX_SPLITS = 8
NUM_FIGURES = 4
"""Number of figures of a module: rank, first output, end of the outputs, and scale."""


def sorted_by_slot(slots: Tensor, num_slots: int) -> Tiles:
    """Sort tokens by adapter slot. slots [T] int32; `num_slots` for a token without adapter."""
    return sorted_by_expert(slots, num_slots + 1, best_block_m(len(slots), num_slots))


def add_lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, modules: Tensor, tiles: Tiles) -> None:
    """Add the outputs of the tokens' adapters for x to y, in place.

    x [T, K] of any row stride, y [T, N] contiguous. For S slots, M modules and room for R ranks of each: a
    [S, M * R, K], b [S, N, R], contiguous, all of one dtype; modules [S, M, NUM_FIGURES] float32. tiles: of
    the T tokens.
    """
    num_tokens, num_slots = len(x), len(a)
    num_modules = modules.shape[1]
    room, width, depth = b.shape[2], b.shape[1], a.shape[2]
    splits = min(MAX_SPLITS, -(-depth // SPLIT_K)) if tiles.block_m == SMALL_TILE else 1
    hidden = torch.empty((splits, num_tokens, num_modules * room), dtype=torch.float32, device=x.device)
    num_tiles = min(num_slots, num_tokens) + num_tokens // tiles.block_m
    shape = num_slots, num_modules, room, width, depth
    shrink, expand = _sites(shape, tiles.block_m, splits)
    shrink.launch(
        (num_tiles, num_modules * room // BLOCK_R, splits), x, hidden, a, modules, tiles.order, tiles.ends,
        tiles.tile_ends, num_tokens, x.stride()[0],
    )  # fmt: skip
    expand.launch(
        (num_tiles, -(-width // BLOCK_N), num_modules), hidden, y, b, modules, tiles.order, tiles.ends,
        tiles.tile_ends, num_tokens,
    )  # fmt: skip


@cache
def _sites(shape: tuple[int, int, int, int, int], block_m: int, splits: int) -> tuple[CallSite, CallSite]:
    num_slots, num_modules, room, width, depth = shape
    common = {
        "NUM_SLOTS": num_slots,
        "NUM_MODULES": num_modules,
        "ROOM": room,
        "NUM_FIGURES": NUM_FIGURES,
        "SPLITS": splits,
        "BLOCK_S": triton.next_power_of_2(num_slots),
        "BLOCK_M": block_m,
        "BLOCK_R": BLOCK_R,
        "num_warps": 4,
    }
    shrink = CallSite(_shrink, DEPTH=depth, BLOCK_K=BLOCK_K, **common, num_stages=3)
    expand = CallSite(_expand, WIDTH=width, BLOCK_N=BLOCK_N, **common, num_stages=2)
    return shrink, expand


@triton.jit
def _tile(
    tile, order, ends, tile_ends, NUM_SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return a tile's slot, its positions among the sorted tokens, the tokens, and a mask of valid ones. For
    a tile behind the last slot: slot NUM_SLOTS and no tokens.
    """
    s = tl.arange(0, BLOCK_S)
    end_of_tiles = tl.load(tile_ends + s, mask=s < NUM_SLOTS, other=1 << 30)
    slot = tl.sum((end_of_tiles <= tile).to(tl.int32), 0)
    is_there = slot < NUM_SLOTS
    has_before = is_there & (slot > 0)
    first_tile = tl.load(tile_ends + slot - 1, mask=has_before, other=0)
    begin = tl.load(ends + slot - 1, mask=has_before, other=0)
    end = tl.load(ends + slot, mask=is_there, other=0)
    place = begin.to(tl.int64) + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = place < end
    token = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    return slot, place, token, inside


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x, hidden, a, modules, order, ends, tile_ends, num_tokens, x_stride, DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_MODULES: tl.constexpr, ROOM: tl.constexpr,
    NUM_FIGURES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    slot, place, token, inside = _tile(tl.program_id(0), order, ends, tile_ends, NUM_SLOTS, BLOCK_S, BLOCK_M)
    if slot < NUM_SLOTS:
        first = tl.program_id(1) * BLOCK_R
        module = first // ROOM
        rank = tl.load(modules + (slot * NUM_MODULES + module) * NUM_FIGURES).to(tl.int32)
        if first - module * ROOM < rank:
            r = first + tl.arange(0, BLOCK_R)
            exists = r - module * ROOM < rank
            k = tl.arange(0, BLOCK_K)
            split = tl.program_id(2)
            length: tl.constexpr = tl.cdiv(tl.cdiv(DEPTH, SPLITS), BLOCK_K) * BLOCK_K
            matrix = a + (slot.to(tl.int64) * NUM_MODULES * ROOM + r[None, :]) * DEPTH
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for start in range(0, length, BLOCK_K):
                deep = split * length + start + k
                rows = tl.load(
                    x + token[:, None] * x_stride + deep[None, :],
                    mask=inside[:, None] & (deep[None, :] < DEPTH),
                    other=0.0,
                )
                columns = tl.load(
                    matrix + deep[:, None], mask=exists[None, :] & (deep[:, None] < DEPTH), other=0.0
                )
                acc = tl.dot(rows, columns, acc, input_precision="ieee")
            at = (split.to(tl.int64) * num_tokens + place[:, None]) * (NUM_MODULES * ROOM) + r[None, :]
            tl.store(hidden + at, acc, mask=inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    hidden, y, b, modules, order, ends, tile_ends, num_tokens, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SLOTS: tl.constexpr, NUM_MODULES: tl.constexpr, ROOM: tl.constexpr, NUM_FIGURES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    slot, place, token, inside = _tile(tl.program_id(0), order, ends, tile_ends, NUM_SLOTS, BLOCK_S, BLOCK_M)
    if slot < NUM_SLOTS:
        module = tl.program_id(2)
        figures = modules + (slot * NUM_MODULES + module) * NUM_FIGURES
        rank = tl.load(figures).to(tl.int32)
        first = tl.load(figures + 1).to(tl.int32) + tl.program_id(1) * BLOCK_N
        end = tl.load(figures + 2).to(tl.int32)
        if (rank > 0) & (first < end):
            scale = tl.load(figures + 3)
            n = first + tl.arange(0, BLOCK_N)
            matrix = b + (slot.to(tl.int64) * WIDTH + n[None, :]) * ROOM
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, rank, BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                exists = r < rank
                at = place[:, None] * (NUM_MODULES * ROOM) + module * ROOM + r[None, :]
                rows = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for split in range(SPLITS):
                    step = tl.cast(split, tl.int64) * num_tokens * (NUM_MODULES * ROOM)
                    rows += tl.load(hidden + step + at, mask=inside[:, None] & exists[None, :], other=0.0)
                columns = tl.load(matrix + r[:, None], mask=(n[None, :] < end) & exists[:, None], other=0.0)
                # Rounded before it is multiplied, as the reference does.
                acc = tl.dot(rows.to(columns.dtype), columns, acc, input_precision="ieee")
            mask = inside[:, None] & (n[None, :] < end)
            target = y + token[:, None] * WIDTH + n[None, :]
            before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (before + scale * acc).to(y.dtype.element_ty), mask=mask)
