"""decode_body: decodes the JSON of a body to a typed object, with a limited cost for each turn of the event
loop.

A few bytes of JSON can stand for much memory: a list of empty lists takes sixty times as long to decode as a
text of its size, and the maximum length of a list is checked only after all of it has been made. So a large
body is first cut into its fields without decoding them. Only fields that may be large are then decoded in
pieces, after counting the contents of each piece. All other fields together may be no larger than a small
body.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Hashable, Iterator
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast, get_type_hints

import msgspec
from msgspec import inspect

from carousel.conversation import TEXT_ONLY
from carousel.server.request.field_table import EXAMPLES, FIELD_TABLES
from carousel.server.request.large_fields import LARGE_FIELDS, PromptLimits, cut_fields, decode_large
from carousel.server.request.large_json import SEGMENT_BYTES, BodyBytes, LargeJson, Span, Wait
from carousel.server.request.unknown_fields import (
    OBJECT,
    FieldFilter,
    has_float_for_integer,
    has_unknown_field,
    joined,
    type_info,
    unknown_field,
)
from runtime.base.errors import InvalidRequest
from runtime.wire.transport import DECODE_ERRORS

SMALL_BODY_BYTES = SEGMENT_BYTES
"""Size up to which a body is decoded in one piece: at worst that takes 11 ms
(docs/measurements/request_cost.md).
"""

T = TypeVar("T")
Begin: TypeAlias = Callable[[Any], Awaitable[None]]
"""Function that waits until the large fields of a body may be decoded. It gets the body with all its other
fields.
"""

_AT = re.compile(r" - at .*`\$\.?(?P<path>[^`]*)`$")
_PART = re.compile(r"\.content\[\d+\]\.type$")
_INDEX = re.compile(r"\[\d+\]")
_WRONG_TYPE = re.compile("Expected `.*, got `")
_LISTED = "Invalid enum value"
_STEP = re.compile(r"[^.\[\]]+(?=[.\[]|$)|\[\d+\]")
_FIELD = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>[^`]*)`")


async def at_once(body: Any) -> None:
    """Begin to decode large fields without a wait."""


async def decode_body(
    data: BodyBytes,
    kind: type[T],
    limits: PromptLimits,
    wait: Wait,
    fields: FieldFilter,
    begin: Begin = at_once,
) -> T:
    """Decode a body. `limits` are those of prompts in a large body, `wait` is called before each piece of
    one, and `begin` before its large fields are decoded, with the body that has the others. `fields` removes
    fields that the type does not declare. Raises InvalidRequest that names the field.
    """
    if len(data) <= SMALL_BODY_BYTES:
        return await _decode(data.first_segment, kind, fields)
    try:
        return await _decode_large(LargeJson(data, wait), kind, limits, fields, begin)
    except DECODE_ERRORS as error:
        raise _no_json(error) from None


async def _decode_large(
    large: LargeJson, kind: type[T], limits: PromptLimits, fields: FieldFilter, begin: Begin
) -> T:
    whole = await large.whole()
    if large.first(whole) != OBJECT:
        return await _decode(
            await large.read(Span(whole.start, min(whole.end, whole.start + 64))), kind, fields
        )
    large_fields = LARGE_FIELDS.get(kind, {})
    spans = await cut_fields(large, whole, kind, large_fields, SMALL_BODY_BYTES, fields)
    small = {name: await large.read(span) for name, span in spans.items() if name not in large_fields}
    _check_small(small)
    stand_ins = {name: field.stand_in for name, field in large_fields.items() if name in spans}
    body = await _decode(joined(small | stand_ins), kind, fields)
    if is_truncated(body):
        limits = PromptLimits(limits.max_ids)  # a text that does not fit is truncated
    hints = _hints_of(cast(Hashable, kind))
    await begin(body)
    for name in stand_ins:
        try:
            value = await decode_large(
                name, large, spans[name], hints[name], large_fields[name], limits, fields
            )
        except msgspec.ValidationError as error:
            raise field_error(str(error), hints[name], within=name) from None
        setattr(body, name, value)
    return body


def is_truncated(body: Any) -> bool:
    """Return True for a body that asks for its prompt to be truncated: for `/generate` in its parameters, and
    for `/v1/responses` also in other words.
    """
    if getattr(body, "truncation", None) == "auto":
        return True
    parts = (body, getattr(body, "sampling_params", None))
    return any(getattr(part, "truncate_prompt_tokens", None) is not None for part in parts)


@cache
def _hints_of(kind: Hashable) -> dict[str, Any]:
    """Return the types of the fields. Finding them out takes 3 ms, so they are cached."""
    return get_type_hints(cast(type, kind), include_extras=True)


async def _decode(data: bytes | bytearray, kind: type[T], fields: FieldFilter) -> T:
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if not _is_for_filter(error, kind):
                raise
            return msgspec.json.decode(await fields.clean(data, kind), type=kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
    except DECODE_ERRORS as error:
        raise _no_json(error) from None


def _is_for_filter(error: msgspec.ValidationError, kind: type) -> bool:
    """Return True if the filter may repair the error of a body of this type."""
    return kind in FIELD_TABLES and (has_unknown_field(error) or has_float_for_integer(error))


def _check_small(given: dict[str, bytes]) -> None:
    """Check the size of the fields that may not be large. Raises InvalidRequest."""
    num_bytes = sum(map(len, given.values()))
    if num_bytes > SMALL_BODY_BYTES:
        name = max(given, key=lambda each: len(given[each]))
        raise InvalidRequest(
            f"{name} has {len(given[name])} bytes; all fields but prompts and messages may have "
            f"{SMALL_BODY_BYTES} together",
            param=name,
        )


def _no_json(error: Exception) -> InvalidRequest:
    reason = "lists and objects are nested too deeply" if isinstance(error, RecursionError) else error
    return InvalidRequest(f"the body is not valid JSON: {reason}", code="invalid_json")


def field_error(message: str, kind: object, within: str = "") -> InvalidRequest:
    """Return the error for a fault that msgspec has found. `kind` is the decoded type, and `within` the field
    that was decoded by itself.
    """
    at = _AT.search(message)
    # msgspec does not name an entry of an object: logit_bias[...].
    path = at["path"].partition("[...]")[0] if at else ""
    choices = _choices_at(kind, path) if message.startswith(_LISTED) else []
    path = f"{within}.{path}".replace(".[", "[").removesuffix(".") if within else path
    field = _FIELD.match(message)
    if field is None:
        text = message[: at.start()] if at else message
        if _PART.search(path):
            text = f"{TEXT_ONLY}: {text}"
        elif choices:
            text += f"; it is one of {', '.join(choices)}"
        example = EXAMPLES.get(_INDEX.sub("", path))
        if example is not None and (choices or _WRONG_TYPE.match(text)):
            text += f"; it is written as {example}"
        return InvalidRequest(f"{path or 'the body'}: {text}", param=path or None)
    name = f"{path}.{field['name']}" if path else field["name"]
    if field["what"].startswith("missing"):
        return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    return unknown_field(name)


def _choices_at(kind: object, path: str) -> list[str]:
    """Return the allowed values at a path such as `messages[0].role` in a body of a type; none if there is no
    list of them.
    """
    nodes = [type_info(kind)]
    for step in _STEP.findall(path):
        nodes = [inner for node in _members(nodes) for inner in _inside(node, step)]
    return [
        str(value)
        for node in _members(nodes)
        if isinstance(node, inspect.LiteralType)
        for value in node.values
    ]


def _members(nodes: list[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield types, each member of a union by itself."""
    for node in nodes:
        if isinstance(node, inspect.Metadata):
            yield from _members([node.type])
        elif isinstance(node, inspect.UnionType):
            yield from _members(list(node.types))
        else:
            yield node


def _inside(node: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.ListType) and step.startswith("["):
        yield node.item_type
    elif isinstance(node, inspect.StructType):
        yield from (field.type for field in node.fields if field.encode_name == step)
