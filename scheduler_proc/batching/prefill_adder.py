"""PrefillAdder: keeps the budgets of one step, and alone decides how many tokens each row gets.

Running rows are continued first, decodes before anything else, so prefill never starves decode. What is left
of the budget goes to newcomers. Every try_* method either does what it says or changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from scheduler_proc.batching.chunk_costs import ChunkCosts
from scheduler_proc.cache.group_pages import seat_others
from scheduler_proc.cache.kv_cache_manager import KVCacheManager, Prefix
from scheduler_proc.capacity.base import CapacityPolicy
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.guesses import Guesses, RowGuesser
from scheduler_proc.core.request import Request, RowGroup
from scheduler_proc.core.row_columns import RowArray
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import NO_COST, Cost, combined_cost


class StepLimits(NamedTuple):
    """Limits of one forward, decodes included."""

    max_tokens: int
    """Maximum number of new tokens in one forward."""
    max_requests: int
    cuts_prompts: bool = True
    """True: a prompt may be computed in chunks. False: a prompt is computed in one step, and waits for a step
    that has room for it.
    """
    costs: ChunkCosts | None = None
    """Cost of prompt tokens by position; None: each token costs 1."""


class PrefillTotals(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Counts of a batch's work besides decoding."""

    num_admitted: int
    num_new_tokens: int
    num_cached_tokens: int
    num_prefills: int = 0
    """Number of requests of which the batch computes given tokens: of the prompt, or output that is computed
    again.
    """
    num_recomputed_tokens: int = 0
    """New tokens that are computed again, or are output: see InflightBatchingStats.num_recomputed_ctx_tokens.
    """


