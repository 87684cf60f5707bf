"""StatsQuestions: requests for statistics, which are answered at once or after the next step.

Every answer needs a new question. A waiting question is one small entry, so a reader that is slow or gone
costs nothing. Records that it misses meanwhile leave the ring, and the answer says how many these were.
"""

from __future__ import annotations

from typing import TypeAlias

from runtime.base.errors import InvalidRequest
from runtime.ring.tenants import OWNER
from runtime.wire.messages import ControlRequest
from runtime.wire.stats import IterationStatsPage, RequestStatsPage
from scheduler_proc.core.output import Output, reply_to
from scheduler_proc.observe.step_stats import StepStats

StatsPage: TypeAlias = IterationStatsPage | RequestStatsPage

MAX_RECORDS = 100
"""Maximum number of iterations in one answer, which takes 0.6 ms to make and encode."""
MAX_REQUEST_ITERATIONS = 4
"""Maximum number of iterations in one answer about requests. Each has a record for every live request."""
MAX_WAITING = 1024
"""Maximum number of questions that wait for the next step. With one more, the oldest is answered at once with
the records so far.
"""


class StatsQuestions:
    def __init__(self, stats: StepStats, output: Output) -> None:
        self.stats = stats
        self._output = output
        self._waiting: dict[tuple[int, int], ControlRequest] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ask(self, question: ControlRequest) -> StatsPage | None:
        """Return the answer to a question; None if it waits for newer records. Raises InvalidRequest if no
        statistics are kept.
        """
        missing = self.stats.missing_setting(question.op == "request_stats")
        if missing:
            text = f"these statistics are off: start the runtime with {missing} above 0"
            raise InvalidRequest(text, code="stats_off", param=missing)
        if not question.wait or self.stats.has_news_for(question.after):
            return self._page(question)
        if len(self._waiting) >= MAX_WAITING:
            self._answer(self._waiting.pop(next(iter(self._waiting))))
        self._waiting[question.client, question.number] = question
        return None

    def answer_waiting(self) -> None:
        """Answer the waiting questions if a step has ended."""
        for key, question in list(self._waiting.items()):
            if self.stats.has_news_for(question.after):
                del self._waiting[key]
                self._answer(question)

    def forget(self, client: int, tenant: str) -> None:
        """Forget the questions of a client that has gone: those of this tenant, or all for the owner."""
        for key, question in list(self._waiting.items()):
            if key[0] == client and tenant in (OWNER, question.tenant):
                del self._waiting[key]

    def _answer(self, question: ControlRequest) -> None:
        self._output.reply(reply_to(question, self._page(question)))

    def _page(self, question: ControlRequest) -> StatsPage:
        if question.op == "iteration_stats":
            return self.stats.iterations_after(question.after, MAX_RECORDS)
        return self.stats.requests_after(question.after, MAX_REQUEST_ITERATIONS, question.own)
