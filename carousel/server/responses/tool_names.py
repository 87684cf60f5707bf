"""read_tools_of: the tools of a request to /v1/responses as functions of a chat, and what their calls are
called here.

A chat has functions with names alone. Tools of a namespace are functions whose names begin with its name, and
a tool of free text is a function with one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec import Raw, Struct
from msgspec.json import decode, encode

from carousel.server.chat.definitions import (
    MAX_NAME_CHARS,
    ToolName,
    check_kind,
    check_reach,
    decode_part,
    definitions_of,
)
from carousel.server.request.unknown_fields import joined
from carousel.server.responses.types import ToolReference, ToolSelection
from runtime.base.errors import InvalidRequest

KINDS = ("function", "custom")
SEPARATOR = "__"
TOP_LEVEL = "functions"
"""Namespace of functions that have none, as models of OpenAI call it."""
INPUT = "input"
"""The one argument of a tool of free text."""
OWN_FIELDS = ("type", "defer_loading", "allowed_callers")
"""Fields of a function that its definition in a chat does not have."""


class _Tool(Struct):
    type: str
    name: ToolName = ""
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class _Namespace(Struct):
    name: ToolName
    tools: Raw
    description: str | None = None


class _Format(Struct):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class _Custom(Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class CalledTool(NamedTuple):
    """Tool by the names that it has in the request."""

    name: str
    namespace: str = ""
    is_custom: bool = False
    """True for a tool of free text."""


@dataclass(slots=True)
class ReadTools:
    """Tools that the model is shown."""

    definitions: Raw
    places: list[str] = field(default_factory=list)
    """Place of each in the request."""
    called: dict[str, CalledTool] = field(default_factory=dict)
    """Tools that a chat calls by other names, or whose calls have another form, by their names there."""


def name_in_chat(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a tool."""
    if not namespace or namespace == TOP_LEVEL:
        return name
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"


def arguments_of(text: str) -> str:
    """Return the arguments of the function that stands for a tool of free text."""
    return encode({INPUT: text}).decode()


def text_of(arguments: str) -> str:
    """Return the only string in the arguments of a free-text tool's call. Arguments of another form, which
    the model has written of itself, are returned as they are.
    """
    try:
        values = list(decode(arguments, type=dict[str, str]).values())
    except ValueError:
        return arguments
    return values[0] if len(values) == 1 else arguments


def read_tools_of(tools: Raw, choice: str | ToolSelection | None) -> ReadTools:
    """Return the tools of a request, of those the ones that its `tool_choice` allows. Raises
    InvalidRequest.
    """
    made = ReadTools(Raw())
    allowed = _allowed(choice)
    names: set[str] = set()
    definitions: list[bytes] = []
    for where, definition, namespace in _each(tools):
        tool: _Tool = decode_part(definition, _Tool, where)
        check_reach(where, defer_loading=tool.defer_loading, allowed_callers=tool.allowed_callers)
        name = name_in_chat(tool.name, None if namespace is None else namespace.name)
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(
                f"{where}.name: {tool.name} has {len(name)} characters with its namespace, more than "
                f"{MAX_NAME_CHARS}; shorten one of them",
                param=f"{where}.name",
            )
        names.add(name)
        if allowed is not None and name not in allowed:
            continue
        about = ""
        if namespace is not None and namespace.description:
            # Of a namespace the first tool tells: there is no other place.
            about, namespace.description = f"{namespace.name}: {namespace.description}\n", None
        if tool.type == "custom":
            definitions.append(_custom(definition, where, name, about))
        else:
            definitions.append(_function(definition, where, name, about))
        made.places.append(where)
        own = "" if namespace is None or namespace.name == TOP_LEVEL else namespace.name
        if own or tool.type == "custom":
            made.called[name] = CalledTool(tool.name, own, tool.type == "custom")
    if unknown := sorted((allowed or set()) - names):
        raise InvalidRequest(
            f"tool_choice.tools: {unknown[0]:.100} is not one of tools", param="tool_choice.tools"
        )
    if definitions:
        made.definitions = Raw(b"[" + b",".join(definitions) + b"]")
    return made


def _each(tools: Raw) -> Iterator[tuple[str, Raw, _Namespace | None]]:
    """Yield the place of each tool, its definition and its namespace."""
    given = definitions_of(bytes(tools)) if len(memoryview(tools)) else []
    for number, definition in enumerate(given):
        where = f"tools[{number}]"
        tool: _Tool = decode_part(definition, _Tool, where)
        if tool.type != "namespace":
            check_kind(where, tool.type, KINDS)
            yield where, definition, None
            continue
        namespace: _Namespace = decode_part(definition, _Namespace, where)
        for index, inner in enumerate(definitions_of(namespace.tools)):
            place = f"{where}.tools[{index}]"
            check_kind(place, decode_part(inner, _Tool, place).type, KINDS)
            yield place, inner, namespace


def _function(definition: Raw, where: str, name: str, about: str) -> bytes:
    """Return a definition as a chat has it, with its fields in their order."""
    fields: dict[str, Raw] = decode_part(definition, dict[str, Raw], where)
    for own in OWN_FIELDS:
        fields.pop(own, None)
    if "name" in fields:
        fields["name"] = Raw(encode(name))
    if about:
        told = fields.get("description")
        description = decode_part(told or b"null", str | None, f"{where}.description")
        fields["description"] = Raw(encode(about + (description or "")))
    return _in_chat(fields)


def _custom(definition: Raw, where: str, name: str, about: str) -> bytes:
    """Return a tool of free text as a function with one text."""
    tool: _Custom = decode_part(definition, _Custom, where)
    text: dict[str, Any] = {"type": "string"}
    fields: dict[str, Any] = {"name": name}
    if about or tool.description:
        fields["description"] = about + (tool.description or "")
    if tool.format is not None and tool.format.type == "grammar":
        text["pattern"] = _pattern(tool.format, f"{where}.format")
        fields["strict"] = True
    fields["parameters"] = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return _in_chat({key: encode(value) for key, value in fields.items()})


def _pattern(given: _Format, where: str) -> str:
    if given.syntax is None or given.definition is None:
        missing = f"{where}.{'syntax' if given.syntax is None else 'definition'}"
        raise InvalidRequest(f"{missing} is missing", param=missing, code="missing_required_parameter")
    if given.syntax == "lark":
        raise InvalidRequest(
            f"{where}.syntax: lark is not supported, since calls are JSON here, in which texts are escaped; "
            "regex is, and so is a tool without a format",
            param=f"{where}.syntax",
            code="unsupported_parameter",
        )
    return f"^(?:{given.definition})$"


def _in_chat(fields: Mapping[str, bytes | Raw]) -> bytes:
    inner = b",".join(encode(name) + b":" + bytes(value) for name, value in fields.items())
    return joined({"type": b'"function"', "function": b"{" + inner + b"}"})


def _allowed(choice: str | ToolSelection | None) -> set[str] | None:
    """Return the names of the functions that may be called; None for all."""
    if choice is None or isinstance(choice, str) or choice.type != "allowed_tools":
        return None
    if not choice.tools:
        raise InvalidRequest("tool_choice.tools is missing, or empty", param="tool_choice.tools")
    return {_referred(each) for each in choice.tools}


def _referred(tool: ToolReference | ToolSelection) -> str:
    return name_in_chat(tool.name or "", tool.namespace)
