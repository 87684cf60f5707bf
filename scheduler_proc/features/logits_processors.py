"""Processed: samples the tokens of a sequence with logits processors, which the worker calls. Processors see
all earlier tokens, so a step is sampled only when the earlier steps are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

from runtime.base.errors import InvalidRequest, RequestError
from runtime.wire.plan import PROCESSORS, ProcessedRow
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature


class Processed(RequestFeature):
    """Feature of a sequence with logits processors. It makes no guesses, because a processor is called for a
    single position.
    """

    def __init__(self, req: Request) -> None:
        self._req = req
        self._num_seen = 0
        """Number of tokens that the processors have seen in this stay."""

    def row_opened(self, row: int) -> None:
        self._num_seen = self._req.num_tokens

    def step_undone(self) -> None:
        self._num_seen = self._req.num_tokens

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        row.unseen = self._unseen

    def accept(self, sampled: Sampled) -> list[int]:
        if sampled.error:
            raise RequestError(sampled.error, param=PROCESSORS, code="logits_processor_failed")
        return sampled.ids

    def _unseen(self) -> ProcessedRow:
        row, tokens = self._req.row, self._req.tokens
        start, self._num_seen = self._num_seen, len(tokens)
        return ProcessedRow(row, row, start, tokens[start:].tobytes())


def attach_logits_processors(
    names: Collection[str], *, speculates: bool = False, is_static: bool = False
) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives Processed to each request with logits processors, except beam
    searches, which ask for them themselves. names: processors of the launch. speculates: True if rows guess
    unless they say otherwise. is_static: True with static batching.
    """

    def attach(req: Request) -> RequestFeature | None:
        if req.processing is None:
            return None
        if is_static:
            _refuse("not supported with static batching (--batching-type)")
        for number, call in enumerate(req.processing.calls):
            if call.name not in names:
                known = f"there are {', '.join(sorted(names))}" if names else "there are none"
                _refuse(f"no logits processor is called {call.name!r}; {known} (--logits-processor)", number)
        if req.draft_ids:
            _refuse("not supported together with draft_token_ids")
        if req.processing.searches:
            return None
        if speculates and req.sampling.speculative_num_draft_tokens != 0:
            _refuse("not supported together with speculation; set speculative_num_draft_tokens to 0")
        return Processed(req)

    return attach


def _refuse(why: str, number: int | None = None) -> NoReturn:
    where = PROCESSORS if number is None else f"{PROCESSORS}[{number}].name"
    raise InvalidRequest(f"{where}: {why}", param=where, code="unsupported_parameter")
