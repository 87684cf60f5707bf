"""/v1/responses by openai's own client, with a fake ring that says what the test's script has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from carousel.client.core.result import Delta
from carousel.server.openai.chat_format import ChatView
from carousel.server.responses.answer_format import ResponsesFormat
from carousel.server.responses.types import ResponseBody
from runtime.base.errors import RequestError
from tests.harness.http.http_front import Front
from tests.harness.http.scripted_model import CALL, NOW, Script, scripted_front

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THOUGHT = "<think>\nIt is <cold>.\n</think>\n\n"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ANSWERS = ["Hello <b>", THOUGHT + "Well, " + CALL, CALL + NOW, THOUGHT, "", CALL + " and <tool_call> more"]


@pytest.fixture(scope="module")
def script() -> Script:
    return Script([""])


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[Front]:
    with scripted_front(tmp_path_factory.mktemp("run"), script) as front:
        yield front


@pytest.fixture(autouse=True)
def from_the_beginning(script: Script) -> None:
    script.texts, script.reason = ["x"], "stop"


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{front.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


def ask(front: Front, **body: Any) -> httpx.Response:
    return front.post("/v1/responses", **{"input": "x", **body})


def whole(front: Front, **body: Any) -> dict[str, Any]:
    """The answer, which openai's own types accept as it is."""
    response = ask(front, **body)
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    return dict(response.json())


def streamed(front: Front, **body: Any) -> list[dict[str, Any]]:
    """The events, which openai's own types accept as they are."""
    response = ask(front, stream=True, **body)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for number, block in enumerate(text.split("\n\n")[:-1]):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert EVENTS.validate_json(data.removeprefix("data: "), strict=True).type == event["type"]
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is drawn for each, and the count of reasoning: the ring's ids mean nothing."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    usage = {name: value for name, value in response["usage"].items() if name != "output_tokens_details"}
    drawn = ("id", "created_at", "completed_at")
    kept = {name: value for name, value in response.items() if name not in drawn}
    return kept | {"output": items, "usage": usage}


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", ANSWERS)
def test_a_stream_ends_with_what_a_whole_answer_has(
    front: Front, script: Script, text: str, reason: str
) -> None:
    script.texts, script.reason = [text], reason
    answer = whole(front, tools=TOOLS)
    events = streamed(front, tools=TOOLS)
    final = events[-1]["response"]
    assert without_ids(final) == without_ids(answer)
    assert events[-1]["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    assert answer["status"] == ("completed" if reason == "stop" else "incomplete")
    assert (answer["incomplete_details"] is None) == (reason == "stop")
    assert len({item["id"] for item in final["output"]}) == len(final["output"])


@pytest.mark.parametrize("text", ANSWERS)
def test_the_events_of_each_item_add_up_to_it(front: Front, script: Script, text: str) -> None:
    script.texts, script.reason = [text], "stop"
    first, second, *events, last = streamed(front, tools=TOOLS)
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"]["status"] == "in_progress"
    assert first["response"]["output"] == []
    items = last["response"]["output"]
    for number, group in groupby(events, lambda event: event["output_index"]):
        told, item = list(group), items[number]
        kind = {"message": "output_text", "reasoning": "reasoning_text"}.get(
            item["type"], "function_call_arguments"
        )
        parts = item["type"] != "function_call"
        names = [event["type"].removeprefix("response.") for event in told]
        added = ["output_item.added", *["content_part.added"] * parts]
        done = [f"{kind}.done", *["content_part.done"] * parts, "output_item.done"]
        deltas = [event["delta"] for event in told if "delta" in event]
        assert names == [*added, *[f"{kind}.delta"] * len(deltas), *done]
        end = told[-len(done)]
        assert "".join(deltas) == (end["text"] if parts else end["arguments"])
        assert told[-1]["item"] == item
        assert (
            {event["item_id"] for event in told if "item_id" in event}
            == {told[0]["item"]["id"]}
            == {item["id"]}
        )
        if parts:
            assert [part["text"] for part in item["content"]] == [end["text"]]
        else:
            assert (end["name"], end["arguments"]) == (item["name"], item["arguments"])
    assert [number for number, _ in groupby(events, lambda event: event["output_index"])] == list(
        range(len(items))
    )


def test_the_order_of_items_is_that_of_the_text(front: Front, script: Script) -> None:
    script.texts = [THOUGHT + "Well, " + CALL + NOW]
    reasoning, message, *calls = whole(front, tools=TOOLS)["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It is <cold>."}]
    assert message["content"][0]["text"] == "Well, "
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": "Köln", "days": 2}),
        ("now", {}),
    ]
    assert all(call["call_id"].startswith("call_") for call in calls)


