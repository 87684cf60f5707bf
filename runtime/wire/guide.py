"""Guide: what the output of a request must look like, as the wire carries it. And records of the matchers,
which follow outputs in their guides.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.wire.format import Count, Handle, PackedIds, Record

GuideKind: TypeAlias = Literal["json", "json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"]
MAX_GUIDE_CHARS = 1 << 18
"""Most characters of a guide: more than any schema that a model can follow. Each process on the way holds it.
"""


class Guide(Record, frozen=True):
    """Form that the output of one request must have, in all of its sequences."""

    kind: GuideKind
    text: Annotated[str, Meta(max_length=MAX_GUIDE_CHARS)] = ""
    """A JSON schema, a regular expression, a grammar, or a JSON list of the texts to choose from; empty with
    kind `json`, any JSON object.
    """
    any_whitespace: bool = True
    """JSON may have up to 20 characters of white space between two tokens. False: none."""

    def validate(self) -> None:
        """Check the kind and the text. Raises InvalidRequest that names the kind."""
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
    """News of one sequence for its matcher."""

    handle: Handle
    num_tokens: Count
    """Output tokens of the sequence, with the new ones."""
    ids: PackedIds = b""
    """New ids, packed."""
    guesses: PackedIds = b""
    """Ids that a step verifies behind them: what may follow each of those is wanted, too."""


class MatcherState(Record, frozen=True):
    handle: Handle
    num_tokens: Count
    """Output tokens that the matcher has seen."""
    masks: tuple[bytes | Count, ...]
    """Bitmasks of what may come next, and behind each of the guesses, as far as those may follow. Each allows
    ids but for stop ids: int32 words, bit i of word j allows id 32 * j + i. Empty: nothing may come. Or the
    slot in which it lies, and allows something.
    """
    are_complete: tuple[bool, ...]
    """Tells of each whether the output may end there."""
    guesses: PackedIds = b""
    """Guesses whose masks these are."""
    is_short: bool = False
    """True where masks are missing behind guesses that may follow: to find them takes too long."""
