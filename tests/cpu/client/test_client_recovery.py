"""Each kind of client goes on where it was when a process of the ring has been replaced."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from carousel import LLM, AsyncClient, Client, RingClosed, SamplingParams
from carousel.client import offline
from runtime.wire.format import pack_ids
from runtime.wire.handle import attempt_of, sequence_key
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest, SequenceOutput
from runtime.wire.status_page import ProcessStatus
from tests.harness.http.http_front import http_front
from tests.harness.ring.fake_ring import EPOCH, WAIT_S, FakeRing, fake_ring, finish, output
from tests.harness.ring.stand_in_runtime import StandInRuntime

TEXT = "go on"
CUT = 2


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """The beginning to a first attempt, the rest to a second one."""
    if not attempt_of(request.handle):
        return [output(request, TEXT[:CUT])] if request.stream else []
    at = request.resume.num_chars if request.resume is not None else 0
    return [output(request, TEXT[at:], finish=finish("length", len(TEXT)))]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FakeRing]:
    with fake_ring(tmp_path, answer) as ring:
        yield ring


def replace_engine(ring: FakeRing, state: str = "ready", *, epoch: int = EPOCH + 1) -> None:
    replace(ring, "scheduler", state, epoch)


def replace(ring: FakeRing, role: str, state: str = "ready", epoch: int = EPOCH + 1) -> None:
    ring.status.write(role, ProcessStatus(epoch, os.getpid(), state, time.monotonic_ns()))


def check_second_attempt(ring: FakeRing, *, has_output: bool) -> None:
    first, second = ring.requests
    assert sequence_key(second.handle) == sequence_key(first.handle)
    assert attempt_of(second.handle) == 1
    assert second.sampling == first.sampling, "another seed would draw other tokens"
    assert (second.resume is not None) == has_output
    if second.resume is not None:
        assert second.resume.num_chars == CUT
        assert second.resume.output_ids == pack_ids([ord(character) for character in TEXT[:CUT]])


def test_a_stream_of_a_client_goes_on(ring: FakeRing) -> None:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", SamplingParams(max_tokens=5), timeout=WAIT_S)
        assert next(stream).text == TEXT[:CUT]
        replace_engine(ring)
        assert "".join(delta.text for delta in stream) == TEXT[CUT:]
        assert stream.state.completion().text == TEXT
    check_second_attempt(ring, has_output=True)


def test_an_attempt_of_which_nothing_has_come_is_made_again_when_the_tokenizer_dies_too(
    tmp_path: Path,
) -> None:
    """It may have died with the attempt, whatever had come of the one before."""

    def reply(request: GenerateRequest) -> list[SequenceOutput]:
        return [] if attempt_of(request.handle) == 1 else answer(request)

    with fake_ring(tmp_path, reply) as ring, Client(tmp_path, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", SamplingParams(max_tokens=5), timeout=WAIT_S)
        assert next(stream).text == TEXT[:CUT]
        replace_engine(ring)
        ring.wait_request(1)
        replace(ring, "tokenizer")
        assert "".join(delta.text for delta in stream) == TEXT[CUT:]
    assert [attempt_of(request.handle) for request in ring.requests] == [0, 1, 2]


def test_what_has_come_and_was_not_read_is_not_asked_for_again(ring: FakeRing) -> None:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", SamplingParams(max_tokens=5), timeout=WAIT_S)
        client.server_info()  # answered after the first output
        replace_engine(ring)
        ring.wait_request(1)
        assert "".join(delta.text for delta in stream) == TEXT
    check_second_attempt(ring, has_output=True)


def test_a_plain_call_of_an_asynchronous_client_goes_on(ring: FakeRing) -> None:
    async def main() -> None:
        async with AsyncClient(ring.run_dir, connect_timeout=WAIT_S) as client:
            call = asyncio.create_task(client.generate("x", timeout=WAIT_S))
            await asyncio.to_thread(ring.wait_request)
            replace_engine(ring)
            assert (await call).text == TEXT

    asyncio.run(main())
    check_second_attempt(ring, has_output=False)


def test_a_prompt_of_an_llm_goes_on(ring: FakeRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "OwnRuntime", lambda *_: StandInRuntime(ring))
    with LLM() as llm, ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, "x", SamplingParams(max_tokens=5), timeout=WAIT_S)
        ring.wait_request()
        replace_engine(ring)
        assert call.result(WAIT_S).text == TEXT
    check_second_attempt(ring, has_output=False)


def test_a_plain_call_over_http_goes_on(tmp_path: Path) -> None:
    with http_front(tmp_path, answer) as front, ThreadPoolExecutor(1) as pool:
        call = pool.submit(front.complete, max_tokens=5)
        front.ring.wait_request()
        replace_engine(front.ring)
        response = call.result(WAIT_S)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)


def test_a_stream_over_http_goes_on(tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 5, "stream": True}
    with (
        http_front(tmp_path, answer) as front,
        front.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        texts = [json.loads(next(lines))["choices"][0]["text"]]
        replace_engine(front.ring)
        *rest, end = lines
    assert end == "[DONE]"
    texts += [json.loads(event)["choices"][0]["text"] for event in rest]
    assert (texts[0], "".join(texts)) == (TEXT[:CUT], TEXT)


def test_nothing_is_sent_while_the_engine_is_missing(ring: FakeRing) -> None:
    replace_engine(ring, "loading")
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        with pytest.raises(TimeoutError):
            client.server_info(timeout=0.3)
        assert not ring.arrivals
        replace_engine(ring)
        assert client.server_info(timeout=WAIT_S)["op"] == "server_info"


def test_a_question_is_asked_again_unless_its_caller_has_left(ring: FakeRing) -> None:
    ring.answers_questions = False
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client, ThreadPoolExecutor() as threads:
        with pytest.raises(TimeoutError):
            client.pause_generation(timeout=0.05)
        answer = threads.submit(client.server_info, timeout=WAIT_S)
        ring.wait_for(lambda: len(ring.arrivals) == 2)
        ring.answers_questions = True
        replace_engine(ring)
        assert answer.result(WAIT_S)["op"] == "server_info"
    ops = [message.op for _, message in ring.arrivals if isinstance(message, ControlRequest)]
    assert ops == ["pause_generation", "server_info", "server_info"]


def test_a_ring_that_stays_without_its_engine_is_gone(ring: FakeRing) -> None:
    with Client(ring.run_dir, connect_timeout=WAIT_S, ring_timeout=0.1) as client:
        replace_engine(ring, "restarting")
        with pytest.raises(RingClosed, match="has lacked a process"):
            client.generate("x", timeout=WAIT_S)


def test_an_abort_is_repeated(ring: FakeRing) -> None:
    with Client(ring.run_dir, connect_timeout=WAIT_S) as client:
        stream = client.stream("x", SamplingParams(max_tokens=5), timeout=WAIT_S)
        assert next(stream).text == TEXT[:CUT]
        client.abort(stream)
        first = ring.wait_request().handle
        assert ring.wait_abort() == AbortRequest((first,))
        replace_engine(ring)
        again = ring.wait_request(1).handle
        ring.wait_for(lambda: AbortRequest((again,)) in ring.aborts)
