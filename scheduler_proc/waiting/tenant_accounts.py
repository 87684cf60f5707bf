"""Accounts: number of each tenant's sequences, and the tokens that it uses. It only counts and decides
nothing.

A request is charged for its prompt when it is accepted, unless it is known to have been before, and for its
output in all of its rows when it ends. `settle` charges the output of running requests, so that no step has
to count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from runtime.ring.tenants import OWNER, Tenants
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import CLIENT_BYTES
from scheduler_proc.core.request import Request
from scheduler_proc.core.rows import Rows
from scheduler_proc.waiting.account import Account
from scheduler_proc.waiting.sorted_requests import SortedRequests

SETTLE_S = 0.05
"""Maximum age, in seconds, of the figures by which a new request is judged."""


class Accounts:
    """Accounts of all tenants that have requests here, or an entry in the table."""

    def __init__(self, rows: Rows, clock: Callable[[], float]) -> None:
        self.tenants = Tenants()
        """Table of tenants, as it was last read."""
        self._named: frozenset[str] = frozenset()
        self._has_several = False
        self._rows = rows
        self._clock = clock
        self._accounts: dict[str, Account[Request]] = {}
        self._settled_at = 0.0

    def __iter__(self) -> Iterator[Account[Request]]:
        return iter(self._accounts.values())

    def of(self, name: str) -> Account[Request]:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self.tenants.named(name), self._clock())
            if account.max_running is not None:
                account.queued = SortedRequests()
            self._has_several |= name != OWNER and name not in self._named
        return account

    def has_several(self) -> bool:
        """Return True if there may be more than one tenant: the table has several, or one that is not in it
        has come over TCP.
        """
        return self._has_several

    def _note_names(self) -> None:
        """Find out whether there are several tenants: this is asked for every request."""
        others = self._accounts.keys() - self._named
        self._has_several = len(self.tenants.tenants) > 1 or bool(others - {OWNER})

    def add(self, req: Request) -> None:
        """Count a request that was accepted."""
        account = req.account = self._accounts.get(req.tenant) or self.of(req.tenant)
        client = req.handle[:CLIENT_BYTES]
        account.num_live += 1
        account.num_live_rows += req.width
        account.num_live_of[client] += 1
        num_tokens = req.num_charged = len(req.parked) // TOKEN_BYTES
        if req.is_again:
            account.num_again += 1
            account.num_again_of[client] += 1
        if not req.is_paid:
            account.num_used += num_tokens

    def discard(self, req: Request, num_tokens: int) -> None:
        """Uncount a request that ends with num_tokens tokens."""
        account, client = req.account, req.handle[:CLIENT_BYTES]
        if req.group is not None:
            num_tokens = _num_of_all_rows(req, num_tokens)
        account.num_used += num_tokens - req.num_charged
        account.num_live -= 1
        account.num_live_rows -= req.width
        num_left = account.num_live_of[client] = account.num_live_of[client] - 1
        if not num_left:
            del account.num_live_of[client]
        if req.is_again:
            account.num_again -= 1
            account.num_again_of[client] -= 1
            if not account.num_again_of[client]:
                del account.num_again_of[client]

    def change(self, tenants: Tenants) -> list[Account[Request]]:
        """Apply a new table. Returns the existing accounts, all of which may have new limits. A tenant that
        is taken out of the table keeps its limits as long as its account exists: without them all that it
        has here would run at once.
        """
        self.tenants = tenants
        self._named = frozenset(tenant.name for tenant in tenants.tenants)
        now_s = self._clock()
        for tenant in tenants.tenants:
            self.of(tenant.name)
        for name, account in self._accounts.items():
            account.close_books(now_s)
            if name in self._named:
                account.change(tenants.named(name), now_s)
        self._note_names()
        return list(self)

    def settle(self, *, no_older_s: float = 0.0) -> None:
        """Charge running requests for their output so far, unless that was done at most no_older_s ago."""
        now_s = self._clock()
        if now_s - self._settled_at < no_older_s:
            return
        self._settled_at = now_s
        for req in self._rows.running_requests():
            num_tokens = req.num_tokens
            if req.group is not None:
                num_tokens = _num_of_all_rows(req, num_tokens)
            req.account.num_used += num_tokens - req.num_charged
            req.num_charged = num_tokens
        for account in self:
            account.close_books(now_s)
        for name, account in list(self._accounts.items()):
            if not account.num_live and not account.used_in_minute and name not in self._named:
                del self._accounts[name]
        self._note_names()

    def check(self, live: Iterable[Request]) -> None:
        """Assert that every live request is counted exactly once, in the right account."""
        live = list(live)
        for account in self:
            own = [req for req in live if req.tenant == account.tenant.name]
            assert account.num_live == len(own)
            assert account.num_live_rows == sum(req.width for req in own)
            assert account.num_running == sum(req.row >= 0 for req in own)
            assert account.num_rows == sum(req.width for req in own if req.row >= 0)
            assert account.num_live_of == Counter(req.handle[:CLIENT_BYTES] for req in own)
            again = [req for req in own if req.is_again]
            assert account.num_again == len(again)
            assert account.num_again_of == Counter(req.handle[:CLIENT_BYTES] for req in again)
        assert {req.tenant for req in live} <= self._accounts.keys()

    def figures(self) -> dict[str, dict[str, int]]:
        """Return each tenant's figures by name, for /server_info."""
        self.settle()
        return {
            name: {
                "num_running": account.num_running,
                "num_waiting": account.num_waiting,
                "tokens_this_minute": account.used_in_minute,
                "num_tokens": account.num_used,
            }
            for name, account in self._accounts.items()
        }


def _num_of_all_rows(req: Request, num_tokens: int) -> int:
    """Return the tokens charged for a request whose rows each have num_tokens tokens: its prompt once, and
    the output of every row. A beam search that starts again gets nothing back and is not charged twice.
    """
    return max(req.num_charged, num_tokens + (req.width - 1) * (num_tokens - req.num_prompt))
