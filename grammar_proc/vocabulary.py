"""Vocabulary of llguidance's matchers over the tokenizer's ids, and the masks that they give."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np

from grammar_proc.backend import Matcher
from grammar_proc.guide_grammar import grammar_of
from runtime.base.errors import ModelError
from runtime.wire.format import IntArray
from runtime.wire.guide import Guide

WORD_BITS = 32
STATE_SIGN = "\n<"
"""Beginning of the parser's state, which follows the text of an error."""
STATES_SIGN = "lexer error"
"""Words of an error about the states that all matchers of a compiled guide share."""
MAX_THREADS = 8
MAX_STEP_ITEMS = 10_000
"""Limit on the work for one mask. With llguidance's own, 50,000, one mask of a two-line grammar whose texts
can be read in many ways took 7.7 s. Objects of 300 optional properties need more than 5,000.
"""
MAX_LEXER_STATES = 1 << 16
"""Maximum number of states that the texts of a guide are in, which are made as they are met: 50 MB. With
llguidance's own, 250,000, eight patterns of 80 characters took 636 MB. An object of 60 texts of 50 to 110
characters needs more than 8,000, and all such objects together more than 32,768.
"""
STEP_FUEL = 200_000
"""Limit on the expressions that are made for one mask. In the middle of an output a mask may need expressions
that the masks before it had made, 1.5 times as much in all: a guide that is compiled anew has twice as much.
"""
MAX_PROBES = 16
TOKENS_A_MASK = 8
"""Tokens of an output that are followed with what is left of a mask: all of it was enough for 40 to 60 tokens
of the most costly guides.
"""


class GrammarVocabulary:
    """The tokenizer's ids and the bytes that they stand for, for llguidance. Special tokens stand for no
    bytes, so a guide allows one by its id alone.

    special: ids of the special tokens, by their spelling. llguidance takes every added token with a spelling
    of the form <...> for one.
    """

    def __init__(self, directory: Path, num_threads: int) -> None:
        """Read the tokenizer of a directory. Raises ModelError."""
        self._tokenizer, self.special = read_tokenizer(directory)
        self._num_words = -(-self._tokenizer.vocab_size // WORD_BITS)
        self._limits, self._limits_anew = (
            llguidance.LLParserLimits(
                step_max_items=MAX_STEP_ITEMS,
                max_lexer_states=MAX_LEXER_STATES,
                step_lexer_fuel=fuel,
                verbose_errors=False,
            )
            for fuel in (STEP_FUEL, 2 * STEP_FUEL)
        )
        self._executor = llguidance.LLExecutor(num_threads)
        self._others = others_of(self._tokenizer)

    def grammar_of(self, guide: Guide) -> str:
        return grammar_of(guide, self.special)

    def compile(self, grammar: str, *, anew: bool = False) -> llguidance.LLMatcher:
        """Return a matcher at the start of a grammar that was tried. `anew`: it will follow outputs that have
        begun. Callers check `is_error`. Other threads run meanwhile.
        """
        limits = self._limits_anew if anew else self._limits
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return matcher
        first = matcher.deep_copy()
        first.compute_bitmask()  # warms up what all matchers of the grammar share
        return first if first.is_error() else matcher  # one that has made no mask, for `follow`

    def follow(self, start: llguidance.LLMatcher, ids: Sequence[int]) -> llguidance.LLMatcher:
        """Return a copy of a matcher from `compile` that has followed an output. It is in error if the
        grammar does not allow it.

        What tokens may take is what the last mask of the grammar has left, so masks are made in between.
        Those of the start cost little, and nothing is kept of them.
        """
        matcher = start.deep_copy()
        for at in range(0, len(ids), TOKENS_A_MASK):
            self.masks([start.deep_copy()])
            if not matcher.consume_tokens(list(ids[at : at + TOKENS_A_MASK])):
                break
        return matcher

    def after_one(self, matcher: llguidance.LLMatcher) -> llguidance.LLMatcher:
        """Try the first few tokens that a matcher allows. Returns a copy that is in error after one of them,
        else the matcher itself. This detects a grammar that is too complex, which compiling does not.
        """
        (mask,) = self.masks([matcher])
        for token in probes_of(mask):
            copy = matcher.deep_copy()
            copy.consume_token(token)
            if copy.is_error():
                return copy
        return matcher

    def masks(self, matchers: Sequence[llguidance.LLMatcher]) -> IntArray:
        """Return the masks [n, words] of the ids that each matcher allows, without the ids that end
        a text.
        """
        n = len(matchers)
        masks = np.zeros((n, self._num_words), np.int32)
        open_ = [(matcher, i) for i, matcher in enumerate(matchers) if not matcher.is_stopped()]
        if len(open_) == 1:
            matcher, i = open_[0]
            matcher.unsafe_compute_mask_ptr(masks[i].ctypes.data, self._num_words * 4)
        elif open_:
            self._executor.unsafe_compute_mask_ptr(open_, masks.ctypes.data, self._num_words * 4, n)
        masks &= self._others
        return masks

    def timed_mask(self, matcher: llguidance.LLMatcher) -> tuple[IntArray, float]:
        """Return the mask of one matcher, and the CPU seconds that it took."""
        began = time.thread_time()  # the mask of a single matcher is computed in this thread
        (mask,) = self.masks([matcher])
        return mask, time.thread_time() - began


def read_tokenizer(directory: Path) -> tuple[llguidance.LLTokenizer, dict[str, int]]:
    """Return the tokenizer of a directory, and its special tokens. Raises ModelError."""
    try:
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = llguidance.LLTokenizer(text)
    except Exception as error:  # the library raises any kind
        raise ModelError(
            f"The tokenizer in {directory} cannot be read: {error}. If it is good for all else, "
            "--grammar-backend none serves without guides."
        ) from None
    special = {
        token["content"]: token["id"]
        for token in json.loads(text).get("added_tokens") or ()
        if tokenizer.is_special_token(token["id"])
    }
    return tokenizer, special


def others_of(tokenizer: llguidance.LLTokenizer) -> IntArray:
    """Return the mask [words] of all ids except those that end a text."""
    ends = np.zeros((-(-tokenizer.vocab_size // WORD_BITS), WORD_BITS), np.uint8)
    ends.flat[list(tokenizer.eos_tokens)] = 1
    others: IntArray = ~np.packbits(ends, bitorder="little").view(np.int32)
    return others


def probes_of(mask: IntArray) -> list[int]:
    """Return the first few ids of a mask."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[
        :MAX_PROBES
    ].tolist()
    return ids


def reason_of(matcher: Matcher) -> str:
    """Return the reason for which a matcher is in error."""
    words = matcher.get_error().partition(STATE_SIGN)[0].strip()
    return "no output can match it" if words.startswith("NoExtension") else words


def is_used_up(matcher: Matcher) -> bool:
    """Return True if a matcher cannot go on because of the states of its guide: there are too many, or a step
    had to make too many. All matchers of a compiled guide share them, so none of these can go on, while one
    of the same guide compiled anew may.
    """
    return matcher.is_error() and STATES_SIGN in matcher.get_error().partition(STATE_SIGN)[0]
