"""Rewriting of schemas as alternatives of plain ones, without `allOf`, `anyOf` and `$ref`.

A grammar has no "and". So the keywords of two schemas for one value are merged, keyword by keyword. A keyword
that cannot be merged is refused with its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grammar_proc.xgrammar_backend.numbers import exact
from runtime.guides.disjoint import Follow
from runtime.guides.json_schema import Schema, place_of, refuse

MAX_ALTERNATIVES = 1000

ALL_TYPES = ("null", "boolean", "object", "array", "number", "string")
OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")
ARRAY_KEYWORDS = ("prefixItems", "items")
COMBINERS = ("$ref", "$defs", "anyOf", "allOf")


@dataclass(slots=True)
class Plain:
    """Keywords of a schema in which only members and elements have schemas."""

    keywords: dict[str, Any]
    places: dict[str, str]
    """JSON pointers of the keywords, for errors."""


def alternatives(schema: Any, follow: Follow, trail: tuple[str, ...] = ()) -> list[Plain]:
    """Return plain schemas such that a value matches at least one of them exactly if it matches the schema.
    `trail` has the references that led here. Raises SchemaRefused.
    """
    if isinstance(schema, bool):
        return [Plain({}, {})] if schema else []
    made = [_plain(schema)]
    if "$ref" in schema:
        ref = schema["$ref"]
        if ref in trail:
            refuse(f"{place_of(schema)}/$ref", "it leads to itself")
        made = _both(made, alternatives(follow(ref), follow, (*trail, ref)), schema)
    for each in schema.get("allOf", ()):
        made = _both(made, alternatives(each, follow, trail), schema)
    if "anyOf" in schema:
        any_of = [plain for each in schema["anyOf"] for plain in alternatives(each, follow, trail)]
        made = _both(made, any_of, schema)
    return made


def _plain(schema: Schema) -> Plain:
    keywords = {name: value for name, value in schema.items() if name not in COMBINERS}
    places = {name: f"{place_of(schema)}/{name}" for name in keywords}
    if "const" in keywords:
        value = keywords.pop("const")
        known = keywords.get("enum", [value])
        keywords["enum"] = [each for each in known if canonical(each) == canonical(value)]
        places["enum"] = places.pop("const")
    return Plain(keywords, places)


def _both(ones: list[Plain], others: list[Plain], schema: Schema) -> list[Plain]:
    if len(ones) * len(others) > MAX_ALTERNATIVES:
        refuse(place_of(schema), f"more than {MAX_ALTERNATIVES} combinations of its alternatives")
    return [_conjunction(one, other) for one in ones for other in others]


def _conjunction(one: Plain, other: Plain) -> Plain:
    if not one.keywords or not other.keywords:
        return other if not one.keywords else one
    keywords, places = dict(one.keywords), {**other.places, **one.places}
    for name in OBJECT_KEYWORDS + ARRAY_KEYWORDS:
        keywords.pop(name, None)
    for name, value in other.keywords.items():
        if name in OBJECT_KEYWORDS or name in ARRAY_KEYWORDS:
            continue
        keywords[name] = _merged(name, keywords[name], value, other) if name in keywords else value
    keywords |= _members(one, other) | _elements(one, other)
    return Plain(keywords, places)


def _merged(name: str, one: Any, other: Any, place: Plain) -> Any:
    match name:
        case "type":
            return both_types(types_of(one), types_of(other))
        case "enum":
            known = {canonical(each) for each in other}
            return [each for each in one if canonical(each) in known]
        case "minimum" | "exclusiveMinimum" | "minLength" | "minItems":
            return max(one, other)
        case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
            return min(one, other)
        case "multipleOf":
            a, b = exact(one), exact(other)
            both = Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))
            return int(both) if both.denominator == 1 else float(both)
        case "required":
            return list(dict.fromkeys([*one, *other]))
    if one != other:
        refuse(place.places[name], f"a second {name} for the same value is not supported")
    return one


def _members(one: Plain, other: Plain) -> dict[str, Any]:
    """Return the merged keywords about an object's members."""
    kept = [
        {name: each.keywords[name] for name in OBJECT_KEYWORDS if name in each.keywords}
        for each in (one, other)
    ]
    if not all(kept):
        return kept[0] or kept[1]
    for each in (one, other):
        if "patternProperties" in each.keywords:
            refuse(each.places["patternProperties"], "beside other schemas of the same object")
    properties, more = ([each.get(name, empty) for each in kept] for name, empty in _DEFAULTS)
    made: dict[str, Any] = {}
    for name in dict.fromkeys([*properties[0], *properties[1]]):
        made[name] = _all_of(said.get(name, rest) for said, rest in zip(properties, more, strict=True))
    return {"properties": made, "additionalProperties": _all_of(more)}


_DEFAULTS: tuple[tuple[str, Any], ...] = (("properties", {}), ("additionalProperties", True))


def _elements(one: Plain, other: Plain) -> dict[str, Any]:
    """Return the merged keywords about an array's elements."""
    kept = [
        {name: each.keywords[name] for name in ARRAY_KEYWORDS if name in each.keywords}
        for each in (one, other)
    ]
    if not all(kept):
        return kept[0] or kept[1]
    first: list[list[Any]] = [each.get("prefixItems", []) for each in kept]
    more = [each.get("items", True) for each in kept]
    made = [
        _all_of(said[at] if at < len(said) else rest for said, rest in zip(first, more, strict=True))
        for at in range(max(map(len, first)))
    ]
    return {"items": _all_of(more)} | ({"prefixItems": made} if made else {})


def _all_of(schemas: Iterable[Any]) -> Any:
    kept = list({canonical(each): each for each in schemas if each is not True}.values())
    if any(each is False for each in kept):
        return False
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else True


def types_of(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def both_types(ones: list[str], others: list[str]) -> list[str]:
    """Return the types of values that have a type of each list; an integer is a number."""
    made = []
    for one in ones:
        if one in others or (one == "integer" and "number" in others):
            made.append(one)
        elif one == "number" and "integer" in others:
            made.append("integer")
    return made


def canonical(value: Any) -> str:
    """Return a text that is the same for equal values: for 1.0 and 1, but not for 1 and true."""

    def plain(each: Any) -> Any:
        if isinstance(each, float) and each.is_integer():
            return int(each)
        if isinstance(each, dict):
            return {name: plain(inner) for name, inner in each.items()}
        return [plain(inner) for inner in each] if isinstance(each, list) else each

    return json.dumps(plain(value), sort_keys=True)
