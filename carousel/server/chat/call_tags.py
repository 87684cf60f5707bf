"""CALL_TAGS: the tool call formats as structural tags, which constrain a model to them.

A format writes the arguments of a call between two fixed texts, the first of which contains the name of the
tool.
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
"""Placeholder for the number of a call, which may be any."""
_DIGITS = r"[0-9]{1,3}"


@dataclass(frozen=True, slots=True)
class CallTags:
    begin: str
    """Text before the arguments of a call, with tags.NAME in place of the tool's name."""
    end: str
    separator: str = ""
    section: tuple[str, str, str] = ("", "", "")
    """Texts before all calls (in front of and behind an optional space), and after the last call."""
    triggers: tuple[str, ...] = ()
    """Texts that begin calls after other text; empty if calls can only be the whole answer."""
    argument: tuple[str, str] = ("", "")
    """Texts around each argument, with tags.NAME in place of its name; empty if the arguments are one object.
    With these only calls with schemas can be held.
    """

    is_single: bool = False
    """True if the model ends its answer after one call."""

    @property
    def holds_any(self) -> bool:
        """Return True if a call with arbitrary arguments can be held."""
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
    "gpt_oss": CallTags(
        "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>", "", is_single=True
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
    """Return the tags of a format; None if its calls cannot be held. `special` has the special tokens of the
    tokenizer, which distinguish the newer form of Mistral's calls from the older one.
    """
    return _MISTRAL_ARGS if parser == "mistral" and "[ARGS]" in special else CALL_TAGS.get(parser)


def calls_alone(family: CallTags, tools: ToolSet, *, one: bool, all_held: bool) -> tags.Element:
    """Return an answer of calls alone. The arguments of strict tools, or of all, are held to
    their schemas.
    """
    return _section(family, _calls(family, tools, all_held=all_held), one=one)


def calls_in_text(family: CallTags, tools: ToolSet, *, one: bool) -> tags.Element:
    """Return an answer of text and calls, with the arguments of strict tools held to their schemas."""
    calls = _calls(family, tools, all_held=False)
    section = _section(family, calls, one=one)
    begun = [section, *calls] if isinstance(section, tags.Tag) else calls
    return tags.TriggeredTags(list(family.triggers), begun, one)


def _section(family: CallTags, calls: list[tags.Tag], *, one: bool) -> tags.Element:
    begin, first, end = family.section
    repeated = tags.TagsWithSeparator(calls, family.separator, one or family.is_single)
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
