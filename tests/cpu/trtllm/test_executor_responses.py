"""Enqueue and await: by id, by several ids, for any; each response to one caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from carousel import (
    GenerationRequest,
    InvalidRequest,
    Overloaded,
    RequestError,
    Response,
    RingClosed,
    SamplingParams,
)
from carousel.trtllm.generation_result import GenerationResult
from carousel.trtllm.responses import Result
from runtime.wire.format import pack_ids
from runtime.wire.handle import sibling
from runtime.wire.messages import GenerateRequest, SequenceOutput, TensorBatch, TensorEntry
from tests.harness.ring.executor_back_ends import BACK_ENDS, Make, echo, executors, spell_each
from tests.harness.ring.fake_ring import WAIT_S, failure, finish, output, spell


@pytest.fixture(params=BACK_ENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with executors(request.param, tmp_path, monkeypatch) as make:
        yield make


def request_of(text: str, streaming: bool = False) -> GenerationRequest:
    return GenerationRequest(list(map(ord, text)), streaming=streaming)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_a_response_is_awaited_by_the_id_that_enqueueing_gave(make: Make) -> None:
    executor, _ = make(echo)
    request_id = executor.enqueue_request(request_of("hello"))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert response.request_id == request_id == 1
    assert response.result.text == "hello"
    assert response.is_final
    assert not response.has_error()


def test_requests_enqueued_together_keep_their_order(make: Make) -> None:
    executor, ring = make(echo)
    ids = executor.enqueue_requests([request_of(chr(65 + number)) for number in range(26)])
    assert ids == list(range(1, 27))
    ring.wait_request(25)
    sent = [request.input_ids for request in ring.requests]
    assert sent == [bytes([65 + number, 0, 0, 0]) for number in range(26)]


def test_several_ids_give_a_list_for_each_in_their_order(make: Make) -> None:
    executor, _ = make(echo)
    first, second = executor.enqueue_requests([request_of("a"), request_of("b")])
    responses = executor.await_responses([second, first], timeout=WAIT_S)
    assert [[each.result.text for each in of_one] for of_one in responses] == [["b"], ["a"]]


def test_a_stream_comes_as_responses_of_which_the_last_is_final(make: Make) -> None:
    executor, _ = make(spell("abcdef"))
    request_id = executor.enqueue_request(request_of("x", streaming=True))
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        responses += executor.await_responses(request_id, timeout=WAIT_S)
    assert "".join(each.result.text for each in responses) == "abcdef"
    assert [each.is_final for each in responses].count(True) == 1


def test_nothing_within_the_time_is_an_empty_list(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(request_of("x"))
    assert executor.await_responses(timeout=0.005) == []
    assert executor.await_responses(request_id, timeout=0.005) == []
    assert executor.await_responses([request_id], timeout=0.005) == [[]]
    ring.send(output(ring.wait_request(), "late", finish=finish()))
    assert executor.await_responses(timeout=WAIT_S)[0].result.text == "late"


def test_the_time_may_be_given_as_tensorrt_llm_has_it(make: Make) -> None:
    """Behind the id without a name, and as a timedelta, which stands alone for responses of any request."""
    executor, _ = make()
    request_id = executor.enqueue_request(request_of("x"))
    assert executor.await_responses(request_id, 0.01) == []
    assert executor.await_responses([request_id], timedelta(milliseconds=10)) == [[]]
    assert executor.await_responses(timedelta(milliseconds=10)) == []


def test_waiters_for_any_share_the_responses_out_without_loss_or_repeat(make: Make) -> None:
    executor, _ = make(spell("abc"))
    num_requests = 200
    collected: list[Response] = []
    all_final = threading.Event()

    def wait() -> None:
        while not all_final.is_set():
            collected.extend(executor.await_responses(timeout=0.005))
            if sum(response.is_final for response in collected) == num_requests:
                all_final.set()

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(num_requests):
        executor.enqueue_request(request_of("x", streaming=number % 2 == 0))
    assert all_final.wait(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    num_tokens = dict.fromkeys(range(1, num_requests + 1), 0)
    for response in collected:
        num_tokens[response.request_id] += len(response.result.output_token_ids[0])
    assert set(num_tokens.values()) == {3}
    assert executor.num_responses_ready() == 0


def test_an_id_that_nothing_is_to_come_for_is_refused(make: Make) -> None:
    executor, _ = make(echo)
    request_id = executor.enqueue_request(request_of("a"))
    submitted = executor.submit(request_of("b"))
    submitted.result(WAIT_S)
    for unknown in (99, submitted.request.id, [request_id, 99]):
        with pytest.raises(InvalidRequest, match="nothing is to come"):
            executor.await_responses(unknown, timeout=WAIT_S)
    assert len(executor.await_responses(request_id, timeout=WAIT_S)) == 1
    with pytest.raises(InvalidRequest, match="nothing is to come"):
        executor.await_responses(request_id, timeout=WAIT_S)


def test_an_error_is_a_final_response_of_its_request(make: Make) -> None:
    executor, _ = make(lambda request: [output(request, "ab"), failure(request, "overloaded", 503)])
    request_id = executor.enqueue_request(request_of("x", streaming=True))
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        responses += executor.await_responses(request_id, timeout=WAIT_S)
    assert "".join(each.result.text for each in responses[:-1]) == "ab"
    last = responses[-1]
    assert last.has_error()
    assert last.error_msg == "refused: overloaded"
    for wrong in (last.get_result, lambda: last.result):
        with pytest.raises(Overloaded):
            wrong()


def test_a_result_has_no_error_message_to_give(make: Make) -> None:
    executor, _ = make(echo)
    (response,) = executor.await_responses(executor.enqueue_request(request_of("a")), timeout=WAIT_S)
    assert not response.has_error()
    with pytest.raises(RuntimeError, match="no error"):
        _ = response.error_msg


def test_one_wrong_request_lets_none_be_enqueued(make: Make) -> None:
    executor, ring = make(echo)
    used = request_of("used")
    executor.submit(used).result(WAIT_S)
    wrong = request_of("wrong")
    wrong.priority = 5000
    twice = request_of("twice")
    for requests in ([request_of("a"), wrong], [request_of("a"), used], [twice, twice]):
        with pytest.raises(InvalidRequest):
            executor.enqueue_requests(requests)
    executor.generate([1], timeout=WAIT_S)
    assert len(ring.requests) == 2


def test_requests_that_cannot_all_be_enqueued_leave_none_that_runs_for_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when weights of a later one do not arrive in time, which is no error of the runtime's."""
    executor, ring = make()
    requests = [request_of("a"), request_of("b")]
    submit = executor.submit

    def submit_the_first(request: GenerationRequest) -> GenerationResult:
        if request is requests[1]:
            raise TimeoutError("the time limit of the call is over")
        return submit(request)

    monkeypatch.setattr(executor, "submit", submit_the_first)
    with pytest.raises(TimeoutError):
        executor.enqueue_requests(requests)
    assert ring.wait_abort().handles == (ring.wait_request().handle,)


