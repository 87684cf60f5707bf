"""LARGE_FIELDS: the fields of bodies that may hold megabytes, and how they are decoded piece by piece."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from carousel.conversation import MessageBody, TextPart
from carousel.server.anthropic.types import (
    MAX_BLOCKS,
    BlockBody,
    CountTokensBody,
    MessagesBody,
    TextBlock,
    TurnBody,
)
from carousel.server.openai.embedding_types import MAX_INPUTS, EmbeddingBody
from carousel.server.openai.types import MAX_PROMPTS, ChatBody, CompletionBody
from carousel.server.request.large_json import PIECE_BYTES, QUOTE, LargeJson, Span, TooManyChars, TooManyParts
from carousel.server.request.unknown_fields import (
    LIST,
    MAX_FIELDS,
    OBJECT,
    FieldFilter,
    has_float_for_integer,
    has_unknown_field,
    joined,
    whole_list,
)
from carousel.server.responses.types import InputItem, InputPart, ResponsesBody
from carousel.server.sglang.generate_types import GenerateBody
from carousel.server.sglang.tokenize_types import DetokenizeBody, TokenizeBody
from carousel.server.vectors.scoring_types import RerankBody, ScoreBody
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_TURNS
from runtime.wire.messages import MAX_FURTHER_BYTES, MAX_TOOLS_BYTES
from runtime.wire.sampling_params import TokenId

GROUP_BYTES = PIECE_BYTES // 2
"""Size up to which a value, or several consecutive ones together, is decoded at once."""
MAX_MESSAGE_STRINGS = 5 * MAX_TURNS
"""Maximum number of names and values in all messages. A message has four, for its role and its text, and each
text part four; a tool call has ten.
"""
_NONE_BOUNDED: Mapping[str, int] = {}

_PLACE = re.compile(r" - at `\$(?:\[(?P<number>\d+)\])?(?P<rest>[^`]*)`$")
"""Place of a fault in msgspec's message."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Objects of a large list: the messages of a conversation, or parts of one."""

    kind: Any
    large: tuple[str, ...]
    """Fields with a text that must fit, or a list of `items`."""
    items: Shape | None = None
    texts: tuple[str, ...] = ()
    """Texts of an earlier answer, such as its reasoning."""
    calls: tuple[str, ...] = ()
    """Fields with tool calls of an earlier answer."""
    max_items: int = MAX_MESSAGE_STRINGS
    """Maximum number of such objects in a list."""

    @property
    def bounded(self) -> dict[str, int]:
        """Return the maximum number of bytes of the fields of an earlier answer."""
        return dict.fromkeys((*self.texts, *self.calls), MAX_FURTHER_BYTES)


MESSAGES = Shape(
    MessageBody,
    ("content",),
    Shape(TextPart, ("text",)),
    ("reasoning_content", "reasoning"),
    ("tool_calls",),
    MAX_TURNS,
)
INPUT_ITEMS = Shape(
    InputItem,
    ("content", "output"),
    Shape(InputPart, ("text",)),
    ("arguments", "input"),
    ("summary",),
    MAX_TURNS,
)
TEXT_BLOCKS = Shape(TextBlock, ("text",), max_items=MAX_BLOCKS)
BLOCKS = Shape(BlockBody, ("text", "content"), TEXT_BLOCKS, ("thinking",), ("input",), MAX_BLOCKS)
TURNS = Shape(TurnBody, ("content",), BLOCKS, max_items=MAX_TURNS)


@dataclass(frozen=True, slots=True)
class LargeField:
    """Field that holds one or several prompts in OpenAI's forms: as texts, as token ids, or both."""

    max_items: int = MAX_PROMPTS
    """Maximum number of texts or lists of ids."""
    has_texts: bool = True
    has_ids: bool = True
    items: Shape | None = None
    """Objects of the field's list, if it may be a list of objects."""
    is_for_model: bool = True
    """True if each text, also that of each message, must fit into the model's context: chat templates are not
    expected to leave out more of a message than the model can read.
    """
    max_raw_bytes: int = 0
    """Maximum number of bytes of a field that stays JSON; 0: the field is decoded."""

    @property
    def stand_in(self) -> bytes:
        """Return a small value for the field, used while the other fields are decoded."""
        return b"[]" if self.max_raw_bytes or not self.has_texts else b'""'


