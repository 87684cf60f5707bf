"""WaitingRoom: all requests that wait for a row, and the consequences of waiting long.

    enter ──► queue ──► row        schedule policies order the queue, and admission takes from it
      │         ▲
      └────► held back             requests of a tenant whose queued and running ones reach its max_running

A request that is held back takes no time of a step. It joins the queue when another request of its tenant
ends, or at once if it comes before one of them in the order of the queue, which is then held back instead.

Tenants take turns (FairOrder). A request that has waited in the queue for `max_starvation_s` starves: from
then on it goes before all others. With several tenants it starves only once its turn has come, so that a
tenant cannot pass others by sending many requests. A request that has waited for `queue_timeout_s`, queued or
held back, and never had a row is given up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from runtime.base.errors import Overloaded
from runtime.ring.tenants import Tenants
from runtime.wire.error_info import error_info
from runtime.wire.messages import ErrorInfo
from scheduler_proc.core.request import WAITING, Request
from scheduler_proc.waiting.account import Account
from scheduler_proc.waiting.deadlines import Deadlines
from scheduler_proc.waiting.fair_order import PROMPT_TOKENS, FairOrder, prompt_cost
from scheduler_proc.waiting.serving_time import ServingTime
from scheduler_proc.waiting.sorted_requests import SortedRequests
from scheduler_proc.waiting.tenant_accounts import Accounts
from scheduler_proc.waiting.waiting_queue import SortKey, WaitingQueue, in_turn
from scheduler_proc.waiting.width_gate import WidthGate

QUEUE_RETRY_S = 5.0
"""Seconds after which a caller should try again when its request has waited too long (Retry-After). An
arbitrary value.
"""
MAX_STARVED_AT_ONCE = 64
"""Maximum number of requests that become starving in one step, which takes 0.4 to 0.8 ms with 5,000 in the
queue. The others follow in the next step.
"""


class Patience(NamedTuple):
    """Time limits of waiting, in seconds. 0.0: without limit."""

    max_starvation_s: float = 0.0
    """Seconds of waiting for a row after which a request goes before all that have waited less."""
    queue_timeout_s: float = 0.0
    """Seconds of waiting for the first row after which a request is given up."""

    def error(self) -> ErrorInfo:
        """Return the error for a request that has waited too long."""
        return error_info(
            Overloaded(
                f"the request has not begun within {self.queue_timeout_s:g} s, the server's queue_timeout;"
                " try again later",
                code="queue_timeout",
                retry_after_s=QUEUE_RETRY_S,
            )
        )


FOR_EVER = Patience()
AT_ONCE = -math.inf


class WaitingRoom:
    def __init__(
        self,
        live: Mapping[bytes, Request],
        accounts: Accounts,
        serving: ServingTime,
        sort_key: SortKey = in_turn,
        patience: Patience = FOR_EVER,
    ) -> None:
        """live: live sequences by sequence key. accounts: of their tenants. serving: clock by which waiting
        is measured. sort_key: as in WaitingQueue.
        """
        self.queue = WaitingQueue(sort_key)
        self.num_held = 0
        """Number of requests that are held back."""
        self.is_backed_up = False
        """True if a queued request got no row when rows were last given out. Set by admission."""
        self.width_gate: WidthGate | None = None
        """Gate by beam width; None if requests of all beam widths share steps."""
        self.fair = FairOrder()
        """Turns of tenants. This class reports arrivals and rows to it, and the life cycle reports ends of
        requests that had a row.
        """
        self._accounts = accounts
        self._serving = serving
        self._patience = patience
        self._fresh: list[Request] = []
        """Requests that arrived since the last `tick`."""
        self._not_kept: list[Request] = []
        """Requests that arrived between the two calls before. On a server that is not busy they have a row by
        now, so they need no entry among the deadlines.
        """
        self._starving = Deadlines(live, attrgetter("waits_from_s"))
        self._before_turn = Deadlines(live, attrgetter("start_tag"))
        """Requests that have waited long enough to starve, but whose tenant's turn has not come, by start
        tag.
        """
        self._not_begun = Deadlines(live, attrgetter("came_s"))
        self.tick_at = math.inf
        """Time, by ServingTime, by which `tick` must be called next."""

    def __len__(self) -> int:
        """Return the number of all waiting requests."""
        return len(self.queue) + self.num_held

    def num_tokens(self) -> int:
        """Return the number of tokens to compute for all waiting requests, cached ones included.
        Walks them.
        """
        num_held = sum(account.held.num_tokens() for account in self._accounts) if self.num_held else 0
        return self.queue.num_tokens() + num_held

    # -- arrivals and departures ----------------------------------------------------------------------------

    def weigh_prompt(self, req: Request, match_len: Callable[[Request], int]) -> None:
        """Note what has to be computed of a new request's prompt. Called only with several tenants: a single
        one has no turns. match_len: returns how many of its tokens are cached; called only for a prompt that
        costs anything.
        """
        num_tokens = req.num_tokens
        if num_tokens >= PROMPT_TOKENS:
            num_tokens -= match_len(req)
        req.prompt_cost = prompt_cost(num_tokens)

    def enter(self, req: Request) -> None:
        """Add a request that has arrived, or was retracted."""
        account, queue = req.account, self.queue
        if req.num_retractions:
            self._count_from(req, self._serving.now())
            self._keep_starvation(req)
        else:
            self.fair.tag(req)
            self._fresh.append(req)
            self.tick_at = AT_ONCE
        queue.give_place(req)
        if account.queued is None:
            queue.put(req)
        else:
            self._hold(account, req)
            self._balance(account)

    def leave(self, req: Request) -> None:
        """Remove a request that ends while it waits."""
        account = req.account
        if account.num_waiting == 1:
            self.fair.forget_waiting(account)
        if req.is_held:
            self._unhold(account, req)
        else:
            self.queue.remove(req)
            if account.queued is not None:
                account.queued.remove(req)
        if account.queued is not None:
            self._balance(account)
        self._forget_if_empty()

    def take_admitted(self, positions: list[int]) -> list[Request]:
        """Remove and return the requests at these positions of the queue, which have got rows."""
        now = self._serving.now()
        admitted, has_turns = self.queue.take_at(positions), self._accounts.has_several()
        for req in admitted:
            req.waited_s = now - req.waits_from_s
            if not req.num_retractions:
                if has_turns:
                    self.fair.weigh(req)
                self.fair.note_row(req)
            account = req.account
            account.num_running += 1
            account.num_rows += req.width
            if account.queued is not None:
                account.queued.remove(req)
        if self._before_turn.first <= self._turn_reached:
            self.tick_at = AT_ONCE
        self._forget_if_empty()
        return admitted

    def num_without_row(self, account: Account[Request], num_free: int) -> int:
        """Return how many rows the tenant's requests wait for, not counting those that have just arrived and
        will find one of num_free free rows. Other tenants' requests that have just arrived get those first.
        """
        num_held, num_queued = account.held.num_rows, self.queue.num_rows
        if self.is_backed_up and num_queued:
            return account.num_waiting_rows
        return num_held + min(account.num_waiting_rows - num_held, max(0, num_queued - num_free))

    def note_row_free(self, account: Account[Request]) -> None:
        """Record that one of the tenant's requests with a row has ended, so that a held-back one may join the
        queue.
        """
        self._balance(account)

    def _count_from(self, req: Request, now: float) -> None:
        """Continue the request's waiting time from where it was when it left the queue."""
        req.waits_from_s = now - req.waited_s
        limit = self._patience.max_starvation_s
        if limit and req.waited_s >= limit and req.start_tag <= self._turn_reached:
            req.is_starved = True

    def _forget_if_empty(self) -> None:
        if not len(self):
            self._fresh.clear()
            self._not_kept.clear()
            self._starving.clear()
            self._before_turn.clear()
            self._not_begun.clear()
            self.tick_at = math.inf

    # -- requests held back ---------------------------------------------------------------------------------

    def enqueue_now(self, req: Request) -> None:
        """Put a request into the queue, regardless of its tenant's limit, because it is its turn to run
        alone.
        """
        if req.is_held:
            self._enqueue_held(req.account, req)

    def change_tenants(self, tenants: Tenants) -> None:
        """Apply new limits of tenants. Running requests continue, even if there are more than the limit."""
        self.tick_at = AT_ONCE
        for account in self._accounts.change(tenants):
            if account.max_running is None:
                while account.held:
                    self._enqueue_held(account, account.held[0])
                account.queued = None
                continue
            if account.queued is None:
                name = account.tenant.name
                account.queued = SortedRequests(req for req in self.queue if req.tenant == name)
            self._balance(account)

    def _balance(self, account: Account[Request]) -> None:
        """Move the tenant's first requests without a row into the queue, as many as may run. A request that
        needs more rows than are left is not overtaken by a later one.
        """
        held, queued = account.held, account.queued
        assert queued is not None
        while not account.may_choose(len(queued), queued.num_rows):
            self._hold_back(account, queued[-1])
        while held and (
            account.may_choose(len(queued) + 1, queued.num_rows + held[0].width)
            or (queued and held[0].place < queued[-1].place)
        ):
            self._enqueue_held(account, held[0])
            while not account.may_choose(len(queued), queued.num_rows):
                self._hold_back(account, queued[-1])

    def _hold_back(self, account: Account[Request], req: Request) -> None:
        """Move a request out of the queue, to those held back."""
        assert account.queued is not None
        account.queued.remove(req)
        self.queue.remove(req)
        req.waited_s = self._serving.now() - req.waits_from_s
        self._hold(account, req)

    def _hold(self, account: Account[Request], req: Request) -> None:
        account.held.put(req)
        req.is_held = True
        self.num_held += 1

    def _unhold(self, account: Account[Request], req: Request) -> None:
        account.held.remove(req)
        req.is_held = False
        self.num_held -= 1

    def _enqueue_held(self, account: Account[Request], req: Request) -> None:
        self._unhold(account, req)
        self._count_from(req, self._serving.now())
        if req.is_starved:
            self.queue.give_place(req)
        self._keep_starvation(req)
        self.queue.put(req)
        if account.queued is not None:
            account.queued.put(req)

    # -- long waits -----------------------------------------------------------------------------------------

    def tick(self) -> list[Request]:
        """Move requests forward that starve by now. Returns those that have waited too long and are to be
        given up.
        """
        now = self._serving.now()
        if self._not_kept:
            self._keep_deadlines()
        for req in self._fresh:
            req.came_s = req.waits_from_s = now
        self._not_kept, self._fresh = self._fresh, self._not_kept
        given_up = self._take_given_up(now) if len(self._not_begun) else []
        if len(self._starving) or len(self._before_turn):  # mostly nobody has waited for a whole turn
            self._put_forward_starved(now)
        max_starvation_s, queue_timeout_s = self._patience
        self.tick_at = min(self._starving.first + max_starvation_s, self._not_begun.first + queue_timeout_s)
        if self._not_kept or self._before_turn.first <= self._turn_reached:
            self.tick_at = AT_ONCE
        return given_up

    def _keep_deadlines(self) -> None:
        queue_timeout_s = self._patience.queue_timeout_s
        for req in self._not_kept:
            if req.status is not WAITING:
                continue
            if not req.is_held:
                self._keep_starvation(req)
            if queue_timeout_s:
                self._not_begun.add(req)
        self._not_kept.clear()

    def _keep_starvation(self, req: Request) -> None:
        """Note the time at which a queued request will starve."""
        max_starvation_s = self._patience.max_starvation_s
        if max_starvation_s and not req.is_starved:
            self._starving.add(req)
            self.tick_at = min(self.tick_at, req.waits_from_s + max_starvation_s)

    def _take_given_up(self, now: float) -> list[Request]:
        """Return the requests that have waited for the whole queue timeout and never had a row."""
        passed = self._not_begun.take_passed(now - self._patience.queue_timeout_s)
        return [req for req in passed if req.status is WAITING and not req.num_retractions]

    @property
    def _turn_reached(self) -> int:
        """Return the last start tag whose turn has come; with a single tenant, that of every request."""
        return self.fair.virtual_time if self._accounts.has_several() else sys.maxsize

    def _put_forward_starved(self, now: float) -> None:
        """Move requests that have waited for max_starvation_s before all that have not."""
        turn = self._turn_reached
        starving = self._before_turn.take_passed(turn, MAX_STARVED_AT_ONCE)
        starving += self._starving.take_passed(now - self._patience.max_starvation_s, MAX_STARVED_AT_ONCE)
        for req in starving:
            if req.status is not WAITING or req.is_held or req.is_starved:
                continue
            if req.start_tag > turn:
                self._before_turn.add(req)
                continue
            queued = req.account.queued
            self.queue.remove(req)
            if queued is not None:
                queued.remove(req)
            req.is_starved = True
            self.queue.add(req)
            if queued is not None:
                queued.put(req)

    def check(self) -> None:
        """Assert that every request waits where it should, and that no tenant has more in the queue than it
        may.
        """
        for account in self._accounts:
            held, queued = list(account.held), account.queued
            assert all(req.is_held for req in held)
            if queued is None:
                assert not held
                continue
            name = account.tenant.name
            assert list(queued) == [req for req in self.queue if req.tenant == name]
            if held:
                num_rows = queued.num_rows + held[0].width
                assert not account.may_choose(len(queued) + 1, num_rows), "held back for nothing"
            assert not held or not queued or queued[-1].place < held[0].place, "held back by a later one"
        assert self.num_held == sum(len(account.held) for account in self._accounts)
