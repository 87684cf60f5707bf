"""BatchManager over a fake ring: ids, interruption, callbacks that fail, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carousel import BatchManager, ConfigError, GenerationExecutor, RingClosed
from carousel.trtllm import runtime_link
from tests.harness.ring.batch_manager_caller import LARGEST, Caller, Make, managers, request, statistics
from tests.harness.ring.executor_back_ends import echo
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, finish, output, say_nothing
from tests.harness.ring.stand_in_runtime import StandInRuntime


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with managers(tmp_path) as make:
        yield make


def test_a_duplicate_id_is_refused_and_the_first_request_goes_on(make: Make) -> None:
    _, ring, caller = make()
    caller.give(request(7, "a"), request(7, "b"))
    caller.wait_final()
    assert caller.responses[0][0] == 7
    assert caller.responses[0][3].startswith("duplicate request id 7")
    ring.send(output(ring.wait_request(), "x", finish=finish()))
    caller.wait_final(2)
    assert (caller.responses[1][0], caller.responses[1][3]) == (7, "")
    assert len(ring.requests) == 1


def test_an_id_is_free_with_its_final_response(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Caller.send

    def send_and_ask_again(self: Caller, *response: Any) -> None:
        self.give(request(7))
        original(self, *response)

    # Again in the very callback that says it is final.
    monkeypatch.setattr(Caller, "send", send_and_ask_again)
    _, _, caller = make(echo)
    caller.give(request(7))
    caller.wait_responses(100)
    assert {error for _, _, _, error in caller.responses} == {""}


def test_a_stop_signal_ends_an_active_request_once_and_others_not_at_all(make: Make) -> None:
    _, ring, caller = make()
    caller.give(request(1), request(2))
    ring.wait_request(1)
    caller.to_stop = {1, 99, LARGEST}
    assert ring.wait_abort().handles == (ring.requests[0].handle,)
    caller.wait_turn()
    ring.send(output(ring.requests[0], "so far", finish=finish("abort")))
    caller.wait_final()
    assert caller.responses[0][:1] + caller.responses[0][2:] == (1, True, "")
    assert caller.responses[0][1]["sequence_length"].item() == 1 + len("so far")
    ring.send(output(ring.requests[1], "x", finish=finish()))
    caller.wait_final(2)
    assert len(ring.aborts) == 1


@pytest.mark.parametrize("name", ["get", "send", "poll_stop", "report"])
def test_a_callback_that_raises_ends_nothing(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = threading.Event()
    original = getattr(Caller, name)

    def raise_once(self: Caller, *arguments: Any) -> Any:
        if raised.is_set() or (name == "get" and not self.to_send):
            return original(self, *arguments)
        raised.set()
        raise ValueError("the caller's own mistake")

    monkeypatch.setattr(Caller, name, raise_once)
    _, ring, caller = make(echo)
    ring.info = statistics(1)
    caller.give(request(1))
    assert raised.wait(WAIT_S)
    caller.give(request(2))
    caller.wait_for(lambda: 2 in [each for each, _, _, _ in caller.responses])
    assert "the caller's own mistake" in caplog.text


def test_closing_waits_for_the_active_requests_and_asks_for_no_more(make: Make) -> None:
    manager, ring, caller = make()
    caller.give(*(request(each) for each in range(10)))
    ring.wait_request(9)
    closer = threading.Thread(target=manager.close)
    closer.start()
    caller.wait_for(lambda: [name for name, _ in caller.calls[-6:]].count("get") == 0)
    assert closer.is_alive()
    ring.send(*(output(each, "x", finish=finish()) for each in ring.requests))
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert sorted(each for each, _, _, _ in caller.responses) == list(range(10))
    manager.close()


def test_closing_with_a_time_limit_stops_what_is_left(make: Make) -> None:
    manager, ring, caller = make()
    caller.give(request(1))
    ring.wait_request()
    closer = threading.Thread(target=manager.close, args=(0.005,))
    closer.start()
    ring.wait_abort()
    ring.send(output(ring.requests[0], "so far", finish=finish("abort")))
    closer.join(WAIT_S)
    assert [(each, is_final, error) for each, _, is_final, error in caller.responses] == [(1, True, "")]


def test_a_callback_cannot_close(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Exception] = []
    managers: list[BatchManager] = []
    original = Caller.send

    def close(self: Caller, *response: Any) -> None:
        try:
            managers[0].close()
        except RuntimeError as error:
            caught.append(error)
        original(self, *response)

    monkeypatch.setattr(Caller, "send", close)
    manager, ring, caller = make()
    managers.append(manager)
    caller.give(request(1))
    ring.send(output(ring.wait_request(), "x", finish=finish()))
    caller.wait_final()
    assert [str(error) for error in caught] == [
        "close: a callback cannot wait for the end of the thread that calls it"
    ]


def test_the_end_of_the_runtime_is_an_error_response_of_each_request(make: Make) -> None:
    manager, ring, caller = make()
    caller.give(*(request(each) for each in range(5)))
    ring.wait_request(4)
    ring.set_state("launcher", "failed")
    caller.wait_final(5)
    manager.close()
    assert sorted(each for each, _, _, _ in caller.responses) == list(range(5))
    assert all("it has failed" in error for _, _, _, error in caller.responses)
    assert isinstance(manager.error, RingClosed)


def test_there_is_none_for_an_executor_that_has_ended(tmp_path: Path) -> None:
    ring = FakeRing(tmp_path, say_nothing)
    executor = GenerationExecutor.create(run_dir=tmp_path)
    executor.shutdown()
    with pytest.raises(RingClosed, match="shut down"):
        BatchManager(executor, lambda _: [], lambda *_: None)
    ring.close()


def test_made_from_a_directory_it_owns_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing(tmp_path, echo)
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: runtime)
    caller = Caller()
    with BatchManager.create(
        tmp_path, "inflight_fused_batching", 1, "MAX_UTILIZATION", caller.get, caller.send
    ):
        caller.give(request(1))
        caller.wait_final()
        assert runtime.num_stops == 0
    assert runtime.num_stops == 1
    ring.close()


@pytest.mark.parametrize(
    ("model_type", "max_beam_width", "policy", "named"),
    [
        ("V2", 1, "MAX_UTILIZATION", "model_type: V2"),
        ("V1", 1, "MAX_UTILIZATION", "scheduler_config: V1 batches are closed"),
        ("InflightFusedBatching", 0, "MAX_UTILIZATION", "max_beam_width: 0"),
        ("InflightFusedBatching", 1, "GREEDY", "scheduler_config: GREEDY"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    model_type: str, max_beam_width: int, policy: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=named):
        BatchManager.create("tests", model_type, max_beam_width, policy, lambda _: [], lambda *_: None)


@pytest.mark.parametrize(
    ("model_type", "scheduler_config", "batching", "capacity"),
    [
        ("V1", "STATIC_BATCH", "static", "static_batch"),
        ("InflightBatching", "GUARANTEED_NO_EVICT", "inflight", "guaranteed_no_evict"),
        ("inflight_fused_batching", "guaranteedNoEvict", "inflight_fused", "guaranteed_no_evict"),
        ("InflightFusedBatching", "STATIC_BATCH", "inflight_fused", "static_batch"),
    ],
)
def test_types_and_policies_become_the_runtimes_settings(
    model_type: str, scheduler_config: str, batching: str, capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def create(**settings: Any) -> GenerationExecutor:
        given.update(settings)
        raise RingClosed("far enough")

    monkeypatch.setattr(GenerationExecutor, "create", create)
    with pytest.raises(RingClosed, match="far enough"):
        BatchManager.create("tests", model_type, 4, scheduler_config, lambda _: [], lambda *_: None)
    assert (given["batching_type"], given["capacity_scheduler"]) == (batching, capacity)
    assert given["max_beam_width"] == 4
