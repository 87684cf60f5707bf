"""Vocabulary of xgrammar's matchers over the tokenizer's ids, and the masks that they give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xgrammar

from grammar_proc.vocabulary import WORD_BITS, others_of, probes_of, read_tokenizer
from grammar_proc.xgrammar_backend.guides import ebnf_of
from runtime.wire.format import IntArray
from runtime.wire.guide import Guide

NO_TEXT = b"\xff"
"""Bytes of a special token. No text contains them, and xgrammar could not accept a token without bytes even
by its id.
"""


class XGrammarMatcher:
    """Position of an output in a grammar of xgrammar."""

    __slots__ = ("_error", "inner")

    def __init__(self, inner: xgrammar.GrammarMatcher | None, error: str = "") -> None:
        """`inner` is None if there is an error."""
        self.inner = inner
        self._error = error

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def is_accepting(self) -> bool:
        return self.inner is not None and not self._error and bool(self.inner.is_completed())

    def deep_copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(None if self.inner is None else self.inner.fork(), self._error)

    def consume_token(self, token: int, /) -> bool:
        if self.inner is None or self._error:
            return False
        if not self.inner.accept_token(token):
            self._error = f"token {token} does not match"
        return not self._error

    def consume_tokens(self, tokens: list[int], /) -> bool:
        return all(self.consume_token(token) for token in tokens)


class XGrammarVocabulary:
    """The tokenizer's ids with their bytes, read by llguidance, so that both backends allow the same. Special
    tokens have no text, so a grammar allows one by its id alone.
    """

    def __init__(self, directory: Path, num_threads: int) -> None:
        """Read the tokenizer of a directory. Raises ModelError."""
        tokenizer, self.special = read_tokenizer(directory)
        num_ids = tokenizer.vocab_size
        known = [
            NO_TEXT if tokenizer.is_special_token(number) else tokenizer.decode_bytes([number])
            for number in range(num_ids)
        ]
        info = xgrammar.TokenizerInfo(known, xgrammar.VocabType.RAW, stop_token_ids=[])
        # No threads: the caller is a child process or a thread of low priority.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._num_words = -(-num_ids // WORD_BITS)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)
        self._others = others_of(tokenizer)

    def grammar_of(self, guide: Guide) -> str:
        return ebnf_of(guide, self.special)

    def compile(self, grammar: str, *, anew: bool = False) -> XGrammarMatcher:
        try:
            compiled = self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
        except RuntimeError as error:
            return XGrammarMatcher(None, _reason(error))
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled))

    def follow(self, start: XGrammarMatcher, ids: Sequence[int]) -> XGrammarMatcher:
        """Return a copy of a matcher that has followed an output. It is in error if the grammar does not
        allow it.
        """
        matcher = start.deep_copy()
        matcher.consume_tokens(list(ids))
        return matcher

    def after_one(self, matcher: XGrammarMatcher) -> XGrammarMatcher:
        (mask,) = self.masks([matcher])
        for token in probes_of(mask):
            copy = matcher.deep_copy()
            copy.consume_token(token)
            if copy.is_error():
                return copy
            self.masks([copy])
        return matcher

    def masks(self, matchers: Sequence[XGrammarMatcher]) -> IntArray:
        masks = np.zeros((len(matchers), self._num_words), np.int32)
        open_ = [
            (each.inner, at)
            for at, each in enumerate(matchers)
            if each.inner is not None and not each.is_error()
        ]
        if len(open_) == 1:
            inner, at = open_[0]
            inner.fill_next_token_bitmask(masks, at)
        elif open_:
            inners, rows = zip(*open_, strict=True)
            self._batch.batch_fill_next_token_bitmask(list(inners), masks, list(rows))
        masks &= self._others
        return masks

    def timed_mask(self, matcher: XGrammarMatcher) -> tuple[IntArray, float]:
        began = time.thread_time()
        (mask,) = self.masks([matcher])
        return mask, time.thread_time() - began


def _reason(error: RuntimeError) -> str:
    """Return the message, without the time and the source location of the library."""
    words = str(error).strip().partition("\n")[0]
    return words.partition(": ")[2] if words.startswith("[") else words
