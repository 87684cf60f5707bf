"""NgramIndex: where the end of a growing sequence has come up before.

One table for n-grams of all sizes: at the hash of an n-gram stands the position of the token that followed it
last. A slot that another n-gram has taken since is a match lost; what is found is compared with the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from runtime.wire.format import IntArray, pack_ids

MAX_NGRAM = 8
SLOTS_A_TOKEN = 16
"""Slots of the table for each token, at least; MAX_NGRAM of them are used."""
MAX_SLOTS = 1 << 19
"""Most slots of the table: 2 MiB, enough for 2^15 tokens; of more the oldest are forgotten bit by bit."""
MAX_BULK = 1 << 14
"""Number of a prompt's last tokens that are looked through: 4 ms."""
FEW_TOKENS = 16
"""Number of tokens up to which they are added one by one."""

# The hash of an n-gram is FACTOR * that of its first n - 1 tokens + its last token, in as many bits as number
# the table's slots; of no tokens it is EMPTY. So no product exceeds 30 bits, where Python computes fastest.
FACTOR = 1501
EMPTY = 0x2545F


class NgramIndex:
    """Index of a sequence that grows. `find` looks for its own end, or for that of another one."""

    def __init__(self, tokens: IntArray, max_len: int, slots: IntArray | None = None) -> None:
        """`max_len`: tokens that the sequence may come to have; the table has room for about so many. slots:
        what it may take for that, a power of two; None: memory of its own.
        """
        self.tokens = array("i")  # not a list: its ints would be all over the memory
        self.mask = (1 << (SLOTS_A_TOKEN * max_len - 1).bit_length()) - 1 & MAX_SLOTS - 1
        if slots is None:
            self._table = np.zeros(self.mask + 1, np.int32)
        else:
            self.mask &= len(slots) - 1
            self._table = slots[: self.mask + 1]
            self._table[:] = 0
        self._slots = self._table.data
        self._end: Sequence[int] = ()
        """Hashes of the n-grams at the end, of one token, of two, ..."""
        self._extend_at_once(tokens)

    def extend(self, new: Sequence[int]) -> None:
        """Add tokens at the end."""
        if len(new) > FEW_TOKENS:
            self._extend_at_once(np.array(new, np.int32))
            return
        slots, mask, end = self._slots, self.mask, self._end
        at = len(self.tokens)
        for token in new:
            for h in end:
                slots[h] = at
            if len(end) < MAX_NGRAM:
                end = [h * FACTOR + token & mask for h in (EMPTY, *end)]
            else:  # the same written out: half as long
                a, b, c, d, e, f, g, _ = end
                end = (
                    EMPTY * FACTOR + token & mask,
                    a * FACTOR + token & mask,
                    b * FACTOR + token & mask,
                    c * FACTOR + token & mask,
                    d * FACTOR + token & mask,
                    e * FACTOR + token & mask,
                    f * FACTOR + token & mask,
                    g * FACTOR + token & mask,
                )
            at += 1
        self.tokens.extend(new)
        self._end = end

    def follow(self, new: Sequence[int]) -> None:
        """Add tokens at the end that the table has already."""
        if not new:
            return
        self.tokens.extend(new)
        last, mask = self.tokens[-MAX_NGRAM:], self.mask
        end = []
        for n in range(1, len(last) + 1):
            h = EMPTY
            for token in last[-n:]:
                h = h * FACTOR + token & mask
            end.append(h)
        self._end = end

    def find(self, other: NgramIndex | None = None) -> int:
        """Return the position of the token that followed the longest n-gram at the end when it came up last,
        -1 if it never has. other: the index whose end is looked for, in place of its own; it has room for
        as many tokens.
        """
        tokens, slots, mask = self.tokens, self._slots, self.mask
        of = self if other is None else other
        assert mask <= of.mask
        end, hashes = of.tokens[-MAX_NGRAM:], of._end
        for n in range(len(hashes), 0, -1):
            at = slots[hashes[n - 1] & mask]
            if at >= n and tokens[at - n : at] == end[-n:]:
                return at
        return -1

    def following(self, at: int, num_tokens: int) -> list[int]:
        """Return what followed there. Where it runs into the end the sequence repeats itself, so it goes on
        from there.
        """
        found = self.tokens[at : at + num_tokens].tolist()
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)]
        return found

    def _extend_at_once(self, new: IntArray) -> None:
        """Do the same as `extend`, for many tokens: their cost is that of a few passes over them."""
        num_old = len(self.tokens)
        first = max(0, num_old - MAX_NGRAM)
        self.tokens.frombytes(pack_ids(new))
        num_tokens = len(self.tokens)
        if num_tokens - first > MAX_BULK:
            first = num_tokens - MAX_BULK
        seen = np.array(self.tokens[first:], np.int64)
        # [i, n - 1] is of the n tokens before first + i. Of equal slots the last position is written last.
        places = np.empty((len(seen), MAX_NGRAM), np.int64)
        h = np.full(len(seen) + 1, EMPTY)
        end: list[int] = []
        for n in range(1, min(MAX_NGRAM, len(seen)) + 1):
            h = h[:-1] * FACTOR + seen[n - 1 :] & self.mask  # h[i] is of those before first + n + i
            places[n:, n - 1] = h[:-1]
            end.append(h.item(-1))
        self._end = end
        start = max(1, num_old - first)
        for i in range(start, min(MAX_NGRAM, len(seen))):
            self._table[places[i, :i]] = first + i
        start = max(start, MAX_NGRAM)
        at = np.arange(first + start, num_tokens, dtype=np.int32)
        self._table[places[start:].reshape(-1)] = np.repeat(at, MAX_NGRAM)
