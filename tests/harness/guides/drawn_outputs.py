"""Outputs drawn among the tokens that masks allow, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from grammar_proc.backend import BackendVocabulary, Matcher
from runtime.settings.config import DEMO_MODEL

END_SHARE = 0.3
"""How often an output that may end does."""
CLOSE_SHARE = 0.4
"""How often a sign that closes something is preferred, so that most outputs end."""
CLOSING = ('"', "}", "]")


class Outputs:
    """Outputs over the demo tokenizer, from one seed."""

    def __init__(self, vocabulary: BackendVocabulary[Any], seed: int) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)
        self._tokenizer: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self._closing = {self._tokenizer.token_to_id(sign) for sign in CLOSING}

    def text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def allowed(self, matcher: Matcher) -> list[int]:
        """Return the ids of a mask, which has to be one: bits of 32-bit words, as many as there are ids."""
        mask, _ = self._vocabulary.timed_mask(matcher)
        assert mask.dtype == np.int32
        assert mask.shape == (self._tokenizer.get_vocab_size() // 32,)
        ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return ids

    def check_texts(self, start: Matcher, right: Sequence[str], wrong: Sequence[str]) -> None:
        """See that a grammar has the right texts, and none of the wrong ones."""
        for text in right:
            matcher = start.deep_copy()
            assert matcher.consume_tokens(self.ids(text)), text
            assert matcher.is_accepting(), text
        for text in wrong:
            matcher = start.deep_copy()
            assert not (matcher.consume_tokens(self.ids(text)) and matcher.is_accepting()), text

    def draw(self, start: Matcher, most: int = 400) -> str | None:
        """Return one output from the beginning; None: it did not end within so many tokens."""
        matcher, ids = start.deep_copy(), list[int]()
        while len(ids) < most:
            allowed = self.allowed(matcher)
            if matcher.is_accepting() and (not allowed or self._rng.random() < END_SHARE):
                return self.text(ids)
            assert allowed, f"nothing may follow {self.text(ids)!r}"
            closing = [token for token in allowed if token in self._closing]
            prefers = closing and self._rng.random() < CLOSE_SHARE
            ids.append(self._rng.choice(closing if prefers else allowed))
            assert matcher.consume_token(ids[-1]), f"the mask has a token that does not match {ids}"
        return None
