"""Enqueue and await: by id, by several ids, for any; each response to one caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from carousel import GenerationRequest, InvalidRequest, Overloaded, RequestError, Response, RingClosed
from tests.executor_back_ends import BACK_ENDS, Make, echo, executors
from tests.fake_ring import WAIT_S, failure, finish, output, spell


@pytest.fixture(params=BACK_ENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with executors(request.param, tmp_path, monkeypatch) as make:
        yield make


def request_of(text: str, streaming: bool = False) -> GenerationRequest:
    return GenerationRequest(list(map(ord, text)), streaming=streaming)


def test_a_response_is_awaited_by_the_id_that_enqueueing_gave(make: Make) -> None:
    executor, _ = make(echo)
    request_id = executor.enqueue_request(request_of("hello"))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert response.request_id == request_id == 1
    assert response.get_result().text == "hello"
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
    assert [[each.get_result().text for each in of_one] for of_one in responses] == [["b"], ["a"]]


def test_a_stream_comes_as_responses_of_which_the_last_is_final(make: Make) -> None:
    executor, _ = make(spell("abcdef"))
    request_id = executor.enqueue_request(request_of("x", streaming=True))
    responses: list[Response] = []
    while not responses or not responses[-1].is_final:
        responses += executor.await_responses(request_id, timeout=WAIT_S)
    assert "".join(each.get_result().text_diff for each in responses) == "abcdef"
    assert [each.is_final for each in responses].count(True) == 1


def test_nothing_within_the_time_is_an_empty_list(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(request_of("x"))
    assert executor.await_responses(timeout=0.005) == []
    assert executor.await_responses(request_id, timeout=0.005) == []
    assert executor.await_responses([request_id], timeout=0.005) == [[]]
    ring.send(output(ring.wait_request(), "late", finish=finish()))
    assert executor.await_responses(timeout=WAIT_S)[0].get_result().text == "late"


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
        num_tokens[response.request_id] += len(response.get_result().token_ids_diff)
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
    assert "".join(each.get_result().text_diff for each in responses[:-1]) == "ab"
    assert responses[-1].has_error()
    with pytest.raises(Overloaded):
        responses[-1].get_result()


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


def test_what_is_ready_is_counted(make: Make) -> None:
    executor, ring = make()
    first, second = executor.enqueue_requests([request_of("a"), request_of("b")])
    assert executor.num_responses_ready() == 0
    ring.send(output(ring.wait_request(1), "x", finish=finish()))
    assert executor.await_responses(second, timeout=WAIT_S)
    ring.send(output(ring.wait_request(0), "x", finish=finish()))
    follower = executor.submit(request_of("c"))
    ring.send(output(ring.wait_request(2), "x", finish=finish()))
    follower.result(WAIT_S)  # by now everything before it has arrived
    assert (executor.num_responses_ready(), executor.num_responses_ready(first)) == (1, 1)
    assert executor.num_responses_ready(second) == 0


def test_an_aborted_request_still_gives_its_final_response(make: Make) -> None:
    executor, ring = make()
    request_id = executor.enqueue_request(request_of("x"))
    executor.abort_request(request_id)
    ring.wait_abort()
    ring.send(output(ring.wait_request(), "so far", finish=finish("abort")))
    (response,) = executor.await_responses(request_id, timeout=WAIT_S)
    assert (response.get_result().finish_reason, response.is_final) == ("abort", True)


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
