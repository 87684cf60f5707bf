"""Streams that have nothing to say for a while: a line keeps their connections open."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import PROMPT_TOKENS, WAIT_S, failure, finish, output

INTERVAL_S = 0.1
COMMENT, PING = ": keep-alive", 'event: ping\ndata: {"type":"ping"}'
COMPLETION = {"prompt": "x", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}
MESSAGE = {"model": "fake", "max_tokens": 9, **CHAT}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": MESSAGE,
    "/generate": {"text": "x", "stream": True},
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), sse_keep_alive_interval=INTERVAL_S) as front:
        yield front


def begun(front: Front, path: str) -> tuple[Iterator[str], GenerateRequest]:
    """The blocks of a stream, between empty lines, as they come, and its request."""
    num_before = len(front.ring.requests)

    def blocks() -> Iterator[str]:
        with front.http.stream("POST", path, json=BODIES[path]) as response:
            assert response.status_code == 200
            yield response.headers["content-type"]
            rest = ""
            for text in response.iter_text():
                *whole, rest = (rest + text).split("\n\n")
                yield from whole
            assert not rest

    found = blocks()
    assert next(found).startswith("text/event-stream")
    return found, front.ring.wait_for(lambda: front.ring.requests[num_before:])[0]


def end(front: Front, request: GenerateRequest, text: str = "a") -> None:
    front.ring.send(output(request, text, num_prompt_tokens=PROMPT_TOKENS, finish=finish()))


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_without_a_token_gets_lines_and_then_its_events(front: Front, path: str) -> None:
    began_s = time.monotonic()
    blocks, request = begun(front, path)
    assert [next(blocks) for _ in range(3)] == [COMMENT] * 3
    assert time.monotonic() - began_s >= 2 * INTERVAL_S, "lines come at the interval"
    end(front, request)
    rest = [block for block in blocks if block != COMMENT]
    assert "data: " in rest[0]
    assert '"error":{' not in "".join(rest)


def test_a_pause_between_tokens_gets_lines_too(front: Front) -> None:
    blocks, request = begun(front, "/v1/completions")
    assert next(blocks) == COMMENT
    front.ring.send(output(request, "a"))
    assert '"text":"a"' in next(block for block in blocks if block != COMMENT)
    assert next(blocks) == COMMENT
    end(front, request, "b")
    rest = [block for block in blocks if block != COMMENT]
    assert '"text":"b"' in rest[0]
    assert rest[-1] == "data: [DONE]"


def test_a_message_is_pinged_behind_its_first_event_and_not_before(front: Front) -> None:
    blocks, request = begun(front, "/v1/messages")
    assert next(blocks) == COMMENT, "Anthropic's streams begin with message_start"
    front.ring.send(output(request, "a", num_prompt_tokens=PROMPT_TOKENS))
    names = [block.partition("\n")[0] for block in itertools.takewhile(lambda block: block != PING, blocks)]
    assert [name for name in names if name != COMMENT] == [
        "event: message_start",
        "event: content_block_start",
        "event: content_block_delta",
    ]
    end(front, request, "b")
    assert COMMENT not in list(blocks)


def test_a_refusal_after_a_line_is_an_event(front: Front) -> None:
    blocks, request = begun(front, "/v1/completions")
    assert next(blocks) == COMMENT
    front.ring.send(failure(request, "queue_timeout", 503))
    (last,) = [block for block in blocks if block != COMMENT]
    assert '"code":"queue_timeout"' in last


def test_a_refused_response_has_its_first_events_before_the_error(front: Front) -> None:
    """Openai's client expects them before all others."""
    blocks, request = begun(front, "/v1/responses")
    assert next(blocks) == COMMENT
    front.ring.send(failure(request, "queue_timeout", 503))
    told = [block.partition("\n")[0] for block in blocks if block != COMMENT]
    names = ["response.created", "response.in_progress", "error", "response.failed"]
    assert told == [f"event: {name}" for name in names]


def test_clients_pass_over_the_lines(front: Front) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        time.sleep(2.5 * INTERVAL_S)
        return [output(request, "abc", num_prompt_tokens=PROMPT_TOKENS, finish=finish())]

    front.ring.answer, silent = answer, front.ring.answer
    url = f"http://127.0.0.1:{front.port}"
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S) as client:
            chunks = client.chat.completions.create(model="fake", **CHAT)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
            told = client.responses.create(model="fake", input="x", stream=True)
            assert [each.type for each in told][-1] == "response.completed"
        with anthropic.Anthropic(base_url=url, api_key="none", timeout=WAIT_S) as speaker:
            asked: Any = {name: value for name, value in MESSAGE.items() if name != "stream"}
            with speaker.messages.stream(**asked) as stream:
                assert stream.get_final_message().content[0].to_dict()["text"] == "abc"
    finally:
        front.ring.answer = silent


def test_without_an_interval_nothing_is_said_and_a_refusal_keeps_its_status(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        time.sleep(2.5 * INTERVAL_S)
        return [failure(request, "queue_timeout", 503)]

    with http_front(tmp_path, answer, sse_keep_alive_interval=0.0) as front:
        response: httpx.Response = front.post("/v1/completions", **COMPLETION)
    assert response.status_code == 503
