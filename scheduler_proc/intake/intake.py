"""Intake: what arrives in the scheduler's inbox, checked once more and turned into life-cycle transitions.

Nothing that arrives can raise here: a sequence that cannot run is closed with the reason, never dropped.
Knows no step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from runtime.base.errors import InvalidRequest, Overloaded, RequestError
from runtime.ring.roster import NO_SUSPECTS, Suspects
from runtime.ring.tenants import OWNER
from runtime.wire.error_info import error_info
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import attempt_of, client_of, sequence_key
from runtime.wire.messages import AbortRequest, GuideRefused, StopMatched, TokenizedRequest, ToScheduler
from runtime.wire.plan import NO_LORA, AdapterRef, RowProcessing
from runtime.wire.retention import Retention
from scheduler_proc.cache.pages.retained_pages import RetainedPages, retained_pages
from scheduler_proc.cache.tenants import tenant_of
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request, StopIds
from scheduler_proc.core.solitary import quarantined
from scheduler_proc.features.base import Cost, RequestFeature, combined_cost
from scheduler_proc.intake.adapter_ids import AdapterIds
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.limits import Limits
from scheduler_proc.intake.tenant_limits import TenantLimiter
from scheduler_proc.waiting.tenant_accounts import CLIENT_BYTES

TOMBSTONE_S = 30.0
"""How long the abort of an unknown sequence is remembered; longer than a request may wait to be tokenized."""
MAX_TOMBSTONES = 65536

FeatureFactory: TypeAlias = Callable[[Request], RequestFeature | None]
"""Makes a feature for a new request, or None when it did
not ask for it. Raises RequestError to refuse the request.
"""


@dataclass(slots=True)
class Tombstones:
    """Handles whose abort came before they did, by whose abort it was. Bounded in time and number; the oldest
    go first.
    """

    clock: Callable[[], float]
    max_handles: int = MAX_TOMBSTONES
    # A plain dictionary would walk over all that it has deleted to find the oldest.
    _expires_at: OrderedDict[tuple[bytes, str], float] = field(default_factory=OrderedDict)

    def add(self, handle: bytes, tenant: str = OWNER) -> None:
        now = self.clock()
        while self._expires_at:
            oldest = next(iter(self._expires_at))
            if self._expires_at[oldest] > now and len(self._expires_at) < self.max_handles:
                break
            self._expires_at.popitem(last=False)
        self._expires_at.setdefault((handle, tenant), now + TOMBSTONE_S)

    def try_take(self, handle: bytes, tenant: str = OWNER) -> bool:
        """Tell whether this tenant or the owner has aborted the tenant's handle before it came."""
        if not self._expires_at:
            return False
        expires_at = [self._expires_at.pop((handle, who), 0.0) for who in {tenant, OWNER}]
        return max(expires_at) > self.clock()

    def __len__(self) -> int:
        return len(self._expires_at)


