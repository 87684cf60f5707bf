"""SchedulerLoop and the composition: when it sleeps, what it reports, what it is built from."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock, call

import msgspec
import numpy as np
import pytest

from runtime.base.errors import ConfigError
from runtime.ring.tenants import Tenant, Tenants
from runtime.settings.config import RuntimeConfig
from runtime.wire.handle import MAX_ABORT_HANDLES, make_handle
from runtime.wire.messages import AbortRequest, ControlOp, ControlRequest, TokenizedRequest
from runtime.wire.plan import RankCall, WorkerReady
from runtime.wire.transport import MemoryChannel
from scheduler_proc.batching.prefill_adder import PrefillTotals
from scheduler_proc.build_scheduler import build_scheduler
from scheduler_proc.core import output
from scheduler_proc.heartbeat import Heartbeat
from scheduler_proc.intake.worker_calls import WorkerCalls
from scheduler_proc.loop import CHECK_AFTER_IDLE_S, MAX_ABORTS_PER_STEP, RETRY_S, SchedulerLoop
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.policy.base import SchedulePolicy
from scheduler_proc.policy.longest_prefix import LongestPrefix
from scheduler_proc.port import Port
from scheduler_proc.scheduler import Scheduler
from tests.harness.scheduler.scheduler_parts import message, running
from tests.harness.simulation.fakes import FakeExecutor, RecordingOutbox
from tests.harness.simulation.sim_system import System

LIMITS = WorkerReady(num_pages=10, page_size=4, max_rows=3, max_len=100, vocab_size=96, device="cpu")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def loop_of(system: System) -> SchedulerLoop:
    return SchedulerLoop(system.scheduler)


def test_an_idle_loop_sleeps_and_a_busy_one_does_not() -> None:
    with running() as system:
        loop = loop_of(system)
        assert loop.turn() > RETRY_S
        system.inbox.send(message(1, [1] * 8))
        assert loop.turn() == 0.0
        while not system.scheduler.is_idle:
            assert loop.turn() == 0.0
        assert loop.turn() > RETRY_S


def test_a_loop_that_cannot_send_retries_soon() -> None:
    with running(depth=1) as system:
        loop = loop_of(system)
        system.outbox.refuses = lambda: True
        system.inbox.send(message(1, [1] * 8, max_tokens=1))
        loop.turn()
        assert loop.turn() == RETRY_S


def test_a_loop_that_reads_nothing_is_not_woken_by_what_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "MAX_BACKLOG", 8)
    wait, sleep = Mock(), Mock()
    with running(depth=1) as system:
        loop = loop_of(system)
        loop.rest(loop.turn(), wait, Mock(), sleep)
        assert (wait.call_count, sleep.call_count) == (1, 0)
        system.outbox.refuses = lambda: True
        for number in range(10):
            system.inbox.send(message(number, [], max_tokens=1))
            loop.turn()
        assert system.output.is_full
        loop.rest(loop.turn(), wait, Mock(), sleep)
        assert sleep.call_args_list == [call(RETRY_S)]
        assert wait.call_count == 1
        system.outbox.refuses = lambda: False
        loop.turn()
        loop.rest(loop.turn(), wait, Mock(), sleep)
        assert (wait.call_count, sleep.call_count) == (2, 1)


def test_a_step_takes_few_aborts_and_all_messages_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may send 16 messages of 4,096 handles that nobody knows: 80 ms of work."""
    with running() as system:
        loop = loop_of(system)
        for first in range(0, 16 * MAX_ABORT_HANDLES, MAX_ABORT_HANDLES):
            handles = tuple(make_handle(7, first + each) for each in range(MAX_ABORT_HANDLES))
            system.inbox.send(AbortRequest(handles))
        system.inbox.send(message(1, [1] * 8))
        taken = Mock(wraps=system.scheduler.step)
        monkeypatch.setattr(system.scheduler, "step", taken)
        while loop.turn() == 0.0:
            pass
        steps = [call.args[0] for call in taken.call_args_list]
        most = max(
            sum(len(each.handles) for each in step if isinstance(each, AbortRequest)) for step in steps
        )
        assert most == MAX_ABORTS_PER_STEP
        assert [type(each) for step in steps for each in step] == [AbortRequest] * 16 + [TokenizedRequest]


