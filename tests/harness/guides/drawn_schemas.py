"""JSON schemas that hypothesis-jsonschema draws from a schema of schemas.

Its version 0.23.1, of 2024, uses `more` of Hypothesis's `many`, which Hypothesis 6.170 no longer has. This
module replaces it by a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture.utils import many
from hypothesis_jsonschema import _from_schema, from_schema

DEPTH = 1
"""Levels below the root. With two, a schema takes a third of a second to be drawn."""
NAMES = ("a", "name", "größe", 'q"q', "x y", "tags")
CONSTANTS: list[Any] = [None, True, 0, -1.5, "", "ü\n", [1, []], {"a": {"b": None}}]


class _Elements(many):
    """`many` with `more`."""

    _loop: Iterator[None] | None = None

    def more(self) -> bool:
        """Return True if one more is to be drawn."""
        if self._loop is None:
            self.__enter__()
            self._loop = iter(self)
        for _ in self._loop:
            return True
        self.__exit__(None)
        return False


def drawn_schemas(count: int, number: int) -> list[Any]:
    """Return so many. `number`: of the seed."""
    drawn: list[Any] = []

    @seed(number)
    @settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(from_schema(_schema_of_schemas(DEPTH)))
    def draw(schema: Any) -> None:
        drawn.append(schema)

    with patch.object(_from_schema, "cu", SimpleNamespace(many=_Elements)):
        draw()
    assert len(drawn) >= count
    return drawn[:count]


def _schema_of_schemas(depth: int) -> dict[str, Any]:
    """Return what is a schema with so many levels within. Bounds keep values short."""
    kinds = [
        _kind("string", minLength=_numbers(0, 4), maxLength=_numbers(4, 12)),
        _kind("string", format={"enum": ["date", "ipv4", "uuid"]}),
        _kind("string", pattern={"enum": ["^[a-f]{1,5}$", r"^\d{2}-\d{2}$", "^(ab|cd)$"]}),
        _kind("integer", minimum=_numbers(-500, 0), maximum=_numbers(0, 500)),
        _kind("boolean"),
        _kind("null"),
        _object(["enum"], enum={"type": "array", "items": {"enum": CONSTANTS}, "minItems": 1, "maxItems": 4}),
        _object(["const"], const={"enum": CONSTANTS}),
    ]
    if depth:
        inner = _schema_of_schemas(depth - 1)
        of_names = {"type": "object", "propertyNames": {"enum": list(NAMES)}, "additionalProperties": inner}
        few = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
        kinds += [
            _kind(
                "object", properties={**of_names, "maxProperties": 4}, additionalProperties={"const": False}
            ),
            _kind("array", items=inner, minItems=_numbers(0, 1), maxItems=_numbers(1, 3)),
            _kind("array", prefixItems=few, items={"const": False}),
            _object(["anyOf"], anyOf=few),
        ]
    return {"anyOf": kinds}


def _kind(name: str, **fields: Any) -> dict[str, Any]:
    return _object(["type", *fields], type={"const": name}, **fields)


def _object(required: list[str], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**fields, "title": {"const": "says nothing"}},
        "required": required,
        "additionalProperties": False,
    }


def _numbers(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}
