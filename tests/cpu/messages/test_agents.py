"""Agents that work in several turns of tools: whole loops by the clients' own libraries, with every field
that such agents send, in front of a scripted model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from runtime.wire.messages import GenerateRequest
from tests.harness.http.http_front import Front
from tests.harness.http.scripted_model import Script, scripted_front

RESULTS = ("two files", "Error: no such file", "print(1)", "1 passed")
LONG = "x = 1\n" * 400
"""Text that is written as an argument of a call."""
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
    "required": ["command"],
}
COMMANDS = ("ls", "cat missing", f"cat > a.py <<E\n{LONG}E", "pytest")


def call_of(command: str) -> str:
    arguments = json.dumps({"command": command, "timeout": 5})
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


STEPS = [
    f"<think>\nStep {number}.\n</think>\n\nNow {number}.\n{call_of(command)}"
    for number, command in enumerate(COMMANDS)
]
ANSWER = "<think>\nDone.\n</think>\n\nAll tests pass."


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[Front]:
    with scripted_front(tmp_path_factory.mktemp("run"), script) as front:
        yield front


@pytest.fixture(autouse=True)
def steps(script: Script, front: Front) -> Iterator[None]:
    script.say(*STEPS, ANSWER)
    yield
    script.texts = [""]


def shown(request: GenerateRequest) -> list[tuple[Any, ...]]:
    """Return the turns that the model is shown: role, text, and what else there is of each."""
    return [
        (
            turn.role,
            turn.content,
            turn.further and msgspec.msgpack.decode(turn.further),
        )
        for turn in request.messages or ()
    ]


def check_loop(script: Script, first: list[tuple[str, str]]) -> None:
    """Each request went on where the one before had ended, with all results in their places."""
    assert len(script.requests) == len(STEPS) + 1
    told = [shown(request) for request in script.requests]
    assert [turn[:2] for turn in told[0]] == first
    for before, after in pairwise(told):
        assert after[: len(before)] == before, "a prefix has changed, so it is not found in the cache"
        assert [turn[0] for turn in after[len(before) :]] == ["assistant", "tool"]
    results = [turn[1] for turn in told[-1] if turn[0] == "tool"]
    assert results == list(RESULTS)
    assert [turn[1].strip() for turn in told[-1] if turn[0] == "assistant"] == [f"Now {n}." for n in range(4)]
    for number, command in enumerate(COMMANDS):
        (called,) = told[-1][len(first) + 2 * number][2]["tool_calls"]
        given = called["function"]["arguments"]  # OpenAI's APIs have it as text
        assert (given if isinstance(given, dict) else json.loads(given)) == {
            "command": command,
            "timeout": 5,
        }
    assert len({request.tools for request in script.requests}) == 1


# -- Anthropic's Messages API --------------------------------------------------------------------------------

MARK = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
AGENT: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 1500,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": MARK},
        {"type": "text", "text": "Use the tools.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "shell",
            "description": "Run a command",
            "input_schema": {**PARAMETERS, "$schema": "http://json-schema.org/draft-07/schema#"},
            "input_examples": [{"command": "ls"}],
            "eager_input_streaming": True,
            "defer_loading": False,
            "allowed_callers": ["direct"],
            "cache_control": MARK,
        }
    ],
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,prompt-caching-scope-2026-01-05,effort-2025-11-24"
)


def test_an_agent_of_the_messages_api_does_its_work(front: Front, script: Script) -> None:
    """Every second turn is streamed, as the library's beta client asks: /v1/messages?beta=true."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix it."}]}]
    url = f"http://127.0.0.1:{front.port}"
    with anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0, timeout=30.0) as client:
        for number in range(len(STEPS) + 1):
            asked: Any = {
                **AGENT,
                "messages": messages,
                "extra_headers": {"anthropic-beta": BETAS},
                "extra_body": {"temperature": 1, "betas": BETAS.split(",")},
            }
            if number % 2:
                with client.beta.messages.stream(**asked) as stream:
                    message = stream.get_final_message()
            else:
                message = client.beta.messages.create(**asked)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            if message.stop_reason != "tool_use":
                break
            thinking, text, call = message.content
            assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert call.type == "tool_use"
            assert call.input == {"command": COMMANDS[number], "timeout": 5}
            messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
            result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[number]}
            if RESULTS[number].startswith("Error: "):
                result |= {"is_error": True, "content": [{"type": "text", "text": RESULTS[number][7:]}]}
            messages.append({"role": "user", "content": [{**result, "cache_control": MARK}]})
            counted = client.beta.messages.count_tokens(
                model="fake", messages=messages, tools=AGENT["tools"], system=AGENT["system"]
            )
            assert counted.input_tokens > 400 * (number >= 2)
    assert message.stop_reason == "end_turn"
    assert message.content[-1].to_dict() == {"type": "text", "text": "All tests pass."}
    check_loop(script, [("system", "You are an agent.\nUse the tools."), ("user", "Fix it.")])


