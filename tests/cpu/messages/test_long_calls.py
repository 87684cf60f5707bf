"""Answers of many calls: they are parsed in small pieces, or beside the event loop."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from carousel.server import server_state
from carousel.server.answer.whole_answer import BYTES_OF_ID
from carousel.server.chat import answer as answer_module
from carousel.server.chat.answer import PIECE_CHARS, AnswerParser
from carousel.server.chat.events import Event
from carousel.server.tenancy.entrance import Entrance
from runtime.wire.format import pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, finish, output
from tests.harness.ring.launched import wait_until

CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
NUM_CALLS = 400
PARAMETERS = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
}
RESPONSES: dict[str, Any] = {
    "input": "x",
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
}
MESSAGES: dict[str, Any] = {
    "model": "default",
    "max_tokens": 8,
    "messages": CHAT["messages"],
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
}
REQUESTS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
CHAT_PATH = "/v1/chat/completions"
all_apis = pytest.mark.parametrize("path", list(REQUESTS))


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Calls, all in one delta, as after a caller has not read for long. A short answer of one token."""
    num_calls = 1 if request.sampling.max_tokens == 1 else NUM_CALLS
    ids = pack_ids([5] * num_calls)
    return [
        output(request, CALL * num_calls, index=index, token_ids=ids, finish=finish(completion_tokens=7))
        for index in range(request.sampling.n)
    ]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with http_front(tmp_path, answer, tool_call_parser="hermes", context_length=1 << 14) as front:
        yield front


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread and the length of each text that is parsed."""
    texts: list[tuple[str, int]] = []
    push = AnswerParser.push

    def noted(self: AnswerParser, text: str) -> list[Event]:
        texts.append((threading.current_thread().name, len(text)))
        return push(self, text)

    monkeypatch.setattr(answer_module.AnswerParser, "push", noted)
    return texts


def num_calls(data: bytes) -> int:
    return data.count(b'"name":"f"')


@all_apis
def test_long_answers_are_parsed_beside_the_loop(
    front: Front, parsed: list[tuple[str, int]], path: str
) -> None:
    """One of 128 sequences held the loop for 2 s."""
    assert num_calls(front.post(path, **REQUESTS[path]).content) >= NUM_CALLS
    assert {name for name, _ in parsed} == {"answers_0"}


def test_long_answers_with_logprobs_are_parsed_in_the_turns_of_their_tenant(
    front: Front, parsed: list[tuple[str, int]]
) -> None:
    """They had a thread each, so that logprobs got a key more of the processor than others."""
    assert num_calls(front.chat(**CHAT, logprobs=True).content) == NUM_CALLS
    assert {name for name, _ in parsed} == {"answers_0"}


def test_short_answers_with_logprobs_take_the_same_turns(front: Front, parsed: list[tuple[str, int]]) -> None:
    """They went to threads with a line that had no end and no turns."""
    assert num_calls(front.chat(**CHAT, max_tokens=1, logprobs=True).content) == 1
    assert [name for name, _ in parsed] == ["answers_0"]


def test_short_answers_are_parsed_where_they_come(front: Front, parsed: list[tuple[str, int]]) -> None:
    assert num_calls(front.chat(**CHAT, max_tokens=1).content) == 1
    assert [name for name, _ in parsed] == ["http-front"]


@all_apis
@pytest.mark.parametrize("is_shown", [True, False])
def test_what_has_gathered_for_a_slow_reader_is_parsed_in_pieces(
    front: Front, parsed: list[tuple[str, int]], path: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that are left out, all but the first one, held the loop for 58 ms for each 100 KB."""
    num_turns = 0
    take_turn = Entrance.take_turn

    async def counted(self: Entrance, *tenant: Any) -> None:
        nonlocal num_turns
        num_turns += 1
        await take_turn(self, *tenant)

    monkeypatch.setattr(Entrance, "take_turn", counted)
    alone: dict[str, Any] = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    if path != "/v1/messages":
        alone = {"parallel_tool_calls": False}
    data = front.post(path, **REQUESTS[path], **({} if is_shown else alone), stream=True).content
    assert max(size for _, size in parsed) <= PIECE_CHARS
    assert num_turns >= NUM_CALLS * len(CALL) // PIECE_CHARS - 1
    assert len(set(re.findall(rb"call_[0-9a-f]{24}", data))) == (NUM_CALLS if is_shown else 1)


@pytest.fixture
def held_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keeps the thread that formats long answers at the first of them until the event is set."""
    release = threading.Event()
    push = AnswerParser.push

    def held(self: AnswerParser, text: str) -> list[Event]:
        if threading.current_thread().name == "answers_0":
            release.wait(WAIT_S)
        return push(self, text)

    monkeypatch.setattr(answer_module.AnswerParser, "push", held)
    yield release
    release.set()


def statuses(callers: list[socket.socket]) -> list[int]:
    return [int(caller.recv(1 << 16).split()[1]) for caller in callers]


def test_long_answers_wait_in_their_places(tmp_path: Path, held_thread: threading.Event) -> None:
    """Before, they gave their places to others, so any number of them waited."""
    with (
        http_front(
            tmp_path,
            answer,
            tool_call_parser="hermes",
            context_length=1 << 14,
            max_running_requests=2,
            max_queued_requests=2,
        ) as front,
        ExitStack() as stack,
    ):
        callers = [stack.enter_context(front.open_raw(CHAT_PATH, **CHAT)) for _ in range(4)]
        wait_until(lambda: len(front.ring.requests) == 4, WAIT_S, "all are generated")
        assert front.chat(**CHAT).status_code == 503, "there is no place for a fifth one"
        held_thread.set()
        assert statuses(callers) == [200] * 4
        assert front.chat(**CHAT).status_code == 200


def test_bytes_of_long_answers_that_wait_are_bounded(
    tmp_path: Path, held_thread: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = NUM_CALLS * (len(CALL) + BYTES_OF_ID)
    monkeypatch.setattr(server_state, "MAX_LONG_ANSWER_BYTES", 5 * size // 2)
    with (
        http_front(tmp_path, answer, tool_call_parser="hermes", context_length=1 << 14) as front,
        ExitStack() as stack,
    ):
        callers = [stack.enter_context(front.open_raw(CHAT_PATH, **CHAT)) for _ in range(2)]
        wait_until(lambda: len(front.ring.requests) == 2, WAIT_S, "both are generated")
        refused = front.chat(**CHAT)
        assert refused.status_code == 503
        assert "too many long answers wait" in refused.json()["error"]["message"]
        held_thread.set()
        assert statuses(callers) == [200] * 2