class Intake:
    """One `receive` for every message of the socket's union."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        limits: Limits,
        factories: tuple[FeatureFactory, ...] = (),
        *,
        controls: Controls,
        clock: Callable[[], float],
        suspects: Suspects = NO_SUSPECTS,
    ) -> None:
        """`suspects`: under whom earlier engines have died."""
        self._suspects = suspects
        self._lifecycle = lifecycle
        self._limits = limits
        self._tenant_limits = TenantLimiter(
            lifecycle.accounts, lifecycle.room, lifecycle.kv.rows, limits.tenant_share, clock
        )
        self._controls = controls
        self._factories = factories
        self._clock = clock
        self._tombstones = Tombstones(clock)
        self._adapter_ids = AdapterIds()
        self._eos = StopIds(limits.eos_ids)
        self._never = StopIds(frozenset())
        self._num_requests = 0
        self.num_received = 0
        """TokenizedRequests that have come, whatever became of them."""

    def receive(self, message: ToScheduler) -> None:
        if isinstance(message, TokenizedRequest):
            self.num_received += 1
            self._take_in(message)
        elif isinstance(message, AbortRequest):
            self._abort(message)
        elif isinstance(message, StopMatched):
            self._stop_matched(message)
        elif isinstance(message, GuideRefused):
            self._guide_refused(message)
        else:
            self._controls.receive(message)

    # -- new sequences --------------------------------------------------------------------------------------

    def _take_in(self, message: TokenizedRequest) -> None:
        handle, lifecycle = message.handle, self._lifecycle
        key = sequence_key(handle)
        earlier, cached_tokens = lifecycle.requests.get(key), -1
        if earlier is not None:
            # Whoever names another tenant's sequence is not to take its place, nor to end its stream.
            if attempt_of(earlier.handle) >= attempt_of(handle) or earlier.tenant != message.tenant:
                return
            cached_tokens = earlier.cached_tokens  # its own prompt is in the cache by now
            lifecycle.replace(earlier)
        if self._tombstones.try_take(handle, message.tenant):
            lifecycle.refuse(handle, message.stream_open, "abort", None, message.more_opens)
            return
        now = self._clock()
        if message.deadline_s and not message.deadline_s > now:
            lifecycle.refuse(handle, message.stream_open, "timeout", None, message.more_opens)
            return
        try:
            req = self._checked(message, key, now, cached_tokens)
        except RequestError as error:
            lifecycle.refuse(handle, message.stream_open, "error", error_info(error), message.more_opens)
            return
        if message.tenant != OWNER:
            limits = lifecycle.accounts.of(message.tenant).limits
            cache_share = None if limits is None else limits.cache_share
            lifecycle.kv.guard.shares.set(tenant_of(message.namespace), cache_share)
        lifecycle.add(req, message.stream_open, message.more_opens)
        if key in self._suspects.alone:
            lifecycle.solitary.add(req)
        if message.output_ids:
            self._finish_if_complete(req)

    def _checked(self, message: TokenizedRequest, key: bytes, now: float, cached_tokens: int) -> Request:
        """The request, if there is room for it and it can ever run. Raises RequestError."""
        limits, sampling = self._limits, message.sampling
        if key in self._suspects.guilty:
            raise quarantined()
        priority = message.priority
        if message.tenant != OWNER:
            priority = self._tenant_limits.priority_of(message)
        self._check_room(message)
        num_prompt = limits.check(message)
        self._num_requests += 1
        req = Request(
            message.handle,
            key,
            self._num_requests,
            self._lifecycle.kv.rows,
            sampling,
            self._stops(message),
            num_prompt,
            limits.last_len(num_prompt, sampling.max_tokens),
            num_prompt + sampling.min_tokens if sampling.min_tokens else 0,
            # A beam search is made again whole: what has come of it comes again.
            message.input_ids + (message.output_ids if sampling.num_beams == 1 else b""),
            message.namespace,
            priority,
            message.arrived_s if 0.0 < message.arrived_s < now else now,
            message.deadline_s,
            message.draft_ids,
            message.prediction_ids,
            message.num_prompt_logprobs,
            0 if sampling.num_beams == 1 else len(message.output_ids) // TOKEN_BYTES,
            cached_tokens=cached_tokens,
            retained=() if message.retention is None else self._retained(message.retention, num_prompt),
            guide=message.guide,
            processing=RowProcessing(self._num_requests, message.label, message.processors)
            if message.processors
            else None,
            tenant=message.tenant,
            is_again=message.is_again,
            adapter=message.adapter,
            trace=message.trace,
        )
        self._check_adapter(message.adapter)
        self._attach_features(req)
        return req

    def _check_room(self, message: TokenizedRequest) -> None:
        """Raises Overloaded when too many sequences are there, or too many of this tenant or client."""
        limits, lifecycle, is_new = self._limits, self._lifecycle, not message.is_again
        num_live = len(lifecycle.requests)
        if message.tenant != OWNER:
            self._tenant_limits.check(message, num_live)
        # What was accepted by the engine before this one is not refused because new ones have come first.
        max_live = limits.max_live * (1 if is_new else 2)
        if num_live >= max_live:
            raise Overloaded(f"{max_live} sequences run or wait already")
        share = limits.client_share
        # An HTTP server is one client for many tenants: none of them is refused for what another one has.
        if share is None or (message.tenant != OWNER and not share.is_set):
            return
        client, account = message.handle[:CLIENT_BYTES], lifecycle.accounts.of(message.tenant)
        if is_new:
            is_used_up = share.is_used_up(account.num_live_of[client], num_live)
        else:
            is_used_up = account.num_again_of[client] >= share.most
        if is_used_up:
            raise Overloaded(
                "this client has its share of the waiting queue; let some of its requests end first",
                code="client_overloaded",
            )

    def _stops(self, message: TokenizedRequest) -> StopIds:
        sampling = message.sampling
        if not sampling.stop_token_ids:
            return self._never if sampling.ignore_eos else self._eos
        own = frozenset(sampling.stop_token_ids)
        return StopIds(own if sampling.ignore_eos else own | self._limits.eos_ids)

    def _retained(self, wanted: Retention, num_prompt: int) -> tuple[RetainedPages, ...]:
        kv = self._lifecycle.kv
        if not kv.cache.shares:
            raise InvalidRequest(
                "kv_cache_retention_config: this server keeps no KV (disable_radix_cache)",
                param="kv_cache_retention_config",
            )
        wanted.validate()
        return retained_pages(wanted, num_prompt, kv.page_size)

    def _check_adapter(self, adapter: AdapterRef | None) -> None:
        if adapter is None:
            return
        if not self._lifecycle.slots.num_slots:
            raise InvalidRequest(NO_LORA, param="lora_request", code="lora_not_enabled")
        self._adapter_ids.check(adapter)

    def _attach_features(self, req: Request) -> None:
        features: tuple[RequestFeature, ...] = ()
        try:
            for factory in self._factories:
                feature = factory(req)
                if feature is not None:
                    features += (feature,)
            if features:
                self._check_cost(combined_cost(features, req.adapter))
        except RequestError:
            for feature in features:  # what they have begun elsewhere ends
                feature.release()
            raise
        req.features = features

    def _check_cost(self, cost: Cost) -> None:
        for what, needed, there in (
            ("rows", cost.rows, self._lifecycle.kv.rows.max_rows),
            ("slots", len(cost.slots), self._lifecycle.slots.num_slots),
        ):
            if needed > there:
                raise InvalidRequest(
                    f"the request needs {needed} {what}, there are {there}", code="request_too_large"
                )

    def _finish_if_complete(self, req: Request) -> None:
        """A resumed sequence may lack nothing but its end."""
        last = req.tokens.item(-1)
        if req.num_output and req.stops_at(last, req.num_tokens - 1):
            self._lifecycle.finish(req, "stop", stop_token=last)
        elif req.num_tokens >= req.max_len:
            self._lifecycle.finish(req, "length")

    # -- the end, from outside ------------------------------------------------------------------------------

    def _abort(self, message: AbortRequest) -> None:
        """By exact handle, which may be on its way still, or everything that a client has here now: of the
        tenant that says so. The owner may end all.
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
