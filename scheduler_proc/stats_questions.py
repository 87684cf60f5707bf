"""StatsQuestions: who asks for statistics, at once or for those of the next step.

Nothing is sent to somebody who has not asked again: a question is one small entry until it is answered, at
the next step, so a reader that is slow or gone costs nothing. What it misses meanwhile leaves the ring, and
the answer says how much that was.
"""

from __future__ import annotations

import msgspec

from runtime.messages import ControlReply, ControlRequest, ErrorInfo
from scheduler_proc.output import Output
from scheduler_proc.step_stats import StepStats

MAX_RECORDS = 100
"""Iterations in one answer: 0.6 ms to make and encode."""
MAX_REQUEST_ITERATIONS = 4
"""As they hold a record of each live request."""
MAX_WAITING = 1024
"""Questions that wait for the next step; with one more the first is answered with what there is."""


class StatsQuestions:
    def __init__(self, stats: StepStats, output: Output) -> None:
        self.stats = stats
        self._output = output
        self._waiting: dict[tuple[int, int], ControlRequest] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def totals(self) -> dict[str, int | float | str | list[int] | list[float]]:
        """As StepStats."""
        return self.stats.totals()

    def ask(self, question: ControlRequest) -> None:
        """Answer now; or, if it waits, as soon as there is something newer."""
        missing = self.stats.missing_setting(question.op == "request_stats")
        if missing:
            error = ErrorInfo(
                f"these statistics are off: start the runtime with {missing} above 0",
                "stats_off",
                missing,
                400,
            )
            raw = msgspec.Raw(msgspec.msgpack.encode(error))
            self._output.reply(ControlReply(question.client, question.number, raw, ok=False))
            return
        if not question.wait or self.stats.has_news_for(question.after):
            self._answer(question)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._answer(self._waiting.pop(next(iter(self._waiting))))
        self._waiting[question.client, question.number] = question

    def answer_waiting(self) -> None:
        """A step may have ended."""
        for key, question in list(self._waiting.items()):
            if self.stats.has_news_for(question.after):
                del self._waiting[key]
                self._answer(question)

    def forget(self, client: int) -> None:
        """It has gone."""
        for key in [key for key in self._waiting if key[0] == client]:
            del self._waiting[key]

    def _answer(self, question: ControlRequest) -> None:
        stats, after = self.stats, question.after
        page = (
            stats.iterations_after(after, MAX_RECORDS)
            if question.op == "iteration_stats"
            else stats.requests_after(after, MAX_REQUEST_ITERATIONS, question.own)
        )
        raw = msgspec.Raw(msgspec.msgpack.encode(page))
        self._output.reply(ControlReply(question.client, question.number, raw))
