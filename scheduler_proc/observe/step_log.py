"""StepLog: log lines about steps in SGLang's wording, and the throughput they show. Counts only, never
content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized

from scheduler_proc.batching.prefill_adder import PrefillTotals
from scheduler_proc.cache.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

PREFILL_LINE_S = 0.1
"""Least seconds between two prefill lines. Each sums up all chunks since the last line."""
DECODE_LINE_S = 1.0
"""Least seconds between two decode lines, since a small model's steps would fill the log."""
RATE_WINDOW_S = 1.0


class StepLog:
    """Log of steps. Every batch and every committed token is reported to it. It logs prefills as they come,
    and decodes every `decode_interval` steps but at most once a second.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: Sized,
        decode_interval: int,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._decode_interval = decode_interval
        self._clock = clock
        self._num_new_seqs = 0
        self._num_new_tokens = 0
        self._num_cached_tokens = 0
        self._next_prefill_line_at = 0.0
        self._num_decode_steps = 0
        self._next_decode_line_at = 0.0
        self.num_tokens = 0
        """Number of output tokens since the start."""
        self._line_tokens = 0
        self._line_at = clock()
        self._rate_tokens = 0
        self._rate_at = self._line_at
        self._tokens_per_s = 0.0
        self.batch_size = 0
        """Number of rows of the newest batch."""

    def note_batch(self, num_rows: int, totals: PrefillTotals) -> None:
        """Record a batch of num_rows rows."""
        self.batch_size = num_rows
        if totals.num_new_tokens:
            self._num_new_seqs += totals.num_admitted
            self._num_new_tokens += totals.num_new_tokens
            self._num_cached_tokens += totals.num_cached_tokens
            if self._clock() >= self._next_prefill_line_at:
                self._log_prefill()
        if num_rows:
            self._num_decode_steps += 1
            if self._num_decode_steps >= self._decode_interval and self._clock() >= self._next_decode_line_at:
                self._log_decode()

    def note_tokens(self, num_tokens: int) -> None:
        """Record committed output tokens."""
        self.num_tokens += num_tokens

    def tokens_per_s(self) -> float:
        """Return the output tokens per second over about the last second."""
        now = self._clock()
        if now - self._rate_at >= RATE_WINDOW_S:
            self._tokens_per_s = (self.num_tokens - self._rate_tokens) / (now - self._rate_at)
            self._rate_at = now
            self._rate_tokens = self.num_tokens
        return self._tokens_per_s

    def _usage(self) -> float:
        """Return the share of the page pool that is neither free nor evictable."""
        return 1.0 - self._kv.num_available / self._kv.pages.num_pages

    def _log_prefill(self) -> None:
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f,"
            " #running-req: %d, #queue-req: %d",
            self._num_new_seqs,
            self._num_new_tokens,
            self._num_cached_tokens,
            self._usage(),
            self._kv.rows.num_running,
            len(self._waiting),
        )
        self._next_prefill_line_at = self._clock() + PREFILL_LINE_S
        self._num_new_seqs = 0
        self._num_new_tokens = 0
        self._num_cached_tokens = 0

    def _log_decode(self) -> None:
        now = self._clock()
        rate = (self.num_tokens - self._line_tokens) / max(now - self._line_at, 1e-9)
        rows = self._kv.rows
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.1f,"
            " #queue-req: %d",
            rows.num_running,
            int(rows.num_tokens[rows.running].sum()),
            self._usage(),
            rate,
            len(self._waiting),
        )
        self._num_decode_steps = 0
        self._line_tokens = self.num_tokens
        self._line_at = now
        self._next_decode_line_at = now + DECODE_LINE_S
