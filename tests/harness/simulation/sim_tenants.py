"""Limits of tenants, counted from the requests and their outputs: running requests, and tokens used."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from runtime.base.errors import RateLimited
from runtime.ring.tenants import OWNER, Tenant, TenantLimits, Tenants
from runtime.wire.handle import REQUEST_BYTES
from runtime.wire.messages import TokenizedRequest
from scheduler_proc.core.request import Request, Status
from scheduler_proc.intake.limits import QueueShare
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.account import Account
from scheduler_proc.waiting.tenant_accounts import SETTLE_S

NAMES = (OWNER, "running", "using", "all")
"""Tenants of the simulation, by what limits them."""
REFUSED_AGAIN = frozenset({"all"})
"""Those that may be refused what they had before: max_waiting bounds it, and may have become less."""
SETTLED_EVERY = 12
"""Steps between two heartbeats."""
ROUNDING = 3.0
"""Tokens by which a bucket that is looked at seldom may differ from one that is looked at always."""


def draw_tenants(rng: random.Random) -> tuple[Tenant, ...]:
    """In half of the runs there is nobody but the owner."""
    return () if rng.random() < 0.5 else tenants_with(rng)


def tenants_with(rng: random.Random) -> tuple[Tenant, ...]:
    return (
        Tenant("running", "user", TenantLimits(max_running=rng.choice([1, 1, 2, 4]), max_priority=5)),
        Tenant("using", "user", TenantLimits(tokens_per_minute=rng.choice([60, 120, 300]))),
        Tenant(
            "all",
            "user",
            TenantLimits(max_running=rng.choice([1, 3]), max_waiting=rng.choice([1, 3]), max_priority=1000),
        ),
    )


UNKNOWN_STEPS = round(SETTLE_S / 0.01) + 2
"""Most steps for which the scheduler may not have looked at what tenants use."""


class TenantWatch:
    """Told before and after every turn; looks in whenever somebody is taken in or refused."""

    def __init__(self, scheduler: Scheduler, share: QueueShare | None) -> None:
        self._lifecycle = scheduler.lifecycle
        self._share = share
        self._num_turns = 0
        self._running: Counter[str] = Counter()
        self._waited: Counter[str] = Counter()
        """Those that had not begun after the last turn."""
        self._levels: dict[str, float] = {}
        """Levels of buckets that are looked at in every turn, at the beginning of this one."""
        self._used: dict[str, int] = {}
        """Tokens that had been used by then."""
        self._history = defaultdict[str, deque[int]](lambda: deque([0], UNKNOWN_STEPS))
        self._newest: dict[str, bytes] = {}
        self._charged: dict[bytes, tuple[str, int]] = {}
        """By handle: whose it is, and what it is to be charged with besides its output."""
        self.num_held = 0
        self.num_refused: Counter[str] = Counter()
        """Refusals, by the limit that was reached."""
        limiter = scheduler.intake.maker.tenant_limits
        self._check_limits = limiter.check
        limiter.check = self._checked_limits  # type: ignore[method-assign]
        self._add, self._refuse = self._lifecycle.add, self._lifecycle.refuse
        self._lifecycle.add = self._checked_add  # type: ignore[method-assign]
        self._lifecycle.refuse = self._checked_refuse  # type: ignore[method-assign]

    def change(self, tenants: tuple[Tenant, ...]) -> None:
        """Change the table, as the launcher's file does."""
        self._lifecycle.room.change_tenants(Tenants(tenants))

    # -- tokens ---------------------------------------------------------------------------------------------

    def _num_used(self, account: Account[Request]) -> int:
        """Up to now."""
        live = self._lifecycle.requests.values()
        return account.num_used + sum(
            req.num_tokens - req.num_charged for req in live if req.tenant == account.tenant.name
        )

    def _level(self, account: Account[Request]) -> float:
        name = account.tenant.name
        return self._levels[name] - (self._num_used(account) - self._used[name])

    def _checked_limits(self, message: TokenizedRequest, num_live: int, **options: bool) -> None:
        """Assert that whoever is refused has as much as it may, counted from the requests."""
        live = [req for req in self._lifecycle.requests.values() if req.tenant == message.tenant]
        try:
            self._check_limits(message, num_live, **options)
        except RateLimited as error:
            text, limits = str(error), self._lifecycle.accounts.of(message.tenant).limits
            if "max_waiting" in text:
                self.num_refused["max_waiting"] += 1
                assert limits is not None
                assert limits.max_waiting is not None
                num_rows = sum(req.width for req in live if req.status is Status.WAITING)
                num_asked = message.sampling.num_beams
                assert num_rows + num_asked > limits.max_waiting, "refused though fewer wait than may"
            elif "max_queued_requests" in text:
                self.num_refused["share of the queue"] += 1
                if self._share is not None:
                    room = self._share.max_live - (num_live - len(live))
                    assert 2 * len(live) >= room, "refused with half of its part of the queue left"
            elif "made again" in text:
                self.num_refused["made again"] += 1
                assert sum(req.is_again for req in live) > 0, "refused with nothing made again"
            raise

    def _checked_add(self, req: Request, stream_open: msgspec.Raw, more: Sequence[msgspec.Raw] = ()) -> None:
        account, request = self._lifecycle.accounts.of(req.tenant), req.handle[:REQUEST_BYTES]
        if not req.is_again:
            if account.bucket is not None and self._newest.get(req.tenant) != request:
                # The scheduler may not know yet what was produced since it has looked last.
                num_used = self._num_used(account)
                num_unknown = min(num_used - self._history[req.tenant][0], num_used - account.num_used)
                assert self._level(account) > 1 - num_unknown - ROUNDING, "let in without a token"
            priority = None if account.limits is None else account.limits.max_priority
            assert priority is None or req.priority <= priority, "a priority that it may not have"
            self._newest[req.tenant] = request
        self._charged[req.handle] = (req.tenant, 0 if req.is_paid else req.num_tokens)
        self._add(req, stream_open, more)

    def _checked_refuse(
        self,
        handle: bytes,
        stream_open: msgspec.Raw,
        reason: Any,
        error: Any,
        more: Sequence[msgspec.Raw] = (),
    ) -> None:
        self._refuse(handle, stream_open, reason, error, more)
        if error is None or error.code != "rate_limit_exceeded":
            return
        assert (error.status, error.retry_after_s > 0.0) == (429, True)
        if "tokens_per_minute" in error.message:
            (name,) = self._levels
            account = self._lifecycle.accounts.of(name)
            assert self._level(account) < 1 + ROUNDING, "refused with tokens left"

    # -- turns ----------------------------------------------------------------------------------------------

    def begin(self, seconds: float) -> None:
        """Time has passed since the last turn, and none will until the next one."""
        self._num_turns += 1
        if self._num_turns % SETTLED_EVERY == 0:
            self._lifecycle.accounts.settle()
        live = self._lifecycle.requests.values()
        self._running = _num_rows(live)
        for account in self._lifecycle.accounts:
            if account.bucket is None:
                continue
            per_minute, name = float(account.bucket.per_minute), account.tenant.name
            if name in self._levels:
                level = self._level(account)
            else:  # its limit may have changed since it came
                level = account.bucket.level - (self._num_used(account) - account.num_used)
            self._levels[name] = min(per_minute, level + per_minute * seconds / 60)
            self._used[name] = self._num_used(account)
            self._history[name].append(self._used[name])

    def check(self) -> None:
        """After a turn."""
        live = self._lifecycle.requests.values()
        running = _num_rows(live)
        for account in self._lifecycle.accounts:
            name, limits = account.tenant.name, account.limits
            if limits is None:
                continue
            if limits.max_running is not None:
                most = max(limits.max_running, self._running[name])
                is_alone = account.num_running == 1
                assert is_alone or running[name] <= most, "more of a tenant run than may"
            self._check_waiting(name, limits, [req for req in live if req.tenant == name])
        self.num_held += self._lifecycle.room.num_held

    def _check_waiting(self, name: str, limits: TenantLimits, live: list[Request]) -> None:
        num_new = sum(not req.is_again for req in live)
        num_waited, self._waited[name] = self._waited[name], 0
        if limits.max_waiting is not None:
            num_begun = sum(req.status is Status.RUNNING or req.num_retractions > 0 for req in live)
            most = limits.max_waiting + self._lifecycle.kv.rows.max_rows
            # Those that waited already when the limit came down go on waiting.
            assert num_new - num_begun <= max(most, num_waited), "more of a tenant wait than may"
            self._waited[name] = num_new - num_begun
        elif self._share is not None:
            assert num_new <= self._share.max_of_one, "a tenant has all of the queue"

    def judge(self, tokens: Mapping[bytes, list[int]]) -> None:
        """At the end: every token is charged once, and nothing is counted of who has ended. tokens: what came
        out, by handle.
        """
        assert not self._lifecycle.requests
        self._lifecycle.check()  # counts of live sequences are those of none
        assert self._lifecycle.num_paused == 0
        assert self._lifecycle.room.tick_at == math.inf, "waits for the time of somebody who has ended"
        used: Counter[str] = Counter()
        for handle, (name, num_tokens) in self._charged.items():
            used[name] += num_tokens + len(tokens[handle])
        for account in self._lifecycle.accounts:
            name = account.tenant.name
            assert name == OWNER or account.num_used == used[name], "not every token is charged, or one twice"


def _num_rows(live: Iterable[Request]) -> Counter[str]:
    """Count the rows that tenants have."""
    rows = Counter[str]()
    for req in live:
        if req.status is Status.RUNNING:
            rows[req.tenant] += req.width
    return rows