def test_an_idle_loop_checks_itself_once_and_survives_what_it_finds(caplog: pytest.LogCaptureFixture) -> None:
    with running() as system, caplog.at_level(logging.ERROR):
        loop = loop_of(system)
        system.inbox.send(message(1, [1] * 8))
        while loop.turn() == 0.0:
            pass
        system.kv.pages.num_free -= 1  # a page gets lost
        loop.turn()
        assert loop.num_failed_checks == 0, "it has not been idle for long"
        for _ in range(3):
            system.now += CHECK_AFTER_IDLE_S
            loop.turn()
        assert loop.num_failed_checks == 1
        assert "self-check failed" in caplog.text
        system.inbox.send(message(2, [2] * 8))
        assert loop.turn() == 0.0


def test_status_counts_what_waits_and_what_is_free() -> None:
    with running(max_rows=1, budget=4) as system:
        loop = loop_of(system)
        for i in range(3):
            system.inbox.send(message(i, [i + 1] * 10))
        loop.turn()
        status = loop.status()
        assert (status["num_running"], status["num_waiting"], status["queued_prompt_tokens"]) == (1, 2, 20)
        assert status["num_received"] == 3
        assert (status["num_pages"], status["max_len"]) == (64, 96)
        assert status["num_free_pages"] == 63


def test_log_lines_count_and_show_no_content(caplog: pytest.LogCaptureFixture) -> None:
    with running() as system, caplog.at_level(logging.INFO):
        for i in range(3):
            system.inbox.send(message(i, [42, 43, 44, 45, 46], max_tokens=50))
        for _ in range(45):
            system.step()
    assert "Prefill batch, #new-seq: 1, #new-token: 5, #cached-token: 0, token usage:" in caplog.text
    assert "Decode batch, #running-req: 3, #token: " in caplog.text
    assert "42, 43" not in caplog.text
    assert all(isinstance(arg, int | float) for record in caplog.records for arg in record.args or ())


def test_a_fast_model_writes_one_decode_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with running() as system, caplog.at_level(logging.INFO):
        log = StepLog(system.scheduler.kv, system.scheduler.lifecycle.room, 2, clock)
        for _ in range(25):
            clock.now += 0.1
            log.note_tokens(4)
            log.note_batch(4, PrefillTotals(0, 0, 0))
    lines = [record.message for record in caplog.records if record.message.startswith("Decode batch")]
    assert len(lines) == 3
    assert all("(token/s): 40.0," in line for line in lines[1:])


def build(**changes: object) -> tuple[Scheduler, SchedulePolicy]:
    """With one client connected, who has no other beside him."""
    config = msgspec.structs.replace(RuntimeConfig(context_length=2048, model="m"), **changes)
    executor = FakeExecutor(10, 4, 3, 40)
    executor.close()
    port = Port(MemoryChannel("scheduler_in"), [RecordingOutbox()], is_client_alone=lambda: True)
    scheduler = build_scheduler(config, frozenset({2}), executor, LIMITS, port)
    return scheduler, scheduler.builder.admission.policy


def test_no_sequence_may_outgrow_the_pool_the_worker_or_the_context() -> None:
    executor = FakeExecutor(10, 4, 3, 40)
    executor.close()
    for context_length, num_pages, max_len in ((2048, 10, 40), (2048, 100, 100), (30, 100, 30)):
        limits = msgspec.structs.replace(LIMITS, num_pages=num_pages)
        config = RuntimeConfig(context_length=context_length)
        port = Port(MemoryChannel("scheduler_in"), [RecordingOutbox()])
        scheduler = build_scheduler(config, frozenset(), executor, limits, port)
        assert scheduler.rows.tokens.shape == (3, max_len)
        assert scheduler.rows.tokens.dtype == np.int32


def test_settings_choose_policy_and_cache() -> None:
    scheduler, policy = build(schedule_policy="lpm", disable_radix_cache=True)
    assert isinstance(policy, LongestPrefix)
    assert not scheduler.kv.cache.shares


def test_settings_say_how_many_may_live_and_which_logits_may_be_asked_for() -> None:
    scheduler, _ = build(max_running_requests=3, max_queued_requests=5, gather_context_logits=True)
    limits = scheduler.intake.maker.limits
    assert limits.max_live == LIMITS.max_rows + 5
    share = limits.client_share
    assert share is not None
    assert (share.max_of_one, share.max_live) == (LIMITS.max_rows + 4, limits.max_live)
    assert not share.is_used_up(limits.max_live - 1, limits.max_live - 1)
    assert (limits.gather_context_logits, limits.gather_generation_logits) == (True, False)
    assert limits.max_logits_bytes == RuntimeConfig().max_logits_bytes


