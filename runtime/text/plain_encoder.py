"""PlainEncoder: a tokenizer that encodes marked special tokens (runtime.text.special_text) as plain
characters.

It is the model's tokenizer with one more step before the others, which turns marks back into characters.
Special tokens are matched before that step, so unmarked ones, which come from the template, still become
tokens, and all other text is encoded as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from tokenizers import AddedToken, Encoding, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer

from runtime.base.errors import InvalidRequest
from runtime.text.special_text import ESCAPE, ShieldedText, SpecialText
from runtime.wire.format import IntArray


class PlainEncoder:
    def __init__(self, backend: Backend) -> None:
        """backend: tokenizer whose vocabulary is shared, unless its model could turn plain characters into a
        special token.
        """
        added = sorted(backend.get_added_tokens_decoder().items())
        special = {token.content: token_id for token_id, token in added if token.special}
        marks = SpecialText(special).marks
        # A character that the model does not know is one that it may say it does not know.
        unknown = {token.id for token in backend.model.tokenize(ESCAPE)}
        self._reserved = np.array(sorted(set(special.values()) - unknown), np.int32)
        self._letters = re.compile(f"[{''.join(mark[-1] for mark in marks.values())}]")
        self._backend = Backend(backend.model)
        self._backend.normalizer = _reading(marks, backend.normalizer)
        self._backend.pre_tokenizer = backend.pre_tokenizer
        if self._spells_special(special):
            self._backend.model = _without_pieces(backend.model, set(special))
        self._add([token for _, token in added])
        self._real_ids = np.arange(self._backend.get_vocab_size(with_added_tokens=True), dtype=np.int32)
        for token_id, token in added:
            self._real_ids[self._backend.token_to_id(token.content)] = token_id

    def encode_batch(self, texts: Sequence[ShieldedText]) -> list[IntArray]:
        """Return the ids of each text, int32, in order, without added special tokens. Raises InvalidRequest
        if the model would still turn marked characters into a special token.
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [self._checked(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def ids_of(self, text: str) -> IntArray:
        """Return the ids of a text, or of part of one, as encode_batch does."""
        return self.places_of(text)[1]

    def places_of(self, text: str) -> tuple[Encoding, IntArray]:
        """Return the library's encoding of a text, or of part of one, and its ids, as encode_batch does."""
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return encoding, self._checked(text, encoding)

    def _checked(self, text: str, encoding: Encoding) -> IntArray:
        ids = self._real_ids[np.array(encoding.ids, np.int32)]
        places = np.flatnonzero(np.isin(ids, self._reserved))
        for place in places.tolist():
            start, end = encoding.token_to_chars(place) or (0, 0)
            if self._letters.search(text, start, end) is not None:
                raise InvalidRequest(
                    "messages: this model's tokenizer knows no other way to write a special token than the "
                    "token itself; leave it out, or launch with --allow-special-tokens",
                    param="messages",
                )
        return ids

    def _spells_special(self, special: dict[str, int]) -> bool:
        """Return True if the model turns a special token's characters into that token. Call it before tokens
        are added.
        """
        spellings = list(special)
        texts = [*spellings, *(f"a {each} {each}{each}a" for each in spellings)]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return any(np.isin(encoding.ids, self._reserved).any() for encoding in encodings)

    def _add(self, tokens: list[AddedToken]) -> None:
        """Add tokens in the order of their ids, special ones so that they are matched before any step."""
        for is_special, run in groupby(tokens, key=lambda token: bool(token.special)):
            if is_special:
                self._backend.add_special_tokens([_unnormalized(token) for token in run])
            else:
                self._backend.add_tokens(list(run))


def _reading(marks: dict[str, str], normalizer: Normalizer | None) -> Normalizer:
    steps: list[Normalizer] = [normalizers.Replace(mark, char) for char, mark in marks.items()]
    return normalizers.Sequence([*steps, normalizer] if normalizer is not None else steps)


def _unnormalized(token: AddedToken) -> AddedToken:
    """Return the token so that it is matched in the original text; in the normalized text marks are
    characters again.
    """
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _without_pieces(model: Model, pieces: set[str]) -> Model:
    """Return the same model without the ability to form `pieces` from other characters. Ids stay the same."""
    state: dict[str, Any] = json.loads(model.__getstate__())
    kept = {state.get("unk_token")}
    # The new names are random, so no text contains them.
    names = {piece: f"{ESCAPE}{secrets.token_hex(16)}" for piece in pieces - kept}
    vocab = state["vocab"]
    if isinstance(vocab, dict):
        state["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        state["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in state:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in state["merges"]]
        state["merges"] = [pair for pair in pairs if not pieces.intersection((*pair, "".join(pair)))]
    rebuilt: Model = Backend.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": state})
    ).model
    return rebuilt
