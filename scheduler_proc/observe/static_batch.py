"""StaticBatchCounts: the statistics of the static batch that runs now. Knows counts only."""

from __future__ import annotations

from runtime.wire.stats import StaticBatchingStats


class StaticBatchCounts:
    """Counts of the static batch that runs now: what its members that have ended have put out."""

    def __init__(self) -> None:
        self._outputs: list[int] = []
        self._num_ctx_tokens = 0

    def note_step(self, num_ctx_tokens: int) -> None:
        self._num_ctx_tokens += num_ctx_tokens

    def note_ended(self, num_output: int) -> None:
        self._outputs.append(num_output)

    def take(self) -> StaticBatchingStats:
        """Return the figures of the batch, which has ended, and begin anew."""
        outputs, num_ctx_tokens = self._outputs, self._num_ctx_tokens
        self._outputs, self._num_ctx_tokens = [], 0
        num_gen_tokens, n = sum(outputs), len(outputs)
        empty = max(outputs, default=0) * n - num_gen_tokens
        return StaticBatchingStats(n, n, num_ctx_tokens, num_gen_tokens, empty)
