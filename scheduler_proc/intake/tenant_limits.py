"""TenantLimiter: limits of what a tenant may ask for, and of how much at a time. It reads accounts and
changes none. The owner has no limits here; max_running is enforced by WaitingRoom.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.base.errors import InvalidRequest, RateLimited
from runtime.ring.tenants import TenantLimits
from runtime.wire.handle import REQUEST_BYTES
from runtime.wire.messages import TokenizedRequest
from scheduler_proc.core.request import Request
from scheduler_proc.core.rows import Rows
from scheduler_proc.intake.limits import QueueShare
from scheduler_proc.waiting.account import Account, TokenBucket
from scheduler_proc.waiting.tenant_accounts import SETTLE_S, Accounts
from scheduler_proc.waiting.waiting_room import WaitingRoom

SIBLING_S = 1.0
"""Seconds after the first sequence of a request in which its other sequences are accepted with it."""


class TenantLimiter:
    """Limits of all tenants except the owner."""

    def __init__(
        self,
        accounts: Accounts,
        room: WaitingRoom,
        rows: Rows,
        share: QueueShare | None,
        clock: Callable[[], float],
    ) -> None:
        """share: queue share of a tenant without a limit of its own; None: it may fill the queue."""
        self._accounts = accounts
        self._room = room
        self._rows = rows
        self._share = share
        self._clock = clock

    def check(self, message: TokenizedRequest, num_live: int, *, is_paid: bool = False) -> None:
        """Check a request against its tenant's limits. num_live: sequences of all tenants. is_paid: as in
        Request. Raises RateLimited while the tenant has as much as it may, and InvalidRequest for a beam
        search that needs more rows than the tenant may ever have.
        """
        account = self._accounts.of(message.tenant)
        if message.is_again:
            self._check_again(account, is_paid=is_paid)
            if account.bucket is not None and not is_paid:
                self._check_debt(account)
            return
        limits = account.limits
        if limits is not None and limits.max_running is not None:
            _check_width(message.sampling.num_beams, limits.max_running)
        if limits is not None and limits.max_waiting is not None:
            self._check_waiting(account, limits.max_waiting, message.sampling.num_beams)
        elif self._share is not None and self._share.is_used_up(account.num_live, num_live):
            raise RateLimited(
                f"{account.num_live} requests of this key run or wait, which is its share of the queue"
                " (max_queued_requests) while others may come; let some of them end first"
            )
        if account.bucket is not None:
            self._check_tokens(account, message.handle)

    def priority_of(self, message: TokenizedRequest) -> int:
        """Return the priority that a request gets. Raises InvalidRequest if its tenant may not ask for this
        one. A request submitted again gets at most the highest that is allowed now, because it was accepted
        once.
        """
        limits = self._accounts.of(message.tenant).limits
        if limits is None or message.priority <= limits.max_priority:
            return message.priority
        if message.is_again:
            return limits.max_priority
        raise InvalidRequest(
            f"priority: {message.priority} is above {limits.max_priority}, the highest that this key may ask"
            " for (max_priority)",
            param="priority",
        )

    def _check_again(self, account: Account[Request], *, is_paid: bool) -> None:
        """Raise RateLimited if more sequences are submitted again than the tenant can have had before the
        restart, or if it has its whole share, other tenants may come, and nobody here knows this one.
        """
        share, limits = self._share, account.limits
        if share is None:
            return
        is_used_up = account.num_again >= self._most(limits, share.most)
        if not (is_used_up or is_paid) and (limits is None or limits.max_waiting is None):
            is_used_up = account.num_live >= share.max_of_one and not share.is_lifted()
        if is_used_up:
            raise RateLimited("as many requests of this key are made again as it can have had")

    def _check_debt(self, account: Account[Request]) -> None:
        """Raise RateLimited if a tenant owes more than a minute's tokens and says of a request that nobody
        here knows that it is made again. It may be true: what a process has lost on its way is not known.
        """
        self._settle(account)
        assert account.bucket is not None
        if account.bucket.level < -account.bucket.per_minute:
            raise self._no_tokens(account.bucket)

    def _most(self, limits: TenantLimits | None, most: int) -> int:
        if limits is None or limits.max_waiting is None:
            return most
        return min(most, (limits.max_running or self._rows.max_rows) + limits.max_waiting)

    def _check_waiting(self, account: Account[Request], max_waiting: int, num_rows: int) -> None:
        """Raise RateLimited if more than max_waiting sequences of the tenant would wait. One request may
        always wait, however wide a search it is.
        """
        num_waiting = self._room.num_without_row(account, self._rows.num_free)
        if num_waiting and num_waiting + num_rows > max_waiting:
            raise RateLimited(
                f"{num_waiting} sequences of this key wait already, and {max_waiting} may (max_waiting), of a"
                " beam search as many as it has rows; let some of them begin first"
            )

    def _check_tokens(self, account: Account[Request], handle: bytes) -> None:
        """Raise RateLimited if the tenant has no tokens left. The sequences of one request are accepted
        together, because half of a request helps nobody.
        """
        now, request = self._clock(), handle[:REQUEST_BYTES]
        self._settle(account)
        assert account.bucket is not None
        if not account.bucket.seconds_until_one():
            account.newest = (request, now)
            return
        newest, let_in_at = account.newest
        if request == newest and now - let_in_at < SIBLING_S:
            return
        raise self._no_tokens(account.bucket)

    def _settle(self, account: Account[Request]) -> None:
        """Charge what running requests have used, unless that was done at most SETTLE_S ago."""
        self._accounts.settle(no_older_s=SETTLE_S)
        account.close_books(self._clock())

    @staticmethod
    def _no_tokens(bucket: TokenBucket) -> RateLimited:
        seconds = bucket.seconds_until_one()
        return RateLimited(
            f"this key has used its {bucket.per_minute} tokens a minute (tokens_per_minute);"
            f" try again in {seconds:.1f} s",
            retry_after_s=seconds,
        )


def _check_width(num_beams: int, max_running: int) -> None:
    if num_beams > max_running:
        raise InvalidRequest(
            f"beam_width: {num_beams} beams are more than the {max_running} sequences that this key may run"
            " at a time (max_running); ask for fewer",
            param="beam_width",
        )
