"""without_long_texts: a message as its receiver checks it, without what takes long and cannot be wrong."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from runtime.wire.format import MAX_TEXT_CHARS
from runtime.wire.messages import GenerateRequest, ToTokenizer

LONG_CHARS = 1 << 16


def without_long_texts(message: ToTokenizer) -> ToTokenizer:
    """Return the message with empty texts in the place of long ones that are within their bounds."""
    if not isinstance(message, GenerateRequest):
        return message
    messages = message.messages and tuple(
        replace(each, content="") if _is_long(each.content) else each for each in message.messages
    )
    return replace(message, text="" if _is_long(message.text) else message.text, messages=messages)


def _is_long(text: Any) -> bool:
    return isinstance(text, str) and LONG_CHARS < len(text) <= MAX_TEXT_CHARS
