"""Intake: checks the messages in the scheduler's inbox again, and turns them into life-cycle transitions.

Nothing that arrives can raise here: a sequence that cannot run is closed with the reason, never dropped.
Knows no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.base.errors import RequestError
from runtime.ring.suspects.errors import quarantined, suspended
from runtime.ring.suspects.roster import NO_SUSPECTS, Suspects, suspect_of, tenant_mark
from runtime.ring.tenants import OWNER
from runtime.wire.error_info import error_info
from runtime.wire.handle import attempt_of, client_of, sequence_key
from runtime.wire.messages import (
    AbortRequest,
    GiveWay,
    GuideRefused,
    StopMatched,
    TokenizedRequest,
    ToScheduler,
)
from scheduler_proc.cache.tenants import tenant_of
from scheduler_proc.capacity.inline_store import InlineStore
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import FeatureFactory, Request
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.limits import Limits
from scheduler_proc.intake.request_maker import RequestMaker
from scheduler_proc.intake.tombstones import Tombstones

MAX_MADE_AGAIN = 3
"""Number of times that a sequence which this engine has may be made again for nothing and before new ones.
A client over TCP can come back at any time, and would otherwise never give back the rows that it has.
"""


class Intake:
    """Receiver of the scheduler's messages: `receive` takes every message type of the socket."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        limits: Limits,
        factories: tuple[FeatureFactory, ...] = (),
        *,
        controls: Controls,
        clock: Callable[[], float],
        suspects: Suspects = NO_SUSPECTS,
        interrupted: Iterable[bytes] = (),
        inline: InlineStore | None = None,
        may_ask: Callable[[Request], bool] | None = None,
    ) -> None:
        """Start without sequences. suspects: sequences under which earlier engines have died. interrupted:
        those that the engine before had accepted. inline, may_ask: as in RequestMaker.
        """
        self.maker = RequestMaker(lifecycle, limits, factories, clock=clock, inline=inline, may_ask=may_ask)
        self.suspects = suspects
        there_before = set(interrupted)
        self.interrupted = set(map(sequence_key, there_before))
        """Keys of sequences of the engine before that have not come again. Their tenants have paid for them.
        """
        lifecycle.suspicions.expect(there_before & suspects.watched.keys())
        self._lifecycle = lifecycle
        self._controls = controls
        self._clock = clock
        self._tombstones = Tombstones(clock)
        self.num_received = 0
        """Number of TokenizedRequests received, accepted or not."""

    def receive(self, message: ToScheduler) -> None:
        if isinstance(message, TokenizedRequest):
            self.num_received += 1
            self._receive_request(message)
        elif isinstance(message, AbortRequest):
            self._abort(message)
        elif isinstance(message, StopMatched):
            self._stop_matched(message)
        elif isinstance(message, GuideRefused):
            self._guide_refused(message)
        elif isinstance(message, GiveWay):
            self._controls.give_way(message)
        else:
            self._controls.receive(message)

    # -- new sequences --------------------------------------------------------------------------------------

    def _receive_request(self, message: TokenizedRequest) -> None:
        handle, lifecycle = message.handle, self._lifecycle
        key = sequence_key(handle)
        earlier, cached_tokens, num_again = lifecycle.requests.get(key), -1, 0
        # To others who claim that a request is made again nothing is given.
        if earlier is None:
            is_known = key in self.interrupted
        else:
            num_again = earlier.num_made_again + 1
            is_known = num_again <= MAX_MADE_AGAIN and _has_come_from(message, earlier)
        is_paid = message.is_again and is_known
        has_begun = earlier is None or earlier.row >= 0 or earlier.num_retractions > 0
        if earlier is not None:
            # A caller who names another tenant's sequence must not replace it or end its stream.
            if attempt_of(earlier.handle) >= attempt_of(handle) or earlier.tenant != message.tenant:
                return
            cached_tokens = earlier.cached_tokens  # the sequence's own prompt is in the cache by now
            lifecycle.replace(earlier)
        if self._tombstones.try_take(handle, message.tenant):
            lifecycle.refuse(handle, message.stream_open, "abort", None, message.more_opens)
            return
        now = self._clock()
        if message.deadline_s and not message.deadline_s > now:
            lifecycle.refuse(handle, message.stream_open, "timeout", None, message.more_opens)
            return
        suspect = suspect_of(key, message.content)
        try:
            if self.suspects is not NO_SUSPECTS:  # the engine has died before
                self._check_suspects(suspect, message.tenant, now)
            req = self.maker.make(message, key, suspect, now, cached_tokens, is_paid=is_paid)
        except RequestError as error:
            lifecycle.refuse(handle, message.stream_open, "error", error_info(error), message.more_opens)
            return
        req.goes_first = message.is_again and (message.tenant == OWNER or (is_paid and has_begun))
        req.num_made_again = num_again
        if message.tenant != OWNER:
            limits = lifecycle.accounts.of(message.tenant).limits
            cache_share = None if limits is None else limits.cache_share
            lifecycle.kv.guard.shares.set(tenant_of(message.namespace), cache_share)
        lifecycle.add(req, message.stream_open, message.more_opens)
        self.interrupted.discard(key)
        if self.suspects is not NO_SUSPECTS:
            self._watch(req)
        if message.output_ids:
            self._finish_if_complete(req)

    def _check_suspects(self, suspect: bytes, tenant: str, now: float) -> None:
        """Raise RequestError if the engine has died of this request, and RateLimited if its tenant is
        suspended because the engine has died of its requests too often. The only tenant never is: nobody else
        would be better off.
        """
        suspects = self.suspects
        if suspect in suspects.guilty:
            raise quarantined("the engine")
        if tenant == OWNER or not suspects.suspended:
            return
        until_s = suspects.suspended.get(tenant_mark(tenant), 0.0)
        if until_s > now and self._lifecycle.accounts.has_several():
            raise suspended("the engine", until_s - now)

    def _watch(self, req: Request) -> None:
        """Have a sequence go first or run alone if the engine has died under it."""
        if req.suspect in self.suspects.watched:
            self._lifecycle.suspicions.add(req, self.suspects.watched[req.suspect])
        if req.suspect in self.suspects.alone:
            self._lifecycle.solitary.add(req, self.suspects.alone[req.suspect])

    def _finish_if_complete(self, req: Request) -> None:
        """End a resumed sequence that already has all of its output."""
        last = req.tokens.item(-1)
        if req.num_output and req.stops_at(last, req.num_tokens - 1):
            self._lifecycle.finish(req, "stop", stop_token=last)
        elif req.num_tokens >= req.max_len:
            self._lifecycle.finish(req, "length")

    # -- the end, from outside ------------------------------------------------------------------------------

    def _abort(self, message: AbortRequest) -> None:
        """Abort a sequence by its handle, even if it has not arrived yet, or all sequences of a client that
        belong to the sending tenant. The owner may abort all.
        """
        tenant = message.tenant
        for handle in message.handles:
            req = self._live(handle)
            if req is None:
                self._tombstones.add(handle, tenant)
            elif tenant in (OWNER, req.tenant):
                self._lifecycle.finish(req, "abort")
        if message.client:
            self._controls.forget(message.client, tenant)
            for req in list(self._lifecycle.requests.values()):
                if client_of(req.handle) == message.client and tenant in (OWNER, req.tenant):
                    self._lifecycle.finish(req, "abort")

    def _stop_matched(self, message: StopMatched) -> None:
        req = self._live(message.handle)
        if req is not None:
            self._lifecycle.finish(req, "stop_string")

    def _guide_refused(self, message: GuideRefused) -> None:
        req = self._live(message.handle)
        if req is not None:
            self._lifecycle.finish(req, "error", error=message.error)

    def _live(self, handle: bytes) -> Request | None:
        req = self._lifecycle.requests.get(sequence_key(handle))
        return req if req is not None and req.handle == handle else None


def _has_come_from(message: TokenizedRequest, earlier: Request) -> bool:
    """Return True if a request that is made again has nothing but tokens of the earlier attempt, and finds
    them in the cache. Others would be new ones that go under its name.
    """
    if message.namespace != earlier.namespace:
        return False
    tokens = message.input_ids + (message.output_ids if earlier.group is None else b"")
    return earlier.tokens.tobytes().startswith(tokens)
