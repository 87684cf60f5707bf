"""Top-n-sigma, top-k, top-p and min-p of rows of logits, cut without a sort by programs that share each row.

    grid   row × block   `_extremes`        the largest and the smallest logit of each block, and the moments
    grid   row × block   `_count`           how many ids 256 buckets have, from the largest logit down
    grid   row × block   `_best_in_block`   from the counts, the few buckets that the cut may lie in
                                            (`_window`): draws from those above, lists the ids in them
    grid   row           `_best_of_row`     the cut among those listed (`_cut`)

The last two are the draw's. Ids are ordered by logit, largest first, equal logits by id; each of top-k and
top-p keeps a beginning of that order, so its last element says it all, and nearly every id is decided by its
bucket alone. The counts give top-k's bucket exactly and bounds of the mass above and below each, between
which top-p's share is reached: two or three buckets. So a row is read three times, whatever its parameters,
and some hundred ids are searched. Where more are in doubt than a list holds (tens of thousands of equal
logits) the search goes over the whole row. Mass is counted in integers, as in
model_worker.sampling.truncation: sums are exact and the same in any order. Ids that top-n-sigma cuts off
(below `floor`) count nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 1 << 14
"""Number of ids in a row's list: 64 KiB."""
NUM_BUCKETS: tl.constexpr = tl.constexpr(256)
MASS_ONE: tl.constexpr = tl.constexpr(float(1 << 40))
WEIGHTLESS: tl.constexpr = tl.constexpr(28.0)
"""Distance below the largest logit from which on an id has no mass: exp(-28) < 2^-40."""
NARROWEST: tl.constexpr = tl.constexpr(1e-6)
SLACK: tl.constexpr = tl.constexpr(1e-4)
"""Margin that exceeds the rounding errors in the bounds of a bucket's mass."""
NUM_PARTS: tl.constexpr = tl.constexpr(16)
FIRST_OF_ALL: tl.constexpr = tl.constexpr((1 << 63) - 1)
LAST_OF_ALL: tl.constexpr = tl.constexpr(-(1 << 63))


class Scratch(NamedTuple):
    """Memory through which the launches of one truncated draw pass results."""

    highest: Tensor  # [n, blocks] float32
    lowest: Tensor  # [n, blocks] float32, of the finite logits
    histogram: Tensor  # [n, NUM_BUCKETS] int32
    listed: Tensor  # [n, CAPACITY] int32 ids, in no order
    num_listed: Tensor  # [n] int32, more than CAPACITY where they did not fit
    mass: Tensor  # [n, blocks, 2] int64: of the ids above the window, of those ahead of k's bucket
    moments: Tensor  # [n, blocks, 3] float64: number of finite logits, their mean, sum of squares around it

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> Scratch:
        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        return cls(
            highest=of(torch.float32, num_blocks),
            lowest=of(torch.float32, num_blocks),
            histogram=of(torch.int32, NUM_BUCKETS.value),
            listed=of(torch.int32, CAPACITY),
            num_listed=of(torch.int32),
            mass=of(torch.int64, num_blocks, 2),
            moments=of(torch.float64, num_blocks, 3),
        )


@triton.jit
def _key(x):
    """Return an int32 that is ordered like the float; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(logits, start, vocab_size, temperature, BLOCK: tl.constexpr):
    """Return (logit / temperature, id, mask of valid ids) of one block of a row."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + token, mask=inside, other=float("-inf"))
    return tl.math.div_rn(x, temperature), token, inside


@triton.jit
def _mass(x, highest):
    """Return the unnormalised probability in units of 2^-40; 0 for NaN."""
    distance = x - highest
    return tl.where(distance <= 0.0, tl.exp(distance) * MASS_ONE, 0.0).to(tl.int64)


