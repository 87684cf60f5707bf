"""decode_body: a typed body from its JSON, at a bounded cost for each turn of the event loop.

JSON of a few bytes can stand for much memory: a list of empty lists takes sixty times as long to decode as a
text of its size, and the maximum of a list is compared when all of it has been made. So a large body is first
cut into its fields, which makes nothing of them. Only fields that may be large are then looked at further, in
pieces, after counting what they hold; the others may have no more together than a small body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Raw

from carousel.server.request.large_fields import LARGE_FIELDS, decode_large
from runtime.base.errors import InvalidRequest
from runtime.wire.transport import DECODE_ERRORS

SMALL_BODY_BYTES = 128 << 10
"""Size up to which a body is decoded in one piece: 11 ms for the worst that it can hold
(docs/measurements/request_cost.md).
"""

T = TypeVar("T")

_AT = re.compile(r" - at .*`\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>[^`]*)`")
_ABSENT = Raw(b"")


async def decode_body(data: bytes | bytearray, kind: type[T], max_ids: int) -> T:
    """`max_ids`: the most token ids that any list of them may have. Raises InvalidRequest that names the
    field.
    """
    if len(data) <= SMALL_BODY_BYTES:
        return _decode(data, kind)
    await asyncio.sleep(0)
    fields: Any = _decode(data, _cut(cast(Hashable, kind)))
    given = {name: value for name in _names(kind) if len(value := getattr(fields, name))}
    large = {name: given[name] for name in LARGE_FIELDS.get(kind, {}) if name in given}
    _check_small({name: value for name, value in given.items() if name not in large})
    for name, field in LARGE_FIELDS.get(kind, {}).items():
        if name in large:
            given[name] = field.stand_in
    body = _decode(b"{" + b",".join(b'"%b":%b' % (name.encode(), given[name]) for name in given) + b"}", kind)
    hints = get_type_hints(kind, include_extras=True)
    for name, value in large.items():
        await asyncio.sleep(0)
        try:
            decoded = await decode_large(name, value, hints[name], LARGE_FIELDS[kind][name], max_ids)
        except msgspec.ValidationError as error:
            raise _field_error(str(error), within=name) from None
        except DECODE_ERRORS as error:
            raise _no_json(error) from None
        setattr(body, name, decoded)
    await asyncio.sleep(0)
    return body


def _decode(data: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except DECODE_ERRORS as error:
        raise _no_json(error) from None


@cache
def _cut(kind: Hashable) -> Any:
    """Return a type with the same fields, none of which is looked into."""
    fields = [(name, Raw, _ABSENT) for name in _names(kind)]
    return msgspec.defstruct("Cut", fields, forbid_unknown_fields=True)


def _names(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__struct_fields__
    return names


def _check_small(given: dict[str, Raw]) -> None:
    """Raises InvalidRequest."""
    num_bytes = sum(map(len, given.values()))
    if num_bytes > SMALL_BODY_BYTES:
        name = max(given, key=lambda each: len(given[each]))
        raise InvalidRequest(
            f"{name} has {len(given[name])} bytes; all fields but prompts and messages may have "
            f"{SMALL_BODY_BYTES} together",
            param=name,
        )


def _no_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json")


def _field_error(message: str, within: str = "") -> InvalidRequest:
    """`within`: the field that was decoded by itself."""
    at = _AT.search(message)
    # An entry of an object has no name there: logit_bias[...].
    path = at["path"].partition("[...]")[0] if at else ""
    path = f"{within}.{path}".replace(".[", "[").removesuffix(".") if within else path
    field = _FIELD.match(message)
    if field is None:
        text = message[: at.start()] if at else message
        return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)
    name = f"{path}.{field['name']}" if path else field["name"]
    if field["what"].startswith("missing"):
        return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    return InvalidRequest(f"{name} is not a parameter of this endpoint", param=name, code="unknown_parameter")