async def no_bound() -> None:
    """Return None: no limit on characters."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a prompt, beyond which no more of it is decoded."""

    max_ids: int
    """Maximum number of token ids in each list."""
    max_chars: Callable[[], Awaitable[int | None]] = no_bound
    """Function that returns the maximum number of characters of a text that may fit; None for no limit."""


PROMPT = LargeField()
TEXTS = LargeField(has_ids=False)
IDS = LargeField(has_texts=False)
CONVERSATION = LargeField(has_texts=False, has_ids=False, items=MESSAGES)
TOOLS = LargeField(max_raw_bytes=MAX_TOOLS_BYTES)
LARGE_FIELDS: dict[type, dict[str, LargeField]] = {
    CompletionBody: {"prompt": PROMPT},
    ChatBody: {"messages": CONVERSATION, "tools": TOOLS},
    ResponsesBody: {"input": LargeField(items=INPUT_ITEMS), "instructions": TEXTS, "tools": TOOLS},
    **{
        kind: {
            "messages": LargeField(
                has_texts=False, has_ids=False, items=TURNS, is_for_model=kind is MessagesBody
            ),
            "system": LargeField(has_ids=False, items=TEXT_BLOCKS, is_for_model=kind is MessagesBody),
            "tools": TOOLS,
        }
        for kind in (MessagesBody, CountTokensBody)
    },
    GenerateBody: {"text": TEXTS, "input_ids": IDS},
    EmbeddingBody: {"input": LargeField(MAX_INPUTS)},
    ScoreBody: dict.fromkeys(("text_1", "text_2"), LargeField(MAX_INPUTS, has_ids=False)),
    RerankBody: {"documents": LargeField(MAX_INPUTS, has_ids=False)},
    TokenizeBody: {
        "prompt": LargeField(has_ids=False, is_for_model=False),
        "messages": LargeField(has_texts=False, has_ids=False, items=MESSAGES, is_for_model=False),
    },
    DetokenizeBody: {"tokens": IDS},
}


async def cut_fields(
    body: LargeJson,
    span: Span,
    kind: Any,
    large: Collection[str],
    most_bytes: int,
    filter_: FieldFilter,
    where: str = "",
    bounded: Mapping[str, int] = _NONE_BOUNDED,
) -> dict[str, Span]:
    """Return the places of the fields that an object's type `kind` declares; others go through `filter_`.
    Each field that is neither `large` nor in `bounded`, which has other limits, may have `most_bytes`.
    `where` comes before names in errors.

    Raises: msgspec.DecodeError, InvalidRequest.
    """

    def max_bytes(name: str) -> int:
        return span.size if name in large else bounded.get(name, most_bytes)

    given: dict[str, Span] = {}
    try:
        async for name, value in body.fields(span, MAX_FIELDS, max_bytes):
            is_declared = name in kind.__struct_fields__
            if value.size > max_bytes(name):
                filter_.check_large(kind, name, where)
                reason = (
                    "" if name in bounded else ", as much as all fields but prompts and messages may have"
                )
                raise InvalidRequest(
                    f"{where}{name} has more than {max_bytes(name)} bytes{reason}", param=f"{where}{name}"
                )
            if is_declared or filter_.keeps(kind, name, await body.read(value), where):
                given[name] = value
    except TooManyParts:
        raise InvalidRequest(f"{where or 'the body '}has more than {MAX_FIELDS} fields") from None
    return given


async def decode_large(
    name: str,
    body: LargeJson,
    span: Span,
    kind: Any,
    field: LargeField,
    limits: PromptLimits,
    filter_: FieldFilter,
) -> Any:
    """Return the value of a field of the type `kind`. A prompt beyond its limits is refused before all of it
    is decoded. `filter_` handles fields that messages do not declare.

    Raises: msgspec's errors, InvalidRequest.
    """
    if field.max_raw_bytes:
        if span.size > field.max_raw_bytes:
            raise InvalidRequest(f"{name}: at most {field.max_raw_bytes} bytes, got {span.size}", param=name)
        return msgspec.Raw(await body.read(span))
    if not field.is_for_model:
        limits = PromptLimits(limits.max_ids)
    first = body.first(span)
    if span.size > GROUP_BYTES and first == QUOTE and field.has_texts:
        return await _text_that_fits(name, name, body, span, limits)
    if span.size <= GROUP_BYTES or first != LIST:
        data = await _beginning(body, span)
        if field.items is not None and first == LIST:
            return await _cleaned(data, field.items.kind, name, "", 0, filter_)
        return _whole(data, kind, "")
    if field.items is not None:
        return await _Conversation(name, body, limits, filter_).objects(span, field.items)
    try:
        return await _Prompts(name, body, field, limits).decode(span)
    except TooManyParts:
        raise _too_many(name, field.max_items) from None


