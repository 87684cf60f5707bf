"""Spelling: the bytes that a vocabulary's spelling of a token stands for. Knows spellings, not ids.

byte level       "Ġdef"    each character is one byte, spelled so that it can be printed
sentencepiece    "▁def"    text, with a mark for the space; "<0xE6>" is one byte of a rare character
any other        "##ing"   the text depends on the neighbouring tokens
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from tokenizers import decoders
from tokenizers.decoders import Decoder

NO_BYTE = "\uffff"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling(Protocol):
    def bytes_of(self, token: str) -> bytes | None:
        """Return the bytes that a token stands for by itself; None if they depend on its neighbours."""


def spelling_of(decoder: Decoder | None) -> Spelling:
    """Return the spelling that this decoder reads."""
    if isinstance(decoder, decoders.ByteLevel):
        return ByteLevelSpelling()
    steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
    for step in steps:
        if step["type"] == "Metaspace":
            return SentencePieceSpelling(step["replacement"], has_bytes=False)
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            has_bytes = any(other["type"] == "ByteFallback" for other in steps)
            return SentencePieceSpelling(step["pattern"]["String"], has_bytes=has_bytes)
    return ContextualSpelling()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


class ByteLevelSpelling:
    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self.byte_of = {chr(byte): byte for byte in printable}
        """The byte that each character spells: itself if it is printable, else one of the characters from
        U+0100 on.
        """
        self.byte_of.update({chr(256 + n): byte for n, byte in enumerate(others)})
        # A spelling that stands for no byte must not be taken for one.
        self._to_latin_1 = dict.fromkeys(others, NO_BYTE) | {ord(c): b for c, b in self.byte_of.items()}

    def bytes_of(self, token: str) -> bytes:
        try:
            return token.translate(self._to_latin_1).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()  # an added token is spelled as its text


class SentencePieceSpelling:
    def __init__(self, space: str, *, has_bytes: bool) -> None:
        self._space = space
        self._has_bytes = has_bytes

    def bytes_of(self, token: str) -> bytes:
        if self._has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self._space, " ").encode()


class ContextualSpelling:
    def bytes_of(self, token: str) -> None:
        return None
