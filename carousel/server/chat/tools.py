"""ToolSet: the tools of a request, as the parser of its answer needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

ANY = frozenset[str]()
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


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
            types = self._types[name, parameter] = _types_in(msgspec.json.decode(schema))
        return types


NO_TOOLS = ToolSet()


def _schemas_of(schema: bytes) -> dict[str, msgspec.Raw]:
    try:
        properties = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])["properties"]
        return msgspec.json.decode(properties, type=dict[str, msgspec.Raw])
    except (KeyError, msgspec.MsgspecError, RecursionError):
        return {}


def _types_in(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return ANY
    given = schema.get("type")
    if isinstance(given, str | list):
        named = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
        return frozenset(named) if named <= TYPES else ANY
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and choices:
        types = [_types_in(each) for each in choices]
        return frozenset().union(*types) if all(types) else ANY
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return frozenset({"string"})
    return ANY
