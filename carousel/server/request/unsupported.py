"""Fields that are known and not built: accepted in their neutral spellings, because client libraries send
those unasked, and otherwise refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from runtime.base.errors import InvalidRequest

ANY_TEXT = object()
"""Among neutral values: any string is fine; the field is a label for the operator and asks for nothing."""

Unsupported: TypeAlias = msgspec.Raw
"""Type of a field that is known and not built: its value is not looked into where it is refused anyway."""
ABSENT: Any = msgspec.field(default_factory=msgspec.Raw)
"""Default of an Unsupported field: no bytes."""
QUOTE = ord('"')
MAX_NEUTRAL_BYTES = 1 << 10
"""Longer than any neutral value but a text."""

NeutralValues: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By the field's name: the values that ask for nothing."""


def refuse_unsupported(body: msgspec.Struct, neutral: NeutralValues, where: str = "") -> None:
    """Raises InvalidRequest for the first field that asks for something that is not built."""
    for name in body.__struct_fields__:
        accepted = neutral.get(name)
        if accepted is None:
            continue
        value = getattr(body, name)
        if value and not _asks_for_nothing(value, accepted):
            raise InvalidRequest(
                f"{where}{name} is not supported by this server, except as {_spell(accepted)}",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )


def _asks_for_nothing(raw: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    if ANY_TEXT in accepted and memoryview(raw)[0] == QUOTE:
        return True
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    # True == 1 to Python, but `n: true` is a mistake.
    return any(value == each and type(value) is type(each) for each in accepted)


def neutral_schema(accepted: tuple[Any, ...]) -> dict[str, Any]:
    """The JSON Schema of such a field."""
    values = [value for value in accepted if value is not ANY_TEXT]
    if len(values) == len(accepted):
        return {"enum": values}
    return {"anyOf": [{"enum": values}, {"type": "string"}]}


def _spell(accepted: tuple[Any, ...]) -> str:
    return " or ".join(_spell_one(value) for value in accepted)


def _spell_one(value: Any) -> str:
    return "a string" if value is ANY_TEXT else msgspec.json.encode(value).decode()
