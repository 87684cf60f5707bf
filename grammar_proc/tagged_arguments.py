"""tagged_arguments: the arguments of a tool call in families that write each argument as text between tags.

How a parser reads such a text depends on the types that the schema names: if a string is among them, the text
is that string; otherwise it is JSON. So a string can be any text or one of several given texts. A schema that
asks for another form of string is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags

OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})
_NAME = re.compile(r"[^\s<>](?:[^<>\n]{0,254}[^\s<>])?")


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    is_required: bool
    schema: Any = None
    """Schema of the argument's JSON. None: the argument is a text."""
    texts: tuple[str, ...] = ()
    """Texts that the argument may be, if it is a text; empty: any."""


def tagged_arguments(element: tags.TaggedArguments, schema: Any) -> list[Argument]:
    """Return the arguments. `schema` is that of the element, as `schema_of` returns it. Raises
    InvalidRequest.
    """

    def refuse(pointer: str, why: str) -> NoReturn:
        raise InvalidRequest(
            f"{element.param}: {pointer or 'the root'}: {why} where arguments are written between tags",
            param=element.param,
            code="unsupported_schema",
        )

    if not isinstance(schema, dict):
        refuse("", "a schema that is no object cannot be held")
    if schema.get("type") not in ("object", ["object"]):
        refuse("/type", "no type but object can be held")
    for keyword in sorted(schema.keys() - OBJECT_KEYWORDS):
        refuse(f"/{keyword}", "it cannot be held")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name in required:
        if name not in properties:
            refuse("/required", f"{name!r:.100} is none of the properties, and cannot be held")
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    made = []
    for name, each in properties.items():
        pointer = f"/properties/{name:.100}"
        if not _NAME.fullmatch(name):
            refuse(pointer, "such a name cannot be held")
        if each is False:
            if name in required:
                refuse(pointer, "false cannot be held")
            continue
        is_required = name in required
        types = _types_of(each)
        texts = _texts_of(each)
        if (types is None and each in (True, {})) or (types and "string" in types and _is_plain(each)):
            made.append(Argument(name, is_required))
        elif texts and types == {"string"}:
            if any(element.close in text for text in texts):
                refuse(f"{pointer}/enum", "a text with the closing tag cannot be held")
            made.append(Argument(name, is_required, texts=texts))
        elif types and "string" in types:
            refuse(pointer, "a string that is not any string, or one of an enum, cannot be held")
        else:
            made.append(Argument(name, is_required, {**each, **definitions}))
    return made


def _types_of(schema: Any) -> set[str] | None:
    """Return the types that a parser sees; None if the schema names none."""
    if not isinstance(schema, dict):
        return None
    if "type" in schema:
        given = schema["type"]
        return {given} if isinstance(given, str) else set(given)
    if choices := schema.get("anyOf"):
        types = [_types_of(each) for each in choices]
        return None if None in types else set().union(*(each for each in types if each is not None))
    return {"string"} if _texts_of(schema) else None


def _is_plain(schema: dict[str, Any]) -> bool:
    """Return True if the schema allows every value of its types."""
    if choices := schema.get("anyOf"):
        return schema.keys() == {"anyOf"} and all(_is_plain(each) for each in choices)
    return schema.keys() == {"type"}


def _texts_of(schema: Any) -> tuple[str, ...]:
    """Return the texts among which a schema selects, if that is all it says; else none."""
    if not isinstance(schema, dict) or schema.keys() - {"type", "enum", "const"}:
        return ()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return tuple(values) if all(isinstance(each, str) for each in values) else ()