class PrefillAdder:
    """Fills one batch within its budgets."""

    def __init__(
        self,
        batch: ScheduleBatch,
        kv: KVCacheManager,
        capacity: CapacityPolicy,
        slots: SlotPool,
        limits: StepLimits,
    ) -> None:
        self._batch = batch
        self._rows = kv.rows
        self._kv = kv
        self._capacity = capacity
        self._guards_growth = capacity.guards_growth
        self._slots = slots
        self._limits = limits
        self._token_budget, self._request_budget, _, self._costs = limits
        self._num_admitted = 0
        self._num_prefill_tokens = 0
        self._num_cached_tokens = 0
        self._num_prefills = 0
        self._num_recomputed_tokens = 0
        self._guessing: list[ScheduledRow[Request]] = []
        self._reserved: RowGroup | None = None
        """The last group of rows for which pages were reserved."""
        self.num_to_come = 0
        """Number of running rows that are still to be continued one by one. Guesses leave a token of the
        budget to each of them.
        """
        self.num_missing = 0
        """Number of pages that the last row that could not continue lacked."""
        self.was_withheld = False
        """True if the last request that was not admitted lacked pages that are withheld for other tenants, or
        waits for rows of its own tenant.
        """

    def can_admit(self) -> bool:
        """Return True if a row is free and the step has room for a waiting request."""
        if not self._rows.free:
            return False
        return (self._token_budget > 0 and self._request_budget > 0) or self._capacity.closes_batches

    @property
    def totals(self) -> PrefillTotals:
        return PrefillTotals(
            self._num_admitted,
            self._num_prefill_tokens,
            self._num_cached_tokens,
            self._num_prefills,
            self._num_recomputed_tokens,
        )

    def try_continue_together(self, decodes: RowArray) -> bool:
        """Add the next token of every plain decode. Returns False if budget or pages are short; the caller
        then continues them one by one.
        """
        num_decodes = len(decodes)
        if not num_decodes:
            return True
        if num_decodes > self._token_budget or num_decodes > self._request_budget:
            return False
        self._kv.give_back_unseen(decodes)
        if self._guards_growth and not self._capacity.may_grow(decodes, self._rows.kv_len[decodes] + 1):
            return False
        if not self._kv.try_reserve_next(decodes):
            return False
        self._batch.decodes = decodes
        self._token_budget -= num_decodes
        self._request_budget -= num_decodes
        return True

    def try_continue_guessing(self, rows: RowArray, guesser: RowGuesser, num_to_come: int) -> bool:
        """Add the next token and the guesses of all these rows. Returns False if budget or pages are short;
        the caller then continues them one by one. num_to_come: number of running rows that are continued
        after these.
        """
        num_rows = len(rows)
        if num_rows > self._token_budget or num_rows > self._request_budget:
            return False
        self._kv.give_back_unseen(rows)
        if self._guards_growth and not self._capacity.may_grow(rows, self._rows.kv_len[rows] + 1):
            return False
        if not self._kv.try_reserve_next(rows):
            return False
        self._token_budget -= num_rows
        self._request_budget -= num_rows
        guesses = self._batch.guesses = guesser.guess(rows)
        self._token_budget -= guesses.cut_to(self._room_for_guesses(num_to_come))
        return True

    def _room_for_guesses(self, num_to_come: int) -> int:
        """Return how many guessed tokens still fit. Half of the remaining budget stays for prompts, so
        guesses never delay them.
        """
        return max(0, self._token_budget - num_to_come) // 2

    def try_continue(self, req: Request) -> bool:
        """Add the next chunk (or decode token) of a request that holds a row, as much as the budget allows.
        Returns False if pages are short.
        """
        rows, row = self._rows, req.row
        start = rows.kv_len_of[row]
        num_left = rows.num_tokens_of[row] + rows.in_flight_of[row] - start
        if num_left <= 0 or self._token_budget <= 0 or self._request_budget <= 0:
            return True
        num_new = self._chunk_len(req, start, num_left)
        if not num_new:
            return True
        if self._kv.window is not None:
            self._kv.give_back_unseen(np.array([req.row], np.intp))
        if req.group is not None and start >= req.num_prompt:
            if not self._try_reserve_group(req.group):
                self.num_missing = req.group.width
                return False
        elif not self._try_reserve(req, start + num_new):
            self.num_missing = self._kv.num_pages_for(start + num_new) - self._kv.num_pages_of[req.row]
            return False
        self._schedule(req, start, num_new, samples=num_new == num_left)
        return True

    def try_admit(self, req: Request, prefix: Prefix) -> bool:
        """Give a waiting request a row and add its first chunk, if it fits beside what the policy has
        promised to others.
        """
        kv = self._kv
        is_plain = not req.features and req.adapter is None and req.prompt_table is None
        cost = NO_COST if is_plain else combined_cost(req.features, req.contents)
        self.was_withheld = False
        if not self.can_admit() or (not is_plain and not self._can_afford(cost)):
            return False
        start, num_left = prefix.num_pages * kv.page_size, prefix.num_left
        num_new = self._chunk_len(req, start, num_left) if self._request_budget > 0 else 0
        if not num_new and not self._capacity.closes_batches:
            return False
        # Locked before the room is counted, so that the request's own prefix does not count as evictable.
        kv.cache.lock(prefix.node)
        if not self._capacity.try_promise(req, prefix, 0 if is_plain else cost.pages):
            num_final = kv.num_pages_for(req.max_len)
            self.was_withheld = kv.guard.num_withheld(prefix.node, num_final) > 0 or (
                kv.guard.waits_for_its_own(prefix.node, num_final - prefix.num_pages)
            )
            kv.cache.unlock(prefix.node)
            return False
        if not is_plain and cost.slots:
            req.slots, numbers = cost.slots, self._slots.take(cost.slots, req.seq)
            req.note_slots(numbers)
        num_taken = kv.seat(req, prefix, num_new)
        if req.group is not None:
            num_taken += seat_others(kv, req.group)
        self._capacity.note_seated(num_taken)
        for feature in req.features:
            feature.row_opened(req.row)
        if num_new:
            self._schedule(req, start, num_new, samples=num_new == num_left)
        self._num_admitted += 1
        self._num_cached_tokens += start
        return True

    def reserve_guesses(self) -> None:
        """Reserve pages for the guesses of the batch, or cut the guesses to the pages that their rows have.
        Call it when no row can be retracted any more.
        """
        if self._batch.guesses is not None:
            self._reserve_all(self._batch.guesses)
        for scheduled in self._guessing:
            end, num_guesses = scheduled.start + scheduled.num_known, len(scheduled.guesses)
            num_fit = self._kv.num_pages_of[scheduled.row] * self._kv.page_size - end
            if num_fit < num_guesses and not self._try_reserve(scheduled.req, end + num_guesses):
                scheduled.guesses = scheduled.guesses[:num_fit]

    def _reserve_all(self, guesses: Guesses) -> None:
        rows, kv = guesses.rows, self._kv
        end = guesses.starts + 1
        num_fit = kv.num_pages[rows] * kv.page_size - end
        short = (num_fit < guesses.counts).nonzero()[0]
        if not len(short):
            return
        upto = (end + guesses.counts)[short]
        is_allowed = not self._guards_growth or self._capacity.may_grow(rows[short], upto)
        if is_allowed and kv.try_reserve_next(rows[short], upto):
            return
        for at, each in zip(short.tolist(), upto.tolist(), strict=True):
            req = self._rows.holder[rows.item(at)]
            assert req is not None
            if not self._try_reserve(req, each):
                guesses.counts[at] = num_fit[at]

    def _can_afford(self, cost: Cost) -> bool:
        return self._rows.num_free >= cost.rows and self._slots.can_hold(cost.slots)

    def _try_reserve(self, req: Request, upto: int) -> bool:
        if self._guards_growth and not self._capacity.may_grow(req.row, upto):
            return False
        return self._kv.try_reserve(req, upto)

    def _try_reserve_group(self, group: RowGroup) -> bool:
        if group is self._reserved:
            return True
        rows = np.array([beam.row for beam in group.beams], np.intp)
        rows = rows[self._rows.num_tokens[rows] > self._rows.kv_len[rows]]  # others end in this step
        if self._guards_growth and not self._capacity.may_grow(rows, self._rows.kv_len[rows] + 1):
            return False
        if not self._kv.try_reserve_next(rows):
            return False
        self._reserved = group
        return True

    def _chunk_len(self, req: Request, start: int, num_left: int) -> int:
        """Return the length of the next chunk: what the budget allows, less where later tokens cost more. 0:
        the prompt must not be cut and needs a step with more room.

        A chunk that is not the last one ends at a page boundary if it reaches one. While logits of the prompt
        are wanted, no chunk goes beyond the prompt. Only a request that was retracted or restarted with its
        output can be longer than a step's budget; it is computed in chunks in any case.
        """
        if req.wanted_from < req.num_prompt and start < req.num_prompt:
            num_left = min(num_left, req.num_prompt - start)
        costs, room = self._costs, self._token_budget
        if costs is not None:
            room = costs.most(start, room)
        if num_left <= room:
            return num_left
        if not self._limits.cuts_prompts and num_left <= self._limits.max_tokens:
            return 0
        end = start + room
        aligned = end - end % self._kv.page_size
        return (aligned if aligned > start else end) - start

    def _schedule(self, req: Request, start: int, num_new: int, *, samples: bool) -> None:
        """Put a row that has room for its num_new tokens into the batch."""
        is_prefill = start < req.num_given
        scheduled = ScheduledRow(req, req.row, start, num_new, samples, is_prefill)
        costs = self._costs if is_prefill else None
        self._token_budget -= num_new if costs is None else costs.cost(start, num_new, self._token_budget)
        self._request_budget -= 1
        if is_prefill:
            self._num_prefill_tokens += num_new
            self._num_prefills += 1
            end = start + num_new
            if req.computed_len or end > req.num_prompt:
                first_time = min(end, req.num_prompt) - max(start, req.computed_len)
                self._num_recomputed_tokens += num_new - max(0, first_time)
        if req.features:
            self._plan_features(scheduled)
        group = req.group
        if group is not None and samples and group.plan_row is not None:
            group.plan_row(scheduled)
        self._batch.add(scheduled)

    def _plan_features(self, scheduled: ScheduledRow[Request]) -> None:
        features = scheduled.req.features
        if scheduled.is_prefill:
            for feature in features:
                feature.plan_chunk(scheduled)
        if not scheduled.samples:
            return
        for feature in features:
            feature.plan_row(scheduled)
        if scheduled.make_masks is not None and scheduled.note_guesses is None:
            scheduled.guesses = ()  # no masks are made for the places after guesses
        if scheduled.guesses:
            room = self._room_for_guesses(self.num_to_come)
            if len(scheduled.guesses) > room:
                scheduled.guesses = scheduled.guesses[:room]
            self._token_budget -= len(scheduled.guesses)
            self._guessing.append(scheduled)
