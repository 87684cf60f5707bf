"""Tools of /v1/responses that a chat does not have: those in a namespace, and those of free text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from carousel.server.responses.tool_names import text_of
from runtime.wire.messages import GenerateRequest
from tests.harness.http.http_front import Front
from tests.harness.http.scripted_model import Script, scripted_front

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
SEARCH = {"type": "function", "name": "search", "description": "Look.", "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
DOCS = {"type": "namespace", "name": "mcp__docs__", "description": "All docs.", "tools": [SEARCH, PATCH]}
CRM = {"type": "namespace", "name": "crm", "description": "", "tools": [SEARCH]}
PLAIN = {"type": "namespace", "name": "functions", "description": "", "tools": [{**SEARCH, "name": "find"}]}
TOOLS: list[Any] = [DOCS, CRM, PLAIN, PATCH]
LARK = "tools[0].format.syntax: lark is not supported"
TEXT = '*** "Begin"\n+ä\\n'


@pytest.fixture(scope="module")
def script() -> Script:
    return Script([""])


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[Front]:
    with scripted_front(tmp_path_factory.mktemp("run"), script) as front:
        yield front


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(script: Script) -> GenerateRequest:
    return script.requests[-1]


def guide(script: Script) -> str:
    asks = asked(script).guide
    return "" if asks is None else asks.text


def shown(script: Script) -> dict[str, Any]:
    """The functions that the template shows, by name."""
    return {each["function"]["name"]: each["function"] for each in json.loads(asked(script).tools)}


def output(front: Front, script: Script, *calls: str, **body: Any) -> list[dict[str, Any]]:
    script.say("".join(calls))
    response = front.post("/v1/responses", **{"input": "x", "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    return list(response.json()["output"])


def refusal(front: Front, **body: Any) -> str:
    response = front.post("/v1/responses", **{"input": "x", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(error["param"])
    return str(error["message"])


def test_a_tool_of_a_namespace_is_a_function_with_both_names(front: Front, script: Script) -> None:
    output(front, script, "x")
    functions = shown(script)
    assert list(functions) == ["mcp__docs__search", "mcp__docs__patch", "crm__search", "find", "patch"]
    assert functions["mcp__docs__search"]["description"] == "mcp__docs__: All docs.\nLook."
    assert functions["mcp__docs__patch"]["description"] == "Change files.", "a namespace is told of once"
    assert functions["crm__search"] == {
        "name": "crm__search",
        "description": "Look.",
        "parameters": PARAMETERS,
    }
    assert functions["patch"]["parameters"]["properties"] == {"input": {"type": "string"}}


def test_calls_have_the_names_that_the_request_has(front: Front, script: Script) -> None:
    names = ["mcp__docs__search", "crm__search", "find"]
    items = output(front, script, *(call(name, {"q": "a"}) for name in names))
    assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == [
        ("function_call", "mcp__docs__", "search"),
        ("function_call", "crm", "search"),
        ("function_call", None, "find"),
    ]
    assert [json.loads(item["arguments"]) for item in items] == [{"q": "a"}] * 3
    assert "namespace" not in items[2]


@pytest.mark.parametrize(("name", "namespace"), [("patch", None), ("mcp__docs__patch", "mcp__docs__")])
def test_a_call_of_free_text_has_the_text(
    front: Front, script: Script, name: str, namespace: str | None
) -> None:
    (item,) = output(front, script, call(name, {"input": TEXT}))
    assert (item["type"], item["name"], item.get("namespace")) == ("custom_tool_call", "patch", namespace)
    assert (item["input"], item["status"]) == (TEXT, "completed")
    assert "arguments" not in item


def test_a_stream_of_free_text_has_its_own_events(front: Front, script: Script) -> None:
    script.say(call("patch", {"input": TEXT}) + call("crm__search", {"q": "a"}))
    response = front.post("/v1/responses", input="x", tools=TOOLS, stream=True)
    events = [json.loads(block.partition("data: ")[2]) for block in response.text.split("\n\n")[:-1]]
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    of_call = [event for event in events if event.get("output_index") == 0]
    assert [event["type"] for event in of_call] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    begun, delta, done, ended = of_call
    assert begun["item"]["input"] == ""
    assert (delta["delta"], done["input"], ended["item"]["input"]) == (TEXT, TEXT, TEXT)
    assert delta["item_id"] == done["item_id"] == begun["item"]["id"]
    other = [event for event in events if event.get("output_index") == 1]
    assert other[0]["item"]["namespace"] == other[-1]["item"]["namespace"] == "crm"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_conversation_with_such_calls_goes_on(front: Front, script: Script) -> None:
    first = output(front, script, call("mcp__docs__search", {"q": "a"}), call("patch", {"input": TEXT}))
    results = [
        {"type": "function_call_output", "call_id": first[0]["call_id"], "output": "1"},
        {"type": "custom_tool_call_output", "call_id": first[1]["call_id"], "output": "2"},
    ]
    output(front, script, "done", input=[{"role": "user", "content": "x"}, *first, *results])
    _, turn, *told = asked(script).messages or ()
    assert turn.role == "assistant"
    calls = msgspec.msgpack.decode(turn.further)["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["mcp__docs__search", "patch"]
    assert [json.loads(each["function"]["arguments"]) for each in calls] == [{"q": "a"}, {"input": TEXT}]
    assert [(each.role, each.content) for each in told] == [("tool", "1"), ("tool", "2")]


def test_one_tool_is_chosen_by_its_names(front: Front, script: Script) -> None:
    for choice, name in (
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "search", "namespace": "crm"}, "crm__search"),
    ):
        output(front, script, call(name, {"q": "a"}), tool_choice=choice)
        assert name in guide(script)
    allowed = [
        {"type": "custom", "name": "patch"},
        {"type": "function", "name": "search", "namespace": "crm"},
    ]
    output(front, script, "x", tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert list(shown(script)) == ["crm__search", "patch"]


def test_a_regex_is_kept_by_the_guide(front: Front, script: Script) -> None:
    given = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|\\d"}
    output(front, script, "x", tools=[{**PATCH, "format": given}])
    assert json.dumps("^(?:[a-z]+|\\d)$") in guide(script)
    output(front, script, "x", tools=[{**PATCH, "format": {"type": "text"}}])
    assert not guide(script)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "s"}}], LARK),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "regex"}}], "tools[0].format.definition is"),
        ([{**PATCH, "format": {"type": "grammar", "definition": "a"}}], "tools[0].format.syntax is missing"),
        ([{**PATCH, "format": {"type": "xml"}}], "tools[0].format.type"),
        ([{**DOCS, "tools": [DOCS]}], "tools[0].tools[0].type: namespace"),
        ([{**DOCS, "tools": [SEARCH, {"type": "mcp"}]}], "tools[0].tools[1].type: mcp"),
        ([{**DOCS, "tools": {}}], "tools"),
        ([{"type": "namespace", "name": "a"}], "tools[0].tools is missing"),
        ([CRM, {**SEARCH, "name": "crm__search"}], "tools[1].name: crm__search is there twice"),
        ([{**CRM, "tools": [{**SEARCH, "name": "a b"}]}], "tools[0].tools[0].name: Expected"),
        ([{**CRM, "tools": [{**SEARCH, "name": ""}]}], "tools[0].tools[0].name: Expected"),
        ([{**CRM, "name": "a b"}], "tools[0].name: Expected"),
        ([{**CRM, "name": ""}], "tools[0].name: Expected"),
        ([{**CRM, "name": "a" * 257}], "tools[0].name: Expected"),
        ([SEARCH, {**CRM, "name": "a" * 249}], "tools[1].tools[0].name: search has 257 characters with"),
        ([{**CRM, "tools": [{**SEARCH, "defer_loading": True}]}], "tools[0].tools[0].defer_loading"),
    ],
)
def test_what_cannot_be_right_is_refused_at_its_place(front: Front, tools: list[Any], said: str) -> None:
    assert refusal(front, tools=tools).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": "a", "b": "c"}', '{"input": "a", "b": "c"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a', '{"input": "a'),
        ("[]", "[]"),
    ],
)
def test_what_is_no_text_alone_stays_as_the_model_wrote_it(arguments: str, text: str) -> None:
    assert text_of(arguments) == text


def test_openais_client_takes_such_calls(front: Front, script: Script) -> None:
    script.say(call("patch", {"input": TEXT}))
    url = f"http://127.0.0.1:{front.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        (item,) = client.responses.create(model="fake", input="x", tools=TOOLS).output
        with client.responses.stream(model="fake", input="x", tools=TOOLS) as stream:
            (again,) = stream.get_final_response().output
    assert item.type == again.type == "custom_tool_call"
    assert item.input == again.input == TEXT
