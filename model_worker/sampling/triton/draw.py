"""Draw a token for each row of logits: temperature, top-n-sigma, top-k, top-p, min-p and stateless noise.

    grid   row × block   `_extremes`, `_count` of truncation.py, which says how rows are cut; if one is
    grid   row × block   `_best_in_block`: the largest logit + noise of what is surely kept; lists what may be
    grid   row           `_best_of_row`: the largest of the blocks' and of what is kept of the list

Each program reads its row's parameters by row: a launch serves any batch, greedy rows among it, and the host
sends no list of whom it is about. The last one stores the token wherever it is wanted, so a draw is all that
lies between the logits and the next step.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton import truncation
from model_worker.kernels.triton.call_site import CallSite
from model_worker.kernels.triton.truncation import (
    NUM_BUCKETS,
    Scratch,
    _bucket,
    _count,
    _cut,
    _doubtful,
    _extremes,
    _limits,
    _mass,
    _scale,
    _scaled,
    _window,
)
from model_worker.sampling.columns import SamplingColumns

BLOCK = 2048
TILE = 1024
"""Number of doubtful ids that are examined together."""
HIGHEST_ID: tl.constexpr = tl.constexpr((1 << 31) - 1)


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    *,
    truncates: bool,
    top_p: Tensor | None = None,
    out: Tensor | None = None,
    last_token: Tensor | None = None,
) -> Tensor:
    """Return one token for each row, [n] int64, in `out` if given, drawn as model_worker.sampling.sampler
    says. Takes two launches, four with `truncates`.

    - logits [n, V] float32 contiguous; rows, positions [n] int64.
    - truncates: True if some row has top-n-sigma, top-k, top-p or min-p; if False these are ignored.
    - top_p [max_rows + 1] float32: replaces the columns' own. last_token [max_rows + 1] int64: also gets the
      tokens, by row.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device) if out is None else out
    if num_rows == 0:
        return tokens
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    s = Scratch.empty(num_rows, num_blocks, device) if truncates else _no_scratch(num_blocks, device)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    c = columns
    top_p = c.top_p if top_p is None else top_p
    limits = (rows, c.temperature, c.top_k, top_p, c.min_logit_gap, c.top_n_sigma, c.is_greedy)
    strides = (c.temperature.stride(0), c.top_k.stride(0), top_p.stride(0))
    grid = (num_rows, num_blocks, 1)
    sites = _sites(vocab_size, truncates, last_token is not None, truncation.CAPACITY)
    if truncates:
        sites.extremes.launch(
            grid, logits, *limits, s.highest, s.lowest, s.histogram, s.num_listed, s.moments, vocab_size,
            *strides,
        )  # fmt: skip
        sites.count_buckets.launch(
            grid, logits, *limits, s.highest, s.lowest, s.histogram, s.moments, vocab_size, *strides
        )
    sites.best_in_block.launch(
        grid, logits, *limits, c.seed, positions, *s, scores, ids, vocab_size, *strides
    )
    sites.best_of_row.launch(
        (num_rows, 1, 1), logits, *limits, c.seed, positions, *s, scores, ids, tokens,
        tokens if last_token is None else last_token, vocab_size, num_blocks, *strides,
    )  # fmt: skip
    return tokens


@cache
def _no_scratch(num_blocks: int, device: torch.device) -> Scratch:
    """Return a placeholder for the scratch of a draw that truncates nothing. It has the same types, since
    other types would be another kernel.
    """
    return Scratch.empty(0, num_blocks, device)


class _Sites(NamedTuple):
    extremes: CallSite
    count_buckets: CallSite
    best_in_block: CallSite
    best_of_row: CallSite