def test_what_an_agent_only_hints_at_is_named_where_it_has_no_effect(front: Front, script: Script) -> None:
    response = front.post("/v1/messages?beta=true", **AGENT, messages=[{"role": "user", "content": "x"}])
    assert (response.status_code, response.headers["x-carousel-ignored"]) == (200, "output_config.effort")
    (tool,) = json.loads(script.requests[-1].tools)
    assert tool["function"]["input_examples"] == [{"command": "ls"}]
    assert set(tool["function"]) == {"name", "description", "parameters", "input_examples"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"defer_loading": True}, "tools[0].defer_loading: there is no search of tools here"),
        ({"allowed_callers": ["code_execution_20250825"]}, "tools[0].allowed_callers"),
        ({"type": "web_search_20250305"}, "tools[0].type"),
        ({"cache_control": {"type": "persistent"}}, "tools[0].cache_control.type"),
    ],
)
def test_what_a_tool_cannot_be_is_refused_by_name(front: Front, change: dict[str, Any], place: str) -> None:
    tools = [AGENT["tools"][0] | change]
    body = AGENT | {"tools": tools, "messages": [{"role": "user", "content": "x"}]}
    response = front.post("/v1/messages", **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(place)


def test_an_image_that_a_tool_returns_is_refused_at_its_place(front: Front) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shell", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
    ]
    response = front.post("/v1/messages", **AGENT, messages=messages)
    assert response.status_code == 400
    place = "messages[2].content[0].content[0].source is not supported by this server; this server takes text"
    assert place in response.json()["error"]["message"]


# -- OpenAI's Responses API ----------------------------------------------------------------------------------

CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are an agent.",
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Run a command",
            "strict": False,
            "parameters": {**PARAMETERS, "additionalProperties": False},
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "019a-session",
    "text": {"verbosity": "low"},
}


