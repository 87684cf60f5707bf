"""Capacity: who fits, and who has to give way. Estimates only; the KV cache manager has the last word on
every page.

MAX_UTILIZATION: admit on an estimate of what running requests will still produce, and retract one when it was
too optimistic. The estimate is a share (the new-token ratio) of the output that they may still ask for. It
sinks slowly while all goes well and jumps up with a retraction, so that retractions do not come in storms.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.request import Request
from scheduler_proc.rows import Rows

# The figures of SGLang's scheduler (new_token_ratio and its decay), which years of use have tuned.
INITIAL_RATIO = 0.7
FLOOR_OF_INITIAL = 0.14
DECAY_STEPS = 600
MAX_ESTIMATED_TOKENS = 4096
RETRACTION_HEADROOM = 20
"""Tokens each running request is expected to produce at
least, after a retraction showed that pages are short.
"""


class CapacityScheduler(Protocol):
    """Read-only: it answers, the scheduler acts."""

    def pages_wanted(self) -> int:
        """Pages that the running requests will still take, beyond those they hold."""

    def pages_for(self, req: Request) -> int:
        """Pages that a waiting request needs in order to be admitted, cached ones included."""

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Who gives up its row when pages are short."""

    def rank(self, req: Request) -> tuple[int, int]:
        """Who gets pages first when they are short: the lowest rank."""

    def note_step(self) -> None:
        """A step was planned."""

    def note_idle(self) -> None:
        """Nothing runs and nothing waits."""

    def note_retraction(self) -> None:
        """A request lost its row."""


class MaxUtilization:
    """Satisfies CapacityScheduler. `conservativeness` above 1 admits later and retracts less."""

    def __init__(self, rows: Rows, kv: KVCacheManager, conservativeness: float) -> None:
        self._rows = rows
        self._kv = kv
        self._initial = min(1.0, INITIAL_RATIO * conservativeness)
        self._floor = self._initial * FLOOR_OF_INITIAL
        self._decay = (self._initial - self._floor) / DECAY_STEPS
        self.new_token_ratio = self._initial

    def pages_wanted(self) -> int:
        rows, held = self._rows, self._rows.running
        num_tokens = rows.num_tokens[held]
        left = np.minimum(rows.max_len[held] - num_tokens, MAX_ESTIMATED_TOKENS)
        final_len = num_tokens + np.ceil(left * self.new_token_ratio).astype(np.int64)
        missing = -(-final_len // self._kv.page_size) - self._kv.num_pages[held]
        return int(np.maximum(missing, 0).sum())

    def pages_for(self, req: Request) -> int:
        """All its present tokens, and a share of what it may
        still produce; more of it after it was retracted.
        """
        num_tokens = req.num_tokens
        left = min(req.max_len - num_tokens, MAX_ESTIMATED_TOKENS)
        headroom = int(left * self.new_token_ratio) or 1
        if req.num_retractions:
            headroom = max(headroom, min(left, req.num_retractions * RETRACTION_HEADROOM))
        return self._kv.num_pages_for(num_tokens + headroom)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """The lowest priority, then the latest started: whoever started first always gets through."""
        return max(candidates, key=self.rank)

    def rank(self, req: Request) -> tuple[int, int]:
        return (-req.priority, self._rows.tenancy.item(req.row))

    def note_step(self) -> None:
        self.new_token_ratio = max(self._floor, self.new_token_ratio - self._decay)

    def note_idle(self) -> None:
        self.new_token_ratio = self._initial

    def note_retraction(self) -> None:
        """Expect of the running requests what they have produced
        so far and a little more, as a share of what they may.
        """
        rows, held = self._rows, self._rows.running
        running = self._rows.running_requests()
        produced = sum(req.num_output + RETRACTION_HEADROOM for req in running)
        allowed = int(rows.max_len[held].sum()) - sum(req.num_prompt for req in running)
        self.new_token_ratio = min(1.0, max(self.new_token_ratio, produced / (allowed + 1)))


class SlotPool:
    """The device's slots for what several requests may share, such as adapters. Counts leases by key."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._leases: dict[Hashable, int] = {}

    def can_hold(self, key: Hashable) -> bool:
        return key is None or key in self._leases or len(self._leases) < self.num_slots

    def take(self, key: Hashable) -> None:
        if key is not None:
            assert self.can_hold(key)
            self._leases[key] = self._leases.get(key, 0) + 1

    def give_back(self, key: Hashable) -> None:
        if key is not None:
            self._leases[key] -= 1
            if not self._leases[key]:
                del self._leases[key]

    @property
    def num_used(self) -> int:
        return len(self._leases)
