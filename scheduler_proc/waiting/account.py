"""Account: number of a tenant's sequences, and the tokens that it uses."""

from __future__ import annotations

from collections import Counter
from typing import Generic

from runtime.ring.tenants import Tenant, TenantLimits
from scheduler_proc.waiting.sorted_requests import R, SortedRequests

MINUTE_S = 60.0


class TokenBucket:
    """Token bucket that fills with `per_minute` tokens a minute and holds at most as many. It may be in debt,
    because tokens are taken after they were used.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._filled_at = now_s

    def take(self, num_tokens: int, now_s: float) -> None:
        """Fill the bucket up to now, and take the tokens that were used meanwhile."""
        filled = self.level + self.per_minute * (now_s - self._filled_at) / MINUTE_S
        self._filled_at = now_s
        self.level = min(float(self.per_minute), filled) - num_tokens

    def seconds_until_one(self) -> float:
        """Return the seconds until there is a token in the bucket; 0.0 if there is one."""
        return max(0.0, 1.0 - self.level) * MINUTE_S / self.per_minute


class Account(Generic[R]):
    """Account of one tenant."""

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self.num_live = 0
        """Number of sequences that run or wait."""
        self.num_running = 0
        """Number of sequences that have a row."""
        self.num_live_rows = 0
        """Number of rows that all live sequences have or wait for; a beam search has several."""
        self.num_rows = 0
        """Number of rows that the running ones have."""
        self.num_again = 0
        """Number of live sequences that were submitted again after a restart."""
        self.num_live_of: Counter[bytes] = Counter()
        """Number of running and waiting sequences by the client part of their handles."""
        self.num_again_of: Counter[bytes] = Counter()
        """Number of sequences submitted again after a restart, by the client part of their handles."""
        self.queued: SortedRequests[R] | None = None
        """Its requests in the waiting queue; None without max_running, when none is ever held back."""
        self.held = SortedRequests[R]()
        """Its requests that are held back behind the queue; see WaitingRoom."""
        self.next_tag = 0
        """Start tag behind all of its requests (see FairOrder)."""
        self.had_tag = 0
        """Start tag behind those of its requests that have had rows."""
        self.last_tag = 0
        """Start tag of its last request to arrive, while any of them waits."""
        self.bucket: TokenBucket | None = None
        """Bucket of tokens that it may use; None: without limit."""
        self.newest: tuple[bytes, float] = (b"", 0.0)
        """Key of the request that was accepted last, and the time of that."""
        self.num_used = 0
        """Number of tokens used since the account was opened."""
        self._num_booked = 0
        """Number of tokens that bucket and minute count already."""
        self._minute = -1
        self._used_in_minute = 0
        self.change(tenant, now_s)

    @property
    def num_waiting(self) -> int:
        return self.num_live - self.num_running

    @property
    def num_waiting_rows(self) -> int:
        """Number of rows that the waiting sequences wait for."""
        return self.num_live_rows - self.num_rows

    @property
    def limits(self) -> TenantLimits | None:
        return self.tenant.limits

    @property
    def max_running(self) -> int | None:
        return None if self.limits is None else self.limits.max_running

    def may_choose(self, num_requests: int, num_rows: int) -> bool:
        """Return True if its next num_requests waiting requests, which need num_rows rows, may get rows. A
        single request always may while none runs, because max_running may have been higher when it arrived.
        """
        assert self.max_running is not None
        num_places = max(0, self.max_running - self.num_rows)
        return num_rows <= num_places or (num_requests == 1 and not self.num_running)

    def change(self, tenant: Tenant, now_s: float) -> None:
        """Apply new limits. A bucket whose size changes keeps its content."""
        self.tenant = tenant
        per_minute = None if tenant.limits is None else tenant.limits.tokens_per_minute
        if per_minute is None:
            self.bucket = None
        elif self.bucket is None:
            self.bucket = TokenBucket(per_minute, now_s)
        else:
            self.bucket.per_minute = per_minute

    def close_books(self, now_s: float) -> None:
        """Take the tokens used since the last call from the bucket, and count them for the minute."""
        minute = int(now_s // MINUTE_S)
        if minute != self._minute:
            self._minute = minute
            self._used_in_minute = 0
        num_new = self.num_used - self._num_booked
        self._num_booked = self.num_used
        self._used_in_minute += num_new
        if self.bucket is not None:
            self.bucket.take(num_new, now_s)

    @property
    def used_in_minute(self) -> int:
        """Return the number of tokens used in the current minute, up to the last `close_books`."""
        return self._used_in_minute
