"""Guide: the form that a request's output must have, on the wire. Also records of matchers, which follow
outputs in their guides.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.wire.format import Count, Handle, PackedIds, Record

GuideKind: TypeAlias = Literal["json", "json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"]
MAX_GUIDE_CHARS = 1 << 18
"""Maximum number of characters of a guide, more than any schema that a model can follow. Each process on the
way holds the text.
"""


class Guide(Record, frozen=True):
    """Form that the output of one request must have, in all of its sequences."""

    kind: GuideKind
    text: Annotated[str, Meta(max_length=MAX_GUIDE_CHARS)] = ""
    """A JSON schema, a regular expression, a grammar, or a JSON list of texts to choose from. Empty with kind
    `json`: any JSON object.
    """
    any_whitespace: bool = True
    """True: JSON may have up to 20 characters of white space between two tokens. False: none."""

    def validate(self) -> None:
        """Check the kind and the text. Raises InvalidRequest, which names the kind."""
        if bool(self.text) == (self.kind == "json"):
            raise InvalidRequest(
                f"{self.kind}: it takes no text" if self.text else f"{self.kind}: it is empty",
                param=self.kind,
            )
        if len(self.text) > MAX_GUIDE_CHARS:
            raise InvalidRequest(
                f"{self.kind}: at most {MAX_GUIDE_CHARS} characters, got {len(self.text)}", param=self.kind
            )


class MatcherNews(NamedTuple):
    """New ids or guesses of one sequence, for its matcher."""

    handle: Handle
    num_tokens: Count
    """Number of output tokens, including the new ones."""
    ids: PackedIds = b""
    """New ids, packed."""
    guesses: PackedIds = b""
    """Packed ids that a step verifies behind the output. Masks behind each of them are wanted, too."""


class MatcherState(Record, frozen=True):
    handle: Handle
    num_tokens: Count
    """Number of output tokens that the matcher has seen."""
    masks: tuple[bytes | Count, ...]
    """Bitmasks of the ids that may come next and behind each guess, as far as the guesses are allowed,
    without stop ids: int32 words, where bit i of word j allows id 32 * j + i. Empty: no id may come.
    Alternatively the number of the slot that holds the mask, which then allows some id.
    """
    are_complete: tuple[bool, ...]
    """True for each mask at which the output may end."""
    guesses: PackedIds = b""
    """Packed guesses that these masks are for."""
    is_short: bool = False
    """True if masks behind allowed guesses are missing, because computing them takes too long."""
