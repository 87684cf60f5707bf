"""GenerationExecutor's requests and batches, with both back ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carousel import (
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    SamplingParams,
)
from carousel.trtllm.generation_request import NOT_BUILT
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.ring.executor_back_ends import BACK_ENDS, Make, echo, executors
from tests.harness.ring.fake_ring import WAIT_S, failure, finish, output, spell


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


def test_the_query_stands_behind_the_prompt(make: Make) -> None:
    executor, ring = make(spell("a"))
    query = [3]
    request = GenerationRequest((1, 2), query_token_ids=query)
    query.append(4)
    executor.submit(request).result(WAIT_S)
    assert (request.prompt_token_ids, request.query_token_ids) == ([1, 2], [3])
    assert ring.requests[0].input_ids == pack_ids([1, 2, 3])
    no_ids: list[Any] = [[], "text", 7]
    for wrong in no_ids:
        with pytest.raises(InvalidRequest, match="query_token_ids") as caught:
            GenerationRequest([1], query_token_ids=wrong)
        assert caught.value.param == "query_token_ids"


def test_times_and_the_number_of_sequences_reach_the_wire(make: Make) -> None:
    executor, ring = make()
    executor.generate_async([1], SamplingParams(n=3), arrival_time=1.7e9, allotted_time_ms=250)
    executor.generate_async([1], SamplingParams(n=2, best_of=4))
    timed, chosen = ring.wait_request(0), ring.wait_request(1)
    assert (timed.arrival_time, timed.time_limit_ms, timed.sampling.n) == (1.7e9, 250, 3)
    assert (chosen.time_limit_ms, chosen.sampling.n) == (0, 4)
    assert abs(chosen.arrival_time - time.time()) < 60.0


def test_the_limit_of_tokens_is_the_requests_else_the_parameters_else_the_context(make: Make) -> None:
    executor, ring = make(spell("a"))
    for params, max_tokens in ((SamplingParams(max_tokens=9), 4), (SamplingParams(max_tokens=9), None)):
        executor.generate_async([1], params, max_tokens=max_tokens).result(WAIT_S)
    executor.generate_async([1], max_tokens=5).result(WAIT_S)
    executor.generate_async([1]).result(WAIT_S)
    executor.generate([1], timeout=WAIT_S)
    executor.generate([[1], [2]], timeout=WAIT_S)
    assert [request.sampling.max_tokens for request in ring.requests] == [4, 9, 5, *[None] * 4]
    with pytest.raises(InvalidRequest, match="max_tokens"):
        executor.generate_async([1], max_tokens=0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(0, 0), (7, 7), (1, 1), (-1000, -1000), (0.5, 0), (0.0, -1000), (1.0, 1000), (0.75, 500)],
)
def test_a_float_priority_is_spread_over_the_integer_ones(make: Make, given: float, wanted: int) -> None:
    executor, ring = make(spell("a"))
    executor.generate_async([1], priority=given).result(WAIT_S)
    assert ring.requests[0].priority == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1001),
        ("priority", 1.01),
        ("priority", -0.1),
        ("priority", float("nan")),
        ("priority", True),
        ("priority", "high"),
        ("client_id", -1),
        ("client_id", 1 << 64),
        ("client_id", 1.0),
        ("allotted_time_ms", 0),
        ("allotted_time_ms", 1.5),
        ("allotted_time_ms", 1 << 40),
        ("arrival_time", float("inf")),
        ("arrival_time", "now"),
        ("streaming", 1),
        ("return_all_generated_tokens", 1),
        ("exclude_input_from_output", None),
        ("sampling_params", {"max_tokens": 3}),
        ("max_tokens", -3),
        ("label", 3),
        ("cache_salt", "x" * 300),
    ],
)
def test_a_wrong_argument_is_refused_by_name_at_the_call(make: Make, name: str, value: Any) -> None:
    executor, ring = make(spell("a"))
    with pytest.raises(InvalidRequest, match=name) as caught:
        executor.generate_async([1], **{name: value})
    assert caught.value.param == name
    executor.generate([1], timeout=WAIT_S)
    assert len(ring.requests) == 1


def test_a_stream_cannot_have_its_input_in_the_output(make: Make) -> None:
    executor, _ = make()
    with pytest.raises(InvalidRequest, match="exclude_input_from_output"):
        executor.generate_async([1], streaming=True, exclude_input_from_output=False)


def test_a_label_is_free_again_with_the_end_of_the_request_that_has_it(make: Make) -> None:
    executor, ring = make()
    first = executor.generate_async([1], label="mine")
    with pytest.raises(InvalidRequest, match="label") as caught:
        executor.generate_async([2], label="mine")
    assert (caught.value.code, caught.value.param) == ("duplicate_label", "label")
    ring.send(output(ring.wait_request(), "x", finish=finish()))
    assert first.result(WAIT_S).text == "x"
    executor.generate_async([2], label="mine")
    assert ring.wait_request(1).label == "mine"


@pytest.mark.parametrize("request_id", [0, -1, 1 << 64, True, "1", 1.0])
def test_an_id_is_a_number_of_64_bits_above_zero_and_is_set_once(request_id: Any) -> None:
    request = GenerationRequest([1])
    with pytest.raises(InvalidRequest, match="id must be"):
        request.set_id(request_id)
    assert request.id == 0
    request.set_id((1 << 64) - 1)
    with pytest.raises(InvalidRequest, match="already been submitted"):
        request.set_id(2)
    assert request.id == (1 << 64) - 1


@pytest.mark.parametrize("prompt", [[], "text", b"ab", ["a"], [1.5], [True], [-1], 7, [{"role": "user"}]])
def test_what_is_no_list_of_token_ids_is_refused_at_the_call(make: Make, prompt: Any) -> None:
    executor, ring = make(spell("a"))
    with pytest.raises(InvalidRequest, match="prompt"):
        executor.generate_async(prompt)
    assert executor.generate([1], timeout=WAIT_S).outputs[0].text == "a"
    assert len(ring.requests) == 1


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_what_is_not_built_is_refused_by_name(make: Make, name: str) -> None:
    executor, ring = make(spell("a"))
    asked: dict[str, Any] = {name: 2}
    with pytest.raises(InvalidRequest, match=name) as caught:
        executor.generate_async([1], **asked)
    assert caught.value.param == name
    asked[name] = None
    executor.generate_async([1], **asked).result(WAIT_S)
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
    with pytest.raises(InvalidRequest, match="top_p"):
        executor.generate([[1], [2]], [SamplingParams(), SamplingParams(top_p=2.0)])
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


def test_generate_counts_every_sequence_of_its_requests(make: Make) -> None:
    executor, ring = make(config=RuntimeConfig(max_queued_requests=4))
    params = [SamplingParams(n=2), SamplingParams(n=3), SamplingParams(n=9), SamplingParams()]
    results: list[GenerationResult] = []
    caller = threading.Thread(
        target=lambda: results.extend(executor.generate([[65 + i] for i in range(4)], params, timeout=WAIT_S))
    )
    caller.start()
    for number, sampling in enumerate(params):
        request = ring.wait_request(number)
        assert len(ring.requests) == number + 1
        ring.send(*(output(request, "x", index=index, finish=finish()) for index in range(sampling.n)))
    caller.join(WAIT_S)
    assert [len(result.outputs) for result in results] == [2, 3, 9, 1]


def test_the_first_error_of_generate_aborts_the_rest(make: Make) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [failure(request, "invalid_value", 400)] if request is ring.requests[0] else []

    executor, ring = make(answer)
    with pytest.raises(InvalidRequest):
        executor.generate([[1], [2]], timeout=WAIT_S)
    assert ring.wait_abort().handles == (ring.requests[1].handle,)
