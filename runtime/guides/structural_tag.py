"""Elements of a structural tag: an output that is made of fixed texts, free text, and values of schemas.

Their names are those of xgrammar's structural tags. A spelling that the tokenizer has as a special token
stands for that token, wherever it stands in a fixed text.
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
    """Field of the request that has the schema, for errors."""
    at: str = ""
    """JSON pointer of the schema's place in that field."""
    is_object: bool = True
    """The value is an object, where the schema names no type."""


class TaggedArguments(Struct, tag="tagged_arguments"):
    """Members of an object in their schema's order, each between two texts: what may be a string is free
    text, and the others are JSON.
    """

    json_schema: Raw
    param: str
    """Field of the request that has the schema, for errors."""
    begin: str
    """Text before a value, with NAME where the member's name stands."""
    close: str
    """Text that ends a value, with a line break behind it."""


class Nested(Struct, tag="guide"):
    """An output of a guide of its own, of any other kind."""

    kind: NestedKind
    text: str
    any_whitespace: bool


class AnyText(Struct, tag="any_text"):
    """A text without special tokens, as the content of a tag up to the tag's end."""

    most: MaxTokens | None = None


class MaxTokens(Struct):
    """Bound of a free text, whose tag then begins and ends with tokens of their own."""

    count: int
    param: str
    """Field of the request that has it, for errors."""


class AnyTokens(Struct, tag="any_tokens"):
    """Tokens that may be whatever the model says."""

    but: str
    """Special token that may not come; empty for none."""
    param: str
    """Field of the request that needs it to be one, for errors."""


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
    """Most repetitions. None: any number."""


class Tag(Struct, tag="tag"):
    begin: str
    content: Element
    end: str


class TagsWithSeparator(Struct, tag="tags_with_separator"):
    """At least one of the tags; one alone, where it stops after the first."""

    tags: list[Tag]
    separator: str
    stop_after_first: bool


class TriggeredTags(Struct, tag="triggered_tags"):
    """Free text, in which each trigger begins one of the tags."""

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
    """Return the text of a guide of the kind `structural_tag`."""
    return msgspec.json.encode(element).decode()


def decode(text: str) -> Element:
    """Return the elements that the text of a guide says. Raises ValueError."""
    element: Element = msgspec.json.decode(text, type=Element)
    return element
