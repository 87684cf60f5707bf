"""SearchProcessors: what logits processors of the launch see of each hypothesis of a search.

One call has all hypotheses of a step, the best first, each with its own tokens. The worker keeps the tokens
of each row; of one that has forked it is told which row they go on from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.base.errors import RequestError
from runtime.wire.format import FloatArray
from runtime.wire.plan import PROCESSORS, ProcessedRow
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow


class SearchProcessors:
    def __init__(self, req: Request) -> None:
        self._req = req
        self._sources: list[int] | None = None
        """Row that each hypothesis goes on from; None for an output without tokens."""

    def begin(self) -> None:
        """Begin with an output without tokens: what the setup of a row says is all that there is."""
        self._sources = None

    def follow(self, beams: Sequence[tuple[int, int]]) -> None:
        """Go on with (number of a beam now, token) for each of the next beams. Called before rows fork."""
        before = self._members()
        self._sources = [before[parent].row for parent, _ in beams]

    def plan(self, scheduled: ScheduledRow[Request]) -> None:
        """Have processors called for a row of the group, unless it runs for nothing."""
        member = scheduled.req
        number = self._members().index(member)
        if number < (1 if self._sources is None else len(self._sources)):
            scheduled.unseen = lambda: self._unseen(member, number)

    def check(self, results: Sequence[Sampled]) -> None:
        """Raises RequestError where a processor has failed."""
        for sampled in results:
            if sampled.error:
                raise RequestError(sampled.error, param=PROCESSORS, code="logits_processor_failed")

    def _unseen(self, member: Request, number: int) -> ProcessedRow:
        row = member.row
        if self._sources is None:
            return ProcessedRow(row, row, member.num_prompt, b"")
        start = member.num_tokens - 1
        return ProcessedRow(row, self._sources[number], start, member.tokens[start:].tobytes(), number)

    def _members(self) -> Sequence[Request]:
        assert self._req.group is not None
        return self._req.group.beams


def scores_of(sampled: Sampled) -> FloatArray:
    """Return the scores [vocabulary] that processors have left of a row's logprobs."""
    (scores,) = sampled.scores
    row: FloatArray = np.frombuffer(scores.frame, np.float32)
    return row