@cache
def _sites(vocab_size: int, truncates: bool, remembers: bool, capacity: int) -> _Sites:
    blocks = triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))
    return _Sites(
        CallSite(_extremes, BLOCK=BLOCK, num_warps=4),
        CallSite(_count, BLOCKS=blocks, BLOCK=BLOCK, num_warps=4),
        CallSite(
            _best_in_block, TRUNCATES=truncates, CAPACITY=capacity, BLOCKS=blocks, BLOCK=BLOCK, num_warps=8
        ),
        CallSite(
            _best_of_row, TRUNCATES=truncates, REMEMBERS=remembers, CAPACITY=capacity, BLOCKS=blocks,
            TILE=TILE, ID_BITS=(vocab_size - 1).bit_length(), num_warps=16 if truncates else 1,
        ),
    )  # fmt: skip


@triton.jit
def _gumbel(words):
    """Return Gumbel noise as model_worker.sampling.noise.gumbel."""
    uniform = tl.maximum((words >> 8).to(tl.float32), 0.5) * (2.0**-24)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_of_block(seed, position, start, BLOCK: tl.constexpr):
    """Return noise [BLOCK] float32 of the ids from `start` on. One counter gives the noise of four ids."""
    quad = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero, zero)
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _noise_of(seed, position, token):
    """Return float32 noise of each id."""
    quad, lane = (token // 4).to(tl.uint32), token % 4
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero, zero)
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _best(score, token, among):
    """Return (largest score, lowest id that has it) among the ids of the mask."""
    top = tl.max(tl.where(among, score, float("-inf")), 0)
    return top, tl.min(tl.where(among & (score == top), token, HIGHEST_ID), 0)


@triton.jit
def _lowest(top, gap):
    """Return the smallest logit that min-p keeps. It avoids NaN for an infinite `top`."""
    return tl.where(gap > float("-inf"), top + gap, float("-inf"))


@triton.jit
def _append(listed, num_listed, token, among, CAPACITY: tl.constexpr):
    """Append ids to a row's list. Ids that do not fit are only counted."""
    num = tl.sum(among.to(tl.int32), 0)
    if num > 0:
        place = tl.atomic_add(num_listed, num, sem="relaxed") + tl.cumsum(among.to(tl.int32), 0) - 1
        tl.store(listed + place, token, mask=among & (place < CAPACITY))


@triton.jit
def _best_in_block(
    logits, rows, temperatures, top_ks, top_ps, min_logit_gaps, sigmas, greedy, seeds, positions,
    highest, lowest, histogram, listed, num_listed, mass, moments, scores, ids,
    vocab_size, float_stride, integer_stride, top_p_stride,
    TRUNCATES: tl.constexpr, CAPACITY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + i)
    is_greedy = tl.load(greedy + row * integer_stride) != 0
    # A greedy row's logits are compared as they are.
    temperature = tl.where(is_greedy, 1.0, tl.load(temperatures + row * float_stride))
    x, token, kept = _scaled(logits + i * vocab_size, block * BLOCK, vocab_size, temperature, BLOCK)
    place = i * num_blocks + block
    if TRUNCATES:
        columns, strides = (
            (top_ks, top_ps, min_logit_gaps, sigmas, greedy),
            (integer_stride, top_p_stride, float_stride),
        )
        k, p, gap, sigma = _limits(row, columns, strides, vocab_size)
        if (k < vocab_size) | (p < 1.0) | (gap > float("-inf")) | (sigma > 0.0):
            top, per_nat, floor = _scale(highest, lowest, moments, sigma, i, num_blocks, BLOCKS)
            counted = ~(x < floor)
            kept = kept & counted & (x >= _lowest(top, gap))
            if (k < vocab_size) | (p < 1.0):
                counts = histogram + i * NUM_BUCKETS
                first, last, k, k_bucket, _num_ahead = _window(counts, per_nat, k, p, vocab_size)
                # Padding is -inf: it has no mass, and is listed nowhere.
                bucket, each = _bucket(x, top, per_nat), tl.where(counted, _mass(x, top), 0)
                tl.store(mass + 2 * place, tl.sum(tl.where(bucket < first, each, 0), 0))
                tl.store(mass + 2 * place + 1, tl.sum(tl.where(bucket < k_bucket, each, 0), 0))
                in_window = ((bucket >= first) & (bucket <= last)) | (bucket == k_bucket)
                doubtful = (token < vocab_size) & counted & in_window
                _append(listed + i * CAPACITY, num_listed + i, token, doubtful, CAPACITY)
                kept = kept & (bucket < first)
    best, best_id = float("-inf"), HIGHEST_ID
    if tl.sum(kept.to(tl.int32), 0) > 0:
        if is_greedy == 0:
            position = tl.load(positions + i).to(tl.uint32)
            x += _noise_of_block(tl.load(seeds + row * integer_stride), position, block * BLOCK, BLOCK)
        best, best_id = _best(x, token, kept)
    tl.store(scores + place, best)
    tl.store(ids + place, best_id)


