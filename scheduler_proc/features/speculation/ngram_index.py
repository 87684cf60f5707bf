"""NgramIndex: where the end of a growing sequence has come up before.

One table for n-grams of all sizes: at the hash of an n-gram stands the position of the token that followed it
last. A slot that another n-gram has taken since is a match lost; what is found is compared with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from runtime.wire.format import IntArray

MAX_NGRAM = 8
SLOTS_A_TOKEN = 16
"""Slots for each token; MAX_NGRAM of them are used."""
MAX_SLOTS = 1 << 19
"""2 MiB, enough for 2^15 tokens; of more the oldest are forgotten bit by bit."""
MAX_BULK = 1 << 14
"""Tokens of a prompt that are looked through, the last ones: 4 ms."""
FEW_TOKENS = 16
"""So many are added one by one."""

# Odd, of 31 bits, so that a sum of products with token ids is a small integer.
_FACTORS = (
    *(0x7FEB352D, 0x46CA6B45, 0x6C8E9CF5, 0x5851F42D),
    *(0x4C957F2D, 0x78DDE6E5, 0x51ED270B, 0x68E31DA5),
)

# So that an n-gram does not share a slot with its end where its first token is 0.
_STEP = 0x2545F491


class NgramIndex:
    """Tokens are added at its end; `find` is asked for that end."""

    def __init__(self, tokens: IntArray, max_len: int) -> None:
        """`max_len`: tokens that the sequence may come to have; the table has room for about so many."""
        self.tokens: list[int] = []
        self._num_slots = min(SLOTS_A_TOKEN * max_len, MAX_SLOTS) | 1
        self._table = np.zeros(self._num_slots, np.int32)
        self._slots = self._table.data
        self._end: list[int] = []
        """Slots of the n-grams at the end, of one token, of two, ..."""
        self._extend_at_once(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, new: Sequence[int]) -> None:
        """Add tokens at the end."""
        tokens, slots, num_slots = self.tokens, self._slots, self._num_slots
        if len(new) > FEW_TOKENS:
            self._extend_at_once(np.array(new, np.int32))
            return
        for token in new:
            at = len(tokens)
            for slot in self._end:
                slots[slot] = at
            tokens.append(token)
            self._end = _slots_of_end(tokens[-MAX_NGRAM:], num_slots)

    def find(self, end: list[int] | None = None) -> int:
        """Return the position of the token that followed the longest n-gram at the end when it came up last,
        -1 if it never has. end: of another sequence, in place of its own; at most MAX_NGRAM tokens.
        """
        tokens, slots = self.tokens, self._slots
        if end is None:
            end, found = tokens[-MAX_NGRAM:], self._end
        else:
            found = _slots_of_end(end, self._num_slots)
        for n in range(len(found), 0, -1):
            at = slots[found[n - 1]]
            if at >= n and tokens[at - n : at] == end[-n:]:
                return at
        return -1

    def following(self, at: int, num_tokens: int) -> list[int]:
        """Return what followed there. Where it runs into the end the sequence repeats itself, so it goes on
        from there.
        """
        found = self.tokens[at : at + num_tokens]
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)]
        return found

    def _extend_at_once(self, new: IntArray) -> None:
        """Do the same as `extend`, for many tokens: their cost is that of a few passes over them."""
        num_old = len(self.tokens)
        first = max(0, num_old - MAX_NGRAM)
        self.tokens += new.tolist()
        num_tokens = len(self.tokens)
        if num_tokens - first > MAX_BULK:
            first = num_tokens - MAX_BULK
        seen = np.array(self.tokens[first:], np.int64)
        h = np.zeros(len(seen), np.int64)
        self._end = []
        for n, factor in enumerate(_FACTORS, 1):
            if n > len(seen):
                break
            # h[i]: of the n tokens up to first + i; what follows is one behind.
            h[n - 1 :] += seen[: len(seen) - n + 1] * factor + _STEP
            found = h[n - 1 :] % self._num_slots
            # Of equal slots the last one is written last.
            self._table[found[:-1]] = np.arange(first + n, num_tokens, dtype=np.int32)
            self._end.append(found.item(-1))


def _slots_of_end(tokens: list[int], num_slots: int) -> list[int]:
    """Slots of the n-grams at the end of these tokens. Written out where there are eight: three times as
    fast.
    """
    if len(tokens) < MAX_NGRAM:
        sums = accumulate(
            before * factor + _STEP for before, factor in zip(reversed(tokens), _FACTORS, strict=False)
        )
        return [h % num_slots for h in sums]
    h, g, f, e, d, c, b, a = tokens
    fa, fb, fc, fd, fe, ff, fg, fh = _FACTORS
    h1 = a * fa + _STEP
    h2 = h1 + b * fb + _STEP
    h3 = h2 + c * fc + _STEP
    h4 = h3 + d * fd + _STEP
    h5 = h4 + e * fe + _STEP
    h6 = h5 + f * ff + _STEP
    h7 = h6 + g * fg + _STEP
    h8 = h7 + h * fh + _STEP
    n = num_slots
    return [h1 % n, h2 % n, h3 % n, h4 % n, h5 % n, h6 % n, h7 % n, h8 % n]