def test_an_agent_of_the_responses_api_does_its_work(front: Front, script: Script) -> None:
    """Whole items of each stream are sent back, as such agents keep them."""
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ]
    url = f"http://127.0.0.1:{front.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        for number in range(len(STEPS) + 1):
            more = {"client_metadata": {"installation": "i"}}
            events = client.responses.create(**CODEX, input=items, stream=True, extra_body=more)
            done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
            assert events.response.headers.get("x-carousel-ignored") == "reasoning.effort"
            items += done
            calls = [item for item in done if item["type"] == "function_call"]
            if not calls:
                break
            assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
            assert json.loads(calls[0]["arguments"]) == {"command": COMMANDS[number], "timeout": 5}
            output: Any = RESULTS[number] if number % 2 else [{"type": "input_text", "text": RESULTS[number]}]
            call_id = calls[0]["call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
    assert done[-1]["content"][0]["text"] == "All tests pass."
    check_loop(script, [("system", "You are an agent."), ("system", "Be safe."), ("user", "Fix it.")])


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
def test_a_summary_of_reasoning_is_the_reasoning_itself(front: Front, script: Script, summary: str) -> None:
    script.say(ANSWER)
    response = front.post("/v1/responses", input="x", reasoning={"summary": summary})
    assert response.status_code == 200, response.text
    reasoning, _ = response.json()["output"]
    assert (reasoning["summary"], reasoning["content"][0]["text"]) == ([], "Done.")
    assert response.json()["reasoning"]["summary"] == summary


# -- chat completions ----------------------------------------------------------------------------------------

FUNCTION = {"name": "shell", "description": "Run a command", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {
    "model": "fake",
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_completion_tokens": 1500,
    "reasoning_effort": "medium",
    "verbosity": "low",
    "safety_identifier": "somebody",
    "prompt_cache_key": "session",
    "prompt_cache_retention": "24h",
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": LONG},
}


def test_an_agent_of_chat_completions_does_its_work(front: Front, script: Script) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": "Fix it."},
    ]
    url = f"http://127.0.0.1:{front.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        for number in range(len(STEPS) + 1):
            if number % 2:
                with client.chat.completions.stream(**CHAT, messages=messages) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**CHAT, messages=messages).choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                break
            (call,) = message.tool_calls
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"command": COMMANDS[number], "timeout": 5}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[number]})
    assert message.content == "All tests pass."
    check_loop(script, [("system", "You are an agent."), ("user", "Fix it.")])


def test_hints_of_a_chat_are_named_where_they_have_no_effect(front: Front, script: Script) -> None:
    response = front.chat(**CHAT, wonderful=1)
    assert response.status_code == 200, response.text
    assert response.headers["x-carousel-ignored"] == "wonderful,prediction,reasoning_effort"
    assert script.requests[-1].prediction == ""


OTHER = {"type": "function", "function": {"name": "other"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_those_that_the_model_sees(front: Front, script: Script) -> None:
    tools = [OTHER, *CHAT["tools"]]
    for mode in ("auto", "required"):
        response = front.chat(tools=tools, tool_choice=allowed(mode, "shell"))
        assert response.status_code == 200, response.text
        request = script.requests[-1]
        assert json.loads(request.tools) == CHAT["tools"]
        assert (request.guide is not None) == (mode == "required")
    front.chat(tools=tools, tool_choice=allowed("auto", "shell", "other"))
    assert json.loads(script.requests[-1].tools) == tools


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": allowed("auto", "x")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("some", "shell")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", "shell"), "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tool_choice": {**allowed("auto", "shell"), "function": {"name": "shell"}}},
            "tool_choice.function",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "shell"}}}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, "tools[0].type"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(front: Front, body: dict[str, Any], param: str) -> None:
    response = front.chat(**{"tools": CHAT["tools"], **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("policy", ["refuse", "ignore"])
def test_hints_are_treated_as_unknown_fields_are(
    tmp_path_factory: pytest.TempPathFactory, script: Script, policy: str
) -> None:
    asks: list[Callable[[Front], httpx.Response]] = [
        lambda front: front.chat(reasoning_effort="low"),
        lambda front: front.chat(prediction={"type": "content", "content": "x"}),
        lambda front: front.post("/v1/responses", input="x", reasoning={"effort": "low"}),
        lambda front: front.post(
            "/v1/messages",
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            output_config={"effort": "low"},
        ),
    ]
    with scripted_front(tmp_path_factory.mktemp("run"), script, unknown_fields=policy) as front:
        for ask, name in zip(
            asks, ("reasoning_effort", "prediction", "reasoning.effort", "output_config.effort"), strict=True
        ):
            response = ask(front)
            assert response.status_code == (400 if policy == "refuse" else 200), response.text
            assert "x-carousel-ignored" not in response.headers
            if policy == "refuse":
                assert response.json()["error"]["message"].startswith(f"{name}: ")
