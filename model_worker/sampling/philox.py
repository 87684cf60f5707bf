"""Philox 4x32-10: random bits that are a function of a key and a counter, so that a draw needs no state.

    key      the 64-bit seed of the request
    counter  (token id // 4, position of the token, 0, 0)
    lane     token id % 4

This is the layout of Triton's `tl.philox`, so a kernel makes the same bits. 32-bit words are held in int64
tensors: the product of two is exact modulo 2^64, and a word is masked where its upper half would be read.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
WORD = 0xFFFFFFFF
LANES = 4


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words for each counter. All tensors are int64, below 2^32, of shapes that
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1 = _upper(product_1, c1, k0), product_1
        c2, c3 = _upper(product_0, c3, k1), product_0
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _upper(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """Return the product's upper half, mixed with a word and a key."""
    return torch.bitwise_xor(product >> 32, word ^ key).bitwise_and_(WORD)


def token_words(seeds: Tensor, positions: Tensor, quads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of four neighbouring ids: word i is that of id 4 * quad + i. All int64 and not
    negative: seeds and positions [n, 1], quads [n, k], or [k] for all rows; words [n, k].
    """
    zero = torch.zeros_like(seeds)
    return philox_4x32((quads, positions, zero, zero), (seeds & WORD, seeds >> 32))
