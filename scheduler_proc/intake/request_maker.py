"""RequestMaker: turns a message into a Request, if it can run and there is room for it."""

from __future__ import annotations

from collections.abc import Callable

from runtime.base.errors import InvalidRequest, Overloaded, RequestError
from runtime.ring.tenants import OWNER
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import CLIENT_BYTES
from runtime.wire.messages import TokenizedRequest
from runtime.wire.plan import NO_LORA, AdapterRef, RowProcessing
from scheduler_proc.cache.pages.retained_pages import RetainedPages, retained_pages
from scheduler_proc.capacity.inline_store import InlineStore
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import FeatureFactory, Request, StopIds
from scheduler_proc.features.base import Cost, RequestFeature, combined_cost
from scheduler_proc.intake.adapter_ids import AdapterIds
from scheduler_proc.intake.limits import Limits
from scheduler_proc.intake.shared_parts import SharedParts
from scheduler_proc.intake.tenant_limits import TenantLimiter


class RequestMaker:
    """Checks and numbers new sequences, and attaches their features."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        limits: Limits,
        factories: tuple[FeatureFactory, ...],
        *,
        clock: Callable[[], float],
        inline: InlineStore | None = None,
        may_ask: Callable[[Request], bool] | None = None,
    ) -> None:
        """inline: adapters that came with requests. may_ask: returns True if a request may get any feature;
        None: each factory is asked.
        """
        self._inline = inline
        self.limits = limits
        self.factories = factories
        self.may_ask = may_ask
        self.tenant_limits = TenantLimiter(
            lifecycle.accounts, lifecycle.room, lifecycle.kv.rows, limits.tenant_share, clock
        )
        self._lifecycle = lifecycle
        self._adapter_ids = AdapterIds()
        self._shared = SharedParts()
        self._eos = StopIds(limits.eos_ids)
        self._never = StopIds(frozenset())
        self._num_requests = 0

    def make(
        self,
        message: TokenizedRequest,
        key: bytes,
        suspect: bytes,
        now: float,
        cached_tokens: int,
        *,
        is_paid: bool = False,
    ) -> Request:
        """Return the request if it can run and there is room for it. key, suspect, is_paid: as in Request.
        Raises RequestError otherwise.
        """
        message = self._shared.share(message)
        limits, sampling = self.limits, message.sampling
        is_search = sampling.use_beam_search and sampling.num_beams > 1
        priority = message.priority
        if message.tenant != OWNER:
            priority = self.tenant_limits.priority_of(message)
        self._check_room(message, is_paid=is_paid)
        num_prompt = limits.check(message)
        self._num_requests += 1
        tokens, num_delivered = message.input_ids, 0
        if is_search:  # it starts again from its prompt, and comes to the same result
            num_delivered = len(message.output_ids) // TOKEN_BYTES
        elif message.output_ids:
            tokens += message.output_ids
        # By position: with keywords the constructor takes four times as long, 15 instead of 4 us.
        req = Request(
            message.handle,
            key,
            suspect,
            self._num_requests,
            self._lifecycle.kv.rows,
            sampling,
            self._stops(message),
            num_prompt,
            limits.last_len(num_prompt, sampling.max_tokens),
            num_prompt + sampling.min_tokens if sampling.min_tokens else 0,
            tokens,
            message.namespace,
            priority,
            message.arrived_s if 0.0 < message.arrived_s < now else now,
            message.deadline_s,
            message.draft_ids,
            message.prediction_ids,
            message.num_prompt_logprobs,
            num_delivered,
            cached_tokens,
            message.tenant,
            message.is_again,
            is_paid,
            message.guide,
            message.trace,
        )
        req.retained = self._retained(message, num_prompt)
        if message.processors:
            req.processing = RowProcessing(req.seq, message.label, message.processors, is_search)
        if message.adapter is not None or message.prompt_table is not None:
            self._note_contents(req, message)
        if is_search:
            req.shows_hypotheses = message.shows_hypotheses
        if self.may_ask is None or self.may_ask(req):
            self._attach_features(req)
        return req

    def _note_contents(self, req: Request, message: TokenizedRequest) -> None:
        """Set what the request needs in device slots. Raises RequestError if there can be no room for it."""
        req.adapter, req.prompt_table = message.adapter, message.prompt_table
        req.first_virtual = self.limits.vocab_size
        for contents in req.contents:
            self._check_adapter(contents)

    def _check_room(self, message: TokenizedRequest, *, is_paid: bool) -> None:
        """Raise Overloaded if there are too many sequences, or too many of this tenant or client."""
        limits, lifecycle, is_new = self.limits, self._lifecycle, not message.is_again
        num_live = len(lifecycle.requests)
        if message.tenant != OWNER:
            self.tenant_limits.check(message, num_live, is_paid=is_paid)
        # Sequences that the previous engine accepted are not refused because new ones have come first.
        max_live = limits.max_live * (1 if is_new else 2)
        if num_live >= max_live:
            raise Overloaded(f"{max_live} sequences run or wait already")
        share = limits.client_share
        # An HTTP server is one client for many tenants, and none of them is refused for the sequences of
        # another.
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
        return StopIds(own if sampling.ignore_eos else own | self.limits.eos_ids)

    def _retained(self, message: TokenizedRequest, num_prompt: int) -> tuple[RetainedPages, ...]:
        kv, wanted = self._lifecycle.kv, message.retention
        if wanted is None:
            return ()
        if not kv.cache.shares:
            raise InvalidRequest(
                "kv_cache_retention_config: this server keeps no KV (disable_radix_cache)",
                param="kv_cache_retention_config",
            )
        wanted.validate()
        return retained_pages(wanted, num_prompt, kv.page_size)

    def _check_adapter(self, adapter: AdapterRef) -> None:
        if not self._lifecycle.slots.num_slots:
            raise InvalidRequest(NO_LORA, param="lora_request", code="lora_not_enabled")
        if self._inline is not None and self._inline.has(adapter.path):
            self._inline.use(adapter)
        else:
            self._adapter_ids.check(adapter)

    def _attach_features(self, req: Request) -> None:
        features: tuple[RequestFeature, ...] = ()
        try:
            for factory in self.factories:
                if (feature := factory(req)) is not None:
                    features += (feature,)
            if features:
                self._check_cost(combined_cost(features, req.contents))
        except RequestError:
            for feature in features:  # releases what they have begun elsewhere
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
