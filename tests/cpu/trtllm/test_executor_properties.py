"""Random requests through enqueue and await: what holds for each, whatever it asked and however it ended."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from carousel import GenerationRequest, Response, SamplingParams
from runtime.wire.handle import split_handle
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.ring.executor_back_ends import BACK_ENDS, Make, executors
from tests.harness.ring.fake_ring import WAIT_S, failure, finish, output

NUM_REQUESTS = 300
LETTERS = "abcdefgh"


@pytest.fixture(params=BACK_ENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with executors(request.param, tmp_path, monkeypatch) as make:
        yield make


def random_answer(chance: random.Random, request: GenerateRequest) -> list[SequenceOutput]:
    """Sequences by turns, each with its own end; one in ten fails."""
    outputs: list[SequenceOutput] = []
    left = {index: chance.randrange(6) for index in range(request.sampling.n)}
    fails_at = chance.randrange(request.sampling.n) if chance.random() < 0.1 else None
    while left:
        index = chance.choice(list(left))
        left[index] -= 1
        if left[index] >= 0 and request.stream:
            outputs.append(output(request, chance.choice(LETTERS), index=index))
            continue
        del left[index]
        if index == fails_at:
            return [*outputs, failure(request, "unlucky", 500, index=index)]
        text = "" if request.stream else "".join(chance.choices(LETTERS, k=chance.randrange(6)))
        outputs.append(output(request, text, index=index, finish=finish(chance.choice(("stop", "abort")))))
    return outputs


def test_every_request_ends_once_and_nothing_of_it_is_lost_or_told_twice(make: Make) -> None:
    chance = random.Random(4)
    answers: dict[str, list[SequenceOutput]] = {}

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        answers[request.label] = random_answer(chance, request)
        return answers[request.label]

    executor, _ = make(answer)
    requests = [
        GenerationRequest(
            [1],
            SamplingParams(n=chance.choice((1, 1, 2, 4))),
            streaming=chance.random() < 0.5,
            label=str(number),
        )
        for number in range(NUM_REQUESTS)
    ]
    unfinished = set(executor.enqueue_requests(requests))
    collected: defaultdict[int, list[Response]] = defaultdict(list)
    while unfinished:
        responses = executor.await_responses(timeout=WAIT_S)
        assert responses, "not in time"
        for response in responses:
            assert response.request_id in unfinished
            collected[response.request_id].append(response)
            if response.is_final:
                unfinished.remove(response.request_id)
    for request in requests:
        check(request, answers[request.label], collected[request.id])
    assert executor.num_responses_ready() == 0


def check(request: GenerationRequest, sent: list[SequenceOutput], got: list[Response]) -> None:
    assert [response.is_final for response in got] == [False] * (len(got) - 1) + [True]
    has_failed = got[-1].has_error()
    assert has_failed == (sent[-1].finish is not None and sent[-1].finish.reason == "error")
    results = [response.result for response in got[: len(got) - has_failed]]
    for index in range(request.sampling_params.n):
        own = [result for result in results if result.sequence_index == index]
        of_ring = [each for each in sent if split_handle(each.handle)[2] == index]
        has_ended = bool(of_ring) and of_ring[-1].finish is not None and of_ring[-1].finish.reason != "error"
        assert [result.is_sequence_final for result in own] == [False] * (len(own) - has_ended) + [
            True
        ] * has_ended
        if has_ended or request.streaming:
            assert "".join(result.text for result in own) == "".join(each.text for each in of_ring)
            assert [token for result in own for token in result.output_token_ids[0]] == [
                ord(letter) for each in of_ring for letter in each.text
            ]
    if not request.streaming:
        assert len({result.sequence_index for result in results}) == len(results)
