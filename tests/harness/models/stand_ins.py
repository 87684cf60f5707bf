"""Stand-ins for future capabilities, each of which shows that the feature hooks support it without a change
to the step loop.

They are as irregular as real ones: a grammar compiles for some steps and may fail, a proposer guesses wrong,
adapters are few. Each checks that its hooks are called in the order that RequestFeature promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.base.errors import RequestError
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import Cost, RequestFeature
from scheduler_proc.llm_request import KvCacheView, LlmRequestState, RequestList
from scheduler_proc.request_scheduler import RequestScheduler, SchedulerOutput
from tests.harness.simulation.fake_sampling import VOCAB_SIZE


class HookOrder(RequestFeature):
    """Asserts the life of a feature: rows are opened and lost in turns, the release comes once and last."""

    def __init__(self) -> None:
        self.has_row = False
        self.is_released = False

    def ready(self) -> bool:
        assert not self.has_row
        assert not self.is_released
        return True

    def row_opened(self, row: int) -> None:
        assert row >= 0
        assert not self.has_row
        self.has_row = True

    def accept(self, sampled: Sampled) -> list[int]:
        assert self.has_row
        assert sampled.ids
        return sampled.ids

    def row_lost(self) -> None:
        assert self.has_row
        self.has_row = False

    def release(self) -> None:
        assert not self.has_row
        assert not self.is_released
        self.is_released = True


def parity_mask(last_token: int) -> bytes:
    """Bitmask of the ids whose parity is not that of the last token."""
    return np.packbits(np.arange(VOCAB_SIZE) % 2 != last_token % 2, bitorder="little").tobytes()


class ParityGrammar(HookOrder):
    """Ids alternate between odd and even, so its mask needs every earlier token."""

    def __init__(self, req: Request, num_polls: int, fails_to_compile: bool, fails_after: int) -> None:
        super().__init__()
        self._req = req
        self._num_polls = num_polls
        self._fails_to_compile = fails_to_compile
        self._fails_after = fails_after
        """Output tokens after which it gives up; -1: never."""

    def ready(self) -> bool:
        super().ready()
        self._num_polls -= 1
        if self._num_polls <= 0 and self._fails_to_compile:
            raise RequestError("the grammar does not compile", code="invalid_grammar", status=400)
        return self._num_polls <= 0

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        row.make_masks = lambda _: [parity_mask(req.tokens.item(-1))]

    def accept(self, sampled: Sampled) -> list[int]:
        super().accept(sampled)
        last = self._req.tokens.item(-1)
        assert [token % 2 for token in sampled.ids] == [(last + 1 + i) % 2 for i in range(len(sampled.ids))]
        if 0 <= self._fails_after <= self._req.num_output:
            raise RequestError("the grammar is stuck", code="grammar_error")
        return sampled.ids


class Speculation(HookOrder):
    """A proposer that is often right."""

    def __init__(
        self, req: Request, propose: Callable[[Request, int], list[int]], rng: random.Random
    ) -> None:
        super().__init__()
        self._req = req
        self._propose = propose
        self._rng = rng

    def row_opened(self, row: int) -> None:
        """Half of them find a token in flight at nearly every turn, and guess seldom."""
        super().row_opened(row)
        self._req.rows.plan_when_committed(row, self._req.seq % 2 == 0, self)

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        room = min(self._rng.randrange(0, 5), req.max_len - req.num_tokens - 1)
        if room > 0 and not req.num_in_flight:
            row.guesses = [
                token if self._rng.random() < 0.7 else self._rng.randrange(VOCAB_SIZE)
                for token in self._propose(req, room)
            ]


class Adapter(HookOrder):
    """Occupies one of the device's few slots, shared by the requests that use the same one."""

    def __init__(self, name: bytes) -> None:
        super().__init__()
        self.name = name

    def cost(self) -> Cost:
        return Cost(slots=(self.name,))


class WideStart(HookOrder):
    """Wants several rows and a few pages to be free before it starts, as a beam search would."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def cost(self) -> Cost:
        return Cost(rows=self._num_rows, pages=self._num_rows - 1)


class RandomEviction:
    """A user's eviction policy: any rank is allowed; sometimes it is none, or it raises."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._num_asked = 0

    def rank(self, run: object) -> object:
        self._num_asked += 1
        draw = self._random.random()
        if self._num_asked == 1 or draw > 0.1:
            return draw
        if draw > 0.05:
            raise ValueError("an eviction policy of the user's")
        return None


class RandomPolicy:
    """A user's policy: any subset in any order is allowed; sometimes it answers nonsense or raises."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def order(self, waiting: object) -> object:
        assert hasattr(waiting, "__len__")
        positions = list(range(len(waiting)))
        self._random.shuffle(positions)
        draw = self._random.random()
        if draw < 0.02:
            raise ValueError("a policy of the user's")
        return positions + positions if draw < 0.04 else positions[: 1 + len(positions) // 2]


class RandomScheduler(RequestScheduler):
    """A scheduler of the user's: anybody may be left out, and sometimes somebody is paused."""

    def __init__(
        self, max_num_requests: int, kv_cache_manager: KvCacheView, max_batch_size: int, max_num_tokens: int
    ) -> None:
        self._max_batch_size = max_batch_size
        self._random = random.Random(7)

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        paused = [r for r in active_requests if r.has_row and self._random.random() < 0.02]
        there = [r for r in active_requests if r.request_id not in inflight_request_ids and r not in paused]
        chosen = [r for r in there if self._random.random() < 0.8][: self._max_batch_size]
        context = [r for r in chosen if r.state is LlmRequestState.CONTEXT_INIT]
        return SchedulerOutput(context, [r for r in chosen if r not in context], paused)