def test_a_share_that_was_set_is_a_lone_clients_too() -> None:
    scheduler, _ = build(max_queued_requests=5, max_queued_requests_per_client=2)
    share = scheduler.intake.maker.limits.client_share
    assert share is not None
    most = LIMITS.max_rows + 2
    assert [share.is_used_up(number, number) for number in (most - 1, most)] == [False, True]


def test_a_tenant_has_three_quarters_of_the_queue_where_there_are_others() -> None:
    scheduler, _ = build(max_queued_requests=5, max_queued_requests_per_client=2)
    limits = scheduler.intake.maker.limits
    share, most = limits.tenant_share, LIMITS.max_rows + 4
    assert share is not None
    assert (share.max_of_one, share.max_live, share.most) == (most, limits.max_live, limits.max_live)
    for num_tenants, is_used_up in ((0, False), (1, False), (2, True)):
        table = Tenants(tuple(Tenant(f"tenant-{number}") for number in range(num_tenants)))
        scheduler.lifecycle.room.change_tenants(table)
        assert share.is_used_up(most, most) is is_used_up


def test_the_settings_say_how_long_requests_wait() -> None:
    scheduler, _ = build(max_starvation=12.0, queue_timeout=34.0)
    assert scheduler.lifecycle.room._patience == (12.0, 34.0)


def test_an_unknown_policy_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="schedule policy"):
        build(schedule_policy="fastest")


def test_a_change_of_load_is_shown_at_once_and_nothing_else_before_the_heartbeat() -> None:
    class Context:
        def __init__(self) -> None:
            self.shown: list[dict[str, Any]] = []

        def beat(self, *, force: bool = False, **fields: Any) -> None:
            self.shown.append(fields)

    with running(max_rows=1) as system:
        loop = loop_of(system)
        context = Context()
        heartbeat = Heartbeat(context)  # type: ignore[arg-type]
        heartbeat.beat_after(loop)
        heartbeat.beat_after(loop)
        assert len(context.shown) == 1
        for number in range(2):
            system.inbox.send(message(number, [1] * 8))
        while loop.turn() == 0.0:
            heartbeat.beat_after(loop)
        heartbeat.beat_after(loop)
        names = ("num_received", "num_running", "num_waiting", "batch_size")
        loads = [tuple(each[name] for name in names) for each in context.shown]
        assert loads[:2] == [(0, 0, 0, 0), (2, 1, 1, 1)]
        assert loads[-1] == (2, 0, 0, 0)
        assert len(loads) <= 7, "written without a change"
        assert not context.shown[-1]["is_paused"]
        system.scheduler.controls.receive(ControlRequest(7, 1, "pause_generation"))
        heartbeat.beat_after(loop)
        assert context.shown[-1]["is_paused"]


@pytest.mark.parametrize(("op", "is_paused"), [("pause_generation", True), ("continue_generation", False)])
def test_the_page_shows_a_pause_before_its_answer_leaves(op: ControlOp, is_paused: bool) -> None:
    """An engine that dies right after the answer has its place taken by one that reads the page."""
    told: list[bool | str] = []

    class Context:
        def beat(self, *, force: bool = False, **fields: Any) -> None:
            assert force
            told.append(fields["is_paused"])

    with running() as system:
        heartbeat = Heartbeat(Context())  # type: ignore[arg-type]
        if not is_paused:
            system.lifecycle.serving.pause()
        system.lifecycle.serving.on_change = heartbeat.show_pause
        system.lifecycle.output.reply = lambda reply: told.append("answer")  # type: ignore[method-assign]
        system.scheduler.controls.receive(ControlRequest(7, 1, op))
    assert told == [is_paused, "answer"]


def test_a_call_to_the_ranks_is_shown_for_as_long_as_it_has_no_answer() -> None:
    with running() as system:
        loop = loop_of(system)
        ranks = Mock(num_ranks=1, rank_answers=lambda: ())
        calls = system.scheduler.controls.calls = WorkerCalls(ranks, system.output, system.port)
        calls.begin(ControlRequest(7, 1, "collective_rpc", call=RankCall("ping", b"", timeout_s=5.0)))
        assert loop.status()["is_in_call"]
        system.now += 5.0
        system.step()
        assert not loop.status()["is_in_call"]
