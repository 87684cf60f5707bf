"""Schedulers of the user's own: what they are shown, what they decide, and what a bad answer costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import pytest

from runtime.base.errors import ConfigError
from scheduler_proc.llm_request import KvCacheView, LlmRequest, LlmRequestState
from scheduler_proc.request_scheduler import (
    CapacityScheduler,
    MicroBatchScheduler,
    RequestList,
    RequestScheduler,
    SchedulerOutput,
    SimpleScheduler,
)
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation import simulation

EXAMPLE = "examples.guaranteed_no_evict_scheduler:GuaranteedNoEvictScheduler"
REQUESTS = [message(i, [i + 1] * 10, max_tokens=30) for i in range(4)]


class LastFirst(CapacityScheduler):
    """The youngest first, and as many as there are rows; takes rows back when pages are short."""

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheView) -> None:
        self.max_num_requests = max_num_requests

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        started = [request for request in active_requests if request.has_row]
        waiting = [request for request in active_requests if not request.has_row]
        waiting.sort(key=lambda request: -request.request_id)
        return [*started, *waiting][: self.max_num_requests], []


class LeavesOutTheThird(CapacityScheduler):
    """All but one."""

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheView) -> None:
        pass

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return [request for request in active_requests if request.request_id != 3], []


class PausesEveryTenth(CapacityScheduler):
    """Takes the row of the oldest every ten calls."""

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheView) -> None:
        self.num_calls = 0

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        self.num_calls += 1
        if self.num_calls % 10 or not active_requests[0].has_row:
            return active_requests, []
        return active_requests[1:], active_requests[:1]


class OnePrompt(MicroBatchScheduler):
    """At most one prompt a step."""

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self.max_batch_size = max_batch_size

    def schedule(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> tuple[RequestList, RequestList]:
        there = [request for request in active_requests if request.request_id not in inflight_request_ids]
        context = [request for request in there if request.state == LlmRequestState.CONTEXT_INIT]
        generation = [request for request in there if request.state > LlmRequestState.CONTEXT_INIT]
        generation = generation[: self.max_batch_size]
        return context[: min(1, self.max_batch_size - len(generation))], generation


class OneAtATime(RequestScheduler):
    """Both decisions at once."""

    def __init__(
        self, max_num_requests: int, kv_cache_manager: KvCacheView, max_batch_size: int, max_num_tokens: int
    ) -> None:
        pass

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        first = active_requests[0]
        if first.request_id in inflight_request_ids:
            return SchedulerOutput([], [], [])
        if first.state is LlmRequestState.CONTEXT_INIT:
            return SchedulerOutput([first], [], [])
        return SchedulerOutput([], [first], [])


class Scripted(RequestScheduler):
    """Answers as the test says, once; then like SimpleScheduler."""

    answer: ClassVar[Callable[[RequestList], Any]]

    def __init__(self, *limits: object) -> None:
        self.num_calls = 0
        self.usual = SimpleScheduler(LastFirst(4, limits[1]), OnePrompt(4, 64))  # type: ignore[arg-type]

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        self.num_calls += 1
        if self.num_calls == 3:
            answer: SchedulerOutput = Scripted.answer(active_requests)
            return answer
        return self.usual.schedule_request(active_requests, inflight_request_ids)


def name_of(cls: type) -> str:
    return f"{__name__}:{cls.__name__}"


def outputs(**settings: Any) -> list[list[int]]:
    with running(**settings) as system:
        run_until_idle(system, *REQUESTS)
        system.check_empty()
        return [system.detokenizer.tokens[r.handle] for r in REQUESTS]


@cache
def usual_outputs() -> list[list[int]]:
    return outputs()


# -- what they decide --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "scheduler",
    [
        {"capacity": EXAMPLE},
        {"capacity": name_of(LastFirst)},
        {"capacity": name_of(PausesEveryTenth)},
        {"micro_batch_scheduler": name_of(OnePrompt)},
        {"capacity": EXAMPLE, "micro_batch_scheduler": name_of(OnePrompt)},
        {"capacity": "guaranteed_no_evict", "micro_batch_scheduler": name_of(OnePrompt)},
        {"request_scheduler": name_of(OneAtATime)},
        {"capacity": EXAMPLE, "batching": "inflight"},
    ],
    ids=str,
)
def test_output_does_not_depend_on_who_schedules(scheduler: dict[str, str], depth: int) -> None:
    assert outputs(num_pages=26, max_len=56, depth=depth, **scheduler) == usual_outputs()


def test_the_documented_example_reserves_to_completion_and_never_pauses() -> None:
    with running(num_pages=22, max_len=56, capacity=EXAMPLE) as system:
        for item in REQUESTS:
            assert system.inbox.send(item)
        system.step()
        assert system.rows.num_running == 2, "ten pages each at their end"
        run_until_idle(system)
        assert not system.lifecycle.num_retracted


def test_last_come_first_served_turns_the_order_of_completion_round() -> None:
    with running(capacity=name_of(LastFirst), max_rows=1) as system:
        run_until_idle(system, *REQUESTS)
        assert [handle[8] for handle in system.detokenizer.closed] == [3, 2, 1, 0]


def test_who_was_not_chosen_does_not_get_the_row_that_another_one_had_to_give_up() -> None:
    """A row taken back puts its request before those that wait, in the step in which these were chosen."""
    with running(num_pages=6, capacity=name_of(LeavesOutTheThird)) as system:
        for item in (message(0, [1] * 7, 9), message(1, [2] * 15, 9), message(2, [3] * 3), message(3, [4])):
            assert system.inbox.send(item)
        lifecycle = system.scheduler.lifecycle
        while not lifecycle.num_retracted:
            system.step()
        assert [req.seq for req in lifecycle.kv.rows.running_requests()] == [1, 4]


def test_who_is_paused_goes_on_later() -> None:
    with running(capacity=name_of(PausesEveryTenth)) as system:
        run_until_idle(system, *REQUESTS)
        assert system.lifecycle.num_retracted > 1


def test_one_prompt_a_step() -> None:
    with running(micro_batch_scheduler=name_of(OnePrompt)) as system:
        for item in REQUESTS:
            assert system.inbox.send(item)
        started = []
        for _ in range(4):
            system.step()
            started.append(system.rows.num_running)
        assert started == [1, 2, 3, 4]
        run_until_idle(system)


def test_who_is_not_chosen_stays_as_it_is() -> None:
    with running(request_scheduler=name_of(OneAtATime)) as system:
        run_until_idle(system, *REQUESTS)
        assert [handle[8] for handle in system.detokenizer.closed] == [0, 1, 2, 3]


def test_a_capacity_scheduler_that_promises_too_much_makes_somebody_give_way() -> None:
    assert outputs(num_pages=14, max_len=56, capacity=name_of(LastFirst)) == usual_outputs()


# -- a bad answer --------------------------------------------------------------------------------------------


def raises(active: RequestList) -> Any:
    raise ZeroDivisionError("mine")


BAD = {
    "raises": (raises, "ZeroDivisionError: mine"),
    "nothing": (lambda active: None, "3 lists"),
    "two lists": (lambda active: ([], []), "3 lists"),
    "no list": (lambda active: ([], [], 5), "must be a list"),
    "a stranger": (lambda active: ([], ["x"], []), "was not given"),
    "twice": (lambda active: ([], [active[0], active[0]], []), "there twice"),
    "in two lists": (lambda active: ([], [active[0]], [active[0]]), "there twice"),
    "a copy": (lambda active: ([], [LlmRequest(active[0]._req)], []), "was not given"),
    "a decode as a prompt": (lambda active: ([active[0]], [], []), "no context request"),
    "a prompt as a decode": (lambda active: ([], [active[-1]], []), "no generation request"),
    "a pause of who waits": (lambda active: ([], [], [active[-1]]), "does not run"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_ends_the_requests_of_its_call_with_the_reason(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer, reason = BAD[kind]
    monkeypatch.setattr(Scripted, "answer", staticmethod(answer), raising=False)
    caplog.set_level(logging.CRITICAL)
    with running(request_scheduler=name_of(Scripted)) as system:
        run_until_idle(system, *REQUESTS)
        for item in REQUESTS:
            error = system.detokenizer.closed[item.handle].error
            assert error is not None
            assert (error.code, error.status) == ("scheduler_failed", 500)
            assert reason in error.message
        after = message(9, [9] * 5, max_tokens=5)
        run_until_idle(system, after)
        assert system.detokenizer.closed[after.handle].reason == "length", "the engine lives"
        system.check_empty()


def test_more_requests_than_a_step_may_hold_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    Scripted.answer = staticmethod(lambda active: (active[1:], active[:1], []))
    with running(request_scheduler=name_of(Scripted), max_requests=2) as system:
        run_until_idle(system, *REQUESTS)
        error = system.detokenizer.closed[REQUESTS[0].handle].error
        assert error is not None
        assert "4 requests in a step of 2" in error.message


def test_a_class_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="micro-batch scheduler"), running(micro_batch_scheduler="x:Y"):
        raise AssertionError("started")


# -- what they are shown -------------------------------------------------------------------------------------


class Records(CapacityScheduler):
    seen: ClassVar[list[list[tuple[int, str, int]]]] = []

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheView) -> None:
        self.kv = kv_cache_manager
        self.blocks = kv_cache_manager.get_max_resource_count()

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        assert self.kv.get_num_free_blocks() <= self.blocks
        for request in active_requests:
            assert self.kv.get_needed_resource_to_completion(request) == -(-40 // self.kv.tokens_per_block)
            assert (request.orig_prompt_len, request.max_new_tokens) == (10, 30)
            with pytest.raises(AttributeError):
                request.priority = 3  # type: ignore[misc]
        Records.seen.append(
            [(r.request_id, r.state.name, r.context_remaining_length) for r in active_requests]
        )
        return active_requests, []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "os:path"}, "schedule policy 'os:path': this is no class with a method order"),
        ({"policy": "decimal:Context"}, "with a method order"),
        ({"capacity": "types:SimpleNamespace"}, "capacity scheduler .* with a method schedule_request"),
        ({"capacity": "os:sep"}, "with a method schedule_request"),
        ({"micro_batch_scheduler": "os:sep"}, "micro-batch scheduler .* with a method schedule"),
        ({"request_scheduler": "os:sep"}, "request scheduler .* with a method schedule_request"),
        ({"eviction": "os:path"}, "os:path is no class with a method rank"),
    ],
)
def test_what_is_no_class_of_its_kind_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), running(**settings):
        pass


def test_states_follow_a_request_through_its_life() -> None:
    Records.seen.clear()
    with running(capacity=name_of(Records), depth=2, budget=8) as system:
        run_until_idle(system, REQUESTS[0])
    states = [step[0][1:] for step in Records.seen]
    assert states[:3] == [("CONTEXT_INIT", 10), ("CONTEXT_INIT", 2), ("GENERATION_IN_PROGRESS", 0)]
    assert states[-1] == ("GENERATION_TO_COMPLETE", 0)
    order = [LlmRequestState[name] for name, _ in states]
    assert order == sorted(order)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_comes_out_as_the_reference_says(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    capacity = [EXAMPLE, name_of(LastFirst), name_of(PausesEveryTenth)][seed % 3]
    setting = simulation.setting_of(seed, policy="fcfs", capacity=capacity, batching="inflight_fused")
    assert simulation.run(seed, setting)["runs"] == 1
