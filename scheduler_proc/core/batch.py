"""ScheduleBatch: what one step will compute, in the scheduler's terms, and its translation to a BatchPlan.

The rows of a step are in four parts, in the plan's order:

    decodes   array     compute one token each, and nothing else
    single    objects   chunks of prompts: one token is sampled, and no feature looks at it
    guesses   arrays    compute the next token and verify guesses, and nothing else
    loose     objects   everything else: rows with features, groups, chunks that sample nothing

Decodes, single rows and guesses are committed for all rows at once, loose rows one by one.
"""

from __future__ import annotations

import msgspec
import numpy as np

from runtime.wire.format import BoolArray, IntArray, pack_ids
from runtime.wire.plan import BatchPlan, ProcessedRow, PromptPositions
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.guesses import Guesses
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray, StayArray
from scheduler_proc.core.rows import Rows
from scheduler_proc.core.scheduled_row import FUTURE, ScheduledRow

NO_ROWS: RowArray = np.empty(0, np.intp)
NO_STAY = -1
"""Number that no stay has."""
NO_COUNTS: IntArray = np.empty(0, np.int32)


class PlanColumns(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Rows of a plan, with their packed input ids and the plan's lens, samples and drafts."""

    rows: RowArray
    ids: list[bytes | memoryview]
    """Pieces of packed ids. They are joined once for all rows, because those of long prompts are large."""
    lens: IntArray
    samples: IntArray
    drafts: IntArray


def _columns_of(each: list[ScheduledRow[Request]], rows: Rows) -> PlanColumns:
    drafts = np.array([len(scheduled.guesses) for scheduled in each], np.int32)
    row_of = np.array([scheduled.row for scheduled in each], np.intp)
    num_known = [scheduled.num_known for scheduled in each]
    if num_known.count(1) == len(each) and not np.count_nonzero(drafts):  # as in beam searches
        ids: list[bytes | memoryview] = [rows.next_ids(row_of, FUTURE).tobytes()]
    else:
        ids = [scheduled.input_ids(rows) for scheduled in each]
    return PlanColumns(
        row_of,
        ids,
        np.array(num_known, np.int32) + drafts,
        np.array([scheduled.samples for scheduled in each], np.int32),
        drafts,
    )


def _columns_of_single(single: list[ScheduledRow[Request]], rows: Rows) -> PlanColumns:
    """Return the columns of rows that all sample and have no guesses."""
    return PlanColumns(
        np.array([scheduled.row for scheduled in single], np.intp),
        [scheduled.input_ids(rows) for scheduled in single],
        np.array([scheduled.num_known for scheduled in single], np.int32),
        np.array([1] * len(single), np.int32),  # np.ones takes twice as long for a few rows
        np.zeros(len(single), np.int32),
    )


class ScheduleBatch:
    """One step, from its plan to its commit."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.decodes = NO_ROWS
        self.single: list[ScheduledRow[Request]] = []
        self.guesses: Guesses | None = None
        self.loose: list[ScheduledRow[Request]] = []
        self.order = NO_ROWS
        self.step = 0
        self.launched_s = 0.0
        self._rest: list[ScheduledRow[Request]] = []
        self._stays: StayArray = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.guessing) + len(self.single) + len(self.loose)

    @property
    def guessing(self) -> RowArray:
        """Rows that only make guesses."""
        return NO_ROWS if self.guesses is None else self.guesses.rows

    def taken(self) -> set[int]:
        """Return the rows that are in the batch."""
        rest = self.single + self.loose
        together = self.decodes.tolist() + self.guessing.tolist()
        return {*together, *(scheduled.row for scheduled in rest)}

    def sampling_rows(self) -> RowArray:
        """Return the rows for which the batch samples a token."""
        rest = [scheduled.row for scheduled in self.single + self.loose if scheduled.samples]
        if not rest and self.guesses is None:
            return self.decodes
        return np.concatenate([self.decodes, self.guessing, np.array(rest, np.intp)])

    @property
    def has_prefill(self) -> bool:
        """Return True if the batch computes tokens that a request was given, rather than its own output."""
        return any(scheduled.is_prefill for scheduled in self.single + self.loose)

    @property
    def num_guesses(self) -> int:
        loose = sum(len(scheduled.guesses) for scheduled in self.loose)
        return loose if self.guesses is None else loose + self.guesses.total

    def add(self, scheduled: ScheduledRow[Request]) -> None:
        if scheduled.samples and not self.rows.needs_python_of[scheduled.row]:
            self.single.append(scheduled)
        else:
            self.loose.append(scheduled)

    def launch(self, step: int, kv: KVCacheManager) -> BatchPlan:
        """Make the BatchPlan. From here on its tokens count as written and its samples as in flight."""
        rows, decodes = self.rows, self.decodes
        self.step = step
        rest = self._rest = self.single + self.loose
        self.order, ids = decodes, rows.next_ids(decodes, FUTURE).tobytes() if len(decodes) else b""
        lens = samples = drafts = NO_COUNTS
        if rest or self.guesses is not None:
            columns = self._rest_columns()
            self.order = np.concatenate([decodes, columns.rows]) if len(decodes) else columns.rows
            ids = b"".join((ids, *columns.ids))
            lens, samples, drafts = columns.lens, columns.samples, columns.drafts
        self._stays = rows.stay[self.order]
        starts = rows.kv_len[self.order]
        writes = kv.tables.take_table_writes()
        plan = BatchPlan(
            step,
            rows.take_setups(),
            kv.tables.take_page_copies(),
            writes.spans,
            writes.pages,
            len(decodes),
            pack_ids(self.order),
            starts.tobytes(),
            ids,
            lens.tobytes(),
            samples.tobytes(),
            drafts.tobytes(),
            self._prompt_positions() if self.loose else (),
            bool(self.loose)
            and any(
                scheduled.make_masks is not None or scheduled.unseen is not None for scheduled in self.loose
            ),
        )
        if len(decodes):
            rows.count_as_launched(decodes)
        if len(lens):
            rows.count_as_launched(columns.rows, lens, samples)
        return plan

    def _rest_columns(self) -> PlanColumns:
        """Return the columns of all rows except the plain decodes."""
        guesses, rows = self.guesses, self.rows
        if guesses is None:
            return _columns_of(self._rest, rows) if self.loose else _columns_of_single(self.single, rows)
        ids, ones = guesses.input_ids(rows, FUTURE), np.ones(len(guesses.rows), np.int32)
        columns = PlanColumns(guesses.rows, [ids], guesses.counts + 1, ones, guesses.counts)
        if not self._rest:
            return columns
        parts = (_columns_of_single(self.single, rows), columns, _columns_of(self.loose, rows))
        return PlanColumns(
            np.concatenate([part.rows for part in parts]),
            [ids for part in parts for ids in part.ids],
            np.concatenate([part.lens for part in parts]),
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.drafts for part in parts]),
        )

    def _prompt_positions(self) -> tuple[PromptPositions, ...]:
        first_place = len(self.order) - len(self.loose)
        return tuple(
            PromptPositions(place, *scheduled.wanted)
            for place, scheduled in enumerate(self.loose, first_place)
            if scheduled.wanted is not None
        )

    def publish_prefills(self, kv: KVCacheManager) -> None:
        """Publish the full pages of this step's chunks to the prefix cache. Call it when the step is
        launched, before the next plan.
        """
        for scheduled in self._rest:
            if scheduled.is_prefill:
                kv.publish_prefill(scheduled.req)

    def leave_out(self, row: int) -> None:
        """Drop what the step computes for a row, as for one that its request has left."""
        self._stays[self.order == row] = NO_STAY

    def still_held(self) -> BoolArray:
        """Return a mask [len(order)] of the rows that still have the same holder as when the step was
        planned.
        """
        return self.rows.still_held(self.order, self._stays)

    def waits_for_tokens(self) -> bool:
        """Return True if this step can be sampled only when the host knows tokens of earlier steps, because
        some rows have masks or logits processors.
        """
        in_flight = self.rows.in_flight_of
        return any(
            in_flight[scheduled.row] > 1
            for scheduled in self.loose
            if scheduled.make_masks is not None or scheduled.unseen is not None
        )

    def masked(self) -> list[ScheduledRow[Request]]:
        """Return the rows whose masks the plan defers, if they still want their token."""
        held = self.still_held()[len(self.order) - len(self.loose) :].tolist()
        return [
            scheduled
            for scheduled, is_held in zip(self.loose, held, strict=True)
            if scheduled.make_masks is not None and is_held
        ]

    def processed(self) -> tuple[ProcessedRow, ...]:
        """Return the rows with logits processors that still want their token, each with the tokens that its
        processors have not seen.
        """
        if all(scheduled.unseen is None for scheduled in self.loose):
            return ()
        held = self.still_held()[len(self.order) - len(self.loose) :].tolist()
        return tuple(
            scheduled.unseen()
            for scheduled, is_held in zip(self.loose, held, strict=True)
            if scheduled.unseen is not None and is_held
        )
