"""Backend of the grammar process: makes grammars of guides, matchers of grammars, and masks of matchers.

--grammar-backend ──► open_vocabulary ──► BackendVocabulary: grammar_of, compile, follow, after_one, masks,
                                              timed_mask
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from runtime.wire.format import IntArray
from runtime.wire.guide import Guide


class Matcher(Protocol):
    """Position of an output in its grammar."""

    def is_error(self) -> bool:
        """Return True if the matcher cannot go on: a token did not match, or too much work is needed."""

    def get_error(self) -> str:
        """Return the reason of the error; empty if there is none."""

    def is_accepting(self) -> bool:
        """Return True if the output may end here."""

    def deep_copy(self) -> Self:
        """Return a copy at the same position, which moves independently."""

    def consume_token(self, token: int, /) -> bool:
        """Move on by a token. Returns False if it does not match; the matcher is then in error."""

    def consume_tokens(self, tokens: list[int], /) -> bool:
        """Move on by several tokens. Returns False if one does not match; the matcher is then in error."""


M = TypeVar("M", bound=Matcher)


class BackendVocabulary(Protocol[M]):
    """The tokenizer's ids and the bytes that they stand for, in the form that one backend needs."""

    def grammar_of(self, guide: Guide) -> str:
        """Return a grammar of a guide that `compile` accepts as input; `compile` may still find it wrong. A
        guide may take any time, so this runs in processes that may be killed. Raises InvalidRequest.
        """

    def compile(self, grammar: str, *, anew: bool = False) -> M:
        """Return a matcher at the start of a grammar. `anew`: it will follow outputs that have begun. Callers
        check `is_error`. Other threads run meanwhile.
        """

    def follow(self, start: M, ids: Sequence[int]) -> M:
        """Return a copy of a matcher from `compile` that has followed an output. It is in error if the
        grammar does not allow it.
        """

    def after_one(self, matcher: M) -> M:
        """Try the first few tokens that a matcher allows. Returns a copy that is in error after one of them,
        else the matcher itself. This detects a grammar that is too complex, which compiling does not.
        """

    def masks(self, matchers: Sequence[M]) -> IntArray:
        """Return the masks [n, words] of the ids that each matcher allows, without the ids that end
        a text.
        """

    def timed_mask(self, matcher: M) -> tuple[IntArray, float]:
        """Return the mask of one matcher, and the CPU seconds that it took."""
