"""Bound on the number of characters that one token stands for, which limits a prompt before it is encoded.
There is one only if no part of a text can vanish on the way to tokens, and no text of any length can become
one token.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from runtime.text.spelling import ByteLevelSpelling

# One character is composed of at most four (U+1F82 is, for one).
_COMPOSING = {"NFC": 4, "NFKC": 4}
_KEEPING_NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"})


def max_token_chars(backend: Backend, vocabulary: Collection[str]) -> int | None:
    """Return the most characters of text for one token; None if there is no bound. vocabulary: all tokens, as
    the backend spells them.
    """
    factor = _shrinking(_state(backend.normalizer))
    if factor is None or not _keeps_all(_state(backend.pre_tokenizer)) or not _spells_all(backend):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token takes any amount of white space beside it
    # In a byte-level vocabulary a token has as many characters as bytes, so at least as many as its text.
    return factor * max(map(len, vocabulary))


def _state(component: Any) -> dict[str, Any] | None:
    return None if component is None else json.loads(component.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Return the largest factor by which a normalizer shortens a text; None if there is no bound."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        factor = 1
        for part in normalizer["normalizers"]:
            shrinking = _shrinking(part)
            if shrinking is None:
                return None
            factor *= shrinking
        return factor
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 1 <= len(pattern) <= len(normalizer["content"]) else None
    return 1 if kind in _KEEPING_NORMALIZERS else _COMPOSING.get(kind)


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer["pretokenizers"])
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _spells_all(backend: Backend) -> bool:
    """Return True if no character is unknown. Unknown characters may vanish, or a whole run of them may
    become one token.
    """
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        alphabet = list(ByteLevelSpelling().byte_of)
        kinds = f"{backend.normalizer!r} {backend.pre_tokenizer!r}"
        if "ByteLevel" not in kinds:
            return False
    return all(backend.token_to_id(token) is not None for token in alphabet)