async def _beginning(body: LargeJson, span: Span) -> bytes:
    """Return a small value itself, and for a large one a small value of the same kind."""
    if span.size <= GROUP_BYTES:
        return await body.read(span)
    kinds = {QUOTE: b'""', LIST: b"[]", OBJECT: b"{}"}
    return kinds.get(body.first(span)) or await body.read(Span(span.start, span.start + GROUP_BYTES))


async def _text_that_fits(name: str, where: str, body: LargeJson, span: Span, limits: PromptLimits) -> str:
    """Return a text of more than a few pieces. Raises InvalidRequest if it cannot fit, whatever its tokens
    are. `name` is the field, and `where` the place of the text in it.
    """
    max_chars = await limits.max_chars()
    try:
        return await body.text(span, max_chars)
    except TooManyChars:
        raise InvalidRequest(
            f"{where}: more than {max_chars} characters are more than the longest sequence has, whatever "
            "their tokens are; send less",
            param=name,
            code="context_length_exceeded",
        ) from None


class _Prompts:
    """List of texts, of token ids, or of lists of token ids."""

    def __init__(self, name: str, body: LargeJson, field: LargeField, limits: PromptLimits) -> None:
        self._name = name
        self._body = body
        self._field = field
        self._limits = limits

    async def decode(self, span: Span) -> list[str] | list[int] | list[list[int]]:
        inner = await self._body.inside(span)
        first = self._body.first(inner)
        if first == QUOTE and self._field.has_texts:
            return [await self._text(number, each) async for number, each in self._numbered(span)]
        if first in (QUOTE, OBJECT) or not self._field.has_ids:
            expected = " or ".join(["texts"] * self._field.has_texts + ["token ids"] * self._field.has_ids)
            raise InvalidRequest(f"{self._name} must be {expected}", param=self._name)
        if first == LIST:
            return [await self._list(number, each) async for number, each in self._numbered(span)]
        return await self._ids(inner)

    async def _numbered(self, span: Span) -> AsyncIterator[tuple[int, Span]]:
        number = 0
        async for each in self._body.elements(span, self._field.max_items):
            yield number, each
            number += 1

    async def _text(self, number: int, span: Span) -> str:
        if span.size <= GROUP_BYTES or self._body.first(span) != QUOTE:
            text: str = _decode(await _beginning(self._body, span), str, f"[{number}]")
            return text
        return await _text_that_fits(self._name, f"{self._name}[{number}]", self._body, span, self._limits)

    async def _list(self, number: int, span: Span) -> list[int]:
        if self._body.first(span) != LIST:
            raise InvalidRequest(
                f"{self._name} must be all text, all token ids or all lists of token ids", param=self._name
            )
        return await self._ids(await self._body.inside(span), f"[{number}]")

    async def _ids(self, span: Span, where: str = "") -> list[int]:
        """Return the numbers between commas. `where` is the place of their list in the field."""
        ids: list[int] = []
        async for piece in self._body.comma_pieces(span):
            num_ids = piece.count(b",") + 1
            if len(ids) + num_ids > self._limits.max_ids:
                raise InvalidRequest(
                    f"{self._name}: more than {self._limits.max_ids} token ids; the longest sequence ends "
                    "there",
                    param=self._name,
                    code="context_length_exceeded",
                )
            part = _whole(b"[" + piece + b"]", list[TokenId], where, len(ids))
            if len(part) != num_ids:
                raise msgspec.DecodeError("a number is missing between two commas")
            ids += part
        return ids


