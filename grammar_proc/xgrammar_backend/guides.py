"""Conversion of guides to grammars in xgrammar's EBNF. It runs in a process that may be killed, because
guides come from callers and may take any time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from grammar_proc.guide_grammar import choices_of, refused
from grammar_proc.xgrammar_backend.expressions import Expression, ExpressionRefused
from grammar_proc.xgrammar_backend.json_values import JsonValues
from grammar_proc.xgrammar_backend.nodes import QUOTED, GrammarNode, Rules, chars, literals
from grammar_proc.xgrammar_backend.tags import TagNodes
from runtime.guides import structural_tag
from runtime.guides.json_schema import schema_of
from runtime.wire.guide import Guide

OF_TOKENS = re.compile(r"\b(?:Token|ExcludeToken|TagDispatch|TokenTagDispatch|Regex|Substring)\s*\(")
"""Notation that xgrammar has beyond GBNF. It is refused: a guide that names tokens by their ids could allow
special ones.
"""
CODE = re.compile(r"((?<!\\)(?:\\\\)*)\\x([0-9a-fA-F]{2})")
"""Code of a character: two digits in GBNF, any number in xgrammar's EBNF."""
WIDE = re.compile(r"\\[uU]")


def ebnf_of(guide: Guide, special: Mapping[str, int]) -> str:
    """Return a grammar that xgrammar accepts as input, though it may find it wrong. `special` has the special
    tokens by their spelling. Raises InvalidRequest.
    """
    if guide.kind == "ebnf":
        return _checked(guide.text)
    rules = Rules()
    grammar = rules.ebnf(_node(guide, rules, special))
    if grammar is None:
        raise refused(guide.kind, "no output can match it")
    return grammar


def _node(guide: Guide, rules: Rules, special: Mapping[str, int]) -> GrammarNode:
    match guide.kind:
        case "json":
            return JsonValues(rules, any_whitespace=guide.any_whitespace).of_schema({"type": "object"})
        case "json_schema":
            return JsonValues(rules, any_whitespace=guide.any_whitespace).of_schema(schema_of(guide.text))
        case "regex":
            try:
                return Expression(guide.text, chars).whole()
            except ExpressionRefused as error:
                raise refused("regex", str(error)) from None
        case "choice":
            return literals(choices_of(guide.text), rules)
        case "ebnf":
            return rules.foreign(_checked(guide.text))
        case "structural_tag":
            tag = TagNodes(
                rules,
                special,
                JsonValues(rules, any_whitespace=guide.any_whitespace),
                lambda each: _node(Guide(each.kind, each.text, each.any_whitespace), rules, special),
            )
            return tag.of(structural_tag.decode(guide.text))
    raise refused(guide.kind, "--grammar-backend xgrammar does not take it; llguidance does")


def _checked(ebnf: str) -> str:
    """Return a GBNF grammar in xgrammar's spelling. Raises InvalidRequest."""
    found = OF_TOKENS.search(QUOTED.sub('""', ebnf))
    if found:
        raise refused("ebnf", f"{found[0].rstrip('(').strip()}(...) is not supported")
    sets: dict[str, str] = {}
    first = next(name for number in itertools.count() if (name := f"set{number}-") not in ebnf)

    def spelled(quoted: re.Match[str]) -> str:
        text = CODE.sub(r"\1\\u00\2", quoted[0])
        if text.startswith("[") and not text.startswith("[^") and (not text.isascii() or WIDE.search(text)):
            return sets.setdefault(text, f"{first}{len(sets)}")  # see _Writer
        return text

    made = QUOTED.sub(spelled, ebnf)
    return "\n".join([made, *(f"{name} ::= {text}" for text, name in sets.items())])
