"""The backend xgrammar: outputs at random are what their guides say, and what it cannot keep is refused."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import jsonschema
import pytest

from grammar_proc.compile_child import try_guide
from grammar_proc.xgrammar_backend.numbers import Bounds
from grammar_proc.xgrammar_backend.vocabulary import XGrammarMatcher, XGrammarVocabulary
from runtime.guides import structural_tag as tags
from runtime.guides.keywords import KEYWORDS, XGRAMMAR
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide
from runtime.wire.messages import ErrorInfo
from tests.harness.guides.drawn_outputs import Outputs
from tests.harness.guides.random_guides import RandomGrammars, RandomRegexes, RandomSchemas

SEED = 24
MIN_TAKEN = 0.85
MIN_ENDED = 0.95


@pytest.fixture(scope="module")
def vocabulary() -> XGrammarVocabulary:
    return XGrammarVocabulary(DEMO_MODEL, num_threads=2)


@pytest.fixture
def outputs(vocabulary: XGrammarVocabulary) -> Outputs:
    return Outputs(vocabulary, SEED)


def start_of(guide: Guide, vocabulary: XGrammarVocabulary) -> XGrammarMatcher:
    compiled = try_guide(guide, vocabulary)
    assert compiled.error is None, compiled.error
    return vocabulary.compile(compiled.grammar)


def refusal(guide: Guide, vocabulary: XGrammarVocabulary) -> ErrorInfo:
    error = try_guide(guide, vocabulary).error
    assert error is not None
    return error


def schema_guide(schema: Any) -> Guide:
    return Guide("json_schema", json.dumps(schema))


# -- many at random ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_output_is_what_its_schema_says(count: int, vocabulary: XGrammarVocabulary, outputs: Outputs) -> None:
    drawn = RandomSchemas(SEED)
    num_taken = num_ended = 0
    for schema in (drawn.next() for _ in range(count)):
        compiled = try_guide(schema_guide(schema), vocabulary)
        if compiled.error is not None:
            assert re.match(r"json_schema: (/\S*[a-zA-Z]|/.*): ", compiled.error.message)
            continue
        num_taken += 1
        text = outputs.draw(vocabulary.compile(compiled.grammar))
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    print(f"{num_taken} of {count} schemas taken, {num_ended} outputs ended")
    assert num_taken >= MIN_TAKEN * count
    assert num_ended >= MIN_ENDED * num_taken


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.full)])
def test_output_is_a_full_match_of_its_expression(
    count: int, vocabulary: XGrammarVocabulary, outputs: Outputs
) -> None:
    drawn = RandomRegexes(SEED)
    for expression in (drawn.next() for _ in range(count)):
        text = outputs.draw(start_of(Guide("regex", expression), vocabulary))
        assert text is not None
        assert re.fullmatch(expression, text), (expression, text)


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.full)])
def test_output_is_a_text_of_its_grammar(
    count: int, vocabulary: XGrammarVocabulary, outputs: Outputs
) -> None:
    drawn = RandomGrammars(SEED)
    for _ in range(count):
        grammar, meaning = drawn.next()
        drawn.next()  # of Lark
        text = outputs.draw(start_of(Guide("ebnf", grammar), vocabulary))
        assert text is not None
        assert re.fullmatch(meaning, text), (grammar, text)


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.full)])
def test_a_mask_has_the_tokens_that_the_matcher_takes_and_no_others(
    count: int, vocabulary: XGrammarVocabulary, outputs: Outputs
) -> None:
    """Its own masks are partly made beforehand; the matcher decides byte by byte."""
    rng, drawn, schemas = random.Random(SEED), RandomRegexes(SEED), RandomSchemas(SEED)
    guides = [Guide("regex", "(x)?[^a-z]-"), Guide("ebnf", 'root ::= "x"? [ -`{-\ud7ff] "-"')]
    guides += [Guide("regex", drawn.next()) for _ in range(count)]
    guides += [schema_guide(schemas.next()) for _ in range(count)]
    text = tags.AnyText()
    call = tags.Tag("<call>", tags.Regex("[é-ü]+"), "</call>")
    guides.append(Guide("structural_tag", tags.encode(tags.TriggeredTags(["<c", "ell"], [call], False))))
    guides.append(Guide("structural_tag", tags.encode(tags.Tag("", text, "<|im_end|>"))))
    for guide in guides:
        compiled = try_guide(guide, vocabulary)
        if compiled.error is not None:
            continue
        matcher = vocabulary.compile(compiled.grammar)
        for _ in range(4):
            taken = [token for token in range(4096) if matcher.deep_copy().consume_token(token)]
            assert outputs.allowed(matcher) == taken, guide
            if not taken:
                break
            assert matcher.consume_token(rng.choice(taken))


# -- schemas -------------------------------------------------------------------------------------------------


def test_numbers_within_bounds_are_taken_and_no_others(
    vocabulary: XGrammarVocabulary, outputs: Outputs
) -> None:
    rng = random.Random(SEED)
    for _ in range(60):
        low, high = sorted(rng.choice([1, 10, 0.25]) * rng.randrange(-60, 60) for _ in range(2))
        keywords = {
            rng.choice(["minimum", "exclusiveMinimum"]): low,
            rng.choice(["maximum", "exclusiveMaximum"]): high,
        }
        if rng.random() < 0.3:
            del keywords[rng.choice(list(keywords))]
        schema = {"type": rng.choice(["number", "integer"]), **keywords}
        compiled = try_guide(schema_guide(schema), vocabulary)
        for _ in range(8):
            value = rng.choice([low, high, rng.randrange(-700, 700) / rng.choice([1, 4, 10])])
            text = str(int(value)) if value == int(value) else str(value)
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
            if compiled.error is not None:
                assert not is_valid
                continue
            matcher = vocabulary.compile(compiled.grammar)
            is_taken = matcher.consume_tokens(outputs.ids(text)) and matcher.is_accepting()
            assert is_taken is is_valid, (schema, text)


def test_bounds_are_those_that_say_most() -> None:
    bounds = Bounds().narrowed("minimum", 1).narrowed("exclusiveMinimum", 1).narrowed("minimum", 0)
    assert bounds == Bounds(least=Fraction(1), is_above=True)
    bounds = Bounds().narrowed("exclusiveMaximum", 0.1).narrowed("maximum", 0.1).narrowed("maximum", 2)
    assert bounds == Bounds(most=Fraction(1, 10), is_below=True)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"required": ["z"], "type": "object"}, ['{"z":1}', '{"z":1,"a":2}'], ["{}", '{"a":2}']),
        (
            {"properties": {"a": {"type": "integer"}}, "type": "object"},
            ['{"a":1}', '{"b":""}', '{"a":1,"ab":""}'],
            ['{"a":""}', '{"a":1,"a":2}', '{"b":1,"\\u0061":""}'],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, True], "items": False},
            ["[]", "[null,1]"],
            ["[1]"],
        ),
        (
            {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3},
            ["[1,1]"],
            ["[1]", "[1,1,1,1]"],
        ),
        ({"type": "integer", "multipleOf": 7}, ["0", "-14", "7000"], ["1", "71"]),
        ({"multipleOf": 0.5, "minimum": 0, "maximum": 2, "type": "number"}, ["0", "1.5"], ["0.25", "2.5"]),
        ({"type": "string", "pattern": '^a."$'}, ['"ax\\""', '"a\\\\\\""'], ['"ax"', '"a\\n\\""']),
        ({"type": "string", "pattern": "b"}, ['"b"', '"abc"'], ['"a"']),
        (
            {"type": "string", "minLength": 1, "maxLength": 2},
            ['"ü"', '"\\u00e9a"'],
            ['""', '"\\ud83d\\ude00"'],
        ),
        ({"minimum": 3}, ["3", '"a"', "null", "[0]"], ["2"]),
        ({"allOf": [{"type": "number"}, {"multipleOf": 2}], "minimum": 1, "maximum": 9}, ["2"], ["3", "10"]),
        (
            {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"additionalProperties": {"type": "integer"}}]}
            | {"type": "object"},
            ['{"a":1,"b":0}'],
            ['{"a":0}', '{"a":"x"}', '{"b":"x"}'],
        ),
        ({"enum": [1, "1", None], "type": ["string", "null"]}, ['"1"', "null"], ["1"]),
        (
            {"type": "object", "patternProperties": {"^p": {"type": "null"}}, "additionalProperties": False},
            ['{"p1":null}', "{}"],
            ['{"a":null}', '{"p":1}'],
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
            ["[[],[[]]]"],
            ["[1]"],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/n"}] * 9,
                "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            },
            ["[[],[[]]]"],
            ["[1]"],
        ),
        ({"items": {"const": 1}, "allOf": [{"items": {"const": True}}], "type": "array"}, ["[]"], ["[1]"]),
        ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2023-02-30"', '"2024-13-01"']),
    ],
)
def test_what_a_schema_says_is_kept(
    schema: Any, right: list[str], wrong: list[str], vocabulary: XGrammarVocabulary, outputs: Outputs
) -> None:
    start = start_of(schema_guide(schema), vocabulary)
    outputs.check_texts(start, right, wrong)


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "not is not supported"),
        ({"items": {"type": "number", "multipleOf": 0.1}}, "/items/multipleOf", "between two bounds"),
        ({"properties": {"a": {"enum": ["x"], "maxLength": 3}}}, "/properties/a/maxLength", "beside enum"),
        (
            {"$defs": {"s": {"pattern": "a+", "maxLength": 3}}, "$ref": "#/$defs/s"},
            "/$defs/s/maxLength",
            "no other",
        ),
        ({"patternProperties": {"a": {}}}, "/patternProperties", "additionalProperties is false"),
        ({"maxProperties": 2, "properties": {"a": {}}}, "/maxProperties", "all of properties are required"),
        ({"pattern": "(?=a)"}, "/pattern", "look-ahead"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/allOf/1/pattern", "a second pattern"),
        ({"format": "date", "pattern": "a"}, "/format", "beside pattern"),
        ({"$ref": "#", "type": "object"}, "/$ref", "leads to itself"),
        (
            {
                "anyOf": [{"const": n} for n in range(40)],
                "allOf": [{"anyOf": [{"minimum": n} for n in range(40)]}],
            },
            "the root",
            "1000 combinations",
        ),
    ],
)
def test_what_is_not_kept_is_refused_with_its_place(
    schema: Any, place: str, words: str, vocabulary: XGrammarVocabulary
) -> None:
    error = refusal(schema_guide(schema), vocabulary)
    assert error.message.startswith(f"json_schema: {place}: ")
    assert words in error.message
    assert error.code == "unsupported_schema"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"allOf": [{"const": 1}, {"const": 2}]},
    ],
)
def test_a_schema_that_no_value_matches_is_refused(schema: Any, vocabulary: XGrammarVocabulary) -> None:
    assert refusal(schema_guide(schema), vocabulary).message == "json_schema: no output can match it"


def test_notes_are_of_keywords_that_are_kept() -> None:
    assert {KEYWORDS[name].treatment for name in XGRAMMAR} == {"kept"}


# -- other guides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (Guide("regex", "(?=a)b"), "regex: at position 3: look-around, including look-ahead"),
        (Guide("regex", r"(a)\1"), "backreferences are not supported"),
        (Guide("regex", "(a"), "unclosed group"),
        (Guide("regex", "a)"), "unopened group"),
        (Guide("regex", r"\bfoo"), "word boundaries"),
        (Guide("regex", "(?i)a"), "flags are not supported"),
        (Guide("regex", "a^b"), "an anchor within"),
        (Guide("regex", "[[:alpha:]]"), "sets within a set"),
        (Guide("regex", r"\p{L}"), r"\p is not supported"),
        (Guide("regex", "a{3,2}"), "the wrong way round"),
        (Guide("regex", "*a"), "nothing to repeat"),
        (Guide("ebnf", "root ::= other"), 'Rule "other" is not defined'),
        (Guide("ebnf", "root ::= Token(0)"), "Token(...) is not supported"),
        (Guide("lark", 'start: "a"'), "lark: --grammar-backend xgrammar does not take it; llguidance does"),
        (Guide("choice", "[]"), "a list of 1 to 10000 texts"),
    ],
)
def test_a_guide_that_cannot_be_kept_is_refused_with_the_reason(
    guide: Guide, words: str, vocabulary: XGrammarVocabulary
) -> None:
    error = refusal(guide, vocabulary)
    assert words in error.message
    assert error.status == 400
    assert error.param == guide.kind
