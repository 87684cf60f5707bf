"""Controls: answers requests about the scheduler itself. Each ControlRequest is answered exactly once; one
from a tenant that is not an admin with an error.

    server_info                      settings in force, and totals
    iteration_stats, request_stats   StatsQuestions, whose answers may wait for a step
    flush_cache                      drops all cached pages that no running request uses
    pause_…, continue_generation     no step is launched; those in flight are committed, messages are received
    start_profile, stop_profile      StepProfile
    collective_rpc                   calls a method of the ranks between two steps: WorkerCalls
    put_adapter                      InlineStore: keeps weights that came with a request, if there is room
    snapshot                         current state, at bounded cost: SnapshotMaker
    update_weights                   passed on to the launcher, which answers and has the engine give way
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from runtime.base.errors import Forbidden, InvalidRequest, RequestError
from runtime.ring.tenants import Role
from runtime.wire.error_info import error_info
from runtime.wire.messages import ControlOp, ControlRequest, GiveWay
from runtime.wire.plan import NO_LORA, NO_UPDATES
from runtime.wire.transport import Outbox
from scheduler_proc.capacity.inline_store import InlineStore
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import reply_to
from scheduler_proc.intake.worker_calls import WorkerCalls
from scheduler_proc.observe.queue_times import BOUNDS_S
from scheduler_proc.observe.snapshot import SnapshotMaker
from scheduler_proc.observe.stats_questions import StatsQuestions
from scheduler_proc.observe.step_profile import StepProfile

logger = logging.getLogger(__name__)

Answer: TypeAlias = Mapping[str, Any]


def _ask_detokenizers(request: ControlRequest) -> Answer:
    raise InvalidRequest(f"{request.op}: the detokenizers answer this, and tokenizers send it there")


class Controls:
    """Answers control requests: statistics, cache, pause, profile, adapters, snapshot."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        questions: StatsQuestions,
        max_len: int,
        settings: Answer | None = None,
        *,
        profile: StepProfile,
        snapshots: SnapshotMaker,
        calls: WorkerCalls,
        inline: InlineStore | None = None,
        to_launcher: Outbox | None = None,
        epoch: int = 0,
    ) -> None:
        """questions: requests for statistics, some of which wait for the next step. max_len: most tokens of a
        sequence. settings: further content of server_info. inline: adapters that came with requests.
        to_launcher: takes requests for other weights; None: they are refused. epoch: that of the engine.
        """
        self.gives_way = False
        """True once another engine takes the place of this one: no step is launched any more."""
        self._to_launcher = to_launcher
        self._is_update_asked = False
        self._epoch = epoch
        self.questions = questions
        self.profile = profile
        self.calls = calls
        self._lifecycle = lifecycle
        self._inline = inline
        self._settings = {**(settings or {}), "max_len": max_len}
        self._answers: dict[ControlOp, Callable[[ControlRequest], object]] = {
            "server_info": lambda _: self._server_info(),
            "iteration_stats": questions.ask,
            "request_stats": questions.ask,
            "flush_cache": lambda _: self._flush_cache(),
            "pause_generation": lambda request: self._pause(request.mode),
            "continue_generation": lambda _: self._continue(),
            "start_profile": lambda request: self.profile.start(request.num_steps),
            "stop_profile": lambda _: self.profile.stop(),
            "drop_adapter": lambda request: {"num_dropped": lifecycle.slots.retire(request.label)},
            "put_adapter": self._put_adapter,
            "snapshot": lambda _: snapshots.make(),
            "collective_rpc": self.calls.begin,
            "timeline": _ask_detokenizers,
            "update_weights": self._update_weights,
        }

    def receive(self, request: ControlRequest) -> None:
        """Carry out a control request and reply, with an error if it fails."""
        output = self._lifecycle.output
        try:
            self._check_role(request)
            answer = self._answers[request.op](request)
        except RequestError as error:
            output.reply(reply_to(request, error_info(error), ok=False))
        else:
            if answer is not None:
                output.reply(reply_to(request, answer))

    @property
    def is_paused(self) -> bool:
        """True while no step is launched, until generation is continued, also across restarts of
        the engine.
        """
        return self._lifecycle.serving.is_paused

    @property
    def may_launch(self) -> bool:
        """True unless generation is paused, a call to ranks is open, or the engine gives way."""
        return not (self._lifecycle.serving.is_paused or self.calls.is_open or self.gives_way)

    def give_way(self, message: GiveWay) -> None:
        """Prepare for the end of this engine. No effect if nobody has asked for other weights, or if another
        engine is meant.
        """
        if not self._is_update_asked or message.epoch != self._epoch:
            return
        self.gives_way = True
        if message.aborts:
            self._abort_all()

    def _check_role(self, request: ControlRequest) -> None:
        """Raise Forbidden unless an admin asks, or a user about something of its own."""
        tenant = self._lifecycle.accounts.tenants.named(request.tenant)
        role: Role = "user" if request.op == "put_adapter" else "admin"
        if not tenant.may(role):
            raise Forbidden(f"{request.op} needs the role {role}; this key has the role {tenant.role}")

    def forget(self, client: int, tenant: str) -> None:
        """Forget a client that has gone, and its open questions, but only those of this tenant unless it is
        the owner.
        """
        self.questions.forget(client, tenant)
        self.calls.forget(client, tenant)

    def _server_info(self) -> Answer:
        lifecycle, kv = self._lifecycle, self._lifecycle.kv
        return {
            **self._settings,
            "is_paused": self.is_paused,
            "num_running": kv.rows.num_running,
            "num_waiting": len(lifecycle.room),
            "queued_tokens": lifecycle.room.num_tokens(),
            "max_running_requests": kv.rows.max_rows,
            "page_size": kv.page_size,
            "num_pages": kv.pages.num_pages,
            "num_free_pages": kv.pages.num_free,
            "num_cached_pages": kv.cache.num_pages,
            "num_evicted_pages": kv.counts.num_evicted,
            "num_new_pages": kv.counts.num_new,
            "num_reused_pages": kv.counts.num_reused,
            "num_missed_pages": kv.counts.num_missed,
            "cache_hit_rate": kv.counts.hit_rate,
            "num_accepted": lifecycle.num_accepted,
            "num_terminated": lifecycle.num_terminated,
            "num_replaced": lifecycle.num_replaced,
            "num_retracted": lifecycle.num_retracted,
            "queue_time_bounds_s": list(BOUNDS_S),
            "queue_time_counts": lifecycle.queue_times.counts,
            "queue_time_sum_s": lifecycle.queue_times.sum_s,
            "tenants": lifecycle.accounts.figures(),
            **lifecycle.slots.figures(),
            **({} if lifecycle.room.width_gate is None else lifecycle.room.width_gate.figures()),
            **({} if self._inline is None else self._inline.figures()),
            **self.questions.stats.totals(),
        }

    def _put_adapter(self, request: ControlRequest) -> Answer:
        if self._inline is None or request.adapter is None:
            raise InvalidRequest(NO_LORA, param="lora_config", code="lora_not_enabled")
        self._inline.put(request.adapter.path)
        return {"is_resident": True}

    def _flush_cache(self) -> Answer:
        """Flush the cache. Pages of running requests become evictable when these end."""
        kv = self._lifecycle.kv
        num_freed = kv.flush()
        return {"num_freed_pages": num_freed, "num_pages_in_use": kv.pages.num_pages - kv.pages.num_free}

    def _pause(self, mode: str) -> Answer:
        """Pause generation, or change the mode of a pause.

        in_place  running requests keep their rows and pages
        retract   running requests are retracted, which frees the whole cache, and computed again later
        abort     all live requests end
        """
        self._lifecycle.serving.pause()
        if mode == "retract":
            for req in self._lifecycle.kv.rows.running_requests():
                self._lifecycle.retract(req)
        elif mode == "abort":
            self._abort_all()
        return self._said(f"paused ({mode})")

    def _abort_all(self) -> None:
        for req in list(self._lifecycle.requests.values()):
            self._lifecycle.finish(req, "abort")

    def _update_weights(self, request: ControlRequest) -> None:
        """Pass on a request for other weights. The launcher answers it."""
        if self._to_launcher is None:
            raise Forbidden(NO_UPDATES)
        if request.weights is None:
            raise InvalidRequest("weights: say which", param="weights")
        if not self._to_launcher.send(request):
            raise RequestError("the launcher does not read its messages", code="timeout", status=503)
        self._is_update_asked = True

    def _continue(self) -> Answer:
        self._lifecycle.serving.resume()
        return self._said("going on")

    def _said(self, what: str) -> Answer:
        num_running = self._lifecycle.kv.rows.num_running
        num_waiting = len(self._lifecycle.room)
        logger.info("Generation is %s, #running-req: %d, #queue-req: %d", what, num_running, num_waiting)
        return {"is_paused": self.is_paused, "num_running": num_running, "num_waiting": num_waiting}
