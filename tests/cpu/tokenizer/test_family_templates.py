"""The published chat templates of families that call tools (tests/data/chat_templates): which family each is
known as, and prompts of conversations with tools beside those of transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carousel.conversation import MessageBody, conversation
from runtime.base.errors import InvalidRequest
from runtime.checkpoint.chat_formats import NONE, REASONING, TOOL_CALLS, found_in
from runtime.launcher.checks.chat_formats import TOOLS_VARIABLE
from runtime.text.tokenizer import Tokenizer
from tests.harness.models import special_tokenizers as made

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
FAMILIES = {
    "deepseek-r1-distill-qwen-32b": (NONE, "deepseek_r1"),
    "deepseek-v3-with-tools": ("deepseek_v3", NONE),
    "deepseek-v3.1": (NONE, "deepseek_r1"),
    "deepseek-v3.1-with-tools": ("deepseek_v31", "deepseek_r1"),
    "devstral-small-2507": ("mistral", NONE),
    "glm-4.6": ("glm45", "glm45"),
    "glm-4.7-flash": ("glm45", "glm45"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss"),
    "ministral-3-14b-reasoning-2512": ("mistral", "mistral"),
    "mistral-nemo-instruct-2407": ("mistral", NONE),
    "mistral-small-3.2-24b-instruct-2506": ("mistral", NONE),
    "qwen2.5-7b-instruct": ("hermes", NONE),
    "qwen3-0.6b": ("hermes", "qwen3"),
    "qwen3-coder": ("qwen3_coder", NONE),
    "qwen3.5-4b": ("qwen3_coder", "qwen3"),
    "qwq-32b": ("hermes", "qwen3"),
}
"""Formats of calls and of reasoning. A template that shows no tools has none of calls."""
MAY_REFUSE = {"gpt-oss-120b"}
"""A call with both content and reasoning before it, which the template says itself."""
WORDS = [
    *("Ulm", 'the "weather"', "a\\b", "ü\U0001f600", '{"x": 1}', "<b>", "line\nbreak", "3", "null", "it's"),
    *("&amp;", "  ", "tab\t", "<tool_call>", "[TOOL_CALLS]", "</think>"),
]
KINDS = ["string", "integer", "number", "boolean", "array", "object"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_launch_knows_the_family_by_its_template(name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    calls = found_in(TOOL_CALLS, template) if TOOLS_VARIABLE.search(template) else NONE
    assert (calls, found_in(REASONING, template)) == FAMILIES[name]


def test_each_template_is_named() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    readme = (TEMPLATES / "README.md").read_text()
    assert all(f"| {name}.jinja |" in readme for name in FAMILIES)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_transformers_byte_for_byte(name: str, count: int) -> None:
    """A conversation as OpenAI's clients send it becomes the prompt that transformers makes of it."""
    tokenizer = made.byte_level()
    wrapper = tokenizer._chat_template._wrapper
    wrapper.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    wrapper.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    draw = random.Random(name)
    num_refused = num_calls = 0
    for _ in range(count):
        messages, tools = drawn_conversation(draw)
        tools = tools if FAMILIES[name][0] != NONE else []
        ours = prompt_of(tokenizer, messages, tools)
        if ours is None:
            assert name in MAY_REFUSE
            with pytest.raises(Exception, match="content and thinking"):
                wrapper.apply_chat_template(messages, tools=tools or None, tokenize=False)
            num_refused += 1
            continue
        theirs = wrapper.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert ours.encode() == theirs.encode()
        num_calls += sum(call["function"]["name"] in ours for call in calls_in(messages))
    assert num_refused <= count // 2
    assert num_calls > count


def prompt_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Any]) -> str | None:
    """The prompt by the way of a request: arguments are JSON there. None: the messages are refused."""
    sent = [dict(message) for message in messages]
    for message in sent:
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
    bodies = msgspec.json.decode(json.dumps(sent), type=list[MessageBody])
    try:
        return tokenizer.apply_chat_template(conversation(bodies), tools=tools)
    except InvalidRequest as error:
        if error.param != "messages":
            raise
        return None


def calls_in(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def drawn_conversation(draw: random.Random) -> tuple[list[dict[str, Any]], list[Any]]:
    tools = [drawn_tool(draw, number) for number in range(draw.randint(1, 3))]
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": drawn_text(draw, 1)})
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": drawn_text(draw, 1)})
        for _ in range(draw.randint(1, 2)):
            calls = [drawn_call(draw, tools) for _ in range(draw.randint(1, 3))]
            content = drawn_text(draw) if draw.random() < 0.3 else ""
            messages.append(
                with_reasoning(draw, {"role": "assistant", "content": content, "tool_calls": calls})
            )
            for call in calls:
                result = {"tool_call_id": call["id"], "name": call["function"]["name"]}
                messages.append({"role": "tool", **result, "content": drawn_text(draw, 1)})
        messages.append(with_reasoning(draw, {"role": "assistant", "content": drawn_text(draw, 1)}))
    messages.append({"role": "user", "content": drawn_text(draw, 1)})
    return messages, tools


def with_reasoning(draw: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    return message if draw.random() < 0.6 else {**message, "reasoning_content": drawn_text(draw, 1)}


def drawn_text(draw: random.Random, least: int = 0) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, 4)))


def drawn_tool(draw: random.Random, number: int) -> dict[str, Any]:
    properties = {
        name: {"type": draw.choice(KINDS), "description": drawn_text(draw, 1)}
        for name in draw.sample(["city", "days", "flag", "list", "deep"], draw.randint(0, 3))
    }
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": f"tool_{number}", "description": drawn_text(draw, 1), "parameters": schema}
    return {"type": "function", "function": function}


def drawn_call(draw: random.Random, tools: list[Any]) -> dict[str, Any]:
    names = draw.sample(["city", "days", "flag"], draw.randint(0, 3))
    function = {
        "name": draw.choice(tools)["function"]["name"],
        "arguments": {name: drawn_value(draw) for name in names},
    }
    return {"id": "".join(draw.choices("abcdef012345", k=9)), "type": "function", "function": function}


def drawn_value(draw: random.Random, depth: int = 0) -> Any:
    match draw.randint(0, 7 if depth < 2 else 5):
        case 0:
            return drawn_text(draw)
        case 1:
            return draw.randint(-5, 99999)
        case 2:
            return draw.random() * 1000
        case 3:
            return draw.choice([True, False])
        case 4:
            return None
        case 5:
            return ""
        case 6:
            return {draw.choice("abc"): drawn_value(draw, depth + 1) for _ in range(draw.randint(0, 3))}
        case _:
            return [drawn_value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
