"""Elements of a structural tag, which describes an output of fixed texts, free text, and values of schemas.
The names are those of xgrammar's structural tags. In fixed texts, the spelling of a special token stands for
that token.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

NAME = "$NAME"
NestedKind: TypeAlias = Literal["json", "json_schema", "regex", "choice", "ebnf", "lark"]


class ConstString(Struct, tag="const_string"):
    value: str


class Regex(Struct, tag="regex"):
    pattern: str


class JsonSchema(Struct, tag="json_schema"):
    json_schema: Raw
    param: str
    """Request field that has the schema, for errors."""
    at: str = ""
    """JSON pointer of the schema within that field."""
    is_object: bool = True
    """True if the value must be an object when the schema names no type."""


class TaggedArguments(Struct, tag="tagged_arguments"):
    """Members of an object in the order of their schema, each between two texts. A member that may be a
    string is free text, others are JSON.
    """

    json_schema: Raw
    param: str
    """Request field that has the schema, for errors."""
    begin: str
    """Text before each value; NAME in it is replaced by the member's name."""
    close: str
    """Text that ends a value, followed by a line break."""


class Nested(Struct, tag="guide"):
    """An output that keeps to a guide of any other kind."""

    kind: NestedKind
    text: str
    any_whitespace: bool


class AnyText(Struct, tag="any_text"):
    """Text without special tokens; as the content of a tag it ends at the tag's end."""

    most: MaxTokens | None = None


class MaxTokens(Struct):
    """Bound on the tokens of a free text, whose tag must begin and end with special tokens."""

    count: int
    param: str
    """Request field that has it, for errors."""


class AnyTokens(Struct, tag="any_tokens"):
    """Any tokens."""

    but: str
    """Special token that must not occur; empty for none."""
    param: str
    """Request field that requires this to be a special token, for errors."""


class Sequential(Struct, tag="sequence"):
    elements: list[Element]


class Or(Struct, tag="or"):
    elements: list[Element]


class Optional(Struct, tag="optional"):
    content: Element


class Repeat(Struct, tag="repeat"):
    content: Element
    least: int
    most: int | None = None
    """Maximum number of repetitions; None: any number."""


class Tag(Struct, tag="tag"):
    begin: str
    content: Element
    end: str


class TagsWithSeparator(Struct, tag="tags_with_separator"):
    """At least one of the tags, with separators; only one if it stops after the first."""

    tags: list[Tag]
    separator: str
    stop_after_first: bool


class TriggeredTags(Struct, tag="triggered_tags"):
    """Free text in which each trigger begins one of the tags."""

    triggers: list[str]
    tags: list[Tag]
    stop_after_first: bool


Element: TypeAlias = (
    ConstString
    | Regex
    | JsonSchema
    | TaggedArguments
    | Nested
    | AnyText
    | AnyTokens
    | Sequential
    | Or
    | Optional
    | Repeat
    | Tag
    | TagsWithSeparator
    | TriggeredTags
)


def encode(element: Element) -> str:
    """Return the text of a guide of kind `structural_tag`."""
    return msgspec.json.encode(element).decode()


def decode(text: str) -> Element:
    """Parse the text of a guide into elements. Raises ValueError."""
    element: Element = msgspec.json.decode(text, type=Element)
    return element
