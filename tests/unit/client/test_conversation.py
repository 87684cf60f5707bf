"""Conversations of OpenAI's form in a program: what is made of them, and refusals by the caller's names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from carousel.conversation import (
    IGNORED_KEYS,
    MessageBody,
    conversation,
    conversation_of,
    conversations_of,
    pack_tools,
    wire_messages,
)
from carousel.server.request.field_table import FIELD_TABLES
from runtime.base.errors import InvalidRequest
from tests.harness.cases import for_each

USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_it_is_what_the_http_server_makes_of_the_same_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "x", "name": "me"},
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "so"},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    bodies = msgspec.json.decode(msgspec.json.encode(messages), type=list[MessageBody])
    made = conversation_of(messages)
    assert made == conversation(bodies)
    assert [each["role"] for each in made] == ["system", "user", "assistant", "tool"]
    assert made[0]["content"] == "a\nb"
    assert made[2] == {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "so"}
    assert len(wire_messages(made)) == 4


def test_an_answer_is_sent_back_as_it_came() -> None:
    """The form of an answer of OpenAI's client library: most of it is None."""
    answer: dict[str, Any] = {"role": "assistant", "content": "It is", "audio": None, "function_call": None}
    answer |= {"refusal": "no", "annotations": [], "tool_calls": None}
    assert conversation_of([USER, answer])[1] == {"role": "assistant", "content": "It is"}
    assert FIELD_TABLES[MessageBody].taken.keys() == IGNORED_KEYS


def test_one_and_several_are_told_apart() -> None:
    assert conversations_of([USER]) == [USER]
    assert conversations_of([[USER], (USER, USER)]) == [[USER], [USER, USER]]


@for_each(
    ("messages", "param", "words"),
    [
        ("x", "messages", "must be a list of messages"),
        (USER, "messages", "must be a list of messages"),
        (None, "messages", "got NoneType"),
        ([], "messages", "is empty"),
        ([USER, "x"], "messages[1]", "must be a mapping"),
        ([USER, [USER]], "messages[1]", "must be a mapping"),
        ([[USER], USER], "messages[1]", "must be a list of messages"),
        ([[USER], []], "messages[1]", "is empty"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"content": "x"}], "messages[0]", "missing required field `role`"),
        ([[USER], [{"role": 1}]], "messages[1][0].role", "Expected `str`"),
        ([USER | {"content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "Expected"),
        (
            [USER | {"content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "takes text only: Invalid enum",
        ),
        ([USER | {"function_call": {}}], "messages[0].function_call", "not supported"),
        ([USER | {"content": object()}], "messages[0]", "JSON"),
        ([USER | {"content": "\ud800"}], "messages[0]", "surrogates"),
    ],
)
def test_what_is_wrong_is_named_as_the_caller_wrote_it(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversations_of(messages)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
    assert words in caught.value.message


def test_tools_are_a_list_or_its_json() -> None:
    packed = pack_tools([TOOL])
    assert msgspec.json.decode(packed) == [TOOL]
    assert pack_tools(packed) == packed
    assert pack_tools(None) == pack_tools([]) == b""


@for_each("tools", ["x", {"a": 1}, ["x"], [{"a": object()}], 3])
def test_other_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^tools") as caught:
        pack_tools(tools)
    assert caught.value.param == "tools"
