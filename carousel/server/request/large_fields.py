"""LARGE_FIELDS: the fields of bodies that may hold megabytes, and how these are decoded piece by piece."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from carousel.server.openai.embedding_types import MAX_INPUTS, EmbeddingBody
from carousel.server.openai.types import MAX_PROMPTS, ChatBody, CompletionBody
from carousel.server.sglang.generate_types import GenerateBody
from carousel.server.sglang.tokenize_types import DetokenizeBody, TokenizeBody
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_TURNS
from runtime.wire.sampling_params import TokenId

PIECE_BYTES = 256 << 10
"""Bytes of token ids, decoded in one turn of the event loop: 3 ms."""
LIST = ord("[")
MAX_MESSAGE_STRINGS = 5 * MAX_TURNS
"""Names and values in all messages. A message has four, of its role and its text, and each text part four."""

_IDS = msgspec.json.Decoder(list[TokenId])
_TEXTS = msgspec.json.Decoder(list[str])


@dataclass(frozen=True, slots=True)
class LargeField:
    """A prompt or several, in the forms that OpenAI has: as texts, as token ids, or both."""

    max_items: int = MAX_PROMPTS
    """Texts or lists of ids."""
    has_texts: bool = True
    has_ids: bool = True
    is_conversation: bool = False

    @property
    def stand_in(self) -> msgspec.Raw:
        """A value that the field may hold while the others are decoded."""
        return msgspec.Raw(b"[]" if self.is_conversation or not self.has_texts else b'""')


PROMPT = LargeField()
TEXTS = LargeField(has_ids=False)
IDS = LargeField(has_texts=False)
CONVERSATION = LargeField(is_conversation=True)
LARGE_FIELDS: dict[type, dict[str, LargeField]] = {
    CompletionBody: {"prompt": PROMPT},
    ChatBody: {"messages": CONVERSATION},
    GenerateBody: {"text": TEXTS, "input_ids": IDS},
    EmbeddingBody: {"input": LargeField(MAX_INPUTS)},
    TokenizeBody: {"prompt": TEXTS, "messages": CONVERSATION},
    DetokenizeBody: {"tokens": IDS},
}


async def decode_large(name: str, value: msgspec.Raw, kind: Any, field: LargeField, max_ids: int) -> Any:
    """The value of a field of the type `kind`. `max_ids`: in each list of token ids, at most; what has more
    is refused before it is decoded.

    Raises: msgspec's errors, InvalidRequest.
    """
    if len(value) <= PIECE_BYTES // 4 or memoryview(value)[0] != LIST:
        return msgspec.json.decode(value, type=kind)
    data = bytes(value).strip()
    if field.is_conversation:
        if count_strings(data) > MAX_MESSAGE_STRINGS:
            raise InvalidRequest(
                f"{name}: more than {MAX_MESSAGE_STRINGS} texts and names; send fewer messages or parts",
                param=name,
            )
        return msgspec.json.decode(data, type=kind)
    if b'"' in data and field.has_texts:
        if (num_texts := count_strings(data)) > field.max_items:
            raise _too_many(name, field, num_texts)
        # Not `kind`: where that takes lists of ids as well, texts between them cost as much as those.
        return _TEXTS.decode(data)
    if b'"' in data or b"{" in data or not field.has_ids:
        expected = " or ".join(["texts"] * field.has_texts + ["token ids"] * field.has_ids)
        raise InvalidRequest(f"{name} must be {expected}", param=name)
    return await _id_lists(name, data, field, max_ids)


def count_strings(data: bytes) -> int:
    """Strings in a piece of JSON, the names of an object's fields included."""
    plain = data.replace(b"\\\\", b"") if b"\\" in data else data
    return (plain.count(b'"') - plain.count(b'\\"')) // 2


async def _id_lists(name: str, data: bytes, field: LargeField, max_ids: int) -> list[int] | list[list[int]]:
    """Decode token ids, or lists of them, from JSON without strings and objects, in which every bracket and
    comma is a list's. Raises msgspec's errors, InvalidRequest.
    """
    if not data.endswith(b"]"):
        raise msgspec.DecodeError("the list does not end")
    num_lists = data.count(b"[") - 1
    if not num_lists:
        return await _ids(name, data[1:-1], max_ids)
    if num_lists > field.max_items:
        raise _too_many(name, field, num_lists)
    lists: list[list[int]] = []
    for part in data[1:-1].strip().removesuffix(b"]").split(b"]"):
        between, _, ids = part.partition(b"[")
        if between.strip() != (b"," if lists else b""):
            raise InvalidRequest(
                f"{name} must be all text, all token ids or all lists of token ids", param=name
            )
        lists.append(await _ids(name, ids, max_ids))
    return lists


async def _ids(name: str, data: bytes, max_ids: int) -> list[int]:
    """The numbers between commas. Raises msgspec's errors, InvalidRequest."""
    if (num_ids := data.count(b",") + 1) > max_ids:
        raise InvalidRequest(
            f"{name}: {num_ids} token ids, at most {max_ids} are taken; the longest sequence ends there",
            param=name,
            code="context_length_exceeded",
        )
    data = data.strip()
    ids: list[int] = []
    start = 0
    while start < len(data):
        end = data.find(b",", start + PIECE_BYTES)
        piece = data[start : len(data) if end < 0 else end]
        part = _IDS.decode(b"[" + piece + b"]")
        if len(part) != piece.count(b",") + 1:
            raise msgspec.DecodeError("a number is missing between two commas")
        ids += part
        start += len(piece) + 1
        await asyncio.sleep(0)
    return ids


def _too_many(name: str, field: LargeField, number: int) -> InvalidRequest:
    return InvalidRequest(f"{name}: at most {field.max_items} of them, got {number}", param=name)