def test_what_is_cut_off_is_incomplete(front: Front, script: Script) -> None:
    script.reason = "length"
    for text, statuses in (
        (THOUGHT + "Well", ["completed", "incomplete"]),
        ("<think>\nIt is", ["incomplete"]),
        (CALL, ["completed"]),
        (CALL[:-30], ["incomplete"]),
        ("", ["incomplete"]),
    ):
        script.texts = [text]
        assert [item["status"] for item in whole(front, tools=TOOLS)["output"]] == statuses, text


def test_an_answer_shows_the_settings_of_its_request(front: Front, script: Script) -> None:
    script.texts = ["x"]
    shown = {
        "instructions": "Be brief.",
        "max_output_tokens": 40,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.25,
        "top_p": 0.5,
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
            "verbosity": "low",
        },
        "tool_choice": {"type": "function", "name": "now"},
        "tools": TOOLS,
        "truncation": "auto",
        "user": "u",
    }
    answer = whole(front, **shown)
    assert {name: answer[name] for name in shown} == shown
    (request,) = script.requests[-1:]
    assert request.sampling.max_tokens == 40
    assert request.sampling.truncate_prompt_tokens == -1
    assert request.sampling.temperature == 0.25


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_what_a_request_has_on_several_lines_is_on_one_in_an_event(front: Front, line_break: str) -> None:
    """The line breaks of tools and of a schema ended the lines of the events that show them."""
    schema = {"type": "json_schema", "name": "n", "schema": PARAMETERS}
    body = {"input": "x", "stream": True, "tools": TOOLS, "text": {"format": schema}}
    data = json.dumps(body, indent=2).replace("\n", line_break)
    headers = {"Content-Type": "application/json"}
    response = front.http.post("/v1/responses", content=data, headers=headers)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert events[-1]["type"] == "response.completed"
    for shown in (events[0]["response"], events[-1]["response"]):
        assert (shown["tools"], shown["text"]["format"]) == (TOOLS, schema)


def test_a_failure_in_a_stream_is_told_with_what_there_is(front: Front) -> None:
    head = msgspec.structs.replace(msgspec.json.decode(ask(front).content, type=ResponseBody), output=[])
    answer = ResponsesFormat(ChatView("m"), head, {}, skips_special=True)
    told = b"".join(answer.events(0, Delta("Well", [1], [])))
    told += b"".join(answer.failure_events(RequestError("It is gone.", code="aborted", status=503)))
    events = [json.loads(block.partition("data: ")[2]) for block in told.decode().split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *_, delta, error, failed = events
    assert delta["delta"] == "Well"
    assert (error["type"], error["code"], error["message"]) == ("error", "aborted", "It is gone.")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "It is gone."}
    (item,) = failed["response"]["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == "Well"
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]


# -- the client of openai ------------------------------------------------------------------------------------


class Place(BaseModel):
    city: str
    days: int


def test_the_client_creates_and_streams(client: openai.OpenAI, script: Script) -> None:
    script.texts = [THOUGHT + "Well."]
    assert client.responses.create(model="fake", input="x").output_text == "Well."
    with client.responses.stream(model="fake", input="x") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "Well."


