"""GenerationExecutor's requests, batches and making, with both back ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import client.executor
from carousel import (
    ConfigError,
    GenerationExecutor,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    RingClosed,
    SamplingParams,
)
from runtime.config import RuntimeConfig
from runtime.messages import GenerateRequest, SequenceOutput
from runtime.wire import unpack_ids
from tests.executor_back_ends import BACK_ENDS, Make, StandInRuntime, echo, executors
from tests.fake_ring import WAIT_S, FakeRing, failure, say_nothing, spell


@pytest.fixture(params=BACK_ENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with executors(request.param, tmp_path, monkeypatch) as make:
        yield make


def texts(results: list[GenerationResult]) -> list[str]:
    return [result.result(0).text for result in results]


def test_ids_count_from_one_and_never_repeat(make: Make) -> None:
    executor, ring = make()
    requests: list[GenerationRequest] = []

    def submit() -> None:
        for _ in range(50):
            requests.append(executor.generate_async([1]).request)  # noqa: PERF401 - threads share the list

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(request.id for request in requests) == list(range(1, 401))
    ring.wait_request(399)
    assert len({request.handle for request in ring.requests}) == 400


def test_a_request_is_submitted_once(make: Make) -> None:
    executor, ring = make(spell("a"))
    request = GenerationRequest([1])
    executor.submit(request).result(WAIT_S)
    with pytest.raises(InvalidRequest, match="already been submitted"):
        executor.submit(request)
    assert len(ring.requests) == 1


def test_a_refused_submission_leaves_the_request_free_to_be_submitted(make: Make) -> None:
    executor, _ = make(spell("a"))
    request = GenerationRequest([1])
    request.priority = 5000
    with pytest.raises(InvalidRequest, match="priority"):
        executor.submit(request)
    request.priority = 0
    assert executor.submit(request).result(WAIT_S).text == "a"


def test_the_prompt_is_copied_and_the_options_reach_the_wire(make: Make) -> None:
    executor, ring = make(spell("a"))
    ids = [1, 2, 3]
    request = GenerationRequest(
        ids, SamplingParams(max_tokens=9), max_tokens=4, priority=2, cache_salt="s", label="l"
    )
    ids.append(4)
    executor.submit(request).result(WAIT_S)
    executor.generate_async(np.array([7, 8])).result(WAIT_S)
    sent, array = ring.requests
    assert sent.input_ids is not None
    assert array.input_ids is not None
    assert unpack_ids(sent.input_ids).tolist() == [1, 2, 3]
    assert unpack_ids(array.input_ids).tolist() == [7, 8]
    assert sent.sampling.max_tokens == 4
    assert (sent.priority, sent.cache_salt, sent.label, sent.stream) == (2, "s", "l", False)


@pytest.mark.parametrize("prompt", [[], "text", b"ab", ["a"], [1.5], [True], [-1], 7, [{"role": "user"}]])
def test_what_is_no_list_of_token_ids_is_refused_at_the_call(make: Make, prompt: Any) -> None:
    executor, ring = make(spell("a"))
    with pytest.raises(InvalidRequest, match="prompt"):
        executor.generate_async(prompt)
    assert executor.generate([1], timeout=WAIT_S).outputs[0].text == "a"
    assert len(ring.requests) == 1


@pytest.mark.parametrize(
    "name",
    [
        "arrival_time",
        "best_of",
        "disaggregated_params",
        "kv_cache_retention_config",
        "lora_request",
        "multimodal_params",
        "n",
        "prompt_adapter_request",
        "query_token_ids",
    ],
)
def test_what_is_not_built_is_refused_by_name(make: Make, name: str) -> None:
    executor, ring = make(spell("a"))
    with pytest.raises(InvalidRequest, match=name) as caught:
        executor.generate_async([1], **{name: 2})
    assert caught.value.param == name
    executor.generate_async([1], n=1, best_of=1).result(WAIT_S)
    with pytest.raises(TypeError, match="max_token'"):
        executor.generate_async([1], max_token=3)
    assert len(ring.requests) == 1


def test_generate_gives_finished_results_in_the_order_of_the_prompts(make: Make) -> None:
    waiting: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        waiting.append(request)
        return [] if len(waiting) < 3 else [each for one in reversed(waiting) for each in echo(one)]

    executor, ring = make(answer)
    params = [SamplingParams(max_tokens=number) for number in (50, 100, 80)]
    results = executor.generate([[65], [66], [67]], params, timeout=WAIT_S)
    assert all(result.done for result in results)
    assert texts(results) == ["A", "B", "C"]
    assert [request.sampling.max_tokens for request in ring.requests] == [50, 100, 80]
    assert executor.generate([]) == []


def test_generate_submits_nothing_when_one_argument_is_wrong(make: Make) -> None:
    executor, ring = make(spell("a"))
    with pytest.raises(InvalidRequest, match="1 for 2 prompts"):
        executor.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        executor.generate([[1], "two"])  # type: ignore[list-item]
    assert ring.requests == []


def test_generate_keeps_no_more_in_flight_than_the_server_queues(make: Make) -> None:
    executor, ring = make(config=RuntimeConfig(max_queued_requests=4))
    results: list[GenerationResult] = []
    prompts = [[65 + number] for number in range(11)]
    caller = threading.Thread(target=lambda: results.extend(executor.generate(prompts, timeout=WAIT_S)))
    caller.start()
    for number in range(11):
        request = ring.wait_request(number)
        assert len(ring.requests) - number <= 4
        ring.send(*echo(request))
    caller.join(WAIT_S)
    assert texts(results) == list("ABCDEFGHIJK")


def test_the_first_error_of_generate_aborts_the_rest(make: Make) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [failure(request, "invalid_value", 400)] if request is ring.requests[0] else []

    executor, ring = make(answer)
    with pytest.raises(InvalidRequest):
        executor.generate([[1], [2]], timeout=WAIT_S)
    assert ring.wait_abort().handles == (ring.requests[1].handle,)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"run_dir": "x", "model": "y"}, "model"),
        ({"run_dir": "x", "page_size": 16}, "page_size"),
        ({"model": "x", "engine_dir": "y"}, "engine_dir"),
        ({"tokenizer_dir": "x", "tokenizer": "y"}, "tokenizer_dir"),
        ({"num_postprocess_workers": 4}, "num_postprocess_workers"),
    ],
)
def test_create_refuses_arguments_that_contradict_or_are_not_built(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        GenerationExecutor.create(**arguments)


def test_create_passes_its_arguments_on_and_shutdown_stops_only_a_runtime_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, Any]] = []
    ring = FakeRing(tmp_path, say_nothing)
    runtime = StandInRuntime(ring)

    def start(model: Any, settings: Any) -> StandInRuntime:
        started.append((model, settings))
        return runtime

    monkeypatch.setattr(client.executor, "OwnRuntime", start)
    with GenerationExecutor.create(engine_dir="m", tokenizer_dir="t", page_size=16):
        with GenerationExecutor.create(run_dir=tmp_path):
            pass
        assert runtime.num_stops == 0
    assert started == [("m", {"page_size": 16, "tokenizer": "t"})]
    assert runtime.num_stops == 1
    ring.close()


def test_a_runtime_that_cannot_be_reached_is_stopped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(tmp_path, say_nothing)
    ring.shakes_hands = False
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(client.executor, "OwnRuntime", lambda *_: runtime)
    with pytest.raises(RingClosed, match="has not answered"):
        GenerationExecutor.create(connect_timeout=0.01)
    assert runtime.num_stops == 1
    ring.close()


def test_dropping_an_executor_stops_its_runtime_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(tmp_path, echo)
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(client.executor, "OwnRuntime", lambda *_: runtime)
    executor = GenerationExecutor.create()
    executor.await_responses(executor.enqueue_request(GenerationRequest([65])), timeout=WAIT_S)
    del executor
    assert runtime.num_stops == 1
    ring.close()
