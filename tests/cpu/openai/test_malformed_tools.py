"""Malformed tools and histories: a 400 that names the place; and tools of a megabyte, in little time."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from carousel.server.chat.call_tags import call_tags
from carousel.server.chat.definitions import read_tools
from carousel.server.chat.output_guide import HeldCalls, output_guide
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import finish, output

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        "strict": False,
    },
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": [{"type": "text", "text": "y"}]},
]
NO_TEXT = [1, 1.5, True, {}, []]
NO_OBJECT = [1, True, "x", []]
NO_LIST = [1, True, "x", {}]
ABSENT = object()
WRONG: dict[str, list[Any]] = {
    "tools": NO_LIST,
    "tools[0]": [*NO_OBJECT, None],
    "tools[0].type": [*NO_TEXT, "", "custom", "Function", None, ABSENT],
    "tools[0].function": [*NO_OBJECT, None, ABSENT],
    "tools[0].function.name": [*NO_TEXT, "", "a b", "ä", "x" * 257, "a\n", None, ABSENT],
    "tools[0].function.description": NO_TEXT,
    "tools[0].function.parameters": [1, True, "x", []],
    "tools[0].function.parameters.type": [*NO_TEXT, "", "string", ["object"]],
    "tools[0].function.parameters.properties": [1, True, "x", []],
    "tools[0].function.strict": [1, "true", {}, []],
    "tool_choice": [1, True, "", "any", "f", []],
    "tool_choice.type": [*NO_TEXT, "tool", ABSENT],
    "tool_choice.function": [*NO_OBJECT, ABSENT],
    "tool_choice.function.name": [*NO_TEXT, "g", ABSENT],
    "parallel_tool_calls": [1, "no", {}, []],
    "messages[0].role": [*NO_TEXT, "", None, ABSENT],
    "messages[0].content": [1, True, {}, None, ABSENT],
    "messages[0].content[0]": [*NO_OBJECT, None],
    "messages[0].content[0].type": [*NO_TEXT, "", "image_url", "tool_result", None, ABSENT],
    "messages[0].content[0].text": [*NO_TEXT, None, ABSENT],
    "messages[1].tool_calls": NO_LIST,
    "messages[1].tool_calls[0]": [*NO_OBJECT, None],
    "messages[1].tool_calls[0].id": NO_TEXT,
    "messages[1].tool_calls[0].type": [*NO_TEXT, "", "custom"],
    "messages[1].tool_calls[0].index": [True, "0", {}, []],
    "messages[1].tool_calls[0].function": [*NO_OBJECT, None, ABSENT],
    "messages[1].tool_calls[0].function.name": [*NO_TEXT, None, ABSENT],
    "messages[1].tool_calls[0].function.arguments": [1, True, []],
    "messages[1].reasoning_content": NO_TEXT,
    "messages[2].tool_call_id": NO_TEXT,
    "messages[2].name": NO_TEXT,
    "messages[2].content": [1, True, {}, None, ABSENT],
    "messages[2].content[0].type": [*NO_TEXT, "image_url", "audio", None, ABSENT],
    "messages[2].content[0].text": [*NO_TEXT, None, ABSENT],
}
CASES = [(place, value) for place, values in WRONG.items() for value in values]


def body_with(place: str, value: Any) -> dict[str, Any]:
    """A body that is right but for one place."""
    body: dict[str, Any] = {"messages": copy.deepcopy(HISTORY), "tools": [copy.deepcopy(TOOL)]}
    if place.startswith("tool_choice."):
        body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    *path, last = place.replace("[", ".").replace("]", "").split(".")
    inside: Any = body
    for step in path:
        inside = inside[int(step) if step.isdecimal() else step]
    key = int(last) if last.isdecimal() else last
    if value is ABSENT:
        del inside[key]
    else:
        inside[key] = value
    return body


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(
        tmp_path_factory.mktemp("run"),
        lambda request: [output(request, "x", finish=finish("stop", 1))],
        tool_call_parser="hermes",
        context_length=2048,
    ) as front:
        yield front


def test_there_are_enough_of_them_and_what_they_change_was_right(front: Front) -> None:
    assert len(CASES) >= 200
    response = front.post("/v1/chat/completions", **body_with("parallel_tool_calls", None))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("custom", "free text is for /v1/responses; define a function with one string"),
        ("web_search", "this server runs no tools; define a function, and run it yourself"),
    ],
)
def test_the_refusal_of_another_kind_of_tool_says_what_to_use(front: Front, kind: str, said: str) -> None:
    tool = {"type": kind, kind: {"name": "f"}}
    response = front.post("/v1/chat/completions", messages=HISTORY, tools=[TOOL, tool])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].type")
    assert error["message"] == f"tools[1].type: {kind} is not supported: {said}"


@pytest.mark.parametrize(("place", "value"), CASES)
def test_what_is_malformed_is_named(front: Front, place: str, value: Any) -> None:
    response = front.post("/v1/chat/completions", **body_with(place, value))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == place
    assert place in error["message"]


def properties(count: int, kind: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": kind for number in range(count)}}


def definition(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


MEGABYTES = {
    "descriptions": [definition(f"f{n}", description="x" * 900) for n in range(1024)],
    "escapes": [definition("f", description='\\"\n' * 130_000)],
    "tools of many properties": [
        definition(f"f{n}", parameters=properties(40, {"type": "string"})) for n in range(700)
    ],
    "one tool of many properties": [definition("f", parameters=properties(31_000, {"type": "string"}))],
    "alternatives": [
        definition("f", parameters=properties(1, {"anyOf": [{"type": ["integer", "null"]}] * 16_000}))
    ],
    "levels": [
        definition("f", parameters=properties(1, {"anyOf": [{"anyOf": [{"anyOf": [{}] * 100}] * 20}] * 10}))
    ],
    "numbers": [definition("f", parameters={**properties(1, {}), "x": [1.5] * 60_000})],
}


@pytest.mark.parametrize("name", MEGABYTES)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_tools_of_a_megabyte_hold_the_event_loop_for_less_than_20_ms(name: str, parser: str) -> None:
    """All that is done of them at one time, before an answer and at its first call."""
    data = json.dumps(MEGABYTES[name], separators=(",", ":")).encode()
    assert len(data) <= 1 << 20
    first = MEGABYTES[name][0]["function"]["name"]
    times_s = []
    for _ in range(5):
        began_s = time.thread_time()
        tools = read_tools(data)
        family = call_tags(parser, ())
        if len(data) < 200_000:
            output_guide(None, HeldCalls(parser, tools, "required", False, family), None, "none")
        before_s = time.thread_time() - began_s
        began_s = time.thread_time()
        tools.types_of(first, "p0")
        times_s.append(max(before_s, time.thread_time() - began_s))
    assert min(times_s) < 0.02
