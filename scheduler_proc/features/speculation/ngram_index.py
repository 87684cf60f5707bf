"""NgramIndex: finds where the last tokens of a growing sequence occurred before, and so which tokens may come
next.

One hash table serves n-grams of all sizes: the slot of an n-gram holds the position of the token that
followed it last. If another n-gram takes the slot, that match is lost; every match is compared with the
tokens. When MIN_RUN tokens in sequence came as expected, the sequence repeats itself, and is followed there
without further lookups. Behind LONG_RUN such tokens the n-grams, which the table already has, are not added
again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from runtime.wire.format import IntArray, pack_ids

MAX_NGRAM = 8
SLOTS_A_TOKEN = 16
"""Least number of table slots for each token. MAX_NGRAM of them are used."""
MAX_SLOTS = 1 << 19
"""Maximum number of slots of the table: 2 MiB, enough for 2^15 tokens. Beyond that the oldest n-grams are
gradually overwritten.
"""
MAX_BULK = 1 << 14
"""Number of a prompt's last tokens that are indexed, which takes 4 ms."""
FEW_TOKENS = 16
"""Number of tokens up to which they are added one by one."""
MIN_RUN = 16
LONG_RUN = 2 * MIN_RUN
"""Number of expected tokens in sequence that are still added. A later repetition of the same text thus finds
its newest copy for as long as it needs lookups, and follows that copy.
"""

# The hash of an n-gram is FACTOR * that of its first n - 1 tokens + its last token, in as many bits as number
# the table's slots; of no tokens it is EMPTY. So no product exceeds 30 bits, where Python computes fastest.
FACTOR = 1501
EMPTY = 0x2545F


class NgramIndex:
    """N-gram index of a growing sequence. `find` looks up the end of this sequence or of another one."""

    def __init__(self, tokens: IntArray, max_len: int, slots: IntArray | None = None) -> None:
        """max_len: expected number of tokens, for which the table is sized. slots: memory for it, a power of
        two; None: the index allocates its own.
        """
        self.tokens = array("i")  # not a list, whose ints would be scattered over the memory
        self.mask = (1 << (SLOTS_A_TOKEN * max_len - 1).bit_length()) - 1 & MAX_SLOTS - 1
        if slots is None:
            self._table = np.zeros(self.mask + 1, np.int32)
        else:
            self.mask &= len(slots) - 1
            self._table = slots[: self.mask + 1]
            self._table[:] = 0
        self._slots = self._table.data
        self._end: Sequence[int] = ()
        """Hashes of the n-grams at the end, of sizes 1, 2, ...; empty if they must be computed."""
        self.found = -1
        """Position of the token that may come next, by the last lookup; -1: unknown."""
        self._looked_upto = 0
        """Number of tokens at the last lookup."""
        self.num_passed = 0
        """Number of first tokens among which some may not be in the table."""
        self.num_foretold = 0
        """Number of tokens in sequence that came as expected."""
        self._foretold: Sequence[int] = ()
        self._extend_at_once(tokens)

    def extend(self, new: Sequence[int]) -> None:
        """Add tokens at the end."""
        if len(new) > FEW_TOKENS:
            self._extend_at_once(np.array(new, np.int32))
            return
        slots, mask, end = self._slots, self.mask, self._end or self._make_end()
        at = len(self.tokens)
        for token in new:
            for h in end:
                slots[h] = at
            if len(end) < MAX_NGRAM:
                end = [h * FACTOR + token & mask for h in (EMPTY, *end)]
            else:  # the same, written out: half the time
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

    def pass_over(self, new: Sequence[int]) -> None:
        """Add tokens at the end whose n-grams are in the table already."""
        self.tokens.extend(new)
        self.num_passed = len(self.tokens)
        self._end = ()

    def _make_end(self) -> Sequence[int]:
        last, mask = self.tokens[-MAX_NGRAM:], self.mask
        end = []
        for n in range(1, len(last) + 1):
            h = EMPTY
            for token in last[-n:]:
                h = h * FACTOR + token & mask
            end.append(h)
        self._end = end
        return end

    # -- what may come next ---------------------------------------------------------------------------------

    def find(self, other: NgramIndex | None = None) -> int:
        """Return the position of the token that followed the last earlier occurrence of the longest n-gram at
        the end; -1 if there is none. other: index whose end is looked up instead; it has room for at least
        as many tokens.
        """
        tokens, slots, mask = self.tokens, self._slots, self.mask
        of = self if other is None else other
        assert mask <= of.mask
        end, hashes = of.tokens[-MAX_NGRAM:], of._end or of._make_end()
        for n in range(len(hashes), 0, -1):
            at = slots[hashes[n - 1] & mask]
            if at >= n and tokens[at - n : at] == end[-n:]:
                return at
        return -1

    def look(self) -> int:
        """Return the position that `find` returns, or the one where the sequence is already
        being followed.
        """
        if self.num_foretold < MIN_RUN and self._looked_upto != len(self.tokens):
            self.found, self._looked_upto = self.find(), len(self.tokens)
        return self.found

    def guess(self, num_tokens: int) -> Sequence[int]:
        """Return up to num_tokens tokens that may come next; none if nothing is known."""
        at = self.look()
        if at < 0:
            return ()
        self._foretold = self.following(at, num_tokens + 1)
        return self._foretold[:num_tokens]

    def following(self, at: int, num_tokens: int) -> list[int]:
        """Return the num_tokens tokens from position `at` on. Where they reach the end the sequence repeats
        itself, so it continues from `at`.
        """
        found = self.tokens[at : at + num_tokens].tolist()
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)]
        return found

    def follow(self, new: Sequence[int], num_guesses: int) -> bool:
        """Record whether these next tokens came as expected. num_guesses: how many of the last guesses they
        follow; 0: of none, or of other guesses. Returns True if they continue a long run; they are then
        added, and otherwise the caller adds them.
        """
        num_new = len(new)
        if not 0 < num_guesses == num_new - 1 or new[-1] != self._foretold[num_guesses]:
            self.num_foretold = 0
            return False
        is_long = self.num_foretold >= LONG_RUN
        self.num_foretold += num_new
        self.found += num_new
        if is_long:
            self.pass_over(new)
        return is_long

    def resume(self, found: int, num_foretold: int) -> None:
        """Set the result of a lookup that was made elsewhere."""
        self.found, self.num_foretold, self._looked_upto = found, num_foretold, len(self.tokens)

    def _extend_at_once(self, new: IntArray) -> None:
        """Do what `extend` does for many tokens at once, at the cost of a few passes over them."""
        num_old = len(self.tokens)
        first = max(0, num_old - MAX_NGRAM)
        self.tokens.frombytes(pack_ids(new))
        num_tokens = len(self.tokens)
        if num_tokens - first > MAX_BULK:
            first = num_tokens - MAX_BULK
        seen = np.array(self.tokens[first:], np.int64)
        # [i, n - 1] belongs to the n tokens before first + i. If slots are equal, the last position is
        # written last.
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
