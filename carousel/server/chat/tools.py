"""ToolSet: the tools of a request, as the parser of its answer needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

ANY = frozenset[str]()
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

MAX_CHOICES, MAX_CHOICE_DEPTH = 256, 4
"""Maximum number of alternatives of a schema that are looked at, and of their levels. With more it may have
any type.
"""


class _Schema(msgspec.Struct):
    """The parts of a JSON Schema that name types."""

    type: Any = None
    any_of: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="anyOf")
    one_of: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="oneOf")
    enum: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ToolSet:
    def __init__(self, parameters: Mapping[str, bytes] = {}, strict: Collection[str] = ()) -> None:
        """`parameters` has the JSON Schemas of the tools' parameters by the tools' names, in the order of the
        request; empty for none. `strict` has the names of tools whose schema a call must match.
        """
        self._parameters = parameters
        self.strict = frozenset(strict)
        self._numbers = {name: number for number, name in enumerate(parameters)}
        self._schemas: dict[str, dict[str, msgspec.Raw]] = {}
        """Undecoded schemas of each parameter, by tool; a megabyte of them may be one tool's."""
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    @property
    def names(self) -> Mapping[str, bytes]:
        return self._parameters

    def only(self, *names: str) -> ToolSet:
        """Return a set with some of the tools, which keep their places."""
        kept = {name: schema for name, schema in self._parameters.items() if name in names}
        made = ToolSet(kept, self.strict & kept.keys())
        made._numbers = self._numbers
        return made

    def where(self, name: str) -> str:
        """Return the place of a tool in the request."""
        return f"tools[{self._numbers[name]}].function"

    def types_of(self, name: str, parameter: str) -> frozenset[str] | None:
        """Return the types that a parameter may have: ANY if its schema names none; None if the tool does not
        have the parameter.
        """
        types = self._types.get((name, parameter))
        if types is None:
            if name not in self._schemas:
                self._schemas[name] = _schemas_of(self._parameters.get(name, b""))
            schema = self._schemas[name].get(parameter)
            if schema is None:
                return None
            types = self._types[name, parameter] = _types_in(schema, [MAX_CHOICES])
        return types


NO_TOOLS = ToolSet()


def _schemas_of(schema: bytes) -> dict[str, msgspec.Raw]:
    try:
        properties = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])["properties"]
        return msgspec.json.decode(properties, type=dict[str, msgspec.Raw])
    except (KeyError, msgspec.MsgspecError, RecursionError):
        return {}


def _types_in(schema: msgspec.Raw, num_left: list[int], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema names. Only these parts of it are decoded: all of it may take 40 ms.
    `num_left` holds how many more alternatives may be looked at.
    """
    read = _decoded(schema, _Schema)
    if read is None or depth > MAX_CHOICE_DEPTH:
        return ANY
    given = read.type
    if isinstance(given, str | list):
        named = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
        return frozenset(named) if named <= TYPES else ANY
    choices = _decoded(read.any_of, list[msgspec.Raw]) or _decoded(read.one_of, list[msgspec.Raw])
    if choices:
        num_left[0] -= len(choices)
        if num_left[0] < 0:
            return ANY
        types = [_types_in(each, num_left, depth + 1) for each in choices]
        return frozenset().union(*types) if all(types) else ANY
    return frozenset({"string"}) if _decoded(read.enum, list[str]) else ANY


def _decoded(data: msgspec.Raw, kind: Any) -> Any:
    """Return a decoded part of a schema; None if it is absent or of another kind."""
    try:
        return msgspec.json.decode(data, type=kind) if len(data) else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
