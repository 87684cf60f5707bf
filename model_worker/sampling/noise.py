"""Gumbel noise by (seed, position, token id). argmax(logit + noise) is a draw from softmax(logits).

A uniform number comes from the upper 24 bits of a word, as the float32 max(bits, 1/2) / 2^24: exact, so the
same on every device, and strictly between 0 and 1, so the noise is bounded: LOWEST <= noise <= HIGHEST.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_worker.sampling.philox import LANES, token_words

LOWEST = -math.log(25 * math.log(2))
HIGHEST = 24 * math.log(2)
# An id whose logit is this far below the largest cannot win, whatever its noise; the margin covers rounding.
PRUNE_BELOW = HIGHEST - LOWEST + 0.01
# Ten rounds touch a dozen buffers of this many int64; on a CPU they should stay in the cache.
COUNTERS_AT_A_TIME = {"cpu": 1 << 14, "cuda": 1 << 22}


def gumbel(words: Tensor) -> Tensor:
    """Return noise float32 for 32-bit words (int64), of the same shape."""
    uniform = (words >> 8).float().clamp_min_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def noise_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return noise float32 [n, k] of token ids [n, k] for rows with seeds [n] and positions [n];
    all int64.
    """
    words = torch.stack(token_words(seeds[:, None], positions[:, None], ids // LANES), dim=2)
    return gumbel(words.gather(2, (ids % LANES)[:, :, None])[:, :, 0])


def perturbed(logits: Tensor, seeds: Tensor, positions: Tensor, *, prune: bool) -> Tensor:
    """Return logits [n, V] + noise, float32. prune: ids that cannot win get -inf, and no noise is computed
    for them.
    """
    num_rows, vocab_size = logits.shape
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % LANES), value=-math.inf)
    grouped = padded.view(num_rows, -1, LANES)
    all_quads = torch.arange(grouped.shape[1], device=logits.device)
    out = torch.full_like(grouped, -math.inf)
    at_a_time = COUNTERS_AT_A_TIME[logits.device.type]
    rows_at_a_time = max(1, at_a_time // len(all_quads))
    for first in range(0, num_rows, rows_at_a_time):
        rows = slice(first, first + rows_at_a_time)
        quads = _hopeful_quads(grouped[rows]) if prune else all_quads
        for some in torch.split(quads, at_a_time):
            words = token_words(seeds[rows, None], positions[rows, None], some)
            out[rows, some] = grouped[rows, some] + gumbel(torch.stack(words, dim=2))
    return out.view(num_rows, -1)[:, :vocab_size]


def _hopeful_quads(grouped: Tensor) -> Tensor:
    """Return the groups of four ids that contain one which may win, in any of the rows [n, num_quads, 4]."""
    best = grouped.amax(dim=2)
    return (best >= best.amax(dim=1, keepdim=True) - PRUNE_BELOW).any(dim=0).nonzero()[:, 0]
