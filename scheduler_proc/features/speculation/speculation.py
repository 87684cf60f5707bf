"""Speculation: guesses at the next tokens of one request. In this order it uses drafts that came with the
request, the continuation in its `prediction`, and what followed earlier occurrences of the last tokens of
prompt and output.

While the request has something to guess, its row is planned only after its tokens are committed. Otherwise
its steps overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from runtime.base.errors import InvalidRequest
from runtime.wire.format import unpack_ids
from runtime.wire.messages import Closed, DraftCounts
from scheduler_proc.core.request import Request
from scheduler_proc.core.rows import Rows
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.speculation.draft_length import DraftLength
from scheduler_proc.features.speculation.guessing_rows import MIN_TOGETHER, GuessingRows
from scheduler_proc.features.speculation.ngram_index import MAX_NGRAM, NgramIndex
from scheduler_proc.features.speculation.step_cost import StepCost

MAX_OUTPUT_INDEXED = 4096
"""Number of output tokens for which an index has room. Further ones overwrite older ones."""


class SpeculationSettings(NamedTuple):
    has_ngram: bool = False
    num_draft_tokens: int = 0
    """Maximum number of guesses of a row in a step."""
    min_together: int = MIN_TOGETHER
    """Number of rows from which on guesses are made for all of them at once."""


class Speculation(RequestFeature):
    """Speculation of one request. Its hooks must come after those of a feature that masks the row, and before
    those that report tokens.
    """

    def __init__(
        self, req: Request, num_draft_tokens: int, cost: StepCost, guesser: GuessingRows | None = None
    ) -> None:
        """num_draft_tokens: most guesses in a step; 0: only the drafts of the request. guesser: RowGuesser
        that the row may join.
        """
        self._req = req
        self._most = num_draft_tokens
        self._cost = cost
        self._drafts: list[int] = unpack_ids(req.draft_ids).tolist()
        ids = unpack_ids(req.prediction_ids)
        self._prediction = NgramIndex(ids, len(ids)) if len(ids) else None
        self._index: NgramIndex | None = None
        self._length = DraftLength() if self._prediction is not None else DraftLength(cost.rate)
        self._is_adaptive = True
        """True if the last guesses were not the request's own drafts."""
        self._is_predicted = False
        """True if the last guesses came from its prediction."""
        self._num_drafted = 0
        self._num_right = self._num_wrong = 0
        """Numbers of right and wrong guesses from its prediction."""
        self._guesser = guesser if self._most and self._prediction is None else None
        self._row = -1
        self._is_together = False
        """True while the guesser has its row and its state."""
        self._is_marked = False

    # -- hooks ----------------------------------------------------------------------------------------------

    def row_opened(self, row: int) -> None:
        self._row = row
        self._cost.num_guessing += self._most > 0
        if self._guesser is not None and self._only_looks_up():
            self._guesser.admit(row, self)
        self._plan_when_committed(bool(self._drafts) or self._num_drafts() > 0)

    def row_lost(self) -> None:
        self._cost.num_guessing -= self._most > 0
        if self._is_together:
            self._leave()
        if self._guesser is not None:
            self._index = None  # the memory belongs to the row

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        if self._is_together:
            self._leave()
        if not req.num_in_flight:
            room = req.max_len - req.num_tokens - 1
            row.guesses = self._guesses(room) if room > 0 else ()

    def accept(self, sampled: Sampled) -> list[int]:
        if self._is_together:
            self._leave()
        num_drafted, num_accepted = sampled.num_guesses, len(sampled.ids) - 1
        if num_drafted:
            self._num_drafted += num_drafted
            if self._is_predicted:
                self._num_right += num_accepted
                self._num_wrong += num_drafted - num_accepted
            if self._is_adaptive:
                self._cost.note_verified(num_drafted, num_accepted)
        if self._is_followed(sampled):
            return sampled.ids
        if not num_drafted:
            self._length.note_without()
        elif self._is_adaptive:
            self._length.note_verified(num_drafted, num_accepted)
        self._plan_when_committed(bool(self._drafts) or self._has_guesses(sampled.ids))
        return sampled.ids

    def closing(self, closed: Closed) -> Closed:
        if self._is_together:
            self._leave()
        num_accepted = self._req.num_accepted_drafts
        counts = DraftCounts(self._num_drafted, num_accepted, self._num_right, self._num_wrong)
        return msgspec.structs.replace(closed, drafts=counts)

    # -- with others ----------------------------------------------------------------------------------------

    def join(self, upto_now: bool) -> None:
        """Add the row to those for which the guesser guesses together. upto_now: with an index up to now."""
        assert self._guesser is not None
        self._is_together = self._is_adaptive = True
        is_marked = self._is_marked
        self._plan_when_committed(False)
        index = self._index
        if upto_now or index is None:
            index = self._index_upto_now()
        self._guesser.put(self._row, self._most, self._length, index, is_marked)

    def _only_looks_up(self) -> bool:
        """Return True if only n-gram lookup needs the tokens of its row, so the guesser can handle it."""
        req = self._req
        return not self._drafts and req.features == (self,) and req.stops.fit_the_column

    def _leave(self) -> None:
        assert self._guesser is not None
        assert self._index is not None
        self._is_together = False
        row, rows = self._row, self._req.rows
        self._num_drafted += self._guesser.take_back(row, self._length, self._index)
        if self._req.row == row:
            is_marked = rows.is_planned_when_committed(row)
            rows.plan_all_when_committed(np.array([row], np.intp), np.zeros(1, np.bool_))
            self._plan_when_committed(is_marked)

    # -- guesses --------------------------------------------------------------------------------------------

    def _plan_when_committed(self, wanted: bool) -> None:
        self._is_marked = wanted
        self._req.rows.plan_when_committed(self._req.row, wanted, self)

    def _num_drafts(self) -> int:
        cost = self._cost
        return self._length.num_drafts(min(self._most, cost.most), cost.bar, cost.least)

    def _is_followed(self, sampled: Sampled) -> bool:
        """Return True if the tokens came as expected for so long that there is nothing to learn or
        look up.
        """
        if self._index is None:
            return False
        is_own = self._is_adaptive and not self._is_predicted
        return self._index.follow(sampled.ids, sampled.num_guesses if is_own else 0)

    def _has_guesses(self, new: list[int]) -> bool:
        """Return True if there is something to guess behind the new tokens, which are not yet appended to the
        request. If a guess was right there are probably more, which are looked up when the row is planned.
        """
        is_likely = len(new) > 1
        if not (is_likely or self._num_drafts()):
            return False
        index = self._index_upto_now(new)
        return (
            is_likely
            or index.look() >= 0
            or (self._prediction is not None and self._prediction.find(index) >= 0)
        )

    def _guesses(self, room: int) -> Sequence[int]:
        self._is_adaptive = self._is_predicted = False
        if self._drafts:
            req = self._req
            output = req.tokens[req.num_prompt :].tolist()
            num_output = len(output)
            if num_output < len(self._drafts) and output == self._drafts[:num_output]:
                return self._drafts[num_output : num_output + room]
            self._drafts = []
        num_tokens = min(room, self._num_drafts())
        if not num_tokens:
            return ()
        self._is_adaptive = True
        index = self._index_upto_now()
        if self._prediction is not None and (found := self._predicted(index, num_tokens)):
            self._is_predicted = True
            return found
        return index.guess(num_tokens)

    def _predicted(self, index: NgramIndex, num_tokens: int) -> list[int]:
        """Return the continuation in the prediction; at the start of the output, its beginning."""
        assert self._prediction is not None
        at = self._prediction.find(index) if self._req.num_output else 0
        return self._prediction.tokens[at : at + num_tokens].tolist() if at >= 0 else []

    def _index_upto_now(self, new: Sequence[int] = ()) -> NgramIndex:
        """Return the index, brought up to all committed tokens and the given new ones."""
        req, index = self._req, self._index
        num_tokens = req.num_tokens
        num_indexed = 0 if index is None else len(index.tokens)
        if index is None or num_indexed > num_tokens:
            num_predicted = 0 if self._prediction is None else len(self._prediction.tokens)
            max_len = max(min(req.max_len, num_tokens + MAX_OUTPUT_INDEXED), num_predicted)
            slots = None if self._guesser is None else self._guesser.slots_of(req.row)
            index = self._index = NgramIndex(req.tokens, max_len, slots)
        elif num_indexed < num_tokens:
            index.extend(req.tokens[num_indexed:].tolist())
        if new:
            index.extend(new)
        return index


