"""Conversion of structural tags to nodes of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grammar_proc.guide_grammar import refused
from grammar_proc.tag_walk import GrammarParts, TagWalk, errors_of
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
    seq,
)
from runtime.guides import structural_tag as tags


class TagNodes(TagWalk[GrammarNode]):
    def __init__(
        self,
        rules: Rules,
        special: Mapping[str, int],
        values: JsonValues,
        nested: Callable[[tags.Nested], GrammarNode],
    ) -> None:
        """`special` has the special tokens by their spelling; `nested` makes nodes of nested guides."""
        super().__init__(special, GrammarParts(FixedText, Token, seq, alt, Repeated, rules.new, nested))
        self._rules = rules
        self._values = values

    def _or(self, element: tags.Or) -> GrammarNode:
        """Return the alternatives. Refuses a tag of free text beside free text that may contain the tag's
        beginning: it would be ambiguous which of the two a text is.
        """
        firsts = [_first(each) for each in element.elements]
        if any(isinstance(each, (tags.AnyText, tags.TriggeredTags)) for each in firsts):
            for each in firsts:
                if not isinstance(each, tags.Tag) or not isinstance(each.content, tags.AnyText):
                    continue
                if not any(spelling in each.begin for spelling in self._special):
                    raise refused(
                        "structural_tag",
                        f"--grammar-backend xgrammar needs {each.begin[:100]!r} to be a token of its own",
                    )
        return super()._or(element)

    def _triggered(self, element: tags.TriggeredTags) -> GrammarNode:
        """Return free text with tags. Triggers that are tokens never occur in free text and need no search;
        triggers that are text are searched for in it.
        """
        texts: dict[str, GrammarNode] = {}
        segments: list[GrammarNode] = []
        for trigger in element.triggers:
            rest = self._behind(trigger, element)
            has_token = any(spelling in trigger for spelling in self._special)
            if has_token:
                segments.append(seq(self._text(trigger), rest))
            if not has_token or trigger in self._special:  # the text of the special token is a trigger, too
                texts[trigger] = rest
        text = free_text(self._rules, texts, is_endless=not element.stop_after_first)
        if not segments:
            return text
        if not element.stop_after_first:
            return seq(text, many(seq(alt(segments), text)))
        before = free_text(self._rules, {}, list(texts))
        return alt([text, seq(before, alt(segments))])

    def _up_to(self, end: str) -> GrammarNode:
        text, spelled = free_text(self._rules, {}, [end]), FixedText(end)
        return seq(text, alt([spelled, Token(self._special[end])]) if end in self._special else spelled)

    def _any_text(self) -> GrammarNode:
        return many(chars(complement(())))

    def _any_tokens(self, but: int | None) -> GrammarNode:
        return many(alt([AnyToken((0,)), Token(0)]) if but is None else AnyToken((but,)))

    def _few_tokens(self, most: int) -> GrammarNode:
        return Repeated(AnyToken(tuple(self._special.values())), 0, most)

    def _regex(self, pattern: str) -> GrammarNode:
        try:
            return Expression(pattern, chars).whole()
        except ExpressionRefused as error:
            raise refused("structural_tag", str(error)) from None

    def _schema(self, schema: Any, param: str, at: str = "") -> GrammarNode:
        with errors_of(param, at):
            return self._rules.new(self._values.of_schema(schema))


def _first(element: tags.Element) -> tags.Element:
    """Return the first element that is no sequence."""
    while isinstance(element, tags.Sequential) and element.elements:
        element = element.elements[0]
    return element
