"""Conversion of guides to grammars of llguidance. It runs in a process that may be killed, because guides
come from callers and may take any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from grammar_proc.structural_grammar import StructuralGrammar
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag
from runtime.guides.json_schema import schema_of
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.guide import Guide

MAX_WHITESPACE = 20
"""Characters of white space between two tokens of JSON. Without a limit, a model might never stop writing
them.
"""
MAX_CHOICES = 10_000
MAX_WORDS = MAX_SHORT_CHARS // 2


def grammar_of(guide: Guide, special: Mapping[str, int]) -> str:
    """Return a grammar that LLMatcher accepts as input, though it may find it wrong. `special` has the
    special tokens by their spelling. Raises InvalidRequest.
    """
    match guide.kind:
        case "json":
            return _json_grammar({"type": "object"}, guide)
        case "json_schema":
            return _json_grammar(schema_of(guide.text), guide)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(guide.text)
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(_choices(guide.text))
        case "ebnf":
            return llguidance.LLMatcher.grammar_from_lark(_lark_of(guide.text))
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(guide.text)
        case "structural_tag":
            return StructuralGrammar(
                special,
                lambda schema: _json_grammar(schema, guide),
                lambda nested: grammar_of(Guide(nested.kind, nested.text, nested.any_whitespace), special),
            ).make(structural_tag.decode(guide.text))


def _json_grammar(schema: Any, guide: Guide) -> str:
    if schema is False:
        raise refused(guide.kind, "no value matches false")
    options: Any = {
        "whitespace_flexible": guide.any_whitespace,
        "whitespace_pattern": rf"[ \n\r\t]{{0,{MAX_WHITESPACE}}}",
        "coerce_one_of": False,
        "lenient": False,
    }
    if not guide.any_whitespace:
        del options["whitespace_pattern"]
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema if isinstance(schema, dict) else {}), overrides=options
    )


def _choices(text: str) -> str:
    choices = choices_of(text)
    # One terminal, because llguidance follows at most 2,000 alternatives of a rule.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def choices_of(text: str) -> list[str]:
    """Return the texts of a choice from its JSON list. Raises InvalidRequest."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    is_list = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
    if not is_list or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(
            f"choice: a list of 1 to {MAX_CHOICES} texts is needed, none of them empty", param="choice"
        )
    return list(choices)


def _lark_of(ebnf: str) -> str:
    """Return the Lark text of a grammar in EBNF. Raises InvalidRequest."""
    try:
        return str(gbnf_to_lark(ebnf))
    except Exception as error:  # the converter raises plain Exception
        raise refused("ebnf", str(error)) from None


def refused(kind: str, words: str) -> InvalidRequest:
    """Return the error for a wrong guide, in the compiler's words."""
    return InvalidRequest(
        f"{kind}: {words[:MAX_WORDS] or 'it cannot be compiled'}", code="invalid_guide", param=kind
    )