def test_the_count_of_what_is_ready_is_the_number_of_responses_then_collected(make: Make) -> None:
    executor, ring = make()
    params = SamplingParams(n=2)
    first, second = executor.enqueue_requests([GenerationRequest([1], params) for _ in range(2)])
    assert executor.num_responses_ready() == 0
    for number, indexes in ((0, (1,)), (1, (0, 1))):
        request = ring.wait_request(number)
        ring.send(*(output(request, "x", index=index, finish=finish()) for index in indexes))
    follower = executor.submit(request_of("c"))
    ring.send(output(ring.wait_request(2), "x", finish=finish()))
    follower.result(WAIT_S)  # by now everything before it has arrived
    ready = [executor.num_responses_ready(each) for each in (first, second, follower.request.id)]
    assert ready == [1, 2, 0]
    assert executor.num_responses_ready() == len(executor.await_responses(timeout=WAIT_S)) == 3
    assert executor.num_responses_ready() == 0


def test_the_callers_own_number_comes_back_and_need_not_be_unique(make: Make) -> None:
    executor, _ = make(lambda request: echo(request) if request.label else [failure(request, "x", 400)])
    largest = (1 << 64) - 1
    requests = [GenerationRequest([65], client_id=largest, label=label) for label in ("good", "")]
    requests.append(GenerationRequest([65], label="none"))
    ids = executor.enqueue_requests(requests)
    responses = [each for of_one in executor.await_responses(ids, timeout=WAIT_S) for each in of_one]
    assert [each.client_id for each in responses] == [largest, largest, None]
    assert [each.has_error() for each in responses] == [False, True, False]


