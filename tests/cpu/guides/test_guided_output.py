"""Guides against a launch with the demo model at temperature 1: what comes out is what the guide says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from carousel import Client, CompletionOutput, InvalidRequest, Overloaded, RequestError, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.harness.guides.random_guides import RandomGrammars, RandomRegexes, RandomSchemas
from tests.harness.ring.launched import SLACK, Launched

SEED = 24
REFUSALS = ("invalid_guide", "guide_too_large", "guide_too_complex", "too_many_guides")
MIN_STOPPED = 0.95
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(demo_launch: Launched) -> Iterator[Client]:
    with Client(demo_launch.run_dir) as client:
        yield client


def output(client: Client, guide: Guide | None, prompt: str = "x", **sampling: Any) -> CompletionOutput:
    """Asks again while too many guides are compiled."""
    params = SamplingParams(**{"max_tokens": 600, "seed": 1, **sampling})
    while True:
        try:
            return client.generate(prompt, params, structured_outputs=guide, timeout=60).outputs[0]
        except Overloaded as error:
            if error.code != "too_many_guides" or not error.retry_after_s:
                raise
            time.sleep(0.05)


def outputs(client: Client, guides: list[Guide]) -> list[CompletionOutput]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda at: output(client, guides[at], seed=at), range(len(guides))))


def ids_of(client: Client, text: str) -> list[int]:
    """The ids of the tokens that are these characters."""
    return [output(client, Guide(regex=re.escape(each)), max_tokens=2).token_ids[0] for each in text]


# -- many at random ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_output_is_what_its_schema_says(client: Client, count: int) -> None:
    random = RandomSchemas(SEED)
    schemas = [random.next() for _ in range(count)]
    got = outputs(client, [Guide(json=schema) for schema in schemas])
    stopped = [
        (schema, each.text) for schema, each in zip(schemas, got, strict=True) if each.finish_reason == "stop"
    ]
    print(f"{len(stopped)} of {len(schemas)} outputs ended with stop")
    assert len(stopped) >= MIN_STOPPED * len(schemas)
    for schema, text in stopped:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.full)])
def test_output_is_a_full_match_of_its_expression(client: Client, count: int) -> None:
    random = RandomRegexes(SEED)
    expressions = [random.next() for _ in range(count)]
    got = outputs(client, [Guide(regex=expression) for expression in expressions])
    assert [each.finish_reason for each in got] == ["stop"] * len(got)
    for expression, each in zip(expressions, got, strict=True):
        assert re.fullmatch(expression, each.text), (expression, each.text)


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.full)])
def test_output_is_a_text_of_its_grammar(client: Client, count: int) -> None:
    random = RandomGrammars(SEED)
    made = [random.next() for _ in range(count)]
    got = outputs(client, [Guide(grammar=grammar) for grammar, _ in made])
    assert [each.finish_reason for each in got] == ["stop"] * len(got)
    for (grammar, meaning), each in zip(made, got, strict=True):
        assert re.fullmatch(meaning, each.text), (grammar, each.text)


def test_the_output_is_one_of_the_choices_or_of_a_grammar(client: Client) -> None:
    choices = ["a", "ab", 'q"\n', "größe"]
    drawn = {output(client, Guide(choice=choices), seed=seed).text for seed in range(24)}
    assert drawn <= set(choices)
    assert len(drawn) > 1
    ebnf = 'root ::= "(" root ")" | digit digit?\ndigit ::= [0-9]'
    lark = 'start: "(" start ")" | DIGIT DIGIT?\nDIGIT: /[0-9]/'
    for seed in range(6):
        for guide in (Guide(grammar=ebnf), Guide(grammar=lark), Guide(ebnf=ebnf)):
            got = output(client, guide, seed=seed, max_tokens=64)
            if got.finish_reason == "stop":
                inner = got.text.strip("()")
                assert re.fullmatch("[0-9]{1,2}", inner)
                assert got.text == "(" * got.text.count("(") + inner + ")" * got.text.count("(")


def test_white_space_between_tokens_of_json_is_bounded_or_none(client: Client) -> None:
    got = [output(client, Guide(json=OBJECT), seed=seed).text for seed in range(8)]
    assert max(len(gap) for text in got for gap in re.findall(r"\s*", text)) <= 20
    bare = [output(client, Guide(json=OBJECT, disable_any_whitespace=True), seed=seed) for seed in range(4)]
    assert not any(re.search(r"\s", each.text) for each in bare)


# -- where it ends -------------------------------------------------------------------------------------------


def test_a_closed_guide_ends_with_stop_and_without_a_token_for_it(client: Client) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        got = output(client, Guide(choice=["red"]), **more)
        assert (got.text, got.finish_reason) == ("red", "stop")
        assert got.stop_reason is None
        assert 0 not in got.token_ids


def test_an_open_guide_ends_where_it_may_and_nowhere_else(client: Client) -> None:
    got = [output(client, Guide(regex="(ab)+"), seed=seed, max_tokens=400) for seed in range(6)]
    for each in got:
        assert re.fullmatch("(ab)+", each.text) or each.finish_reason == "length"
    bias = {0: 100.0}  # the model's end token, as likely as can be
    assert output(client, Guide(regex="(ab)+"), logit_bias=bias).text.startswith("ab")
    assert re.fullmatch("(ab)+", output(client, Guide(regex="(ab)+"), logit_bias=bias).text)
    # No end token is drawn where it is not to stop, nor before it may.
    assert output(
        client, Guide(regex="a+"), logit_bias=bias, ignore_eos=True, max_tokens=9
    ).text == "a" * len(
        output(client, Guide(regex="a+"), logit_bias=bias, ignore_eos=True, max_tokens=9).text
    )
    least = output(client, Guide(regex="(ab)*"), logit_bias=bias, min_tokens=5)
    assert len(least.token_ids) >= 5
    assert re.fullmatch("(ab)+", least.text)


def test_an_output_that_is_cut_off_says_so(client: Client) -> None:
    got = output(client, Guide(regex="[a-z]{200}"), max_tokens=5)
    assert got.finish_reason == "length"
    assert len(got.token_ids) == 5


def test_a_stop_id_of_the_callers_ends_it_where_the_guide_may_end(client: Client) -> None:
    (star,) = ids_of(client, "*")
    got = output(client, Guide(regex="(ab)+"), stop_token_ids=[star], logit_bias={star: 100.0})
    assert got.finish_reason == "stop"
    assert got.stop_reason == star
    assert re.fullmatch(r"(ab)+\*?", got.text)


def test_a_stop_string_ends_the_output_within_a_string_of_json(client: Client) -> None:
    got = output(client, Guide(json={"const": "one two"}), stop=["two"])
    assert (got.text, got.finish_reason, got.stop_reason) == ('"one ', "stop", "two")


# -- against other parameters --------------------------------------------------------------------------------


def test_bad_words_and_biases_yield_to_the_guide(client: Client) -> None:
    a, b = ids_of(client, "ab")
    got = output(client, Guide(regex="[ab]{4}"), bad_words_ids=[[a]], logit_bias={a: 100.0})
    assert set(got.text) == {"b"} or a not in got.token_ids
    assert output(client, Guide(regex="a{3}"), bad_words_ids=[[a]], logit_bias={a: -100.0}).text == "aaa"
    assert b not in output(client, Guide(regex="a{3}"), logit_bias={b: 100.0}).token_ids


def test_allowed_ids_narrow_the_guide_and_may_leave_nothing(client: Client) -> None:
    a, b = ids_of(client, "ab")
    got = output(client, Guide(regex="[ab]{6}"), allowed_token_ids=[b])
    assert got.text == "bbbbbb"
    with pytest.raises(RequestError, match="allowed_token_ids") as caught:
        output(client, Guide(regex="aab"), allowed_token_ids=[a])
    assert caught.value.code == "grammar_unsatisfiable"
    done = output(client, Guide(regex="aab?"), allowed_token_ids=[a])
    assert set(done.token_ids) == {a}
    assert done.finish_reason == "stop"


def test_no_id_that_the_tokenizer_does_not_know_or_that_is_special_is_drawn(client: Client) -> None:
    everything = dict.fromkeys(range(4000, 4096), 100.0)
    got = output(
        client, Guide(json={"type": "string", "maxLength": 40}), logit_bias=everything, max_tokens=80
    )
    assert 0 not in got.token_ids
    assert max(got.token_ids) < 4096
    json.loads(got.text if got.finish_reason == "stop" else '""')


# -- beside others -------------------------------------------------------------------------------------------


def test_the_sequences_of_a_request_have_each_their_own_place_in_the_guide(client: Client) -> None:
    params = SamplingParams(max_tokens=200, seed=3, n=4)
    got = client.generate("x", params, structured_outputs=Guide(json=OBJECT), timeout=60)
    texts = [each.text for each in got.outputs]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), OBJECT)
    alone = [output(client, Guide(json=OBJECT), seed=3 + at, max_tokens=200).text for at in range(4)]
    assert texts == alone


def test_what_has_no_guide_is_the_same_beside_what_has_one(client: Client) -> None:
    plain = SamplingParams(max_tokens=48, seed=5, ignore_eos=True)
    alone = client.generate("import os", plain, timeout=60).token_ids
    with ThreadPoolExecutor(8) as pool:
        guided = [pool.submit(output, client, Guide(json=OBJECT), seed=at) for at in range(12)]
        beside = [client.generate("import os", plain, timeout=60).token_ids for _ in range(4)]
        for each in guided:
            jsonschema.validate(json.loads(each.result().text), OBJECT)
    assert beside == [alone] * 4


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (
            Guide(json={"properties": {"a": {"not": {}}}}),
            "json_schema: /properties/a/not: not is not supported",
        ),
        (Guide(json="{"), "json_schema: the root: not JSON"),
        (Guide(json=False), "no value matches"),
        (Guide(json={"$ref": "#"}), "no output can match it"),
        (Guide(regex="(?=a)b"), "look-ahead"),
        (Guide(regex=r"(a)\1"), "backreferences are not supported"),
        (Guide(regex="(a"), "unclosed group"),
        (Guide(grammar="root ::= other"), "'other' not found"),
        (Guide(grammar="start: nothing"), "lark: "),
        (Guide(json={"type": "string", "pattern": "(?<=a)b"}), "json_schema: "),
    ],
)
def test_a_guide_that_cannot_be_kept_is_refused_with_the_reason(
    client: Client, guide: Guide, words: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
            output(client, guide)
        assert caught.value.status == 400
        assert caught.value.code in ("invalid_guide", "unsupported_schema")


@pytest.mark.parametrize(
    ("guide", "param"),
    [
        (Guide(), "structured_outputs"),
        (Guide(regex="a", choice=["a"]), "structured_outputs"),
        (Guide(regex=""), "regex"),
        (Guide(choice=[]), "choice"),
        (Guide(choice=["a", ""]), "choice"),
        (Guide(grammar=""), "lark"),
        (Guide(json=""), "json_schema"),
        (Guide(json="x" * (1 << 20)), "json_schema"),
        (Guide(json_object=3), "structured_outputs"),  # type: ignore[arg-type]
        (Guide(regex=3), "regex"),  # type: ignore[arg-type]
        ("a+", "structured_outputs"),
    ],
)
def test_what_is_no_guide_is_refused_at_the_call(client: Client, guide: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        output(client, guide)
    assert caught.value.param == param


def bombs() -> list[Guide]:
    nested: Any = {"type": "string"}
    for depth in range(9):
        nested = {"anyOf": [{"type": "object", "properties": {f"p{depth}{k}": nested}} for k in range(2)]}
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}}
    circle = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    return [
        Guide(json=nested),
        Guide(json=wide),
        Guide(json=circle),
        Guide(regex="(a+)+b"),
        Guide(regex=".{1,65535}"),
        Guide(regex="(.{1,65535}x){1,1000}y{65535}"),
        Guide(regex="(a|b)*a(a|b){2000}c"),
    ]


def test_bombs_are_over_in_time_and_others_go_on(client: Client) -> None:
    """16 at once. Each is refused, or its output goes on; requests without a guide wait for none of them."""
    plain = SamplingParams(max_tokens=16, seed=1)

    def explode(number: int) -> tuple[float, int]:
        guide = bombs()[number % len(bombs())]
        began = time.monotonic()
        try:
            params = SamplingParams(max_tokens=4, seed=number)
            client.generate("x", params, structured_outputs=guide, timeout=60)
        except RequestError as error:
            if error.code not in REFUSALS:
                raise
            return time.monotonic() - began, error.status
        return time.monotonic() - began, 200

    with ThreadPoolExecutor(16) as pool:
        exploding = [pool.submit(explode, number) for number in range(32)]
        waits = []
        while not all(each.done() for each in exploding):
            began = time.monotonic()
            client.generate("x", plain, timeout=60)
            waits.append(time.monotonic() - began)
        ended = [each.result() for each in exploding]
    assert {status for _, status in ended} <= {200, 400, 503}
    assert len([status for _, status in ended if status == 400]) > 3
    assert sorted(waits)[len(waits) // 2] < 2.0
    assert max(waits) < 2.0 * SLACK
    assert output(client, Guide(choice=["still here"])).text == "still here"


def test_who_leaves_is_waited_for_no_longer(client: Client) -> None:
    streams = []
    for letter in "abcde":  # all of them would take longer than the next one is given
        properties = {f"{letter}{number}": {"type": "string"} for number in range(3000)}
        guide = Guide(json={"type": "object", "properties": properties})
        params = SamplingParams(max_tokens=4)
        streams.append(client.stream("x", params, structured_outputs=guide, timeout=60))
    for stream in streams:
        stream.close()
    began = time.monotonic()
    assert output(client, Guide(choice=["next"])).text == "next"
    assert time.monotonic() - began < 2.0 * SLACK
