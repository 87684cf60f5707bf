"""TagWalk: the walk over a structural tag's elements, with the grammar parts of one backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import Raw

from grammar_proc.tagged_arguments import tagged_arguments
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags
from runtime.guides.json_schema import SchemaRefused, schema_of

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class GrammarParts(Generic[Part]):
    """Functions that make the parts which every kind of grammar has."""

    fixed: Callable[[str], Part]
    """Makes a text of characters alone."""
    token: Callable[[int], Part]
    seq: Callable[..., Part]
    alt: Callable[[Iterable[Part]], Part]
    repeated: Callable[[Part, int, int | None], Part]
    rule: Callable[[Part], Part]
    """Makes a rule of a part that is used in several places."""
    nested: Callable[[tags.Nested], Part]
    """Makes the part of a nested guide."""


class TagWalk(ABC, Generic[Part]):
    """Walk over the elements of a tag. Methods that depend on the backend are abstract, at the end."""

    def __init__(self, special: Mapping[str, int], parts: GrammarParts[Part]) -> None:
        """`special` has the special tokens by their spelling."""
        self._special = special
        self._fixed, self._token, self._seq, self._alt = parts.fixed, parts.token, parts.seq, parts.alt
        self._repeated, self._rule, self._nested = parts.repeated, parts.rule, parts.nested

    def of(self, element: tags.Element) -> Part:
        """Return the part that matches the texts of an element. Raises InvalidRequest."""
        match element:
            case tags.ConstString():
                return self._text(element.value)
            case tags.Regex():
                return self._regex(element.pattern)
            case tags.JsonSchema():
                schema = element_schema(
                    element.json_schema, element.param, element.at, is_object=element.is_object
                )
                return self._schema(schema, element.param, element.at)
            case tags.TaggedArguments():
                return self._tagged(element)
            case tags.Nested():
                return self._nested(element)
            case tags.AnyText():
                return self._any_text()
            case tags.AnyTokens():
                return self._any_tokens(self._id_of(element.but, element.param) if element.but else None)
            case tags.Sequential():
                return self._seq(*map(self.of, element.elements))
            case tags.Or():
                return self._or(element)
            case tags.Optional():
                return self._repeated(self.of(element.content), 0, 1)
            case tags.Repeat():
                return self._repeated(self._rule(self.of(element.content)), element.least, element.most)
            case tags.Tag():
                return self._seq(self._begin(element), self._rest(element))
            case tags.TagsWithSeparator():
                call = self._rule(self._alt(map(self.of, element.tags)))
                if element.stop_after_first:
                    return call
                return self._seq(
                    call, self._repeated(self._seq(self._text(element.separator), call), 0, None)
                )
            case tags.TriggeredTags():
                return self._triggered(element)

    def _tagged(self, element: tags.TaggedArguments) -> Part:
        schema = element_schema(element.json_schema, element.param, is_object=True)
        parts = []
        for argument in tagged_arguments(element, schema):
            begin = element.begin.replace(tags.NAME, argument.name)
            if argument.schema is None and not argument.texts:
                value = self._up_to(element.close)
            else:
                held = (
                    self._alt(map(self._text, argument.texts))
                    if argument.texts
                    else self._schema(argument.schema, element.param)
                )
                line_break = "\n" if begin.endswith("\n") else ""
                value = self._seq(held, self._text(line_break + element.close))
            whole = self._rule(self._seq(self._text(begin), value, self._fixed("\n")))
            parts.append(whole if argument.is_required else self._repeated(whole, 0, 1))
        return self._seq(*parts)

    def _or(self, element: tags.Or) -> Part:
        return self._alt(map(self.of, element.elements))

    def _begin(self, tag: tags.Tag) -> Part:
        return self._text(tag.begin)

    def _rest(self, tag: tags.Tag) -> Part:
        """Return the part after the beginning of a tag: its content and its end."""
        if isinstance(tag.content, tags.AnyText):
            most = tag.content.most
            if most is None:
                return self._up_to(tag.end)
            return self._seq(self._few_tokens(most.count), self._token(self._id_of(tag.end, most.param)))
        return self._seq(self.of(tag.content), self._text(tag.end))

    def _behind(self, trigger: str, element: tags.TriggeredTags) -> Part:
        """Return the part that may follow a trigger: the rest of each tag that begins with it."""
        begun = [tag for tag in element.tags if tag.begin.startswith(trigger)]
        rests = [self._seq(self._text(tag.begin[len(trigger) :]), self._rest(tag)) for tag in begun]
        return self._rule(self._alt(rests))

    def _text(self, text: str) -> Part:
        """Return a fixed text in which each special token is that token."""
        parts = []
        while text:
            found = [(text.find(spelling), -len(spelling), spelling) for spelling in self._special]
            at, _, spelling = min((each for each in found if each[0] >= 0), default=(len(text), 0, ""))
            if at:
                parts.append(self._fixed(text[:at]))
            if spelling:
                parts.append(self._token(self._special[spelling]))
            text = text[at + len(spelling) :]
        return self._seq(*parts)

    def _id_of(self, spelling: str, param: str) -> int:
        """Return the id of the special token with this spelling. Raises InvalidRequest that names `param`."""
        if spelling not in self._special:
            raise InvalidRequest(
                f"{param}: {spelling} is no token of its own in the model's tokenizer", param=param
            )
        return self._special[spelling]

    # -- what a backend brings ------------------------------------------------------------------------------

    @abstractmethod
    def _any_text(self) -> Part:
        """Return free text without special tokens."""

    @abstractmethod
    def _any_tokens(self, but: int | None) -> Part:
        """Return any tokens, including special ones, except `but`."""

    @abstractmethod
    def _few_tokens(self, most: int) -> Part:
        """Return free text of at most `most` tokens."""

    @abstractmethod
    def _up_to(self, end: str) -> Part:
        """Return free text up to and including the first `end`."""

    @abstractmethod
    def _triggered(self, element: tags.TriggeredTags) -> Part: ...

    @abstractmethod
    def _regex(self, pattern: str) -> Part: ...

    @abstractmethod
    def _schema(self, schema: Any, param: str, at: str = "") -> Part:
        """Return the values of a schema, which is at the place `at` in a field of the request."""


def element_schema(json_schema: Raw, param: str, at: str = "", *, is_object: bool) -> Any:
    """Return the schema of an element. Raises InvalidRequest."""
    with errors_of(param, at):
        schema = schema_of(bytes(json_schema).decode())
    if is_object and isinstance(schema, dict):
        schema.setdefault("type", "object")
    return schema


@contextmanager
def errors_of(param: str, at: str) -> Iterator[None]:
    """Add the place in the request to errors of a schema."""
    try:
        yield
    except SchemaRefused as error:
        where = f"{param}: {at}" if at else param
        message = where + error.message.removeprefix(error.param or "")
        raise InvalidRequest(message, code=error.code, param=param) from None
