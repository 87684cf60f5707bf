"""ChunkCosts: cost of prompt tokens that grows with their position, because later tokens attend to more. With
it each chunk of a long prompt takes about as long as the first one, so no stage of a pipeline waits for a
longer chunk in another.
"""

from __future__ import annotations

from math import isqrt

LEAST_PART = 8
"""Smallest chunk, as a fraction 1/LEAST_PART of a whole one. Smaller matrix products take longer per token.
"""


class ChunkCosts:
    def __init__(self, max_tokens: int, attention_span: int) -> None:
        """max_tokens: size of a whole chunk at the start of a prompt. attention_span: position at which a
        token takes twice as long as the first one.
        """
        self._span = attention_span
        self._budget = max_tokens
        self._least = max(1, max_tokens // LEAST_PART)

    def most(self, start: int, budget: int) -> int:
        """Return how many tokens from position `start` on fit into the remaining budget; at least 1."""
        # n + (start * n + n * n / 2) / span, the time of n tokens, is to be the budget's part of the time of
        # a whole chunk: a quadratic equation, in whole numbers so that a run replays on any machine.
        before = self._span + start
        room = budget * (2 * self._span + self._budget)
        fits = isqrt(before * before + room) - before
        return min(budget, max(fits, self._least))

    def cost(self, start: int, num_new: int, budget: int) -> int:
        """Return how much of the remaining budget num_new tokens from position `start` on take."""
        work = num_new * (2 * (self._span + start) + num_new)
        return min(budget, max(num_new, -(-work // (2 * self._span + self._budget))))
