"""CALL_TAGS: how families write calls, as structural tags, which hold a model to them.

A family writes the arguments of a call between two fixed texts, the first of which has the name of the tool.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from msgspec import Raw

from carousel.server.chat.tools import ToolSet
from runtime.guides import structural_tag as tags

NO_PARAMETERS = Raw(b'{"type":"object","properties":{},"additionalProperties":false}')
ANY_OBJECT = Raw(b"{}")
NUMBER = "$NUMBER"
"""Stands for the number of a call, which may be any."""
_DIGITS = r"[0-9]{1,3}"


@dataclass(frozen=True, slots=True)
class CallTags:
    begin: str
    """Text before the arguments of a call, with tags.NAME where its name stands."""
    end: str
    separator: str = ""
    section: tuple[str, str, str] = ("", "", "")
    """Texts before all calls, before the first of them, where a space may stand between the two, and behind
    the last.
    """
    triggers: tuple[str, ...] = ()
    """Texts that begin calls behind other text; none where calls are the whole answer."""
    argument: tuple[str, str] = ("", "")
    """Texts around each argument, with tags.NAME where its name stands; empty where all are one object. Only
    calls with schemas can be held then.
    """

    @property
    def holds_any(self) -> bool:
        """Return True if a call can be held whose arguments are any."""
        return not self.argument[0]


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>")
_DEEPSEEK_TRIGGERS = (_DEEPSEEK[0], "<｜tool▁call▁begin｜>")
_MISTRAL_ARGS = CallTags("[TOOL_CALLS]$NAME[ARGS]", "", triggers=("[TOOL_CALLS]",))
CALL_TAGS: dict[str, CallTags] = {
    "hermes": CallTags(
        '<tool_call>\n{"name": "$NAME", "arguments": ', "}\n</tool_call>", "\n", triggers=("<tool_call>",)
    ),
    "llama3_json": CallTags('{"name": "$NAME", "parameters": ', "}", "; "),
    "mistral": CallTags(
        '{"name": "$NAME", "arguments": ', "}", ", ", ("[TOOL_CALLS]", "[", "]"), ("[TOOL_CALLS]",)
    ),
    "deepseek_v3": CallTags(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        _DEEPSEEK,
        _DEEPSEEK_TRIGGERS,
    ),
    "deepseek_v31": CallTags(
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        _DEEPSEEK,
        _DEEPSEEK_TRIGGERS,
    ),
    "kimi_k2": CallTags(
        "<|tool_call_begin|>functions.$NAME:$NUMBER<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ),
    "qwen3_coder": CallTags(
        "<tool_call>\n<function=$NAME>\n",
        "</function>\n</tool_call>",
        "\n",
        argument=("<parameter=$NAME>\n", "</parameter>"),
    ),
    "glm45": CallTags(
        "<tool_call>$NAME\n",
        "</tool_call>",
        "\n",
        argument=("<arg_key>$NAME</arg_key>\n<arg_value>", "</arg_value>"),
    ),
}


def call_tags(parser: str, special: Collection[str]) -> CallTags | None:
    """Return the tags of a family; None where its calls cannot be held. `special`: special tokens of the
    tokenizer, which tell the newer form of Mistral's calls from the older.
    """
    return _MISTRAL_ARGS if parser == "mistral" and "[ARGS]" in special else CALL_TAGS.get(parser)


def calls_alone(family: CallTags, tools: ToolSet, *, one: bool, all_held: bool) -> tags.Element:
    """Return an answer of calls, with arguments held to their schemas: those of strict tools, or all."""
    return _section(family, _calls(family, tools, all_held=all_held), one=one)


def calls_in_text(family: CallTags, tools: ToolSet, *, one: bool) -> tags.Element:
    """Return an answer of text and calls, the arguments of strict tools held to their schemas."""
    calls = _calls(family, tools, all_held=False)
    section = _section(family, calls, one=one)
    begun = [section, *calls] if isinstance(section, tags.Tag) else calls
    return tags.TriggeredTags(list(family.triggers), begun, one)


def _section(family: CallTags, calls: list[tags.Tag], *, one: bool) -> tags.Element:
    begin, first, end = family.section
    repeated = tags.TagsWithSeparator(calls, family.separator, one)
    if not begin:
        return repeated
    space = tags.Optional(tags.ConstString(" "))
    return tags.Tag(begin, tags.Sequential([space, tags.ConstString(first), repeated]), end)


def _calls(family: CallTags, tools: ToolSet, *, all_held: bool) -> list[tags.Tag]:
    return [_call(family, tools, name, is_held=all_held or name in tools.strict) for name in tools.names]


def _call(family: CallTags, tools: ToolSet, name: str, *, is_held: bool) -> tags.Tag:
    begin, has_number, rest = family.begin.replace(tags.NAME, name).partition(NUMBER)
    content = _arguments(family, tools, name, is_held=is_held)
    if has_number:
        content = tags.Sequential([tags.Regex(_DIGITS), tags.ConstString(rest), content])
    return tags.Tag(begin, content, family.end)


def _arguments(family: CallTags, tools: ToolSet, name: str, *, is_held: bool) -> tags.Element:
    where = f"{tools.where(name)}.parameters"
    if not is_held:
        return tags.JsonSchema(ANY_OBJECT, where)
    given = tools.names[name]
    schema = NO_PARAMETERS if given in (b"", b"null") else Raw(given)
    begin, close = family.argument
    return tags.TaggedArguments(schema, where, begin, close) if begin else tags.JsonSchema(schema, where)
