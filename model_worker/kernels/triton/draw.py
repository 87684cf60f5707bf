"""Draw a token from each row of logits: temperature, top-k, top-p, min-p and stateless noise, without a sort.

    grid   row            `_cut`: the last (logit, id) that may be drawn, by search
    grid   row × block    `_best_in_block`: the largest logit + noise of each block of the vocabulary
    grid   row            `_best_of_blocks`

Ids are ordered by logit, largest first, equal logits by id; top-k and top-p keep a beginning of that order,
so its last element says it all. It is found digit by digit: the bits of a float, read as an integer, are in
the order of the floats, and each pass over the row counts (top-k) or weighs (top-p) what lies above eight
candidates at once. Mass is counted in integers, as in model_worker.sampling.truncation: sums are exact and
the same in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
LOWEST_KEY: tl.constexpr = tl.constexpr(-(1 << 31))
HIGHEST_ID: tl.constexpr = tl.constexpr((1 << 31) - 1)
MASS_ONE: tl.constexpr = tl.constexpr(float(1 << 40))
NUM_DIGITS: tl.constexpr = tl.constexpr(8)
NUM_PASSES: tl.constexpr = tl.constexpr(11)
"""33 bits, three at a time."""


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_logit_gap: Tensor | None = None,
) -> Tensor:
    """One token for each row, [n] int64, as model_worker.sampling.sampler draws it.

    logits [n, V] float32 contiguous; temperature [n] float32; seeds, positions [n] int64; greedy [n] (bool or
    int): the largest logit, no noise. top_k [n] int64 (0 keeps all), top_p [n] float32 (1 keeps all) and
    min_logit_gap [n] float32 (-inf keeps all) together or not at all; None: no row is truncated.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    truncates = top_k is not None
    cut = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    lowest = torch.empty(num_rows, dtype=torch.float32, device=device)
    if truncates:
        _cut[(num_rows,)](
            logits, temperature, top_k, top_p, min_logit_gap, greedy, cut, lowest, vocab_size,
            BLOCK=BLOCK, num_warps=16,
        )  # fmt: skip
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    _best_in_block[(num_rows, num_blocks)](
        logits, temperature, seeds, positions, greedy, cut, lowest, scores, ids, vocab_size,
        TRUNCATES=truncates, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _best_of_blocks[(num_rows,)](
        scores, ids, tokens, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1
    )
    return tokens


@triton.jit
def _key(x):
    """int32 in the order of the floats; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(logits, row, vocab_size, temperature, start, BLOCK: tl.constexpr):
    """(logit / temperature, id, whether there is such an id) of one block."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
    return tl.math.div_rn(x, temperature), token, inside


@triton.jit
def _mass(x, highest):
    """Unnormalised probability in units of 2^-40."""
    return (tl.exp(x - highest) * MASS_ONE).to(tl.int64)


@triton.jit
def _cut(
    logits, temperatures, top_ks, top_ps, min_logit_gaps, greedy, cut, lowest, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    highest = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        x, _, _ = _scaled(logits, row, vocab_size, temperature, start, BLOCK)
        highest = tl.maximum(highest, tl.max(x, 0))
    tl.store(lowest + row, highest + tl.load(min_logit_gaps + row))

    last_key = tl.zeros([], tl.int32) + LOWEST_KEY
    num_equal = tl.zeros([], tl.int64) + vocab_size
    """How many of those with the last key are kept."""
    is_greedy = tl.load(greedy + row) != 0
    has_k = (top_k > 0) & (top_k < vocab_size) & (is_greedy == 0)
    has_p = (top_p < 1.0) & (is_greedy == 0)
    above = tl.zeros([], tl.int64)
    mass_above = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    """How many have the last key."""
    mass_at = tl.zeros([], tl.int64)
    if has_k:
        last_key = _search(logits, row, vocab_size, temperature, highest, top_k.to(tl.float64), False, BLOCK)
    if has_k | has_p:
        above, mass_above, count, mass_at = _sums(
            logits, row, vocab_size, temperature, highest, last_key, BLOCK
        )
    if has_k:
        num_equal = top_k - above
    if has_p:
        # The mass that top-k leaves is what p is a share of.
        each = mass_at // tl.maximum(count, 1)
        mass = mass_above + each * tl.minimum(num_equal, count)
        budget = top_p.to(tl.float64) * mass.to(tl.float64)
        p_key = _search(logits, row, vocab_size, temperature, highest, budget, True, BLOCK)
        if p_key >= last_key:
            _, before, count_at_p, total = _sums(logits, row, vocab_size, temperature, highest, p_key, BLOCK)
            one = tl.maximum(total // tl.maximum(count_at_p, 1), 1)
            # So many have less than the budget before them.
            kept = tl.math.ceil((budget - before.to(tl.float64)) / one.to(tl.float64)).to(tl.int64)
            kept = tl.where(total > 0, kept, count_at_p)
            kept = tl.maximum(kept, 1)
            num_equal = tl.where(p_key > last_key, kept, tl.minimum(num_equal, kept))
            count = count_at_p
            last_key = p_key
    tl.store(cut + 2 * row, last_key)
    last_id = tl.zeros([], tl.int32) + HIGHEST_ID
    if num_equal < count:
        last_id = _nth_id(logits, row, vocab_size, temperature, last_key, num_equal, BLOCK)
    tl.store(cut + 2 * row + 1, last_id)


@triton.jit
def _search(logits, row, vocab_size, temperature, highest, bound, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key above which less than `bound` lies: of ids, or of mass."""
    digit = tl.arange(0, NUM_DIGITS)
    base = tl.zeros([], tl.int64) + LOWEST_KEY
    """All smaller keys have at least `bound` above them."""
    width = tl.zeros([], tl.int64) + (1 << 33)
    for _pass in range(NUM_PASSES):
        width = width // NUM_DIGITS
        # Candidate i is the last key of the i-th part of what is left.
        candidate = base + (digit + 1).to(tl.int64) * width - 1
        sums = tl.zeros([NUM_DIGITS], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            x, _, inside = _scaled(logits, row, vocab_size, temperature, start, BLOCK)
            key = _key(x).to(tl.int64)
            if BY_MASS:
                amount = tl.where(inside, _mass(x, highest), 0)
            else:
                amount = inside.to(tl.int64)
            above = key[:, None] > candidate[None, :]
            sums += tl.sum(tl.where(above, amount[:, None], 0), 0)
        # The first part whose last key has less than the bound above it holds the smallest such key.
        too_many = (sums.to(tl.float64) >= bound).to(tl.int64)
        base += tl.sum(too_many, 0) * width
    return base.to(tl.int32)


@triton.jit
def _sums(logits, row, vocab_size, temperature, highest, last_key, BLOCK: tl.constexpr):
    """(number, mass) of the ids with a larger key, then of those with this key."""
    above = tl.zeros([], tl.int64)
    mass_above = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    mass_at = tl.zeros([], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        x, _, inside = _scaled(logits, row, vocab_size, temperature, start, BLOCK)
        key = _key(x)
        mass = _mass(x, highest)
        larger = inside & (key > last_key)
        equal = inside & (key == last_key)
        above += tl.sum(larger.to(tl.int64), 0)
        mass_above += tl.sum(tl.where(larger, mass, 0), 0)
        count += tl.sum(equal.to(tl.int64), 0)
        mass_at += tl.sum(tl.where(equal, mass, 0), 0)
    return above, mass_above, count, mass_at


@triton.jit
def _nth_id(logits, row, vocab_size, temperature, last_key, n, BLOCK: tl.constexpr):
    """The id of the n-th of those with this key, counted from 1 and from the lowest id on."""
    found = tl.zeros([], tl.int32) + HIGHEST_ID
    seen = tl.zeros([], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        x, token, inside = _scaled(logits, row, vocab_size, temperature, start, BLOCK)
        at = (inside & (_key(x) == last_key)).to(tl.int64)
        rank = seen + tl.cumsum(at, 0)
        is_it = (at > 0) & (rank == n)
        found = tl.minimum(found, tl.min(tl.where(is_it, token, HIGHEST_ID), 0))
        seen += tl.sum(at, 0)
    return found


@triton.jit
def _best_in_block(
    logits, temperatures, seeds, positions, greedy, cut, lowest, scores, ids, vocab_size,
    TRUNCATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_greedy = tl.load(greedy + row) != 0
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    quad = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    words = tl.philox(seed, quad, zero + position, zero, zero)
    best = float("-inf")
    best_id = tl.zeros([], tl.int32) + HIGHEST_ID
    for lane in tl.static_range(4):
        token = block * BLOCK + 4 * tl.arange(0, BLOCK // 4) + lane
        inside = token < vocab_size
        logit = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
        x = tl.math.div_rn(logit, temperature)
        uniform = tl.maximum((words[lane] >> 8).to(tl.float32), 0.5) * (2.0**-24)
        noisy = x - tl.log(-tl.log(uniform))
        if TRUNCATES:
            key = _key(x)
            last_key = tl.load(cut + 2 * row)
            last_id = tl.load(cut + 2 * row + 1)
            kept = (key > last_key) | ((key == last_key) & (token <= last_id))
            kept = kept & (x >= tl.load(lowest + row))
            noisy = tl.where(kept, noisy, float("-inf"))
        score = tl.where(inside, tl.where(is_greedy, logit, noisy), float("-inf"))
        top = tl.max(score, 0)
        top_id = tl.min(tl.where(inside & (score == top), token, HIGHEST_ID), 0)
        best_id = tl.where(top > best, top_id, tl.where(top == best, tl.minimum(best_id, top_id), best_id))
        best = tl.maximum(best, top)
    num_blocks = tl.num_programs(1)
    tl.store(scores + row * num_blocks + block, best)
    tl.store(ids + row * num_blocks + block, best_id)


@triton.jit
def _best_of_blocks(scores, ids, tokens, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < num_blocks
    score = tl.load(scores + row * num_blocks + i, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * num_blocks + i, mask=inside, other=HIGHEST_ID)
    top = tl.max(score, 0)
    tl.store(tokens + row, tl.min(tl.where(score == top, token, HIGHEST_ID), 0).to(tl.int64))
