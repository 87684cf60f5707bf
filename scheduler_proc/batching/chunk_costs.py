"""ChunkCosts: what chunks of a prompt take of a step's budget where later tokens count for more, as they
attend to more. So each chunk of a long prompt takes as long as the first one, and no stage of a pipeline
waits for the chunk that the next one computes.
"""

from __future__ import annotations

from math import isqrt

LEAST_PART = 8
"""No chunk is cut to less than this part of a whole one: small products take longer for each token."""


class ChunkCosts:
    def __init__(self, max_tokens: int, attention_span: int) -> None:
        """max_tokens: those of a whole chunk at the beginning of a prompt. attention_span: number of tokens
        before a token at which it takes twice as long as the first one.
        """
        self._span = attention_span
        self._budget = max_tokens
        self._least = max(1, max_tokens // LEAST_PART)

    def most(self, start: int, budget: int) -> int:
        """Return how many tokens behind `start` fit in what is left of a budget; 1 at least."""
        # n + (start * n + n * n / 2) / span, the time of n tokens, is to be the budget's part of the time of
        # a whole chunk: a quadratic equation, in whole numbers so that a run replays on any machine.
        before = self._span + start
        room = budget * (2 * self._span + self._budget)
        fits = isqrt(before * before + room) - before
        return min(budget, max(fits, self._least))

    def cost(self, start: int, num_new: int, budget: int) -> int:
        """Return what so many tokens behind `start` take of what is left of a budget."""
        work = num_new * (2 * (self._span + start) + num_new)
        return min(budget, max(num_new, -(-work // (2 * self._span + self._budget))))
