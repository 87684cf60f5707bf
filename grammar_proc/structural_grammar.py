"""Conversion of structural tags to grammars of llguidance: one in Lark, which refers to the grammars of its
schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import llguidance

from grammar_proc.tag_walk import GrammarParts, TagWalk
from runtime.guides import structural_tag as tags

TEXT = r"/(.|\n)*/"


class StructuralGrammar(TagWalk[str]):
    """Makes expressions of Lark from the elements of a tag; "" is the empty text."""

    def __init__(
        self,
        special: Mapping[str, int],
        json_grammar: Callable[[Any], str],
        nested_grammar: Callable[[tags.Nested], str],
    ) -> None:
        """`special` has the special tokens by their spelling. The other two make grammars of schemas and of
        nested guides.
        """
        parts = (_quoted, "<[{}]>".format, _sequence, self._choice, _repetition, self._named)
        super().__init__(special, GrammarParts(*parts, lambda each: self._refer(nested_grammar(each))))
        self._json_grammar = json_grammar
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._number = 0

    def make(self, element: tags.Element) -> str:
        """Return the grammar of an element. Raises InvalidRequest."""
        self._rules.append(f"start: {self.of(element)}")
        main = {"name": "main", "lark_grammar": "\n".join(self._rules)}
        return json.dumps({"grammars": [main, *self._grammars]})

    def _begin(self, tag: tags.Tag) -> str:
        """Return the beginning of a tag. That of a tag of free text is a lazy rule: where it may come, the
        text is read as nothing else.
        """
        begin = tag.begin
        is_plain = begin and not any(spelling in begin for spelling in self._special)
        if is_plain and isinstance(tag.content, tags.AnyText):
            return self._new_rule(_quoted(begin), attributes="[lazy]")
        return self._text(begin)

    def _triggered(self, element: tags.TriggeredTags) -> str:
        segment = self._alt(
            self._seq(self._up_to(trigger), self._behind(trigger, element)) for trigger in element.triggers
        )
        if element.stop_after_first:
            return self._alt([segment, self._any_text()])
        return self._seq(self._repeated(segment, 0, None), self._any_text())

    def _up_to(self, end: str) -> str:
        lazy = self._new_rule(f"{TEXT} {_quoted(end)}", attributes="[lazy]")
        if end not in self._special:
            return lazy
        return self._alt([self._seq(self._any_text(), self._text(end)), lazy])

    def _any_text(self) -> str:
        return self._new_rule(TEXT, is_terminal=True)

    def _any_tokens(self, but: int | None) -> str:
        return "<[*]>*" if but is None else f"<[^{but}]>*"

    def _few_tokens(self, most: int) -> str:
        return self._new_rule(self._any_text(), attributes=f"[max_tokens={most}]") if most else ""

    def _regex(self, pattern: str) -> str:
        return self._refer(llguidance.LLMatcher.grammar_from_regex(pattern))

    def _schema(self, schema: Any, param: str, at: str = "") -> str:
        return self._refer(self._json_grammar(schema))

    def _choice(self, parts: Iterable[str]) -> str:
        return self._new_rule(" | ".join(part or '""' for part in parts))

    def _named(self, part: str) -> str:
        return part if part.isidentifier() else self._new_rule(part)

    def _new_rule(self, expression: str, *, is_terminal: bool = False, attributes: str = "") -> str:
        self._number += 1
        name = f"{'T' if is_terminal else 'r'}{self._number}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _refer(self, grammar: str) -> str:
        """Add a grammar in llguidance's notation, and return a reference to it."""
        name = f"g{len(self._grammars)}"
        if grammar.startswith("{"):
            (made,) = json.loads(grammar)["grammars"]
        else:
            made = {"lark_grammar": grammar}
        self._grammars.append({**{key: value for key, value in made.items() if value}, "name": name})
        return f"@{name}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _sequence(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _repetition(part: str, least: int, most: int | None) -> str:
    times = f"{{{least},{'' if most is None else most}}}"
    return f"({part})" + {(0, 1): "?", (0, None): "*"}.get((least, most), times)