def test_each_sequence_that_is_not_streamed_is_one_response_as_it_ends(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(GenerationRequest([1], SamplingParams(n=3)))
    request = ring.wait_request()
    collected = []
    for index, text in ((1, "bb"), (2, "c"), (0, "aaa")):
        ring.send(output(request, text, index=index, finish=finish(completion_tokens=len(text))))
        collected += executor.await_responses(request_id, timeout=WAIT_S)
    results = [response.result for response in collected]
    assert [result.sequence_index for result in results] == [1, 2, 0]
    assert [result.output_token_ids for result in results] == [[[98, 98]], [[99]], [[97, 97, 97]]]
    assert [result.is_sequence_final for result in results] == [True, True, True]
    assert [result.is_final for result in results] == [response.is_final for response in collected]
    assert [result.is_final for result in results] == [False, False, True]
    assert [result.usage.completion_tokens for result in results if result.usage] == [2, 1, 3]


def test_streamed_sequences_come_by_themselves_and_only_the_last_response_is_final(make: Make) -> None:
    texts = ("abcdef", "gh", "ijkl")
    executor, _ = make(spell_each(*texts))
    request_id = executor.enqueue_request(GenerationRequest([1], SamplingParams(n=3), streaming=True))
    results: list[Result] = []
    while not results or not results[-1].is_final:
        results += [each.result for each in executor.await_responses(request_id, timeout=WAIT_S)]
    by_sequence = [[each for each in results if each.sequence_index == index] for index in range(3)]
    assert ["".join(each.text for each in of_one) for of_one in by_sequence] == list(texts)
    for of_one in by_sequence:
        assert [each.is_sequence_final for each in of_one] == [False] * (len(of_one) - 1) + [True]
        assert all((each.finish_reason is not None) == each.is_sequence_final for each in of_one)
    assert [each.is_final for each in results] == [False] * (len(results) - 1) + [True]
    assert any(each.is_sequence_final and not each.is_final for each in results)


def test_a_stream_may_return_all_tokens_each_time(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(
        GenerationRequest([1], streaming=True, return_all_generated_tokens=True)
    )
    texts, ids = [], []
    for character, end in (("a", None), ("b", None), ("c", finish())):
        ring.send(output(ring.wait_request(), character, finish=end))
        (response,) = executor.await_responses(request_id, timeout=WAIT_S)
        texts.append(response.result.text)
        ids.append(response.result.output_token_ids)
    assert texts == ["a", "ab", "abc"]
    assert ids == [[[97]], [[97, 98]], [[97, 98, 99]]]


def test_the_input_stands_before_the_output_when_it_is_not_excluded(make: Make) -> None:
    executor, _ = make(spell("ab"))
    request = GenerationRequest([1, 2], query_token_ids=[3], exclude_input_from_output=False)
    (response,) = executor.await_responses(executor.enqueue_request(request), timeout=WAIT_S)
    assert response.result.output_token_ids == [[1, 2, 3, 97, 98]]
    assert response.result.text == "ab"
    result = executor.submit(GenerationRequest([1, 2], exclude_input_from_output=False))
    assert result.result(WAIT_S).token_ids == [1, 2, 97, 98]


def test_log_probs_belong_to_the_generated_tokens_of_their_response(make: Make) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        first = output(request, "ab", logprobs=floats(-0.5, -1.0))
        end = finish("stop", 3, cumulative_logprob=-3.5)
        return [first, output(request, "c", logprobs=floats(-2.0), finish=end)]

    executor, ring = make()
    params = SamplingParams(logprobs=0)
    request = GenerationRequest([1], params, streaming=True)
    request_id = executor.enqueue_request(request)
    results: list[Result] = []
    for each in answer(ring.wait_request()):
        ring.send(each)
        results += [response.result for response in executor.await_responses(request_id, timeout=WAIT_S)]
    assert [each.log_probs for each in results] == [[[-0.5, -1.0]], [[-2.0]]]
    assert [each.cum_log_probs for each in results] == [None, [-3.5]]
    ring.answer = lambda request: [output(request, "a", finish=finish(cumulative_logprob=-1.0))]
    (plain,) = executor.await_responses(executor.enqueue_request(request_of("x")), timeout=WAIT_S)
    assert (plain.result.log_probs, plain.result.cum_log_probs) == (None, None)


def test_logits_come_with_the_last_result_of_the_sequence(make: Make) -> None:
    executor, ring = make()
    params = SamplingParams(n=2, return_context_logits=True, return_generation_logits=True)
    request_id = executor.enqueue_request(GenerationRequest([1, 2], params))
    request = ring.wait_request()
    context = np.arange(6, dtype=np.float32).reshape(2, 3)
    generated = np.arange(3, dtype=np.float32).reshape(1, 3)
    entries = (
        TensorEntry(request.handle, "context_logits", "float32", (2, 3), 0),
        TensorEntry(sibling(request.handle, 1), "generation_logits", "float32", (1, 3), 0),
    )
    ring.send_message(TensorBatch(entries), [context.tobytes(), generated.tobytes()])
    ring.send(*(output(request, "x", index=index, finish=finish()) for index in (0, 1)))
    results: list[Result] = []
    while not results or not results[-1].is_final:
        results += [each.result for each in executor.await_responses(request_id, timeout=WAIT_S)]
    for result in results:
        assert result.context_logits is not None
        assert np.array_equal(result.context_logits, context)
    assert results[0].generation_logits is None
    assert results[1].generation_logits is not None
    assert np.array_equal(results[1].generation_logits, generated[None])


def test_of_more_candidates_the_chosen_ones_are_responses_when_all_have_ended(make: Make) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [
            output(request, text, index=index, finish=finish("stop", 1, cumulative_logprob=value))
            for index, (text, value) in enumerate((("a", -3.0), ("b", -1.0), ("c", -2.0)))
        ]

    executor, ring = make()
    request_id = executor.enqueue_request(GenerationRequest([1], SamplingParams(n=2, best_of=3)))
    request = ring.wait_request()
    assert request.sampling.n == 3
    *early, last = answer(request)
    ring.send(*early)
    assert executor.await_responses(request_id, timeout=0.005) == []
    ring.send(last)
    results = [each.result for each in executor.await_responses(request_id, timeout=WAIT_S)]
    assert [(each.sequence_index, each.text) for each in results] == [(0, "b"), (1, "c")]
    assert [each.is_final for each in results] == [False, True]


SEARCH = SamplingParams(n=2, use_beam_search=True, beam_width=3, logprobs=0)


def test_what_a_search_finds_is_one_response_with_its_beams_in_order(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(GenerationRequest([1], SEARCH))
    request = ring.wait_request()
    assert (request.sampling.num_beams, request.sampling.n) == (3, 2)
    found = [("ab", floats(-0.5, -1.0), "stop", -1.5), ("c", floats(-2.0), "length", -2.0)]
    # Of one that was made again each beam is searched for by itself: they may come in any order.
    for index in (1, 0):
        text, logprobs, reason, total = found[index]
        end = finish(reason, len(text), cumulative_logprob=total)
        ring.send(output(request, text, index=index, logprobs=logprobs, finish=end))
        if index:
            assert executor.await_responses(request_id, timeout=0.005) == []
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    result = response.result
    assert (result.sequence_index, result.is_sequence_final, response.is_final) == (0, True, True)
    assert result.output_token_ids == [[97, 98], [99]]
    assert (result.text, result.finish_reason, result.finish_reasons) == ("ab", "stop", ["stop", "length"])
    assert (result.log_probs, result.cum_log_probs) == ([[-0.5, -1.0], [-2.0]], [-1.5, -2.0])
    assert result.usage is not None
    assert result.usage.completion_tokens == 3
    assert executor.num_responses_ready() == 0


def test_a_streamed_search_gives_all_ids_of_its_beams_each_time(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(GenerationRequest([1], SEARCH, streaming=True))
    request = ring.wait_request()
    assert request.stream
    seen: list[Result] = []
    for beams in ([[7], [8]], [[8, 9], [7, 7]]):
        ring.send(*(output(request, "", index=at, hypothesis=pack_ids(ids)) for at, ids in enumerate(beams)))
        while not seen or seen[-1].output_token_ids != beams:
            seen += [each.result for each in executor.await_responses(request_id, timeout=WAIT_S)]
    assert not any(each.is_final or each.is_sequence_final or each.text for each in seen)
    ends = [output(request, text, index=at, finish=finish("stop", 2)) for at, text in enumerate(("ab", "cd"))]
    ring.send(*ends)
    last = seen[-1]
    while not last.is_final:
        *_, last = [each.result for each in executor.await_responses(request_id, timeout=WAIT_S)]
    assert (last.output_token_ids, last.text) == ([[97, 98], [99, 100]], "ab")


def test_outputs_of_a_streamed_search_cannot_be_iterated(make: Make) -> None:
    executor, _ = make(spell_each("ab", "c"))
    result = executor.submit(GenerationRequest([1], SEARCH, streaming=True))
    with pytest.raises(RuntimeError, match="may change"):
        next(result)


def test_what_ends_a_search_is_its_one_response(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(GenerationRequest([1], SEARCH))
    request = ring.wait_request()
    ring.send(*(output(request, "", index=index, finish=finish("abort")) for index in (0, 1)))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert (response.result.output_token_ids, response.result.finish_reason) == ([[], []], "abort")
    request_id = executor.enqueue_request(GenerationRequest([1], SEARCH))
    request = ring.wait_request(1)
    ring.send(failure(request, "x", 400), failure(request, "x", 400, index=1))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert response.has_error()
    assert response.is_final


@pytest.mark.parametrize("name", ["abort_request", "cancel_request"])
def test_an_aborted_request_still_gives_its_final_response(make: Make, name: str) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(request_of("x"))
    getattr(executor, name)(request_id)
    ring.wait_abort()
    ring.send(output(ring.wait_request(), "so far", finish=finish("abort")))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert (response.result.finish_reason, response.is_final) == ("abort", True)


def test_one_who_waits_for_any_learns_of_the_end(make: Make) -> None:
    executor, ring = make()
    executor.enqueue_request(request_of("x"))
    ring.wait_request()
    caught: list[Exception] = []
    responses: list[Response] = []

    def wait() -> None:
        try:
            while True:
                responses.extend(executor.await_responses())
        except (RequestError, RingClosed) as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    executor.shutdown()
    waiter.join(WAIT_S)
    assert [isinstance(response.error, RingClosed) for response in responses] == [True]
    assert [isinstance(error, RingClosed) for error in caught] == [True]
