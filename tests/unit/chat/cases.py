"""Answers of the families, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from carousel.server.chat.answer import AnswerParser, AnswerPlan
from carousel.server.chat.events import Event, ItemBegun, ItemDelta
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS, Thinking
from carousel.server.chat.tools import ToolSet

Item: TypeAlias = tuple[str, ...]
"""("text", what), ("reasoning", what), ("call", name, JSON), ("broken", name, beginning of JSON)."""

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "object"},
        "list": {"type": "array"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
}
TOOLS = ToolSet({"weather": json.dumps(SCHEMA).encode(), "now": b"", "mcp.find-it": b"{}"})
VALUES: dict[str, Any] = {
    "city": 'Köln "am" \\ Rhein\n\t<tool_call> </tool_call> {[(\U0001f600',
    "days": -3,
    "ratio": 1.5e-7,
    "deep": {"a": {"b": [{}, [], [1, None, True]]}, "": "}"},
    "list": ["]", {"x": "é"}],
    "flag": False,
    "maybe": None,
}


def json_call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _tagged(name: str, values: dict[str, Any], family: str) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    if family == "glm45":
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        pairs = (f"{key if key.isalnum() else _gemma(key)}:{_gemma(each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    return json.dumps(value)


def spelled(family: str, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """These calls as models of the family write them."""
    calls = list(calls)
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{json_call(*call)}\n</tool_call>" for call in calls)
        case "llama3_json":
            return "; ".join(json_call(*call, "parameters") for call in calls)
        case "pythonic":
            parts = (
                f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
                for name, values in calls
            )
            return f"[{', '.join(parts)}]"
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(json_call(*call) for call in calls)}]"
        case "qwen3_coder" | "glm45":
            return "\n".join(_tagged(*call, family) for call in calls)
        case "deepseek_v3":
            parts = (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
                f"{json.dumps(values, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
                for name, values in calls
            )
            return f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            parts = (
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(values, ensure_ascii=False)}"
                "<｜tool▁call▁end｜>"
                for name, values in calls
            )
            return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"
        case "gemma4":
            return "".join(f"<|tool_call>call:{name}{_gemma(values)}<tool_call|>" for name, values in calls)
        case "gpt_oss":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{json.dumps(values, ensure_ascii=False)}<|call|>"
                for name, values in calls
            )
        case "kimi_k2":
            parts = (
                f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
                f"{json.dumps(values, ensure_ascii=False)}<|tool_call_end|>"
                for number, (name, values) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
    raise AssertionError(family)


def plan(family: str, reasoning: str = "", thinking: Thinking = "none", **fields: Any) -> AnswerPlan:
    return AnswerPlan(
        TOOL_FORMATS.get(family),
        TOOLS if family else ToolSet(),
        reasoning_format=REASONING_FORMATS.get(reasoning),
        thinking=thinking,
        **fields,
    )


def read(how: AnswerPlan, pieces: Iterable[str]) -> list[Item]:
    """The items that come of these pieces. Asserts that their events are in order."""
    parser = AnswerParser(how)
    events: list[Event] = []
    for piece in pieces:
        is_plain = bool(piece) and parser.is_plain(piece)
        new = parser.push(piece)
        assert not is_plain or new == [ItemDelta("text", piece)]
        events += new
    items = items_of(events + parser.end())
    assert parser.num_whole_calls == sum(item[0] == "call" for item in items)
    return items


def items_of(events: Iterable[Event]) -> list[Item]:
    items: list[Item] = []
    begun, text = None, ""
    for event in events:
        if isinstance(event, ItemBegun):
            assert begun is None, "an item begins in another"
            assert (event.kind == "tool_call") == bool(event.id) == bool(event.name)
            begun, text = event, ""
        elif isinstance(event, ItemDelta):
            assert begun is not None
            assert event.kind == begun.kind
            assert event.text
            text += event.text
        else:
            assert begun is not None
            assert event.kind == begun.kind
            if begun.kind == "tool_call":
                items.append(("call" if event.is_whole else "broken", begun.name, text))
            else:
                items.append((begun.kind, text))
            begun = None
    assert begun is None, "an item does not end"
    return items
