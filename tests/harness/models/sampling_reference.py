"""Slow reference of the sampler: one row, plain Python and float64, in the order of the documentation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.harness.row_setups import Row

WORD = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def gumbel(seed: int, position: int, token: int) -> float:
    word = philox([token >> 2, position, 0, 0], [seed & WORD, seed >> 32])[token & 3]
    return -math.log(-math.log(max(word >> 8, 0.5) * 2.0**-24))


def within_sigmas(logits: Sequence[float], top_n_sigma: float) -> list[int]:
    """Ids at most so many population standard deviations of the finite logits below the largest; 0: all."""
    x = np.array(logits, np.float64)
    lowest = x.max() - top_n_sigma * x[np.isfinite(x)].std() if top_n_sigma else -math.inf
    return np.flatnonzero(x >= lowest).tolist()


def kept_ids(
    logits: Sequence[float], top_k: int, top_p: float, min_p: float, top_n_sigma: float = 0.0
) -> list[int]:
    order = sorted(within_sigmas(logits, top_n_sigma), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    mass = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, before = sum(mass), 0.0
    kept: list[int] = []
    for token, m in zip(order, mass, strict=True):
        if kept and top_p < 1.0 and before >= top_p * total:
            break
        kept.append(token)
        before += m
    return [t for t in kept if logits[t] >= logits[order[0]] + (math.log(min_p) if min_p else -math.inf)]


def draw(logits: Sequence[float], s: Row, position: int) -> int:
    scaled = [x / s.temperature for x in logits]
    kept = kept_ids(scaled, s.top_k, s.top_p, s.min_p, s.top_n_sigma)
    return max(kept, key=lambda t: (scaled[t] + gumbel(s.seed, position, t), -t))