def test_the_client_parses_what_a_schema_holds(client: openai.OpenAI, script: Script) -> None:
    script.texts = ['{"city": "Ulm", "days": 2}']
    answer = client.responses.parse(model="fake", input="x", text_format=Place)
    assert answer.output_parsed == Place(city="Ulm", days=2)
    guide = script.requests[-1].guide
    assert guide is not None
    with client.responses.stream(model="fake", input="x", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(city="Ulm", days=2)


def test_a_round_of_tools_sends_the_model_what_a_chat_does(
    front: Front, client: openai.OpenAI, script: Script
) -> None:
    script.texts = [THOUGHT + "Well, " + CALL + NOW, "Warm."]
    items: list[Any] = [{"role": "user", "content": "How is it?"}]
    first = client.responses.create(model="fake", instructions="Be brief.", input=items, tools=TOOLS)
    items += first.output
    calls = [item for item in first.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls
    ]
    second = client.responses.create(model="fake", instructions="Be brief.", input=items, tools=TOOLS)
    assert second.output_text == "Warm."
    arguments = [call.arguments for call in calls]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": "Well, ",
            "reasoning_content": "It is <cold>.",
            "tool_calls": [
                {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": given}}
                for call, given in zip(calls, arguments, strict=True)
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": call.name} for call in calls),
    ]
    nested = [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in TOOLS
    ]
    front.chat(messages=messages, tools=nested)
    *_, of_responses, of_chat = script.requests
    assert (of_responses.messages, of_responses.tools) == (of_chat.messages, of_chat.tools)


def test_allowed_tools_are_those_that_the_model_is_shown(front: Front, script: Script) -> None:
    script.texts = [NOW]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    assert whole(front, tools=TOOLS, tool_choice=choice)["tools"] == TOOLS
    assert [tool["function"]["name"] for tool in json.loads(script.requests[-1].tools)] == ["now"]


def test_the_client_is_told_of_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no responses") as caught:
        client.responses.create(model="fake", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    responses = client.responses
    calls: list[Callable[[str], Any]] = [responses.retrieve, responses.cancel, responses.delete]
    for call in (*calls, responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            call("resp_1")


# -- refusals ------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
FUNCTION = TOOLS[0]


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"store": True}, "store", "keeps no responses"),
        ({"background": True}, "background", "stream"),
        ({"conversation": "conv_1"}, "conversation", "items again"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "truncation"),
        ({"moderation": {"model": "m"}}, "moderation", "not supported"),
        ({"max_tokens": 4}, "max_tokens", "max_output_tokens"),
        ({"messages": [USER]}, "messages", "input"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning.effort"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort", "medium"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "auto"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "standard"),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
        ({"truncation": "middle"}, "truncation", "disabled"),
        ({"n": 2}, "n", "chat/completions"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
        ({"separate_reasoning": False}, "separate_reasoning", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [FUNCTION, {"type": "mcp", "server_label": "s"}]}, "tools[1].type", "mcp"),
        ({"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading", "leave it out"),
        ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name", "regex"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "twice"),
        ({"tools": {}}, "tools", "array"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no tools"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
            "f is not",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "needed"),
        ({"input": []}, "input", "empty"),
        ({"input": 7}, "input", "str"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]", "send the item"),
        ({"input": [USER, {"type": "web_search_call", "id": "i"}]}, "input[1].type", "web_search_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "tool"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{**USER, "output": "x"}]}, "input[0].output", "message"),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "c"}]},
            "input[0].arguments",
            "missing",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type",
            "text only",
        ),
        (
            {"input": [{"role": "user", "content": [{"file_id": "f", "type": "input_file"}]}]},
            "input[0].content[0].file_id",
            "text only",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "e"}]},
            "input[0].encrypted_content",
            "cannot read",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    front: Front, body: dict[str, Any], param: str, part: str
) -> None:
    response = ask(front, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert part in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"store": False, "background": False, "service_tier": "auto", "prompt_cache_retention": "24h"},
        {"include": ["reasoning.encrypted_content", "file_search_call.results"], "tools": [], "text": {}},
        {"reasoning": {"effort": "none", "summary": "auto", "context": "auto"}, "tool_choice": "none"},
        {"stream_options": {"include_obfuscation": False}, "prompt_cache_options": {"mode": "implicit"}},
        {"previous_response_id": None, "conversation": None, "metadata": None, "text": None, "user": None},
        {
            "input": [
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "i",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
                },
                USER,
            ]
        },
    ],
)
def test_what_asks_for_nothing_is_taken(front: Front, script: Script, body: dict[str, Any]) -> None:
    script.texts = ["x"]
    response = ask(front, **body)
    assert response.status_code == 200, response.text
    assert "x-carousel-ignored" not in response.headers
