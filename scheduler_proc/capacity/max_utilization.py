"""MAX_UTILIZATION: admit on an estimate of what running requests will still produce, and retract one when it
was too optimistic.

The estimate is a share (the new-token ratio) of the output that they may still ask for. It sinks slowly while
all goes well and jumps up with a retraction, so that retractions do not come in storms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.wire.format import TOKEN_BYTES, IntArray
from scheduler_proc.cache.kv_cache_manager import KVCacheManager, Prefix
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray

# The figures of SGLang's scheduler (new_token_ratio and its decay), which years of use have tuned.
INITIAL_RATIO = 0.7
FLOOR_OF_INITIAL = 0.14
DECAY_STEPS = 600
MAX_ESTIMATED_TOKENS = 4096
RETRACTION_HEADROOM = 20
"""Number of tokens beyond its output so far that each running request is expected to produce, after a
retraction has shown that pages are short.
"""


class MaxUtilization:
    """Capacity policy that admits requests on an estimate of their output. A `conservativeness` above 1
    admits later and retracts less.
    """

    closes_batches = False

    def __init__(self, kv: KVCacheManager, conservativeness: float) -> None:
        self._rows = kv.rows
        self._ledger = kv.cache.ledger
        self._kv = kv
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._floor = self._initial * FLOOR_OF_INITIAL
        self._decay = (self._initial - self._floor) / DECAY_STEPS
        self._promised_pages = -1  # to running requests, beyond what they hold; -1: not counted yet
        self.new_token_ratio = self._initial

    @property
    def guards_growth(self) -> bool:
        return self._ledger.has_several

    def admits(self) -> bool:
        self._promised_pages = -1
        return True

    def try_promise(self, req: Request, prefix: Prefix, extra_pages: int) -> bool:
        num_missing = self.pages_for(req) - prefix.num_pages + extra_pages
        if self._promised_pages < 0:
            if not self._rows.num_running:
                # Alone, it may use everything: intake made sure that it never needs more.
                self._promised_pages = num_missing
                return True
            self._promised_pages = self.pages_wanted()
        room = self._kv.pages.num_free + self._kv.cache.num_evictable - self._promised_pages
        if self._ledger.has_several:
            room -= self._kv.guard.num_withheld(prefix.node, num_missing)
        if num_missing > room and not self._is_owed(prefix, num_missing):
            return False
        self._promised_pages += num_missing
        return True

    def _is_owed(self, prefix: Prefix, num_missing: int) -> bool:
        """Return True if num_missing pages are there now, and keep the tenant within its share together with
        all that its rows are expected to take. What others are expected to take beyond their shares does not
        count: their rows give way when pages are short.
        """
        if not self._ledger.has_several:
            return False
        guard, account = self._kv.guard, prefix.node.account
        if not guard.is_within_share(account, num_missing):  # looks at no row
            return False
        if num_missing > self._kv.num_available - self._ledger.num_withheld(account):
            return False
        return guard.is_within_share(account, num_missing + self.pages_wanted(guard.rows_of(account)))

    def has_room_for(self, num_pages: int) -> bool:
        """Return True if num_pages pages could be promised to newcomers together."""
        return not self._rows.num_running or num_pages <= self._kv.num_available - self.pages_wanted()

    def note_seated(self, num_taken: int) -> None:
        self._promised_pages -= num_taken

    def pages_wanted(self, held: RowArray | None = None) -> int:
        """Return how many pages these rows are expected to take in addition to those they hold. held: running
        rows; None: all of them.
        """
        rows = self._rows
        if held is None:
            held = rows.running
        num_tokens = rows.num_tokens[held]
        left = np.minimum(rows.max_len[held] - num_tokens, MAX_ESTIMATED_TOKENS)
        final_len = num_tokens + np.ceil(left * self.new_token_ratio).astype(np.int64)
        missing = self._kv.most_pages(held, final_len) - self._kv.num_held(held)
        return int(np.add.reduce(np.maximum(missing, 0)))  # `sum` takes twice as long for so few

    def pages_for(self, req: Request) -> int:
        """Return how many pages a waiting request is expected to take: for all tokens that it has and for a
        share of its possible output, a larger share after a retraction.
        """
        num_tokens = len(req.parked) // TOKEN_BYTES
        left = min(req.max_len - num_tokens, MAX_ESTIMATED_TOKENS)
        headroom = int(left * self.new_token_ratio) or 1
        if req.num_retractions:
            headroom = max(headroom, min(left, req.num_retractions * RETRACTION_HEADROOM))
        return self._kv.most_pages_of(num_tokens, num_tokens + headroom)

    def may_grow(self, rows: RowArray | int, upto: IntArray | int) -> bool:
        return self._kv.guard.may_grow(rows, upto)

    def victim(self, candidates: Sequence[Request]) -> Request | None:
        """Return the request of the lowest urgency that started last. So the request that started first
        always completes.
        """
        return max(candidates, key=self.rank)

    def rank(self, req: Request) -> tuple[int, int]:
        return (-req.urgency, self._rows.stay_of[req.row])

    def note_step(self) -> None:
        self.new_token_ratio = max(self._floor, self.new_token_ratio - self._decay)

    def note_idle(self) -> None:
        self.new_token_ratio = self._initial

    def note_retraction(self) -> None:
        """Raise the estimated share: running requests are expected to produce what they have produced so far
        and a little more, relative to the most they may produce.
        """
        running = self._rows.running_requests()
        produced = sum(req.num_output + RETRACTION_HEADROOM for req in running)
        allowed = sum(req.max_len - req.num_prompt for req in running)
        self.new_token_ratio = min(1.0, max(self.new_token_ratio, produced / (allowed + 1)))


class AsChosen(MaxUtilization):
    """Capacity policy that leaves the choice to a scheduler of the user's own: it admits every chosen request
    if there is room for the tokens that it has. If pages run short all the same, the request that started
    last gives way.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        super().__init__(kv, 0.0)

    def note_retraction(self) -> None:
        """Do nothing: the policy has no estimates."""
