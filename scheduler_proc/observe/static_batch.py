"""StaticBatchCounts: statistics of the running static batch. Knows counts only."""

from __future__ import annotations

from runtime.wire.stats import StaticBatchingStats


class StaticBatchCounts:
    """Counts of the running static batch: the output of its requests that have ended."""

    def __init__(self) -> None:
        self._outputs: list[int] = []
        self._num_ctx_tokens = 0

    def note_step(self, num_ctx_tokens: int) -> None:
        self._num_ctx_tokens += num_ctx_tokens

    def note_ended(self, num_output: int) -> None:
        self._outputs.append(num_output)

    def take(self) -> StaticBatchingStats:
        """Return the figures of a batch that has ended, and reset the counts."""
        outputs, num_ctx_tokens = self._outputs, self._num_ctx_tokens
        self._outputs, self._num_ctx_tokens = [], 0
        num_gen_tokens, n = sum(outputs), len(outputs)
        empty = max(outputs, default=0) * n - num_gen_tokens
        return StaticBatchingStats(n, n, num_ctx_tokens, num_gen_tokens, empty)
