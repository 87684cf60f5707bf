"""Requests of the Messages API as chat requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from carousel.conversation import conversation
from carousel.server.anthropic.translation import Translation, translate
from carousel.server.anthropic.types import CountTokensBody, MessagesBody
from runtime.base.errors import InvalidRequest
from tests.harness.cases import for_each

USER = {"role": "user", "content": "x"}


def translated(**body: Any) -> Translation:
    data = msgspec.json.encode({"max_tokens": 9, "messages": [USER], **body})
    return translate(msgspec.json.decode(data, type=MessagesBody))


def turns(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    return conversation(translated(messages=list(messages), **body).body.messages)


def text(what: str) -> dict[str, Any]:
    return {"type": "text", "text": what}


def result(of: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, **fields}


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"id_{name}", "name": name, "input": arguments}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_texts_side_by_side_are_lines_and_those_of_an_answer_are_one() -> None:
    assert turns(user(text("a"), text("b")), assistant(text("c"), text("d")), USER) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "cd"},
        USER,
    ]


@for_each(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be"), text("brief.")], "Be\nbrief."),
        ("x-anthropic-billing-header: cch=1;\nBe brief.", "Be brief."),
        ([text("x-anthropic-billing-header: cch=1;"), text("Be brief.")], "Be brief."),
        ("Be x-anthropic-billing-header: brief", "Be x-anthropic-billing-header: brief"),
        ("", None),
        ([], None),
        (None, None),
    ],
)
def test_the_system_prompt_comes_first(system: Any, expected: str | None) -> None:
    first = [] if expected is None else [{"role": "system", "content": expected}]
    assert turns(USER, system=system) == [*first, USER]


def test_results_are_messages_of_their_own_in_their_order() -> None:
    parts = [text("1"), text("2")]
    blocks = [result("a", content="A"), result("b", content=parts), result("c"), text("so?"), text("well?")]
    assert turns(USER, assistant(use("f", n=1), use("g")), user(*blocks)) == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}, "id": "id_f"},
                {"type": "function", "function": {"name": "g", "arguments": {}}, "id": "id_g"},
            ],
        },
        {"role": "tool", "content": "A", "tool_call_id": "a"},
        {"role": "tool", "content": "1\n2", "tool_call_id": "b"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "user", "content": "so?\nwell?"},
    ]
    before = turns(user(text("first"), result("a", content="A")))
    assert [turn["role"] for turn in before] == ["user", "tool"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("no file", "Error: no file"), ([text("no"), text("file")], "Error: no\nfile"), (None, "Error: ")],
)
def test_a_result_that_is_an_error_says_so(content: Any, expected: str) -> None:
    (turn,) = turns(user(result("a", content=content, is_error=True)))
    assert turn["content"] == expected
    (turn,) = turns(user(result("a", content=content, is_error=False)))
    assert turn["content"] == expected.removeprefix("Error: ")


def test_thinking_is_passed_back_as_reasoning() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    _, turn, _ = turns(USER, assistant(thought, text("Hi")), USER)
    assert turn == {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}


def test_an_answer_that_was_begun_is_continued() -> None:
    assert translated(messages=[USER, assistant(text("I"))]).body.continue_final_message
    assert translated().body.continue_final_message is None
    with pytest.raises(InvalidRequest, match=r"messages\[1\]: its tool calls have no results"):
        translated(messages=[USER, assistant(use("f"))])


@for_each(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: Any, parallel: bool | None) -> None:
    body = translated(tool_choice=choice).body
    assert msgspec.to_builtins(body.tool_choice) == expected
    assert body.parallel_tool_calls is parallel


def test_tools_have_openais_form() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tools = [
        {"name": "f", "description": "d", "input_schema": schema, "strict": True},
        {"name": "g", "input_schema": {}, "type": "custom", "eager_input_streaming": True},
    ]
    assert json.loads(bytes(translated(tools=tools).body.tools)) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]
    assert bytes(translated(tools=[]).body.tools) == bytes(translated(tools=None).body.tools) == b""


def test_reasoning_is_switched_by_the_templates_variables() -> None:
    def switches(**thinking: Any) -> Any:
        body = translated(thinking=thinking, chat_template_kwargs={"a": 1}).body
        return body.thinking_token_budget, body.include_reasoning, body.chat_template_kwargs

    on = {"enable_thinking": True, "thinking": True, "a": 1}
    off = {"enable_thinking": False, "thinking": False, "a": 1}
    assert switches(type="enabled", budget_tokens=8) == (8, None, on)
    assert switches(type="adaptive", display="summarized") == (None, None, on)
    assert switches(type="adaptive", display="omitted") == (None, False, on)
    assert switches(type="disabled") == (None, None, off)
    chosen = {"enable_thinking": False}
    body = translated(thinking={"type": "adaptive"}, chat_template_kwargs=chosen).body
    assert body.chat_template_kwargs == {"enable_thinking": False, "thinking": True}
    assert translated().body.chat_template_kwargs is None


def test_a_count_has_no_limit_that_a_budget_must_be_below() -> None:
    data = b'{"messages": [], "thinking": {"type": "enabled", "budget_tokens": 2000}}'
    body = translate(msgspec.json.decode(data, type=CountTokensBody)).body
    assert (body.thinking_token_budget, body.max_tokens) == (2000, None)


@for_each(
    ("blocks", "words"),
    [
        (user(use("f")), r"messages\[0\].content\[0\]: a block of type tool_use is for .* role assistant"),
        (assistant(result("a")), r"content\[0\]: a block of type tool_result is for .* role user"),
        (
            {"role": "system", "content": [{"type": "thinking", "thinking": "x"}]},
            r"content\[0\]: a block of type thinking is for .* role assistant",
        ),
        (user(text("a"), {"type": "text"}), r"messages\[0\].content\[1\].text is missing"),
        (user({"type": "tool_result"}), r"content\[0\].tool_use_id is missing"),
        (assistant({**use("f"), "input": None}), r"content\[0\].input is missing"),
        (assistant({**use("f"), "input": [1]}), r"content\[0\].input must be an object"),
        (assistant({**use("f"), "name": None}), r"content\[0\].name is missing"),
        (user({**text("a"), "is_error": True}), r"content\[0\].is_error is no field of a block of type text"),
        (user({**text("a"), "input": {}}), r"content\[0\].input is no field of a block of type text"),
    ],
)
def test_a_block_that_is_wrong_is_named(blocks: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        translated(messages=[blocks])


def test_a_field_that_is_null_is_absent() -> None:
    block = {**text("a"), "id": None, "input": None, "content": None, "is_error": None, "cache_control": None}
    assert turns(user(block)) == [{"role": "user", "content": "a"}]


def test_errors_of_the_chat_request_are_told_by_the_names_of_this_one() -> None:
    chat = translated(
        system="s", messages=[USER, assistant(text("a"), use("f")), user(result("a"), text("b"))]
    )

    def spelled(message: str, param: str) -> tuple[str, str | None]:
        error = chat.error(InvalidRequest(message, param=param, code="c"))
        assert (type(error), error.code) == (InvalidRequest, "c")
        return error.message, error.param

    for path, expected in (
        ("messages[0].content", "system"),
        ("messages[2]", "messages[1]"),
        ("messages[2].tool_calls[0].function.arguments", "messages[1].content[1].input"),
        ("messages[3].content", "messages[2]"),
        ("messages[4]", "messages[2]"),
        ("messages", "messages"),
        ("tools[7].function.parameters", "tools[7].input_schema"),
        ("tools[7].function.name", "tools[7].name"),
        ("tools[7].function", "tools[7]"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("thinking_token_budget", "thinking.budget_tokens"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        ("reasoning_effort", "output_config.effort"),
        ("tool_choice: required", "tool_choice: any"),
        ("max_tokens", "max_tokens"),
    ):
        assert spelled(f"{path}: is wrong", path) == (f"{expected}: is wrong", expected)
    names = chat.names({"prompt": "messages", "json": "response_format"})
    assert (names["stop"], names["json"], names["prompt"]) == (
        "stop_sequences",
        "output_config.format",
        "messages",
    )