@triton.jit
def _best_of_list(
    row, window, cut, least, seed, position, best, token, TILE: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return the best of the previous best and the ids of a list up to and with the cut that are at least
    `least`.
    """
    for start in range(0, row[2], TILE):
        each, x, order, kept = _doubtful(row, window, start, TILE, ID_BITS)
        kept = kept & (order >= cut) & (x >= least)
        other, other_id = _best(x + _noise_of(seed, position, each), each, kept)
        is_better = (other > best) | ((other == best) & (other_id < token))
        best, token = tl.where(is_better, other, best), tl.where(is_better, other_id, token)
    return token


@triton.jit
def _best_of_row(
    logits, rows, temperatures, top_ks, top_ps, min_logit_gaps, sigmas, greedy, seeds, positions,
    highest, lowest, histogram, listed, num_listed, mass, moments, scores, ids, tokens, last_token,
    vocab_size, num_blocks, float_stride, integer_stride, top_p_stride,
    TRUNCATES: tl.constexpr, REMEMBERS: tl.constexpr, CAPACITY: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    b = tl.arange(0, BLOCKS)
    inside = b < num_blocks
    at = i * num_blocks + b
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    best, token = _best(score, tl.load(ids + at, mask=inside, other=HIGHEST_ID), inside)
    if TRUNCATES:
        columns, strides = (
            (top_ks, top_ps, min_logit_gaps, sigmas, greedy),
            (integer_stride, top_p_stride, float_stride),
        )
        k, p, gap, sigma = _limits(row, columns, strides, vocab_size)
        if (k < vocab_size) | (p < 1.0):
            top, per_nat, floor = _scale(highest, lowest, moments, sigma, i, num_blocks, BLOCKS)
            counts = histogram + i * NUM_BUCKETS
            first, last, k, k_bucket, num_ahead = _window(counts, per_nat, k, p, vocab_size)
            mass_above = tl.sum(tl.load(mass + 2 * at, mask=inside, other=0), 0)
            mass_ahead = tl.sum(tl.load(mass + 2 * at + 1, mask=inside, other=0), 0)
            num = tl.load(num_listed + i)
            # A list that does not hold all is not read.
            held = tl.where(num <= CAPACITY, num, 0)
            num = tl.where(num <= CAPACITY, num, vocab_size)
            temperature = tl.load(temperatures + row * float_stride)
            doubtful = (logits + i * vocab_size, temperature, num, listed + i * CAPACITY, held, floor)
            window = (top, per_nat, first, last)
            cut = _cut(
                doubtful, window, k, k_bucket, num_ahead, p, mass_above, mass_ahead, vocab_size, TILE, ID_BITS
            )
            seed = tl.load(seeds + row * integer_stride)
            position = tl.load(positions + i).to(tl.uint32)
            token = _best_of_list(
                doubtful, window, cut, _lowest(top, gap), seed, position, best, token, TILE, ID_BITS
            )
    # Where all are no numbers there is no best one.
    token = tl.minimum(token, vocab_size - 1).to(tl.int64)
    tl.store(tokens + i, token)
    if REMEMBERS:
        tl.store(last_token + row, token)