@triton.jit
def _limits(row, columns, strides, vocab_size):
    """Return (k, p, log of min-p, standard deviations) of a row: vocab_size, 1, -inf and 0 if all ids are
    kept, as for a greedy row. columns: (top-k, top-p, log of min-p, standard deviations, greedy). strides: of
    the first three.
    """
    top_ks, top_ps, min_logit_gaps, sigmas, greedy = columns
    integer_stride, top_p_stride, float_stride = strides
    is_drawn = tl.load(greedy + row * integer_stride) == 0
    k = tl.load(top_ks + row * integer_stride)
    k = tl.where(is_drawn & (k > 0) & (k < vocab_size), k, vocab_size)
    p = tl.where(is_drawn, tl.minimum(tl.load(top_ps + row * top_p_stride), 1.0), 1.0)
    gap = tl.where(is_drawn, tl.load(min_logit_gaps + row * float_stride), float("-inf"))
    return k, p, gap, tl.where(is_drawn, tl.load(sigmas + row * float_stride), 0.0)


@triton.jit
def _extremes(
    logits, rows, temperatures, top_ks, top_ps, min_logit_gaps, sigmas, greedy, highest, lowest, histogram,
    num_listed, moments, vocab_size, float_stride, integer_stride, top_p_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest and smallest logits of rows that are truncated; also clears their histograms and
    lists.
    """
    i, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + i)
    columns = (top_ks, top_ps, min_logit_gaps, sigmas, greedy)
    k, p, gap, sigma = _limits(row, columns, (integer_stride, top_p_stride, float_stride), vocab_size)
    if (k < vocab_size) | (p < 1.0) | (gap > float("-inf")) | (sigma > 0.0):
        temperature = tl.load(temperatures + row * float_stride)
        x, _token, _inside = _scaled(logits + i * vocab_size, block * BLOCK, vocab_size, temperature, BLOCK)
        place = i * tl.num_programs(1) + block
        tl.store(highest + place, tl.max(x, 0))
        tl.store(lowest + place, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
        if sigma > 0.0:
            finite = (x > float("-inf")) & (x < float("inf"))
            num = tl.sum(finite.to(tl.float64), 0)
            mean = tl.sum(tl.where(finite, x, 0.0).to(tl.float64), 0) / tl.maximum(num, 1.0)
            distance = tl.where(finite, x.to(tl.float64) - mean, 0.0)
            tl.store(moments + 3 * place, num)
            tl.store(moments + 3 * place + 1, mean)
            tl.store(moments + 3 * place + 2, tl.sum(distance * distance, 0))
        if block == 0:
            bucket = tl.arange(0, NUM_BUCKETS)
            tl.store(histogram + i * NUM_BUCKETS + bucket, bucket * 0)
            tl.store(num_listed + i, 0)


@triton.jit
def _scale(highest, lowest, moments, sigma, i, num_blocks, BLOCKS: tl.constexpr):
    """Return (largest logit of a row, buckets per nat, floor). The buckets divide the range that has mass, or
    the range down to the floor if that is smaller. The floor is `sigma` standard deviations below the largest
    logit; 0: no floor.
    """
    b = tl.arange(0, BLOCKS)
    inside = b < num_blocks
    top = tl.max(tl.load(highest + i * num_blocks + b, mask=inside, other=float("-inf")), 0)
    bottom = tl.min(tl.load(lowest + i * num_blocks + b, mask=inside, other=float("inf")), 0)
    floor = float("-inf")
    if sigma > 0.0:
        place = moments + 3 * (i * num_blocks + b)
        num = tl.load(place, mask=inside, other=0.0)
        mean = tl.load(place + 1, mask=inside, other=0.0)
        square = tl.sum(tl.load(place + 2, mask=inside, other=0.0), 0)
        all_num = tl.maximum(tl.sum(num, 0), 1.0)
        distance = mean - tl.sum(num * mean, 0) / all_num
        variance = (square + tl.sum(num * distance * distance, 0)) / all_num
        floor = (top.to(tl.float64) - sigma.to(tl.float64) * tl.sqrt(variance)).to(tl.float32)
    bottom = tl.maximum(bottom, floor)
    width = tl.maximum(tl.minimum(top - bottom, WEIGHTLESS), NARROWEST)
    return top, tl.math.div_rn(NUM_BUCKETS - 1.0, width), floor


@triton.jit
def _bucket(x, top, per_nat):
    """Return the bucket of x. Bucket 0 has the largest logit, the last one everything far below, and NaN."""
    distance = tl.where(x == top, 0.0, (top - x) * per_nat)
    return tl.where(distance < NUM_BUCKETS - 1, distance, NUM_BUCKETS - 1).to(tl.int32)


@triton.jit
def _count(
    logits, rows, temperatures, top_ks, top_ps, min_logit_gaps, sigmas, greedy, highest, lowest, histogram,
    moments, vocab_size, float_stride, integer_stride, top_p_stride,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + i)
    columns = (top_ks, top_ps, min_logit_gaps, sigmas, greedy)
    k, p, _gap, sigma = _limits(row, columns, (integer_stride, top_p_stride, float_stride), vocab_size)
    if (k < vocab_size) | (p < 1.0):
        temperature = tl.load(temperatures + row * float_stride)
        x, _token, inside = _scaled(logits + i * vocab_size, block * BLOCK, vocab_size, temperature, BLOCK)
        top, per_nat, floor = _scale(highest, lowest, moments, sigma, i, tl.num_programs(1), BLOCKS)
        counts = tl.histogram(_bucket(x, top, per_nat), NUM_BUCKETS, mask=inside & ~(x < floor))
        place = histogram + i * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _window(histogram, per_nat, k, p, vocab_size):
    """Return (first, last, k, bucket of k, number of ids ahead of that bucket): the buckets that may contain
    the last id to be kept. Top-k and top-p keep all ids above them, and none below. If k keeps all ids with
    mass, it is vocab_size and its bucket NUM_BUCKETS.
    """
    bucket = tl.arange(0, NUM_BUCKETS)
    # Ids without mass are not drawn, either: noise makes up for at most 20 nats. It does not count, or where
    # top-k reaches so far, as it does at low temperatures, the window would have nearly all ids.
    num_buckets = tl.where(per_nat * WEIGHTLESS < NUM_BUCKETS - 0.9, NUM_BUCKETS - 1, NUM_BUCKETS)
    count = tl.load(histogram + bucket, mask=bucket < num_buckets, other=0).to(tl.int64)
    upto = tl.cumsum(count, 0)
    k = tl.where(k < tl.sum(count, 0), k, vocab_size)
    within_k = tl.minimum(upto, k) - tl.minimum(upto - count, k)
    most = tl.exp(tl.math.div_rn(-bucket.to(tl.float32), per_nat)) * (MASS_ONE * (1.0 + SLACK)) + 1.0
    least = tl.exp(tl.math.div_rn(-1.0 - bucket, per_nat)) * (MASS_ONE * (1.0 - SLACK))
    least = tl.where(bucket < NUM_BUCKETS - 1, least, 0.0)
    most, least = within_k * most.to(tl.int64), within_k * least.to(tl.int64)
    most_upto, least_upto = tl.cumsum(most, 0), tl.cumsum(least, 0)
    most_after, least_after = tl.sum(most, 0) - most_upto, tl.sum(least, 0) - least_upto
    # A share p of what top-k keeps is reached where (1 - p) * upto = p * after.
    p = p.to(tl.float64)
    missing = tl.where(p < 1.0, p * least_after.to(tl.float64), 1.0)
    is_above = (upto < k) & ((1.0 - p) * most_upto.to(tl.float64) < missing)
    is_enough = (upto >= k) | ((1.0 - p) * least_upto.to(tl.float64) >= p * most_after.to(tl.float64))
    first, last = tl.sum(is_above.to(tl.int32), 0), NUM_BUCKETS - tl.sum(is_enough.to(tl.int32), 0)
    k_bucket = tl.where(k < vocab_size, tl.sum((upto < k).to(tl.int32), 0), NUM_BUCKETS)
    return first, last, k, k_bucket, tl.sum(tl.where(upto < k, count, 0), 0)


@triton.jit
def _doubtful(row, window, start, TILE: tl.constexpr, ID_BITS: tl.constexpr):
    """Return (id, scaled logit, order, mask of valid ids) of TILE ids in a window, from position `start` on.
    The order is an int64, different for all ids, and larger for earlier ones.

    row: (logits, temperature, number of ids to look at, the list, its length or 0 to look at the whole row,
    floor). window: (largest scaled logit, buckets per nat, first, last).
    """
    logits, temperature, num, listed, num_listed, floor = row
    top, per_nat, first, last = window
    at = start + tl.arange(0, TILE)
    inside = at < num
    token = tl.where(at < num_listed, tl.load(listed + at, mask=at < num_listed, other=0), at)
    x = tl.math.div_rn(tl.load(logits + token, mask=inside, other=float("-inf")), temperature)
    bucket = _bucket(x, top, per_nat)
    order = (_key(x).to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - token)
    return token, x, order, inside & (bucket >= first) & (bucket <= last) & ~(x < floor)


@triton.jit
def _range_between(row, window, low, high, TILE: tl.constexpr, ID_BITS: tl.constexpr):
    """Return (smallest, largest) order between low and high."""
    smallest, largest = low * 0 + FIRST_OF_ALL, low * 0 + LAST_OF_ALL
    for start in range(0, row[2], TILE):
        _token, _x, order, inside = _doubtful(row, window, start, TILE, ID_BITS)
        inside = inside & (order >= low) & (order <= high)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, order, FIRST_OF_ALL), 0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, order, LAST_OF_ALL), 0))
    return smallest, largest


@triton.jit
def _mass_from(row, window, cut, TILE: tl.constexpr, ID_BITS: tl.constexpr):
    """Return the mass of the doubtful ids up to the one with order `cut`."""
    mass = cut * 0
    for start in range(0, row[2], TILE):
        _token, x, order, inside = _doubtful(row, window, start, TILE, ID_BITS)
        mass += tl.sum(tl.where(inside & (order >= cut), _mass(x, window[0]), 0), 0)
    return mass


@triton.jit
def _last_before(
    row, window, low, before, bound, BY_MASS: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return the order of the last id in a window such that less than `bound` (ids, or mass) is ahead of it;
    `before` of that is above the window. At least `low`; the first id if there is none.
    """
    part = tl.arange(0, NUM_PARTS).to(tl.int64)
    low, high = _range_between(row, window, low, before * 0 + FIRST_OF_ALL, TILE, ID_BITS)
    while low < high:
        width = (high - low) // NUM_PARTS + 1
        last_of_part = low + (part + 1) * width - 1
        ahead = part * 0 + before
        for start in range(0, row[2], TILE):
            _token, x, order, inside = _doubtful(row, window, start, TILE, ID_BITS)
            if BY_MASS:
                amount = tl.where(inside, _mass(x, window[0]), 0)
            else:
                amount = inside.to(tl.int64)
            ahead += tl.sum(tl.where(order[:, None] > last_of_part[None, :], amount[:, None], 0), 0)
        # The first part ahead of which there is less has the id; all later ones are ids that are kept.
        too_much = tl.sum((ahead.to(tl.float64) >= bound).to(tl.int64), 0)
        low += tl.minimum(too_much, NUM_PARTS - 1) * width
        low, high = _range_between(row, window, low, low + width - 1, TILE, ID_BITS)
    return high


@triton.jit
def _cut(
    row, window, k, k_bucket, num_ahead, p, mass_above, mass_ahead, vocab_size,
    TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Return the order of the last id that is kept. `ahead`: before k's bucket, or all; `above`: above the
    window.
    """
    cut = mass_above * 0 + LAST_OF_ALL
    border = (window[0], window[1], k_bucket, k_bucket)
    if k < vocab_size:
        cut = _last_before(row, border, cut, num_ahead, k.to(tl.float64), False, TILE, ID_BITS)
    if p < 1.0:
        mass = mass_ahead
        if k < vocab_size:
            mass += _mass_from(row, border, cut, TILE, ID_BITS)
        bound = p.to(tl.float64) * mass.to(tl.float64)
        cut = _last_before(row, window, cut, mass_above, bound, True, TILE, ID_BITS)
    return cut
