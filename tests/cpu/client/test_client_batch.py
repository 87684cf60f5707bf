"""Many prompts of one call: their order, how many are in flight, refusals, errors, and the bar over them."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carousel import LLM, Client, Completion, InvalidRequest, Overloaded, RingClosed, SamplingParams
from carousel.client.core.result import CompletionOutput
from carousel.client.offline import progress_bar
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import GenerateRequest, SequenceOutput, Usage
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, failure, fake_ring, finish, output


def echo(request: GenerateRequest) -> list[SequenceOutput]:
    """Each sequence answers with the prompt and its number."""
    return [
        output(request, f"{request.text}.{index}", index=index, finish=finish())
        for index in range(request.sampling.n)
    ]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, config=RuntimeConfig(max_queued_requests=4)) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        yield client


def in_thread(client: Client, results: list[Completion], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.extend(client.generate(*args, timeout=WAIT_S)))
    thread.start()
    return thread


def test_several_prompts_come_back_in_their_order_whatever_order_they_finish_in(tmp_path: Path) -> None:
    waiting: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        waiting.append(request)
        if len(waiting) < 3:
            return []
        return [output(each, str(each.text), finish=finish()) for each in reversed(waiting)]

    with fake_ring(tmp_path, answer), Client(tmp_path) as client:
        completions = client.generate(["one", "two", "three"], timeout=WAIT_S)
        assert [each.text for each in completions] == ["one", "two", "three"]


def test_a_long_batch_keeps_no_more_in_flight_than_the_server_queues(client: Client, ring: FakeRing) -> None:
    texts = [str(number) for number in range(11)]
    results: list[Completion] = []
    caller = in_thread(client, results, texts)
    for number in range(11):
        request = ring.wait_request(number)
        assert len(ring.requests) - number <= 4
        ring.send(output(request, str(request.text), finish=finish()))
    caller.join(WAIT_S)
    assert [each.text for each in results] == texts


def test_sequences_count_and_a_request_larger_than_the_limit_goes_alone(
    client: Client, ring: FakeRing
) -> None:
    results: list[Completion] = []
    counts = [2, 1, 6, 1]
    caller = in_thread(client, results, list("abcd"), [SamplingParams(n=count) for count in counts])
    ring.wait_request(1)
    client.server_info()
    assert len(ring.requests) == 2  # 2 + 1 are in flight, 6 more would be too many
    for number in range(4):
        ring.send(*echo(ring.wait_request(number)))
        client.server_info()
        assert len(ring.requests) <= max(2, number + 2)
    caller.join(WAIT_S)
    assert [len(each.outputs) for each in results] == counts
    assert [each.outputs[-1].text for each in results] == ["a.1", "b.0", "c.5", "d.0"]


def test_whichever_ends_first_makes_room_for_the_next(client: Client, ring: FakeRing) -> None:
    results: list[Completion] = []
    caller = in_thread(client, results, list("abcdef"))
    ring.wait_request(3)
    for number in (3, 2, 4, 5):
        ring.send(*echo(ring.wait_request(number)))
    for number in (0, 1):
        ring.send(*echo(ring.requests[number]))
    caller.join(WAIT_S)
    assert [each.text for each in results] == [f"{text}.0" for text in "abcdef"]


def test_a_batch_waits_where_a_single_request_is_refused(tmp_path: Path) -> None:
    asked: list[tuple[str | None, float]] = []

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append((request.text, time.monotonic()))
        is_first = [text for text, _ in asked].count(request.text) == 1
        if is_first and request.text != "first":
            return [failure(request, "overloaded", 503, retry_after_s=0.05)]
        return [output(request, str(request.text), finish=finish())]

    with fake_ring(tmp_path, answer), Client(tmp_path) as client:
        completions = client.generate(["first", "second", "third"], timeout=WAIT_S)
        assert [each.text for each in completions] == ["first", "second", "third"]
        first_try, second_try = (at for text, at in asked if text == "third")
        assert second_try - first_try >= 0.05
        with pytest.raises(Overloaded) as caught:
            client.generate("alone", timeout=WAIT_S)
        assert caught.value.retry_after_s == 0.05


def test_a_batch_that_is_refused_for_ever_ends_at_its_time_limit(tmp_path: Path) -> None:
    with (
        fake_ring(tmp_path, lambda request: [failure(request, "overloaded", 503, retry_after_s=0.01)]),
        Client(tmp_path) as client,
        pytest.raises(TimeoutError),
    ):
        client.generate(["x", "y"], timeout=0.1)


def test_the_first_error_of_a_batch_is_raised_and_the_others_are_aborted(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [failure(request, "invalid_value", 400, "top_p")] if request.text == "bad" else []

    with fake_ring(tmp_path, answer) as ring, Client(tmp_path) as client:
        with pytest.raises(InvalidRequest, match="refused"):
            client.generate(["bad", "good"], timeout=WAIT_S)
        assert ring.wait_abort().handles == (ring.requests[1].handle,)


def test_a_wrong_prompt_in_a_batch_aborts_those_before_it(client: Client, ring: FakeRing) -> None:
    prompts: list[Any] = ["good", [-1]]
    with pytest.raises(InvalidRequest, match="prompt"):
        client.generate(prompts, timeout=WAIT_S)
    assert ring.wait_abort().handles == (ring.requests[0].handle,)


@pytest.mark.parametrize("wrong", [None, "x", 1])
def test_what_is_no_sampling_parameters_is_refused_before_anything_is_sent(
    client: Client, ring: FakeRing, wrong: Any
) -> None:
    for prompts in (["x"], ["x", "y"]):
        with pytest.raises(InvalidRequest, match="sampling_params") as refused:
            client.generate(prompts, [*[SamplingParams()] * (len(prompts) - 1), wrong], timeout=WAIT_S)
        assert refused.value.param == "sampling_params"
    assert ring.requests == []


def test_a_time_limit_aborts_the_whole_batch(client: Client, ring: FakeRing) -> None:
    with pytest.raises(TimeoutError):
        client.generate(["x", "y", "z"], timeout=0.05)
    ring.wait_for(lambda: len(ring.aborted()) == 3)


def test_closing_ends_a_batch_in_another_thread(client: Client, ring: FakeRing) -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            client.generate(["x", "y"])
        except RingClosed as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    ring.wait_request(1)
    client.close()
    caller.join(WAIT_S)
    assert len(caught) == 1


def test_a_batch_finds_room_again_when_the_way_to_the_server_was_full(
    client: Client, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._session.connection
    looks: list[int] = []

    def has_room(_: object) -> bool:
        looks.append(1)
        return len(looks) % 3 == 0

    ring.answer = echo
    monkeypatch.setattr(type(connection), "has_room", property(has_room))
    assert [each.text for each in client.generate(["a", "b", "c"], timeout=WAIT_S)] == ["a.0", "b.0", "c.0"]


def test_thousands_of_prompts_keep_their_order_within_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.client.core.batch.MAX_IN_FLIGHT", 50)
    with (
        fake_ring(tmp_path, echo, RuntimeConfig(max_queued_requests=1 << 20)) as ring,
        Client(tmp_path) as session_client,
    ):
        most = 0
        session = session_client._session
        texts = [str(number) for number in range(2000)]

        def watch(_: Completion) -> None:
            nonlocal most
            most = max(most, session.num_in_flight)

        completions = session_client._generate(texts, None, WAIT_S * 4, watch)
        assert isinstance(completions, list)
        assert [each.text for each in completions] == [f"{text}.0" for text in texts]
        assert most <= 50
        assert len(ring.requests) == 2000
        assert not session._requests


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def finished(num_tokens: int) -> Completion:
    return Completion([CompletionOutput(0, "a", [1], "a", [1], finish_reason="stop")], Usage(7, num_tokens))


def test_the_bar_counts_prompts_and_tokens_on_a_terminal_and_shows_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stderr, shows in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stderr)
        with progress_bar(2) as on_completion:
            on_completion(finished(3))
            on_completion(finished(5))
        shown = stderr.getvalue()
        assert ("2/2" in shown and "tok/s" in shown) == shows
        assert bool(shown) == shows


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.client.offline.LINE_S", 0.0)
    with progress_bar(4) as on_completion:
        for _ in range(2):
            on_completion(Completion([], Usage(5, 7)))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        f"prompts: {number} of 4 ({25 * number} %)" for number in (1, 2)
    ]
    assert all("input" in line and "output" in line for line in lines)
    monkeypatch.setattr("carousel.client.offline.LINE_S", 1000.0)
    with progress_bar(1) as on_completion:
        on_completion(Completion([], Usage(5, 7)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_llm_shows_a_bar_over_several_prompts_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_tqdm: bool
) -> None:
    stderr = Terminal()
    with fake_ring(tmp_path, echo), LLM.__new__(LLM) as llm:
        llm._stop_runtime = lambda: None  # type: ignore[assignment]
        Client.__init__(llm, tmp_path)
        monkeypatch.setattr("sys.stderr", stderr)
        completions = llm.generate(["a", "b", "c"], SamplingParams(n=2), use_tqdm=use_tqdm, timeout=WAIT_S)
        assert [[each.text for each in completion.outputs] for completion in completions] == [
            ["a.0", "a.1"],
            ["b.0", "b.1"],
            ["c.0", "c.1"],
        ]
        assert ("3/3" in stderr.getvalue()) == use_tqdm
        assert llm.generate("alone", timeout=WAIT_S).text == "alone.0"
        assert "1/1" not in stderr.getvalue()
