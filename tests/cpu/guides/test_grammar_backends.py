"""Contract of grammar backends: each one's grammars, matchers and masks over the same vocabularies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.compile_child import try_guide
from grammar_proc.open_backend import open_vocabulary
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.base.errors import ConfigError
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide
from tests.harness.guides.drawn_outputs import Outputs
from tests.harness.models.special_tokenizers import byte_level, sentencepiece

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def vocabulary(backend: str) -> BackendVocabulary[Any]:
    return open_vocabulary(backend, DEMO_MODEL, num_threads=2)


@pytest.fixture
def outputs(vocabulary: BackendVocabulary[Any]) -> Outputs:
    return Outputs(vocabulary, 1)


def start_of(guide: Guide, vocabulary: BackendVocabulary[Any]) -> Matcher:
    compiled = try_guide(guide, vocabulary)
    assert compiled.error is None, compiled.error
    matcher: Matcher = vocabulary.compile(compiled.grammar)
    assert not matcher.is_error()
    return matcher


@pytest.mark.parametrize(
    ("guide", "right", "wrong"),
    [
        (Guide("json"), ['{"a": [1, {"b": null}]}', "{}", '{"é": -1.5e3}'], ["[]", "1", '{"a": 01}', "{,}"]),
        (
            Guide("json_schema", json.dumps(OBJECT)),
            ['{"a": 12, "b": "x"}', '{ "a":0,\n"b" : "y" }'],
            ['{"a": 1}', '{"b": "x", "a": 1}', '{"a": 1, "b": "z"}', '{"a": 1, "b": "x", "c": 1}'],
        ),
        (Guide("json_schema", json.dumps(OBJECT), False), ['{"a":12,"b":"x"}'], ['{"a": 12,"b":"x"}']),
        (Guide("regex", "^(ab|é+)[^a-z]{2}$"), ["abÄ1", "éé\n-"], ["ab", "abab", "abx1", "ab123", " abÄ1"]),
        (Guide("choice", '["a", "ab", "q\\"\\n"]'), ["a", "ab", 'q"\n'], ["b", "aba", 'q"']),
        (
            Guide("ebnf", 'root ::= "(" root ")" | digit{1,2} "\\x41b"?\ndigit ::= [0-9]'),
            ["((12))", "7Ab", "7"],
            ["(1", "123", "7\u0141b", "()"],
        ),
    ],
)
def test_texts_of_a_guide_are_taken_and_others_are_not(
    guide: Guide, right: list[str], wrong: list[str], vocabulary: BackendVocabulary[Any], outputs: Outputs
) -> None:
    start = start_of(guide, vocabulary)
    outputs.check_texts(start, right, wrong)


def test_an_output_may_end_only_where_it_is_complete(
    vocabulary: BackendVocabulary[Any], outputs: Outputs
) -> None:
    matcher = start_of(Guide("regex", "(ab)+"), vocabulary)
    a, b = outputs.ids("a")[0], outputs.ids("b")[0]
    assert not matcher.is_accepting()
    for _ in range(3):
        assert set(map(outputs.text, ([each] for each in outputs.allowed(matcher)))) <= {"a", "ab"}
        assert matcher.consume_token(a)
        assert not matcher.is_accepting()
        assert outputs.allowed(matcher) == [b]
        assert matcher.consume_token(b)
        assert matcher.is_accepting()
    closed = start_of(Guide("choice", '["ab"]'), vocabulary)
    assert closed.consume_tokens([a, b])
    assert closed.is_accepting()
    assert outputs.allowed(closed) == []


def test_special_tokens_are_never_allowed(vocabulary: BackendVocabulary[Any], outputs: Outputs) -> None:
    allowed = outputs.allowed(start_of(Guide("regex", r"(.|\n)*"), vocabulary))
    assert not {0, 1, 2} & set(allowed)
    assert len(allowed) > 3800


def test_a_token_that_does_not_match_is_an_error_that_stays(
    vocabulary: BackendVocabulary[Any], outputs: Outputs
) -> None:
    matcher = start_of(Guide("regex", "abc"), vocabulary)
    assert matcher.get_error() == ""
    assert not matcher.consume_tokens(outputs.ids("a") + outputs.ids("x"))
    assert matcher.is_error()
    assert matcher.get_error()
    assert not matcher.is_accepting()
    assert not matcher.consume_token(outputs.ids("b")[0])
    assert matcher.deep_copy().is_error()
    assert outputs.allowed(matcher) == []


def test_copies_go_their_own_ways_and_may_be_made_of_the_ids(
    vocabulary: BackendVocabulary[Any], outputs: Outputs
) -> None:
    start = start_of(Guide("regex", "(ab|ac){3}z"), vocabulary)
    one, other = start.deep_copy(), start.deep_copy()
    assert one.consume_tokens(outputs.ids("a") + outputs.ids("b"))
    assert other.consume_tokens(outputs.ids("a"))
    again = start.deep_copy()
    assert again.consume_tokens(outputs.ids("a") + outputs.ids("b"))
    assert outputs.allowed(one) == outputs.allowed(again) == outputs.allowed(start)
    assert outputs.allowed(other) != outputs.allowed(one)


def test_masks_of_several_are_those_of_each(vocabulary: BackendVocabulary[Any]) -> None:
    several = [start_of(Guide("regex", text), vocabulary) for text in ("a+", "[b-d]{2}", "é")]
    alone = [vocabulary.timed_mask(each)[0].tolist() for each in several]
    assert vocabulary.masks(several).tolist() == alone
    assert len({tuple(each) for each in alone}) == 3


def test_white_space_of_json_is_bounded_or_none(vocabulary: BackendVocabulary[Any], outputs: Outputs) -> None:
    text = json.dumps(OBJECT)
    start, bare = (start_of(Guide("json_schema", text, is_any), vocabulary) for is_any in (True, False))
    (space,) = outputs.ids("\n")
    for _ in range(6):
        drawn = outputs.draw(start)
        assert drawn is not None
        assert max(map(len, re.findall(r"[ \n\r\t]+", drawn)), default=0) <= 20
        assert not re.search(r"\s", outputs.draw(bare) or "")
    opened = start.deep_copy()
    assert opened.consume_tokens([*outputs.ids("{"), *[space] * 20])
    assert space not in outputs.allowed(opened)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_vocabularies_of_bytes_spell_what_no_token_is(backend: str, kind: str, tmp_path: Path) -> None:
    """`é` is two bytes in both, and a space is part of the fallback's tokens."""
    tokenizer = byte_level() if kind == "byte level" else sentencepiece()
    Path(tmp_path, "tokenizer.json").write_text(tokenizer._backend.to_str())
    vocabulary = open_vocabulary(backend, tmp_path, num_threads=1)
    pieces: dict[str, int] = tokenizer._backend.get_vocab()
    start = start_of(Guide("regex", "[éè][ q][t-z]h?e?"), vocabulary)
    names = ["Ã", "©", "Ġ", "t"] if kind == "byte level" else ["<0xC3>", "<0xA9>", "▁", "t"]
    matcher = start.deep_copy()
    for name in names:
        (mask,) = vocabulary.masks([matcher])
        token = pieces[name]
        assert mask[token // 32] >> token % 32 & 1, name
        assert matcher.consume_token(token)
    longer = pieces["Ġthe" if kind == "byte level" else "▁th"]
    matcher = start.deep_copy()
    assert matcher.consume_tokens([pieces[name] for name in names[:2]] + [longer])


class OwnVocabulary(GrammarVocabulary):
    """Stands for a backend of a package of one's own."""


def test_a_backend_may_be_a_class_of_your_own() -> None:
    vocabulary = open_vocabulary(f"{__name__}:OwnVocabulary", DEMO_MODEL, num_threads=1)
    assert type(vocabulary).__name__ == "OwnVocabulary"
    assert try_guide(Guide("regex", "a+"), vocabulary).error is None
    with pytest.raises(ConfigError, match=r"there is no module 'my_package\.grammars'"):
        open_vocabulary("my_package.grammars:Vocabulary", DEMO_MODEL, num_threads=1)
