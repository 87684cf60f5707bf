"""SearchProcessors: has the worker call logits processors for the hypotheses of a beam search.

One call has all hypotheses of a step, the best first, each with its own tokens. The worker keeps the tokens
of each row; for a row that has forked it gets the row that its tokens continue.
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
        """Row that each hypothesis continues; None while the output is empty."""

    def begin(self) -> None:
        """Begin with an empty output. The row's setup already says everything."""
        self._sources = None

    def follow(self, beams: Sequence[tuple[int, int]]) -> None:
        """Continue with the next beams, each given as (index of the current beam, token). Called before rows
        fork.
        """
        before = self._members()
        self._sources = [before[parent].row for parent, _ in beams]

    def plan(self, scheduled: ScheduledRow[Request]) -> None:
        """Ask for the processors of a row of the group, unless the row only fills the group."""
        member = scheduled.req
        number = self._members().index(member)
        if number < (1 if self._sources is None else len(self._sources)):
            scheduled.unseen = lambda: self._unseen(member, number)

    def check(self, results: Sequence[Sampled]) -> None:
        """Raise RequestError if a processor has failed."""
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
    """Return the scores [vocabulary] that the processors have made from a row's logprobs."""
    (scores,) = sampled.scores
    row: FloatArray = np.frombuffer(scores.frame, np.float32)
    return row
