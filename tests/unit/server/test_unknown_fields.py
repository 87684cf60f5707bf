"""Fields that a body does not declare are taken, refused by name, or named back."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest

from carousel.server.openai.embedding_types import EmbeddingBody
from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.request.decode import SMALL_BODY_BYTES, decode_body
from carousel.server.request.field_table import FIELD_TABLES, REFUSED, TAKEN
from carousel.server.request.prompts import conversation
from carousel.server.request.unknown_fields import MAX_UNKNOWN, FieldFilter, IgnoredLog, nearest
from carousel.server.sglang.generate_types import GenerateBody
from carousel.server.sglang.tokenize_types import TokenizeBody
from runtime.base.errors import InvalidRequest
from tests.harness.http.bad_input import HTTP_CASES, HttpCase

KINDS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/generate": GenerateBody}
USER = {"role": "user", "content": "x"}


async def no_wait(_: int) -> None:
    pass


def read(kind: Any, policy: Any = "warn", **body: Any) -> tuple[Any, list[str]]:
    """Return the body as it is decoded, and the fields that are named back."""
    fields = FieldFilter(policy)
    data = json.dumps(body).encode()
    return asyncio.run(decode_body(data, kind, 1 << 16, no_wait, fields)), fields.ignored


def refusal(kind: Any, policy: Any = "warn", **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(kind, policy, **body)
    assert caught.value.param
    assert caught.value.param in caught.value.message
    return caught.value


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, {**USER, **message}]}


@pytest.mark.parametrize("padding", ["", "x" * SMALL_BODY_BYTES], ids=["small", "large"])
def test_unknown_fields_are_left_out_and_named(padding: str) -> None:
    body, ignored = read(CompletionBody, prompt="x" + padding, odd={"a": [1]}, odder=2, max_tokens=3)
    assert (body.prompt, body.max_tokens, ignored) == ("x" + padding, 3, ["odd", "odder"])
    messages = [USER, {**USER, "odd": 1, "content": [{"type": "text", "text": "y" + padding, "odd": 2}]}]
    body, ignored = read(ChatBody, messages=messages)
    assert body.messages[1].content[0].text == "y" + padding
    assert sorted(ignored) == ["messages.content.odd", "messages.odd"]


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, {"prompt": "x", "odd": 1}, "odd"),
        (CompletionBody, {"prompt": "x", "stream_options": {"odd": 1}}, "stream_options.odd"),
        (GenerateBody, {"text": "x", "sampling_params": {"odd": 1}}, "sampling_params.odd"),
        (ChatBody, chat(odd=1), "messages[1].odd"),
        (ChatBody, chat(content=[{"type": "text", "text": "x", "odd": 1}]), "messages[1].content[0].odd"),
        (EmbeddingBody, {"input": "x", "odd": 1}, "odd"),
        (TokenizeBody, {"prompt": "x", "max_tokens": 1}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("padding", [0, SMALL_BODY_BYTES], ids=["small", "large"])
def test_one_policy_refuses_them_and_another_says_nothing(
    kind: Any, body: dict[str, Any], param: str, padding: int
) -> None:
    field = next(name for name in ("prompt", "text", "input", "messages") if name in body)
    if isinstance(body[field], str):
        body = {**body, field: "x" * (1 + padding)}
    else:
        body = {**body, field: [{**body[field][0], "content": "x" * (1 + padding)}, *body[field][1:]]}
    error = refusal(kind, "refuse", **body)
    assert (error.param, error.code) == (param, "unknown_parameter")
    assert read(kind, "ignore", **body)[1] == []
    assert len(read(kind, "warn", **body)[1]) == 1


@pytest.mark.parametrize("policy", ["warn", "refuse", "ignore"])
def test_a_null_is_never_unknown(policy: Any) -> None:
    sampling = {"stop_regex": None, "odd": None}
    assert not read(GenerateBody, policy, text="x", regex=None, odd=None, sampling_params=sampling)[1]
    nulls = dict.fromkeys((*REFUSED, *TAKEN, "max_token"), None)
    assert not read(CompletionBody, policy, prompt="x", **nulls)[1]
    assert not read(ChatBody, policy, **chat(odd=None, refusal=None, audio=None, function_call=None))[1]


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_what_the_sdks_send_and_changes_nothing_is_taken(policy: Any) -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": True,
        "no_logs": True,
    }
    assert read(ChatBody, policy, messages=[USER], **labels)[1] == []
    assert read(ChatBody, policy, **chat(annotations=[], cache_control={"type": "ephemeral"}))[1] == []


@pytest.mark.parametrize("policy", ["warn", "refuse", "ignore"])
@pytest.mark.parametrize(
    ("kind", "body", "param", "part"),
    [
        (CompletionBody, {"prompt": "x", "guided_json": {}}, "guided_json", "not supported"),
        (CompletionBody, {"prompt": "x", "regex": "a"}, "regex", "not supported"),
        (CompletionBody, {"prompt": "x", "lora_path": "a"}, "lora_path", "not supported"),
        (CompletionBody, {"prompt": "x", "truncation_side": "left"}, "truncation_side", ""),
        (CompletionBody, {"prompt": "x", "return_perf_metrics": True}, "return_perf_metrics", "library"),
        (CompletionBody, {"prompt": "x", "max_new_tokens": 3}, "max_new_tokens", "max_tokens"),
        (CompletionBody, {"prompt": "x", "request_id": "a"}, "request_id", "X-Request-Id"),
        (ChatBody, {"messages": [USER], "echo": True}, "echo", "except as false"),
        (ChatBody, {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format", ""),
        (ChatBody, {"messages": [USER], "tools": [{}]}, "tools", "not supported"),
        (GenerateBody, {"text": "x", "temperature": 0}, "temperature", "sampling_params.temperature"),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"seed": 1}},
            "sampling_params.seed",
            "sampling_seed",
        ),
        (ChatBody, chat(content=[{"type": "image_url"}]), "messages[1].content[0].type", "text only"),
        (ChatBody, chat(content=[{"image": "x"}]), "messages[1].content[0].image", "text only"),
    ],
)
def test_what_changes_the_answer_and_is_not_built_is_refused_by_name(
    kind: Any, body: dict[str, Any], param: str, part: str, policy: Any
) -> None:
    error = refusal(kind, policy, **body)
    assert error.param == param
    assert part in error.message


@pytest.mark.parametrize("policy", ["warn", "refuse"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("topP", "top_p"),
        ("stops", "stop"),
        ("strem", "stream"),
        ("response_fromat", "response_format"),
        ("top_a", None),
        ("enable_thinking", None),
        ("x" * 5000, None),
    ],
)
def test_a_misspelling_is_refused_with_the_right_name(given: str, meant: str | None, policy: Any) -> None:
    assert nearest(given, (*ChatBody.__struct_fields__, *REFUSED)) == meant
    if meant is not None:
        assert f"did you mean {meant}?" in refusal(ChatBody, policy, messages=[USER], **{given: 1}).message
        assert read(ChatBody, "ignore", messages=[USER], **{given: 1})[1] == []


def test_no_field_of_the_peers_is_close_to_another() -> None:
    """The table has what was meant."""
    for name in (*REFUSED, *TAKEN):
        body = {"messages": [USER], name: None}
        assert read(ChatBody, "refuse", **body)[1] == []
    for table in FIELD_TABLES.values():
        assert not table.taken.keys() & table.refused.keys()


@pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.id)
def test_what_is_bad_input_is_so_under_each_policy(case: HttpCase) -> None:
    """Beside what is unknown; the cases themselves are held against a server that warns."""
    kind = KINDS.get(case.path)
    if kind is None or case.status != 400 or len(case.content()) > SMALL_BODY_BYTES:
        return
    warned, refused = (outcome(kind, case.content(), policy) for policy in ("warn", "refuse"))
    if case.part != "256":
        assert warned == refused
    if case.code in ("unknown_parameter", "unsupported_parameter"):
        assert refused == (case.code, case.param)


def outcome(kind: Any, data: bytes, policy: Any) -> tuple[str | None, str | None]:
    try:
        asyncio.run(decode_body(data, kind, 1 << 16, no_wait, FieldFilter(policy)))
    except InvalidRequest as error:
        return error.code, error.param
    return None, None


def test_names_are_escaped_and_few() -> None:
    names = ["a,b", "c\r\nd", "é", "x" * 100, *(f"odd{number}{'z' * number}" for number in range(20))]
    _, ignored = read(CompletionBody, prompt="x", **dict.fromkeys(names, 1))
    assert len(ignored) == 16
    assert ignored[:4] == ["a\\u002cb", "c\\u000d\\u000ad", "\\u00e9", "x" * 64]
    assert all(name.isascii() and name.isprintable() and "," not in name for name in ignored)
    many = {f"odd{number}": 1 for number in range(MAX_UNKNOWN + 1)}
    with pytest.raises(InvalidRequest, match="unknown fields"):
        read(CompletionBody, prompt="x", **many)


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES, 4 * SMALL_BODY_BYTES], ids=["small", "large"])
def test_few_objects_are_looked_through_for_them(size: int) -> None:
    """A body of 128 KiB that is full of empty objects had taken a tenth of a second."""
    parts: list[dict[str, Any]] = [{}] * (size // 5)
    error = refusal(ChatBody, odd=1, messages=[{"role": "u", "odd": 1, "content": parts}])
    assert (error.param or "").startswith("messages")


def test_the_log_says_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.WARNING):
        log.note("/v1/completions", ["odd"])
        log.note("/v1/completions", ["odd"])
        log.note("/v1/completions", ["odd", "odder"])
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "/v1/completions: unknown fields are ignored: odd",
        "/v1/completions: unknown fields are ignored: odder",
    ]


def test_the_history_of_an_agent_reaches_the_template() -> None:
    calls = [
        {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": {"b": [2]}}, "odd": 1},
    ]
    body, ignored = read(
        ChatBody,
        messages=[
            {"role": "my-own-role", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
        ],
    )
    assert ignored == ["messages.tool_calls.odd"]
    assert conversation(body.messages) == [
        {"role": "my-own-role", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"},
                {"type": "function", "function": {"name": "g", "arguments": {"b": [2]}}},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"},
    ]


def test_calls_of_tools_have_a_bound() -> None:
    nested = msgspec.Raw(b"[" * 10 + b"]" * 10)
    arguments = {"a": [nested] * 20_000}
    call = {"function": {"name": "f", "arguments": msgspec.json.decode(msgspec.json.encode(arguments))}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    body = msgspec.json.decode(msgspec.json.encode({"messages": messages}), type=ChatBody)
    with pytest.raises(InvalidRequest, match="brackets"):
        conversation(body.messages)
