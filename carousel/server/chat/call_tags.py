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
NAME = "$NAME"


@dataclass(frozen=True, slots=True)
class CallTags:
    begin: str
    """Text before the arguments of a call, with NAME where its name stands."""
    end: str
    separator: str = ""
    section: tuple[str, str, str] = ("", "", "")
    """Texts before all calls, before the first of them, where a space may stand between the two, and behind
    the last.
    """
    triggers: tuple[str, ...] = ()
    """Texts that begin calls behind other text; none where calls are the whole answer."""


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
    return [
        tags.Tag(
            family.begin.replace(NAME, name),
            _arguments(tools, name, is_held=all_held or name in tools.strict),
            family.end,
        )
        for name in tools.names
    ]


def _arguments(tools: ToolSet, name: str, *, is_held: bool) -> tags.JsonSchema:
    schema = tools.names[name]
    where = f"{tools.where(name)}.parameters"
    if not is_held:
        return tags.JsonSchema(ANY_OBJECT, where)
    return tags.JsonSchema(NO_PARAMETERS if schema in (b"", b"null") else Raw(schema), where)
