"""BatchManager over a fake ring: when which callback is called, and with what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carousel import InvalidRequest
from runtime.settings.config import RuntimeConfig
from runtime.wire.handle import sibling
from runtime.wire.messages import TensorBatch, TensorEntry
from tests.harness.ring.batch_manager_caller import LARGEST, Make, managers, request, statistics
from tests.harness.ring.executor_back_ends import echo, spell_each
from tests.harness.ring.fake_ring import failure, finish, output, spell


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with managers(tmp_path) as make:
        yield make


def test_each_request_is_answered_under_its_own_id(make: Make) -> None:
    _, _, caller = make(echo)
    ids = [0, 7, LARGEST]
    caller.give(*(request(each, chr(65 + number)) for number, each in enumerate(ids)))
    caller.wait_final(3)
    answered = {each: (tensors["output_ids"][0, 0, 1], error) for each, tensors, _, error in caller.responses}
    assert answered == {0: (65, ""), 7: (66, ""), LARGEST: (67, "")}


def test_a_request_that_is_not_streamed_has_one_response(make: Make) -> None:
    _, _, caller = make(spell("xyz"))
    caller.give(request(1, "ab"))
    caller.wait_final()
    ((_, tensors, is_final, error),) = caller.responses
    assert (is_final, error) == (True, "")
    assert tensors["output_ids"].tolist() == [[[97, 98, 120, 121, 122]]]
    assert tensors["sequence_length"].tolist() == [[5]]
    assert tensors["context_logits"].shape == (1, 1, 1)
    assert tensors["generation_logits"].shape == (1, 1, 1, 1)


def test_beams_are_rows_of_the_tensors(make: Make) -> None:
    _, _, caller = make(spell_each("xy", "z"))
    caller.give(request(1, "ab", beam_width=np.array([2])))
    caller.wait_final()
    ((_, tensors, is_final, error),) = caller.responses
    assert (is_final, error) == (True, "")
    assert tensors["output_ids"].tolist() == [[[97, 98, 120, 121, 0], [97, 98, 122, 0, 0]]]
    assert tensors["sequence_length"].tolist() == [[4, 3]]
    assert tensors["cum_log_probs"].shape == (1, 2)


def test_a_stream_has_a_response_for_what_each_step_adds(make: Make) -> None:
    _, ring, caller = make()
    caller.give(request(1, streaming=np.array([True])))
    for number, character in enumerate("xyz", 1):
        ring.send(output(ring.wait_request(), character, finish=finish() if number == 3 else None))
        caller.wait_responses(number)
    assert [tensors["output_ids"].tolist() for _, tensors, _, _ in caller.responses] == [
        [[[120]]],
        [[[121]]],
        [[[122]]],
    ]
    assert [is_final for _, _, is_final, _ in caller.responses] == [False, False, True]


def test_what_is_wrong_with_a_request_is_its_final_response(make: Make) -> None:
    _, ring, caller = make(echo)
    caller.give(
        request(1, unknown=np.array([1])),
        request(2, length=0),
        request(3, temperature=np.array([2], np.int32)),
        request(4),
    )
    caller.wait_final(4)
    errors = {each: error for each, _, _, error in caller.responses}
    assert "unknown is not supported" in errors[1]
    assert "request_output_len" in errors[2]
    assert "temperature: float values" in errors[3]
    assert errors[4] == ""
    assert [tensors for each, tensors, _, _ in caller.responses if each != 4] == [{}, {}, {}]
    assert len(ring.requests) == 1


def test_what_the_runtime_refuses_is_a_final_response_with_its_words(make: Make) -> None:
    _, _, caller = make(lambda request: [failure(request, "context_length_exceeded", 400)])
    caller.give(request(1))
    caller.wait_final()
    assert caller.responses == [(1, {}, True, "refused: context_length_exceeded")]


def test_what_the_runtime_refuses_is_named_as_the_array_that_it_came_in(make: Make) -> None:
    _, _, caller = make(lambda request: [failure(request, "too_long", 400, "input_ids")])
    caller.give(request(1))
    caller.wait_final()
    assert caller.responses == [(1, {}, True, "input_ids: refused: too_long")]


def test_an_iteration_is_get_send_poll_report(make: Make) -> None:
    _, ring, caller = make(echo)
    ring.info = statistics(1)
    caller.give(request(1))
    caller.wait_final()
    caller.wait_for(lambda: bool(caller.stats))
    names = [name for name, _ in caller.calls]
    at = names.index("send")
    assert names[: at + 1].count("get") >= 1
    turns = " ".join(names).split("get ")[1:]
    assert {turn.strip() for turn in turns[:-1]} <= {
        "poll_stop",
        "poll_stop report",
        "send poll_stop report",
    }


def test_get_is_told_how_many_more_may_come(make: Make) -> None:
    _, ring, caller = make(config=RuntimeConfig(max_running_requests=3, context_length=64))
    caller.wait_for(lambda: ("get", 3) in caller.calls)
    caller.give(request(1), request(2))
    caller.wait_for(lambda: ("get", 1) in caller.calls)
    ring.send(output(ring.wait_request(), "x", finish=finish()))
    caller.wait_final()
    caller.wait_for(lambda: ("get", 2) in caller.calls)


def test_more_than_was_asked_for_is_refused_request_by_request(make: Make) -> None:
    _, ring, caller = make(max_num_requests=2)
    caller.give(*(request(each) for each in range(4)))
    caller.wait_final(2)
    assert [(each, error) for each, _, _, error in caller.responses] == [
        (2, "one more than the 2 requests that were asked for"),
        (3, "one more than the 2 requests that were asked for"),
    ]
    caller.wait_for(lambda: ("get", 0) in caller.calls)
    ring.wait_request(1)


def test_without_a_bound_get_is_told_a_negative_number(make: Make) -> None:
    _, ring, caller = make(max_num_requests=-5)
    caller.give(*(request(each) for each in range(300)))
    ring.wait_request(299)
    assert {what for name, what in caller.calls if name == "get"} == {-1}


def test_no_bound_of_zero(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="max_num_requests"):
        make(max_num_requests=0)


def test_logits_are_tensors_where_they_are_gathered_and_dummies_elsewhere(make: Make) -> None:
    config = RuntimeConfig(gather_context_logits=True, context_length=64)
    _, ring, caller = make(config=config)
    yes = np.array([True])
    caller.give(request(1, return_context_logits=yes, return_generation_logits=yes))
    sent = ring.wait_request()
    assert sent.sampling.return_context_logits
    assert not sent.sampling.return_generation_logits
    logits = np.arange(5, dtype=np.float32).reshape(1, 5)
    entry = TensorEntry(sibling(sent.handle, 0), "context_logits", "float32", (1, 5), 0)
    ring.send_message(TensorBatch((entry,)), [logits.tobytes()])
    ring.send(output(sent, "x", finish=finish()))
    caller.wait_final()
    tensors = caller.responses[0][1]
    assert np.array_equal(tensors["context_logits"], logits[None])
    assert tensors["generation_logits"].shape == (1, 1, 1, 1)


def test_log_probs_are_there_when_asked_for(make: Make) -> None:
    values = np.array([-1.0, -0.5], np.float32)
    _, _, caller = make(lambda request: [output(request, "xy", logprobs=values.tobytes(), finish=finish())])
    caller.give(request(1, return_log_probs=np.array([True])))
    caller.wait_final()
    tensors = caller.responses[0][1]
    assert np.array_equal(tensors["output_log_probs"], values[None, None])
    assert tensors["cum_log_probs"].tolist() == [[-1.5]]


def test_statistics_come_while_requests_are_active_and_not_when_none_are(make: Make) -> None:
    manager, ring, caller = make(max_num_requests=5)
    caller.wait_turn()
    assert caller.stats == []
    ring.info = statistics(1)
    caller.give(request(1), request(2))
    ring.wait_request(1)
    caller.wait_for(lambda: len(caller.stats) >= 1)
    ring.info = statistics(1, 2, 3)
    caller.wait_for(lambda: len(caller.stats) >= 4)
    ring.send(*(output(each, "x", finish=finish()) for each in ring.requests))
    caller.wait_final(2)
    caller.wait_turn()
    num_stats = len(caller.stats)
    caller.wait_turn()
    assert len(caller.stats) == num_stats
    record = caller.stats[0]
    assert record["Iteration Counter"] == 1
    assert record["Max Request Count"] == manager.max_num_requests
    assert (record["Scheduled Requests"], record["Used KV cache blocks"]) == (3, 6)


def test_what_is_no_request_is_reported_and_the_others_are_served(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, caller = make(echo)
    caller.give("nonsense", request(2))
    caller.wait_final()
    assert [each for each, _, _, _ in caller.responses] == [2]
    assert "gave str, no InferenceRequest" in caplog.text