def attach_speculation(
    settings: SpeculationSettings, cost: StepCost, rows: Rows
) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives Speculation to each request that may guess."""
    has_guesser = settings.has_ngram and rows.tokens.shape[1] >= MAX_NGRAM
    most_of_server = settings.num_draft_tokens if settings.has_ngram else 0
    guesser = rows.guesser = GuessingRows(rows, cost, settings.min_together) if has_guesser else None

    def attach(req: Request) -> RequestFeature | None:
        if req.group is not None:  # its next tokens are known only when all its rows have theirs
            return None
        wanted = req.sampling.speculative_num_draft_tokens
        if not most_of_server and wanted is None and not req.prediction_ids and not req.draft_ids:
            return None  # the usual case if nothing guesses
        most = most_of_server
        if wanted is not None and wanted > most:
            has = f"with at most {most}" if most else "without --speculative-algorithm NGRAM"
            raise InvalidRequest(
                f"speculative_num_draft_tokens is {wanted}; the server was started {has}",
                param="speculative_num_draft_tokens",
            )
        most = most if wanted is None else wanted
        if req.prediction_ids and not most:
            has = (
                "speculative_num_draft_tokens is 0"
                if settings.has_ngram
                else "the server was started without --speculative-algorithm NGRAM"
            )
            raise InvalidRequest(f"prediction: nothing looks in it, as {has}", param="prediction")
        if req.prompt_table is not None:
            most = 0  # its index may find virtual tokens, which are never sampled
        return Speculation(req, most, cost, guesser) if most or req.draft_ids else None

    return attach