class _Conversation:
    """List of messages, each with a text or a list of parts; or a list of such parts."""

    def __init__(self, name: str, body: LargeJson, limits: PromptLimits, filter_: FieldFilter) -> None:
        self._name = name
        self._body = body
        self._limits = limits
        self._filter = filter_
        self._num_strings = 0

    async def objects(self, span: Span, shape: Shape) -> list[Any]:
        return await self._list("", span, shape)

    async def _list(self, where: str, span: Span, shape: Shape) -> list[Any]:
        """Return the objects of a list. `where` is the place of the list, within the conversation."""
        items: list[Any] = []
        group = Span(0, 0)
        """Consecutive small objects."""
        try:
            async for each in self._body.elements(span, shape.max_items):
                is_large = each.size > GROUP_BYTES
                if group.size and (is_large or each.end - group.start > GROUP_BYTES):
                    items += await self._small(where, len(items), group, shape.kind)
                    group = Span(0, 0)
                if is_large:
                    items.append(await self._large(where, len(items), each, shape))
                else:
                    group = Span(group.start if group.size else each.start, each.end)
        except TooManyParts:
            raise _too_many(f"{self._name}{where}", shape.max_items) from None
        if group.size:
            items += await self._small(where, len(items), group, shape.kind)
        return items

    async def _small(self, where: str, number: int, span: Span, kind: Any) -> list[Any]:
        """Decode consecutive objects, the first of which is number `number`."""
        data = await self._body.read(span)
        self._count(count_strings(data))
        return await _cleaned(b"[" + data + b"]", kind, self._name, where, number, self._filter)

    async def _large(self, in_list: str, number: int, span: Span, shape: Shape) -> Any:
        """Decode the object number `number` of the list `in_list`."""
        where, kind = f"{in_list}[{number}]", shape.kind
        if self._body.first(span) != OBJECT:
            return _decode(await _beginning(self._body, span), kind, where)
        path = f"{self._name}{where}."
        spans = await cut_fields(
            self._body, span, kind, shape.large, GROUP_BYTES, self._filter, path, shape.bounded
        )
        made: dict[str, Any] = {}
        """Values that are decoded by themselves."""
        fields: dict[str, bytes] = {}
        for name, value in spans.items():
            first = self._body.first(value)
            is_large = name in shape.large
            if is_large and first == LIST and shape.items is not None:
                made[name] = await self._list(f"{where}.{name}", value, shape.items)
            elif first == QUOTE and is_large:
                made[name] = await _text_that_fits(
                    self._name, f"{path}{name}", self._body, value, self._limits
                )
            elif first == QUOTE and name in shape.texts:
                made[name] = await self._body.text(value)
            elif is_large:
                fields[name] = await _beginning(self._body, value)
            else:
                fields[name] = await self._body.read(value)
        data = joined(fields | dict.fromkeys(made, b'""'))
        self._count(count_strings(data))
        (item,) = await _cleaned(b"[" + data + b"]", kind, self._name, in_list, number, self._filter)
        for name, text in made.items():
            setattr(item, name, text)
        return item

    def _count(self, num_strings: int) -> None:
        self._num_strings += num_strings
        if self._num_strings > MAX_MESSAGE_STRINGS:
            raise InvalidRequest(
                f"{self._name}: more than {MAX_MESSAGE_STRINGS} texts and names, with those of all parts; "
                "send fewer",
                param=self._name,
            )


def _too_many(where: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"{where}: at most {most} of them are taken", param=where)


async def _cleaned(
    data: bytes, kind: Any, name: str, where: str, number: int, filter_: FieldFilter
) -> list[Any]:
    """Decode a list of objects, without fields that their type does not declare."""
    try:
        items: list[Any] = _decode(data, list[kind], where, number)
    except msgspec.ValidationError as error:
        if not has_unknown_field(error):
            raise
        data = await filter_.clean_list(data, kind, f"{name}{where}", number)
        items = _decode(data, list[kind], where, number)
    return items


def _decode(data: bytes, kind: Any, where: str, number: int = 0) -> Any:
    """Decode a part of a large value. `where` is its place there, and `number` the number of its first
    element.

    Raises: msgspec's errors, which name the place in the large value.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        place = _PLACE.search(message)
        if place is None:
            raise msgspec.ValidationError(f"{message} - at `${where}`") from None
        index = f"[{number + int(place['number'])}]" if place["number"] else ""
        raise msgspec.ValidationError(
            f"{message[: place.start()]} - at `${where}{index}{place['rest']}`"
        ) from None


def _whole(data: bytes, kind: Any, where: str, number: int = 0) -> Any:
    """Decode a part of a large value in which whole numbers may have a point. Raises as `_decode` does."""
    try:
        return _decode(data, kind, where, number)
    except msgspec.ValidationError as error:
        if not has_float_for_integer(error):
            raise
        return _decode(whole_list(data), kind, where, number)


def count_strings(data: bytes) -> int:
    """Return the number of strings in a piece of JSON, including the names of fields."""
    plain = data.replace(b"\\\\", b"") if b"\\" in data else data
    return (plain.count(b'"') - plain.count(b'\\"')) // 2
