"""From a structural tag to a grammar of llguidance's: one of Lark, which refers to those of its schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llguidance
from msgspec import Raw

from grammar_proc.tagged_arguments import tagged_arguments
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags
from runtime.guides.json_schema import SchemaRefused, schema_of

TEXT = r"/(.|\n)*/"


class StructuralGrammar:
    def __init__(
        self,
        special: Mapping[str, int],
        json_grammar: Callable[[Any], str],
        nested_grammar: Callable[[tags.Nested], str],
    ) -> None:
        """`special`: special tokens by their spelling; the others make grammars of schemas and guides."""
        self._special = special
        self._json_grammar = json_grammar
        self._nested_grammar = nested_grammar
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._number = 0

    def make(self, element: tags.Element) -> str:
        """Make the grammar. Raises InvalidRequest."""
        self._rules.append(f"start: {self._of(element)}")
        main = {"name": "main", "lark_grammar": "\n".join(self._rules)}
        return json.dumps({"grammars": [main, *self._grammars]})

    def _of(self, element: tags.Element) -> str:
        """Return the expression of an element; "" for the empty text."""
        match element:
            case tags.ConstString():
                return self._text(element.value)
            case tags.Regex():
                return self._refer(llguidance.LLMatcher.grammar_from_regex(element.pattern))
            case tags.JsonSchema():
                schema = element_schema(
                    element.json_schema, element.param, element.at, is_object=element.is_object
                )
                return self._refer(self._json_grammar(schema))
            case tags.TaggedArguments():
                return self._tagged(element)
            case tags.Nested():
                return self._refer(self._nested_grammar(element))
            case tags.AnyText():
                return self._rule(TEXT, is_terminal=True)
            case tags.AnyTokens():
                but = f"^{self._id_of(element.but, element.param)}" if element.but else "*"
                return f"<[{but}]>*"
            case tags.Sequential():
                return " ".join(filter(None, map(self._of, element.elements)))
            case tags.Or():
                return self._rule(" | ".join(map(self._of, element.elements)))
            case tags.Optional():
                return f"({self._of(element.content)})?"
            case tags.Repeat():
                most = "" if element.most is None else element.most
                return f"{self._rule(self._of(element.content))}{{{element.least},{most}}}"
            case tags.Tag():
                begin = self._begin(element.begin) if isinstance(element.content, tags.AnyText) else ""
                return f"{begin or self._text(element.begin)} {self._rest(element)}"
            case tags.TagsWithSeparator():
                call = self._rule(" | ".join(map(self._of, element.tags)))
                if element.stop_after_first:
                    return call
                return f"{call} ({self._text(element.separator)} {call})*"
            case tags.TriggeredTags():
                return self._triggered(element)

    def _tagged(self, element: tags.TaggedArguments) -> str:
        arguments = tagged_arguments(
            element, element_schema(element.json_schema, element.param, is_object=True)
        )
        parts = []
        for argument in arguments:
            begin = element.begin.replace(tags.NAME, argument.name)
            if argument.schema is None and not argument.texts:
                value = self._up_to(element.close)
            else:
                fixed = [self._text(text) or '""' for text in argument.texts]
                held = (
                    self._rule(" | ".join(fixed))
                    if fixed
                    else self._refer(self._json_grammar(argument.schema))
                )
                line_break = "\n" if begin.endswith("\n") else ""
                value = f"{held} {self._text(line_break + element.close)}"
            whole = self._rule(f"{self._text(begin)} {value} {_quoted(chr(10))}")
            parts.append(whole if argument.is_required else f"({whole})?")
        return " ".join(parts)

    def _rest(self, tag: tags.Tag) -> str:
        """Return what follows the beginning of a tag."""
        if isinstance(tag.content, tags.AnyText):
            most = tag.content.most
            if most is None:
                return self._up_to(tag.end)
            text = self._rule(TEXT, is_terminal=True)
            limited = self._rule(text, attributes=f"[max_tokens={most.count}]") if most.count else ""
            return f"{limited} <[{self._id_of(tag.end, most.param)}]>"
        return f"{self._of(tag.content)} {self._text(tag.end)}".strip()

    def _triggered(self, element: tags.TriggeredTags) -> str:
        segments = []
        for trigger in element.triggers:
            begun = [tag for tag in element.tags if tag.begin.startswith(trigger)]
            rests = [f"{self._text(tag.begin[len(trigger) :])} {self._rest(tag)}" for tag in begun]
            segments.append(f"{self._up_to(trigger)} {self._rule(' | '.join(rests))}")
        segment, text = self._rule(" | ".join(segments)), self._rule(TEXT, is_terminal=True)
        return self._rule(f"{segment} | {text}") if element.stop_after_first else f"{segment}* {text}"

    def _up_to(self, end: str) -> str:
        """Return free text up to the first `end`, and that."""
        lazy = self._rule(f"{TEXT} {_quoted(end)}", attributes="[lazy]")
        if end not in self._special:
            return lazy
        text = self._rule(TEXT, is_terminal=True)
        return self._rule(f"{text} {self._text(end)} | {lazy}")

    def _begin(self, begin: str) -> str:
        """Return the beginning of a free text that, where it may come, is nothing else."""
        if not begin or any(spelling in begin for spelling in self._special):
            return ""
        return self._rule(_quoted(begin), attributes="[lazy]")

    def _text(self, text: str) -> str:
        """Return a fixed text, each of its special tokens as that token."""
        parts = []
        while text:
            found = [(text.find(spelling), -len(spelling), spelling) for spelling in self._special]
            at, _, spelling = min((each for each in found if each[0] >= 0), default=(len(text), 0, ""))
            if at:
                parts.append(_quoted(text[:at]))
            if spelling:
                parts.append(f"<[{self._special[spelling]}]>")
            text = text[at + len(spelling) :]
        return " ".join(parts)

    def _id_of(self, spelling: str, param: str) -> int:
        """Raises InvalidRequest."""
        if spelling not in self._special:
            raise InvalidRequest(
                f"{param}: {spelling} is no token of its own in the model's tokenizer", param=param
            )
        return self._special[spelling]

    def _rule(self, expression: str, *, is_terminal: bool = False, attributes: str = "") -> str:
        self._number += 1
        name = f"{'T' if is_terminal else 'r'}{self._number}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _refer(self, grammar: str) -> str:
        """Add a grammar, as llguidance writes one, and return a reference to it."""
        name = f"g{len(self._grammars)}"
        if grammar.startswith("{"):
            (made,) = json.loads(grammar)["grammars"]
        else:
            made = {"lark_grammar": grammar}
        self._grammars.append({**{key: value for key, value in made.items() if value}, "name": name})
        return f"@{name}"


def element_schema(json_schema: Raw, param: str, at: str = "", *, is_object: bool) -> Any:
    """Return the schema of an element. Raises InvalidRequest."""
    with errors_of(param, at):
        schema = schema_of(bytes(json_schema).decode())
    if is_object and isinstance(schema, dict):
        schema.setdefault("type", "object")
    return schema


@contextmanager
def errors_of(param: str, at: str) -> Iterator[None]:
    """Give errors of a schema the place that it has in a request."""
    try:
        yield
    except SchemaRefused as error:
        where = f"{param}: {at}" if at else param
        message = where + error.message.removeprefix(error.param or "")
        raise InvalidRequest(message, code=error.code, param=param) from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
