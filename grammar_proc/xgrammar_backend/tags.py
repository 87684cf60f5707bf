"""From a structural tag to nodes of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grammar_proc.guide_grammar import refused
from grammar_proc.structural_grammar import element_schema, errors_of
from grammar_proc.tagged_arguments import tagged_arguments
from grammar_proc.xgrammar_backend.expressions import Expression, ExpressionRefused
from grammar_proc.xgrammar_backend.free_text import free_text
from grammar_proc.xgrammar_backend.json_values import JsonValues
from grammar_proc.xgrammar_backend.nodes import (
    AnyToken,
    FixedText,
    GrammarNode,
    Repeated,
    Rules,
    Token,
    alt,
    chars,
    complement,
    many,
    maybe,
    seq,
)
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags


class TagNodes:
    def __init__(
        self,
        rules: Rules,
        special: Mapping[str, int],
        values: JsonValues,
        nested: Callable[[tags.Nested], GrammarNode],
    ) -> None:
        """`special`: special tokens by their spelling; `nested`: makes nodes of guides within."""
        self._rules = rules
        self._special = special
        self._values = values
        self._nested = nested
        self._any_text = many(chars(complement(())))

    def of(self, element: tags.Element) -> GrammarNode:
        """Return the texts of an element. Raises InvalidRequest."""
        match element:
            case tags.ConstString():
                return self._text(element.value)
            case tags.Regex():
                try:
                    return Expression(element.pattern, chars).whole()
                except ExpressionRefused as error:
                    raise refused("structural_tag", str(error)) from None
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
                return self._any_text
            case tags.AnyTokens():
                if element.but:
                    return many(AnyToken((self._id_of(element.but, element.param),)))
                return many(alt([AnyToken((0,)), Token(0)]))
            case tags.Sequential():
                return seq(*map(self.of, element.elements))
            case tags.Or():
                self._check_beginnings(element)
                return alt(map(self.of, element.elements))
            case tags.Optional():
                return maybe(self.of(element.content))
            case tags.Repeat():
                return Repeated(self._rules.new(self.of(element.content)), element.least, element.most)
            case tags.Tag():
                return seq(self._text(element.begin), self._rest(element))
            case tags.TagsWithSeparator():
                call = self._rules.new(alt(map(self.of, element.tags)))
                if element.stop_after_first:
                    return call
                return seq(call, many(seq(self._text(element.separator), call)))
            case tags.TriggeredTags():
                return self._triggered(element)

    def _schema(self, schema: Any, param: str, at: str = "") -> GrammarNode:
        with errors_of(param, at):
            return self._rules.new(self._values.of_schema(schema))

    def _tagged(self, element: tags.TaggedArguments) -> GrammarNode:
        arguments = tagged_arguments(
            element, element_schema(element.json_schema, element.param, is_object=True)
        )
        parts = []
        for argument in arguments:
            begin = element.begin.replace(tags.NAME, argument.name)
            if argument.schema is None and not argument.texts:
                value = self._up_to(element.close)
            else:
                held = (
                    alt(map(self._text, argument.texts))
                    if argument.texts
                    else self._schema(argument.schema, element.param)
                )
                line_break = "\n" if begin.endswith("\n") else ""
                value = seq(held, self._text(line_break + element.close))
            whole = self._rules.new(seq(self._text(begin), value, FixedText("\n")))
            parts.append(whole if argument.is_required else maybe(whole))
        return seq(*parts)

    def _rest(self, tag: tags.Tag) -> GrammarNode:
        """Return what follows the beginning of a tag."""
        if isinstance(tag.content, tags.AnyText):
            most = tag.content.most
            if most is None:
                return self._up_to(tag.end)
            end = Token(self._id_of(tag.end, most.param))
            return seq(Repeated(AnyToken(tuple(self._special.values())), 0, most.count), end)
        return seq(self.of(tag.content), self._text(tag.end))

    def _triggered(self, element: tags.TriggeredTags) -> GrammarNode:
        """Tokens of their own come nowhere in free text, so they need no look at it; what begins with a text
        is found in it.
        """
        texts: dict[str, GrammarNode] = {}
        segments: list[GrammarNode] = []
        for trigger in element.triggers:
            begun = [tag for tag in element.tags if tag.begin.startswith(trigger)]
            rest = self._rules.new(
                alt(seq(self._text(tag.begin[len(trigger) :]), self._rest(tag)) for tag in begun)
            )
            has_token = any(spelling in trigger for spelling in self._special)
            if has_token:
                segments.append(seq(self._text(trigger), rest))
            if not has_token or trigger in self._special:  # its spelling is a trigger, too
                texts[trigger] = rest
        text = free_text(self._rules, texts, is_endless=not element.stop_after_first)
        if not segments:
            return text
        if not element.stop_after_first:
            return seq(text, many(seq(alt(segments), text)))
        before = free_text(self._rules, {}, list(texts))
        return alt([text, seq(before, alt(segments))])

    def _up_to(self, end: str) -> GrammarNode:
        """Return free text up to the first `end`, and that."""
        text, spelled = free_text(self._rules, {}, [end]), FixedText(end)
        return seq(text, alt([spelled, Token(self._special[end])]) if end in self._special else spelled)

    def _check_beginnings(self, element: tags.Or) -> None:
        """Refuse a tag of free text beside free text in which its beginning may stand, too: nobody could say
        which of both a text is.
        """
        firsts = [_first(each) for each in element.elements]
        if not any(isinstance(each, (tags.AnyText, tags.TriggeredTags)) for each in firsts):
            return
        for each in firsts:
            if not isinstance(each, tags.Tag) or not isinstance(each.content, tags.AnyText):
                continue
            if not any(spelling in each.begin for spelling in self._special):
                raise refused(
                    "structural_tag",
                    f"--grammar-backend xgrammar needs {each.begin[:100]!r} to be a token of its own",
                )

    def _text(self, text: str) -> GrammarNode:
        """Return a fixed text, each of its special tokens as that token."""
        parts: list[GrammarNode] = []
        while text:
            found = [(text.find(spelling), -len(spelling), spelling) for spelling in self._special]
            at, _, spelling = min((each for each in found if each[0] >= 0), default=(len(text), 0, ""))
            if at:
                parts.append(FixedText(text[:at]))
            if spelling:
                parts.append(Token(self._special[spelling]))
            text = text[at + len(spelling) :]
        return seq(*parts)

    def _id_of(self, spelling: str, param: str) -> int:
        """Raises InvalidRequest."""
        if spelling not in self._special:
            raise InvalidRequest(
                f"{param}: {spelling} is no token of its own in the model's tokenizer", param=param
            )
        return self._special[spelling]


def _first(element: tags.Element) -> tags.Element:
    """Return the first part of an element."""
    while isinstance(element, tags.Sequential) and element.elements:
        element = element.elements[0]
    return element
