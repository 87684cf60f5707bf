"""Structural tags of callers: what each format takes, what is refused and where, in all spellings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from carousel import GuidedDecodingParams, StructuredOutputsParams
from carousel.server.chat.formats import REASONING_FORMATS
from carousel.server.chat.output_guide import HeldCalls, output_guide
from carousel.server.guides import asked_guide, asked_guide_of_sampling
from carousel.server.openai.types import ChatBody
from carousel.server.sglang.generate_types import GenerateSampling
from carousel.structured_outputs import guide_for_wire
from grammar_proc.compile_child import try_guide
from runtime.base.errors import InvalidRequest
from tests.cpu.guides.test_structural_grammar import Matching

A = {"type": "const_string", "value": "a"}
B = {"type": "const_string", "value": "b"}
FREE = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {
    "type": "tag",
    "begin": "<call=weather>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</call>",
}
TIME = {"type": "tag", "begin": "<call=time>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ""}
CALLS = {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL, TIME]}
OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<call=weather>", "schema": SCHEMA, "end": "</call>"}],
    "triggers": ["<call="],
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def matching(request: pytest.FixtureRequest) -> Matching:
    return Matching("<tool_call>", "</tool_call>", backend=request.param)


def params(element: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": element})


def takes(matching: Matching, element: Any, text: str) -> bool:
    guide = guide_for_wire(params(element))
    assert guide is not None
    return matching.takes(guide, text)


@pytest.mark.parametrize(
    ("element", "right", "wrong"),
    [
        (A, ["a"], ["", "b", "aa"]),
        (NUMBER, ["12", "-3"], ["", "x", "1.5"]),
        ({"type": "regex", "pattern": "[ab]{2}"}, ["ab", "bb"], ["a", "abc"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["(x", ""]),
        (FREE, ["", "any <x> text\n"], []),
        ({"type": "sequence", "elements": [A, NUMBER, FREE]}, ["a1", "a1 and so on"], ["a", "1"]),
        ({"type": "or", "elements": [A, {"type": "sequence", "elements": [B, B]}]}, ["a", "bb"], ["b", "ab"]),
        (
            {"type": "sequence", "elements": [{"type": "optional", "content": A}, B]},
            ["ab", "b"],
            ["a", "aab"],
        ),
        ({"type": "plus", "content": A}, ["a", "aaa"], ["", "ab"]),
        ({"type": "sequence", "elements": [{"type": "star", "content": A}, B]}, ["b", "aaab"], ["", "a"]),
        ({"type": "repeat", "min": 2, "max": 3, "content": A}, ["aa", "aaa"], ["a", "aaaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": A}, ["aa", "aaaaa"], ["a"]),
        (CALL, ['<call=weather>{"city": "Ulm"}</call>'], ["<call=weather>{}</call>", "text"]),
        (
            {"type": "tag", "begin": "<t>", "content": NUMBER, "end": ["</t>", "<t/>"]},
            ["<t>1</t>", "<t>1<t/>"],
            ["<t>1", "<t></t>"],
        ),
        (
            {"type": "tag", "begin": "<t>", "content": FREE, "end": "</t>"},
            ["<t></t>", "<t>a <b> c</t>"],
            ["<t>a", "<t>a</t>b", "a"],
        ),
        (
            CALLS,
            ["", "text", 'See <call=weather>{"city": "Ulm"}</call> and <call=time>12', "<call=time>1"],
            ["<call=other>", "<call=weather>{}</call>", "<call=time>x"],
        ),
        ({**CALLS, "at_least_one": True}, ["<call=time>1", "<call=time>1 text"], ["", "text <call=time>1"]),
        (
            {**CALLS, "stop_after_first": True},
            ["text <call=time>1", "text"],
            ['<call=weather>{"city": ""}</call> more', '<call=weather>{"city": ""}</call><call=time>1'],
        ),
        ({**CALLS, "at_least_one": True, "stop_after_first": True}, ["<call=time>1"], ["", "x<call=time>1"]),
        (
            {"type": "tags_with_separator", "tags": [{**CALL, "content": NUMBER}, TIME], "separator": ", "},
            ["", "<call=time>1", "<call=weather>1</call>, <call=time>2"],
            ["<call=time>1,", "x", "<call=weather>1</call><call=time>2"],
        ),
        (
            {"type": "tags_with_separator", "tags": [TIME], "separator": ";", "at_least_one": True},
            ["<call=time>1", "<call=time>1;<call=time>2"],
            [""],
        ),
        (
            {"type": "tags_with_separator", "tags": [TIME], "separator": ";", "stop_after_first": True},
            ["", "<call=time>1"],
            ["<call=time>1;<call=time>2"],
        ),
    ],
)
def test_what_a_format_takes(matching: Matching, element: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert takes(matching, element, text), text
    for text in wrong:
        assert not takes(matching, element, text), text


def deep(levels: int) -> Any:
    element: Any = A
    for _ in range(levels):
        element = {"type": "optional", "content": element}
    return element


@pytest.mark.parametrize(
    ("element", "where"),
    [
        (None, "/format: an object"),
        ({}, "/format/type: 'None' is none of const_string"),
        ({"type": "dispatch", "rules": []}, "/format/type: 'dispatch'"),
        ({"type": "token", "token": 3}, "/format/type: 'token'"),
        ({"type": "qwen_xml_parameter"}, "/format/type"),
        ({"type": "const_string"}, "/format/value: it is needed"),
        ({"type": "const_string", "value": ""}, "/format/value: it is empty"),
        ({"type": "const_string", "value": 3}, "/format/value: a text"),
        ({**A, "x": 1}, "/format/x: no such field"),
        ({**NUMBER, "style": "qwen_xml"}, "/format/style: it is not supported"),
        ({**NUMBER, "any_order": True}, "/format/any_order"),
        ({**FREE, "excludes": ["x"]}, "/format/excludes"),
        ({**FREE, "max_tokens": 3}, "/format/max_tokens"),
        ({"type": "sequence", "elements": []}, "/format/elements"),
        ({"type": "sequence", "elements": [FREE, A]}, "/format/elements/0: any_text"),
        ({"type": "sequence", "elements": [CALLS, A]}, "/format/elements/0: triggered_tags"),
        ({"type": "star", "content": FREE}, "/format/content: any_text"),
        ({"type": "tag", "begin": "a", "content": CALLS, "end": "b"}, "/format/content: triggered_tags"),
        ({"type": "tag", "begin": "a", "content": FREE, "end": ""}, "/format/end: it is empty"),
        ({"type": "tag", "begin": "a", "content": FREE, "end": ["b", "c"]}, "/format/end: one text"),
        ({"type": "tag", "begin": {"type": "token", "token": 1}, "content": A, "end": ""}, "/format/begin"),
        ({**CALLS, "triggers": []}, "/format/triggers"),
        ({**CALLS, "triggers": ["<x"]}, "/format/triggers: a tag begins with one of them"),
        ({**CALLS, "triggers": ["<call=", "<c"]}, "/format/triggers: a tag begins with one"),
        ({**CALLS, "triggers": ["<call=", "<x"]}, "/format/triggers: no tag begins with '<x'"),
        ({**CALLS, "tags": []}, "/format/tags"),
        ({**CALLS, "tags": [A]}, "/format/tags/0: a tag is needed"),
        ({**CALLS, "at_least_one": 1}, "/format/at_least_one: true or false"),
        ({**CALLS, "excludes": ["x"]}, "/format/excludes"),
        ({"type": "repeat", "min": 3, "max": 2, "content": A}, "/format: min of at least"),
        ({"type": "repeat", "min": 0, "max": 10**6, "content": A}, "/format/max: a whole number"),
        (deep(60), "nested more than 50 deep"),
        (deep(3000), "nested more than 50 deep"),
    ],
)
def test_what_a_tag_may_not_have_is_named(element: Any, where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guide_for_wire(params(element))
    assert caught.value.param == "structural_tag"
    assert caught.value.message.startswith("structural_tag: ")
    assert where in caught.value.message


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object is needed"),
        ({}, "/format: it is needed"),
        ({"format": A, "x": 1}, "/x: no such field"),
        ({**OLDER, "triggers": ["x"]}, "/triggers: a tag begins"),
        ({"triggers": ["x"]}, "/structures: it is needed"),
        ({**OLDER, "structures": [{"begin": "<call="}]}, "/structures/0/end: it is needed"),
        ({**OLDER, "structures": ["x"]}, "/structures/0: an object"),
    ],
)
def test_what_is_no_tag_is_refused(value: Any, where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guide_for_wire(StructuredOutputsParams(structural_tag=value))
    assert caught.value.param == "structural_tag"
    assert where in caught.value.message


def test_a_keyword_of_a_schema_in_a_tag_is_named_with_both_places(matching: Matching) -> None:
    content = {"type": "json_schema", "json_schema": {"properties": {"a": {"not": {}}}}}
    guide = guide_for_wire(params({"type": "sequence", "elements": [A, content]}))
    assert guide is not None
    error = try_guide(guide, matching.vocabulary).error
    assert error is not None
    assert error.param == "structural_tag"
    assert error.message.startswith(
        "structural_tag: /format/elements/1/json_schema: /properties/a/not: not is not supported"
    )


TAG = {"type": "structural_tag", "format": CALLS}


@pytest.mark.parametrize(
    ("field", "body", "tag"),
    [
        ("response_format", TAG, TAG),
        ("response_format", OLDER, OLDER),
        ("structured_outputs", {"structural_tag": json.dumps(TAG)}, TAG),
        ("structured_outputs", {"structural_tag": OLDER}, OLDER),
        ("structural_tag", json.dumps(OLDER), OLDER),
    ],
)
def test_all_spellings_mean_the_same(field: str, body: Any, tag: Any) -> None:
    chat = chat_body({field: body})
    asked = asked_guide(chat)
    assert asked.names["structural_tag"] == field
    expected = guide_for_wire(StructuredOutputsParams(structural_tag=tag))
    assert guide_for_wire(asked.params) == expected
    of_trtllm = GuidedDecodingParams(GuidedDecodingParams.GuideType.STRUCTURAL_TAG, json.dumps(tag))
    assert guide_for_wire(of_trtllm) == expected
    sampling = msgspec.convert({"structural_tag": json.dumps(tag)}, GenerateSampling)
    assert guide_for_wire(asked_guide_of_sampling(sampling).params) == expected


def chat_body(fields: Any) -> ChatBody:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return msgspec.json.decode(msgspec.json.encode(body), type=ChatBody)


def test_an_empty_text_of_sglangs_is_no_tag() -> None:
    chat = chat_body({"structural_tag": ""})
    assert asked_guide(chat).params is None
    assert asked_guide_of_sampling(GenerateSampling(structural_tag="")).params is None


@pytest.mark.parametrize(
    "body",
    [
        {"type": "structural_tag"},
        {"type": "json_object", "format": A},
        {"type": "text", "triggers": ["x"]},
    ],
)
def test_a_response_format_has_a_tag_with_its_type_and_only_there(body: Any) -> None:
    chat = chat_body({"response_format": body})
    with pytest.raises(InvalidRequest, match="response_format: format or structures") as caught:
        asked_guide(chat)
    assert caught.value.param == "response_format"


def test_a_tag_begins_behind_reasoning(matching: Matching) -> None:
    guide = output_guide(params(CALL), HeldCalls("none"), REASONING_FORMATS["qwen3"], "may begin")
    assert guide is not None
    call = '<call=weather>{"city": "Ulm"}</call>'
    assert matching.takes(guide, f"<think>So</think>\n{call}")
    assert matching.takes(guide, call)
    assert not matching.takes(guide, "<think>So</think>So")
    plain = output_guide(params(CALL), HeldCalls("none"), None, "none")
    assert plain == guide_for_wire(params(CALL))
