"""Check that two JSON schemas are disjoint, so that `oneOf` of them means the same as `anyOf`. The check is
conservative: False means that disjointness was not found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

Follow: TypeAlias = Callable[[Any], Any]
"""Function that returns the schema which a reference refers to."""
ALL_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))
MAX_LOOKS = 4
"""Maximum number of levels of nested property schemas that are compared."""


def are_disjoint(one: Any, other: Any, follow: Follow, looks: int = MAX_LOOKS) -> bool:
    one, other = follow(one), follow(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    types = _types(one) & _types(other)
    return all(_DIFFER[each](one, other, follow, looks) for each in types)


def _values(schema: Any) -> frozenset[str] | None:
    """Return the values that a schema lists, in a form in which equal values are equal texts."""
    if "const" in schema:
        return frozenset([_canonical(schema["const"])])
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_canonical, schema["enum"]))
    return None


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Normalize a value: 1.0 and 1 are the same value, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _types(schema: Any) -> frozenset[str]:
    """Return the types that values of the schema can have. Integers count as numbers."""
    if "type" in schema:
        said = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return ALL_TYPES & {"number" if each == "integer" else each for each in said if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_type_of, values)) if isinstance(values, list) else ALL_TYPES


def _type_of(value: Any) -> str:
    for kind, name in _NAMES:
        if isinstance(value, kind):
            return name
    return "null"


_NAMES = ((bool, "boolean"), ((int, float), "number"), (str, "string"), (list, "array"), (dict, "object"))


def _never(one: Any, other: Any, follow: Follow, looks: int) -> bool:
    return False


def _by_range(least: str, most: str) -> Callable[[Any, Any, Follow, int], bool]:
    def differ(one: Any, other: Any, follow: Follow, looks: int) -> bool:
        return _ends_before(one, other) or _ends_before(other, one)

    def _ends_before(one: Any, other: Any) -> bool:
        end, start = one.get(most), other.get(least)
        return _is_number(end) and _is_number(start) and end < start

    return differ


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _objects_differ(one: Any, other: Any, follow: Follow, looks: int) -> bool:
    """Return True if two object schemas are disjoint: a property that both require has disjoint values, or
    one requires a property that the other forbids.
    """
    if _forbids_of(one, other) or _forbids_of(other, one):
        return True
    if not looks:
        return False
    mine, theirs = _properties(one), _properties(other)
    shared = set(_required(one)) & set(_required(other)) & mine.keys() & theirs.keys()
    return any(are_disjoint(mine[name], theirs[name], follow, looks - 1) for name in shared)


def _forbids_of(one: Any, other: Any) -> bool:
    if one.get("additionalProperties") is not False or one.get("patternProperties"):
        return False
    return any(name not in _properties(one) for name in _required(other))


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Any) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


_DIFFER = {
    "null": _never,
    "boolean": _never,
    "number": _by_range("minimum", "maximum"),
    "string": _by_range("minLength", "maxLength"),
    "array": _by_range("minItems", "maxItems"),
    "object": _objects_differ,
}
