"""Tool calls and reasoning over HTTP, with a fake ring that says what the test's script has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness.http.http_front import Front, events, http_front
from tests.harness.http.scripted_model import CALL, NOW, Script, scripted_front

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "What is the weather?"}


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[Front]:
    with scripted_front(tmp_path_factory.mktemp("run"), script) as front:
        yield front


@pytest.fixture
def says(script: Script, front: Front) -> Iterator[Any]:
    """Set what the model says."""
    yield script.say
    script.texts = [""]


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{front.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


def whole(front: Front, **body: Any) -> Any:
    response = front.chat(**body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def streamed(front: Front, **body: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """The message of a stream, its finish_reason, and its chunks."""
    chunks = events(front.chat(stream=True, **body))[:-1]
    message: dict[str, Any] = {"content": "", "calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert reason is None, "something comes after the end"
            reason = choice["finish_reason"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                assert delta["reasoning"] == delta["reasoning_content"]
                message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                assert call["index"] == len(message["calls"]) - 1
                message["calls"][-1][1] += call["function"].get("arguments", "")
    assert reason is not None
    return message, reason, chunks


def test_an_answer_with_calls(front: Front, says: Any) -> None:
    says(f"Let me see.\n{CALL}\n{NOW}")
    choice = whole(front, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see.\n"
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert first["function"]["name"] == "weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Köln", "days": 2}
    assert second["function"] == {"name": "now", "arguments": "{}"}


def test_a_stream_with_calls_says_the_same(front: Front, says: Any) -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{NOW}"
    says(text)
    message = whole(front, tools=TOOLS)["message"]
    got, reason, chunks = streamed(front, tools=TOOLS)
    assert reason == "tool_calls"
    assert got["content"] == message["content"] == "Let me see.\n"
    assert got["reasoning"] == message["reasoning_content"] == message["reasoning"] == "Hm."
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    assert got["calls"] == calls
    num_argument_deltas = sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert num_argument_deltas >= 4  # each call begins, and has arguments; a step's pieces come as one
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_an_answer_without_calls_is_what_it_always_was(front: Front, says: Any) -> None:
    says("abc")
    choice = whole(front, tools=TOOLS)
    assert choice["message"] | {"reasoning": None} == {
        "role": "assistant",
        "content": "abc",
        "refusal": None,
        "reasoning_content": None,
        "reasoning": None,
    }
    assert choice["finish_reason"] == "stop"
    assert streamed(front, tools=TOOLS)[0]["content"] == "abc"


def test_only_calls_have_no_content(front: Front, says: Any) -> None:
    says(CALL)
    assert whole(front, tools=TOOLS)["message"]["content"] is None
    says("")
    assert whole(front, tools=TOOLS)["message"]["content"] == ""


def test_a_call_that_the_limit_cut_is_not_said_to_be_one(front: Front, says: Any) -> None:
    says(CALL[:20], reason="length")
    choice = whole(front, tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20]
    says(CALL[:70], reason="length")
    choice = whole(front, tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "K')
    says(CALL[:70])
    assert whole(front, tools=TOOLS)["finish_reason"] == "stop"


def test_each_choice_is_read_by_itself(front: Front, says: Any) -> None:
    says(CALL)
    choices = front.chat(tools=TOOLS, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_tools_reach_the_template_and_none_keeps_them_from_it(
    front: Front, says: Any, script: Script
) -> None:
    says(CALL)
    whole(front, tools=TOOLS)
    assert json.loads(script.requests[-1].tools) == TOOLS
    choice = whole(front, tools=TOOLS, tool_choice="none")
    assert script.requests[-1].tools == b""
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert whole(front)["message"]["content"] == CALL


def test_at_most_one_call_where_parallel_ones_are_not_wanted(front: Front, says: Any) -> None:
    says(f"{CALL}\n{NOW}")
    choice = whole(front, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert streamed(front, tools=TOOLS, parallel_tool_calls=False)[0]["calls"] == [
        ["weather", '{"city": "Köln", "days": 2}']
    ]


def test_usage_counts_tokens_of_reasoning(front: Front, says: Any) -> None:
    """The fake ring's tokens are characters, which are not those of the tokenizer: here they all are."""
    says("<think>\nHm.")
    usage = front.chat().json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.")}
    says("Hm.")
    assert front.chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    chunks = events(front.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_may_be_left_in_the_text_or_out_of_the_answer(front: Front, says: Any) -> None:
    says("<think>\nHm.\n</think>\n\nHi")
    assert whole(front)["message"]["reasoning_content"] == "Hm."
    message = whole(front, separate_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHi", "refusal": None}
    message = whole(front, include_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": "Hi", "refusal": None}
    assert "reasoning" not in streamed(front, include_reasoning=False)[0]


def test_logprobs_and_ids_come_with_what_they_are_of(front: Front, says: Any) -> None:
    says(f"<think>\na\n</think>{CALL}x")
    chunks = events(front.chat(stream=True, tools=TOOLS, return_token_ids=True))[:-1]
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"] or ()]
    assert ids == [ord(char) for char in f"<think>\na\n</think>{CALL}x"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"max_thinking_tokens": 3}, "max_thinking_tokens"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]}, "tools"),
    ],
)
def test_what_is_wrong_with_tools_is_named(front: Front, change: dict[str, Any], param: str) -> None:
    response = front.chat(**change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["message"].startswith(param.partition("[")[0]), error


@pytest.mark.parametrize("padding", [0, 200_000])
@pytest.mark.parametrize(
    "tools",
    [
        b'[{"type":"function","function":{"name":"f","parameters":{"a":1,,}}}]',
        b'[{"type":"function","function":{"name":"f","parameters":{"a":"\xff"}}}]',
        b'[{"type":"function","function":{"name":"f\xff"}}]',
        b'[{"type":"function","function":{"name":"f","x":' + b"[" * 3000 + b"]" * 3000 + b"}}]",
        b'[{"type":"function"]',
    ],
)
def test_tools_that_are_no_json_are_a_400(front: Front, says: Any, tools: bytes, padding: int) -> None:
    """In a small body, and in one that is cut into its fields before they are decoded."""
    says("x")
    content = json.dumps("x" * padding).encode()
    body = b'{"messages":[{"role":"user","content":%b}],"return_token_ids":true,"tools":%b}' % (
        content,
        tools,
    )
    response = front.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text


def test_tools_of_many_bytes_are_taken_up_to_their_bound(front: Front, says: Any, script: Script) -> None:
    says(CALL)
    many = [
        {"type": "function", "function": {"name": f"f{number}", "description": "x" * 2000}}
        for number in range(400)
    ]
    assert whole(front, tools=[*TOOLS, *many])["finish_reason"] == "tool_calls"
    assert len(script.requests[-1].tools) > 800_000
    response = front.chat(
        tools=[*many, {"type": "function", "function": {"name": "g", "description": "x" * 300000}}]
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


# -- other people's clients ---------------------------------------------------------------------------------


def test_the_official_client_in_a_loop_of_three_turns(
    client: openai.OpenAI, says: Any, script: Script
) -> None:
    says(f"<think>\nHm.\n</think>\n\n{CALL}\n{NOW}", CALL, "It rains.")
    messages: list[Any] = [{"role": "developer", "content": "Be short."}, USER]
    names = []
    for _ in range(3):
        answer = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert call.type == "function"
            names.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    assert names == ["weather", "now", "weather"]
    assert message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    said = script.requests[-1].messages
    assert said is not None
    assert [each.role for each in said] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]


def test_the_official_client_streams_calls(client: openai.OpenAI, says: Any) -> None:
    says(f"<think>Hm.</think>\n{CALL}\n{NOW}")
    with client.chat.completions.stream(model="fake", messages=[USER], tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Köln", "days": 2}),
        ("now", {}),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


def test_langchain_calls_tools(front: Front, says: Any) -> None:
    import langchain_openai as langchain

    says(f"{CALL}\n{NOW}", CALL, "It rains.")
    model = langchain.ChatOpenAI(
        base_url=f"http://127.0.0.1:{front.port}/v1", api_key="none", model="fake", max_retries=0
    ).bind_tools(TOOLS)
    history: list[Any] = [("user", "What is the weather?")]
    names = []
    for turn in range(3):
        if turn == 1:
            parts = list(model.stream(history))
            answer = parts[0]
            for part in parts[1:]:
                answer += part
        else:
            answer = model.invoke(history)
        history.append(answer)
        for call in answer.tool_calls:
            names.append((call["name"], call["args"]))
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
    assert names == [
        ("weather", {"city": "Köln", "days": 2}),
        ("now", {}),
        ("weather", {"city": "Köln", "days": 2}),
    ]
    assert answer.content == "It rains."


@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning")  # of its own types
def test_litellm_calls_tools(front: Front, says: Any, litellm: Any) -> None:
    says(f"<think>\nHm.\n</think>\n\n{CALL}")
    asked = {
        "model": "openai/fake",
        "api_base": f"http://127.0.0.1:{front.port}/v1",
        "api_key": "none",
        "messages": [USER],
        # As a parameter of its own it makes this library import another one.
        "extra_body": {"tools": TOOLS},
        "max_retries": 0,
    }
    message = litellm.completion(**asked).choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    assert message.reasoning_content == "Hm."
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    call = rebuilt.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Köln", "days": 2}
    assert rebuilt.choices[0].finish_reason == "tool_calls"


# -- a server whose template has no format ----------------------------------------------------------------


def test_tools_are_refused_by_name_where_calls_are_not_read(tmp_path: Path) -> None:
    with http_front(tmp_path, Script(["x"]), tool_call_parser="none", reasoning_parser="none") as front:
        error = front.chat(tools=TOOLS).json()["error"]
        assert error["param"] == "tools"
        assert error["code"] == "unsupported_parameter"
        unused = {"tools": TOOLS, "tool_choice": "none"}
        bodies: list[dict[str, Any]] = [{"tools": []}, {"tools": None}, unused, {"tool_choice": "auto"}]
        for body in bodies:
            assert front.chat(**body).json()["choices"][0]["message"] == {
                "role": "assistant",
                "content": "x",
                "refusal": None,
            }
