"""Backend of the grammar process: makes grammars of guides, matchers of grammars, and masks of matchers.

--grammar-backend ──► open_vocabulary ──► BackendVocabulary: grammar_of, compile, after_one, masks, timed_mask
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from runtime.wire.format import IntArray
from runtime.wire.guide import Guide


class Matcher(Protocol):
    """Place of an output in its grammar."""

    def is_error(self) -> bool:
        """Tell whether it cannot go on: a token did not match, or too much work is needed."""

    def get_error(self) -> str:
        """Say why; empty where it is not in error."""

    def is_accepting(self) -> bool:
        """Tell whether the output may end here."""

    def deep_copy(self) -> Self:
        """Return another in the same place, which goes its own way."""

    def consume_token(self, token: int, /) -> bool:
        """Go on by a token. False: it does not match, and the matcher is in error."""

    def consume_tokens(self, tokens: list[int], /) -> bool:
        """Go on by each of some."""


M = TypeVar("M", bound=Matcher)


class BackendVocabulary(Protocol[M]):
    """Ids with the bytes that they stand for, as one backend has them."""

    def grammar_of(self, guide: Guide) -> str:
        """Return a grammar that `compile` takes, though it may find it wrong. A guide may take any time, so
        this is for processes that may be killed. Raises InvalidRequest.
        """

    def compile(self, grammar: str) -> M:
        """Return a matcher at the beginning of a grammar; look whether it `is_error`. Other threads run
        meanwhile.
        """

    def after_one(self, matcher: M) -> M:
        """Return the matcher after one of the tokens that may come first: one in error, if there is one. What
        is too complex shows there, not before.
        """

    def masks(self, matchers: Sequence[M]) -> IntArray:
        """Return [n, words]: what each allows, without the ids that end a text."""

    def timed_mask(self, matcher: M) -> tuple[IntArray, float]:
        """Return the mask of one, and the seconds of a processor that it took."""
