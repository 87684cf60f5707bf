"""Answers of the Messages API: a stream, the whole answer and a chat completion say the same."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.anthropic.message_format import MessagesFormat
from carousel.server.chat.answer import AnswerPlan
from carousel.server.openai.chat_format import ChatCompletionFormat, ChatView
from carousel.server.openai.response_types import ChatResponse
from runtime.wire.messages import Usage
from tests.harness.cases import for_each
from tests.unit.chat.cases import plan

CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "é", "b": [1, 2]}}\n</tool_call>'
PARTS = ("<think>", "</think>", "\n", " ", "a word", "é<", CALL, CALL[:40], "<tool_call>", "\U0001f600")
USAGE = Usage(7, 20, 3)


def output_of(text: str, reason: Any) -> CompletionOutput:
    return CompletionOutput(0, text, [], text, [], finish_reason=reason)


def view_of(how: AnswerPlan | None) -> ChatView:
    return ChatView("m", plan=how)


def made(how: AnswerPlan | None) -> MessagesFormat:
    return MessagesFormat(view_of(how), 20, "r")


def whole(how: AnswerPlan | None, text: str, reason: Any) -> dict[str, Any]:
    response = made(how).response([Completion([output_of(text, reason)], USAGE)])
    message: dict[str, Any] = json.loads(msgspec.json.encode(response))
    return message


def streamed(how: AnswerPlan | None, pieces: list[str], reason: Any) -> dict[str, Any]:
    """The message that a client makes of a stream. Calls have the text of their arguments."""
    answer = made(how)
    deltas = [Delta(piece, [], []) for piece in pieces]
    deltas.append(Delta("", [], [], reason, usage=USAGE))
    deltas[0] = msgspec.structs.replace(deltas[0], num_prompt_tokens=USAGE.prompt_tokens)
    data = b"".join(event for delta in deltas for event in answer.events(0, delta))
    data += answer.last_events() + answer.done
    events = []
    for block in data.split(b"\n\n")[:-1]:
        name, body = block.split(b"\n")
        events.append(json.loads(body.removeprefix(b"data: ")))
        assert name.decode() == f"event: {events[-1]['type']}"
    first, *inner, delta, last = events
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert message["usage"]["input_tokens"] == USAGE.prompt_tokens
    is_open = False
    for event in inner:
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            block = event["content_block"]
            message["content"].append(block | {"input": ""} if block["type"] == "tool_use" else block)
            continue
        assert is_open
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        new = {name: value for name, value in event["delta"].items() if name != "type"}
        for name, value in new.items():
            block[{"partial_json": "input"}.get(name, name)] += value
    assert not is_open
    message |= delta["delta"] | {"usage": delta["usage"]}
    return message


def told(message: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The blocks of a message, without ids."""
    return [
        (block["type"], *(block[name] for name in ("text", "thinking", "name", "signature") if name in block))
        for block in message["content"]
    ]


def joined(message: dict[str, Any], kind: str, name: str) -> str:
    return "".join(block[name] for block in message["content"] if block["type"] == kind)


PLANS = {
    "text": None,
    "calls": plan("hermes"),
    "reasoning": plan("", "qwen3", "may begin"),
    "both": plan("hermes", "qwen3", "may begin"),
    "calls alone": plan("hermes", "qwen3", "open", is_calls_alone=True),
    "reasoning unseen": plan("", "qwen3", "may begin", shows_reasoning=False),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_stream_says_what_the_whole_answer_and_a_chat_completion_say(kind: str) -> None:
    check_stream(kind, ["<think>", "a word", "</think>", CALL, CALL], random.Random(1), is_cut=False)
    for seed in range(30):
        rng = random.Random(f"{kind} {seed}")
        check_stream(kind, rng.choices(PARTS, k=rng.randrange(7)), rng, is_cut=rng.random() < 0.5)


def check_stream(kind: str, parts: list[str], rng: random.Random, *, is_cut: bool) -> None:
    how, text, reason = PLANS[kind], "".join(parts), "length" if is_cut else "stop"
    pieces, at = [], 0
    while at < len(text):
        size = rng.randint(1, 7)
        pieces.append(text[at : at + size])
        at += size
    message, stream = whole(how, text, reason), streamed(how, pieces or [""], reason)
    assert told(stream) == told(message), (parts, pieces)
    for name in ("stop_reason", "stop_sequence", "usage"):
        assert stream[name] == message[name]
    answer = ChatCompletionFormat(view_of(how)).pieces([Completion([output_of(text, reason)], USAGE)])
    chat = msgspec.json.decode(b"".join(answer), type=ChatResponse)
    (choice,) = chat.choices
    assert joined(message, "text", "text") == (choice.message.content or "")
    assert joined(message, "thinking", "thinking") == (choice.message.reasoning or "")
    calls = choice.message.tool_calls or []
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    streamed_uses = [block for block in stream["content"] if block["type"] == "tool_use"]
    assert [block["name"] for block in uses] == [call.function.name for call in calls]
    assert [block["input"] for block in streamed_uses] == [call.function.arguments for call in calls]
    assert (message["stop_reason"] == "tool_use") == (choice.finish_reason == "tool_calls")
    for use, call in zip(uses, calls, strict=True):
        try:
            assert use["input"] == json.loads(call.function.arguments)
        except json.JSONDecodeError:
            assert use["input"] == {}


@for_each(
    ("reason", "num_tokens", "expected"),
    [
        ("stop", 20, "end_turn"),
        ("length", 20, "max_tokens"),
        ("length", 19, "model_context_window_exceeded"),
        ("timeout", 19, "max_tokens"),
        ("abort", 19, "max_tokens"),
    ],
)
def test_why_an_answer_ended(reason: Any, num_tokens: int, expected: str) -> None:
    completion = Completion([output_of("x", reason)], Usage(7, num_tokens, 0))
    assert made(None).response([completion]).stop_reason == expected


@pytest.mark.parametrize("arguments", ["{", '{"a": ', '{"a": 1,'])
def test_arguments_that_break_off_are_an_empty_input(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}'
    (block,) = whole(PLANS["calls"], text, "length")["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "now", {})
