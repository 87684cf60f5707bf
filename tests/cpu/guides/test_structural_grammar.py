"""Grammars of structural tags: what they take of each family's calls, with special tokens and without."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from carousel.server.chat.answer import AnswerParser, AnswerPlan
from carousel.server.chat.call_tags import CALL_TAGS, call_tags, calls_alone, calls_in_text
from carousel.server.chat.events import Event, ItemBegun, ItemDelta
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS, Thinking
from carousel.server.chat.output_guide import HeldCalls, output_guide
from carousel.server.chat.tools import ToolSet
from carousel.structured_outputs import StructuredOutputsParams
from grammar_proc.backend import Matcher
from grammar_proc.compile_child import try_guide
from grammar_proc.open_backend import open_vocabulary
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide

CITY = (
    b'{"type":"object","properties":{"city":{"type":"string"}},'
    b'"required":["city"],"additionalProperties":false}'
)
TOOLS = ToolSet(
    {"now": b"", "weather": CITY, "loose": b'{"properties":{"a":{"type":"integer"}}}'}, {"weather"}
)
THINKING: tuple[Thinking, ...] = ("open", "may begin", "none")
TAGGED = [family for family, found in CALL_TAGS.items() if not found.holds_any]
FAMILIES = [
    *(family for family in CALL_TAGS if family not in (*TAGGED, "gpt_oss")),
    "mistral with [ARGS]",
]
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>", "<|eom_id|>"),
    "mistral": ("[TOOL_CALLS]", "[IMG]"),
    "mistral with [ARGS]": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<arg_key>", "</arg_value>"),
}


BACKENDS: list[str] = []
"""The last is the one that is tried."""


class Matching:
    """A vocabulary in which two spellings are special tokens, added tokens, or text like any other."""

    def __init__(self, one: str, two: str, tokens: str = "added", backend: str = "") -> None:
        """`backend`: empty for the one that is tried."""
        if tokens == "none":
            one, two = "<x>", "<y>"
        tokenizer: Any = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
        for added, spelling in zip(tokenizer["added_tokens"][1:], (one, two), strict=True):
            tokenizer["model"]["vocab"].pop(added["content"])
            tokenizer["model"]["vocab"][spelling] = added["id"]
            added.update(content=spelling, special=tokens == "special")
        text = json.dumps(tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokenizer.json").write_text(text)
            self.vocabulary = open_vocabulary(backend or BACKENDS[-1], Path(folder), num_threads=1)
        self._tokenizer = Tokenizer.from_str(text)
        self._compiled: tuple[Guide, Matcher] | None = None

    def compile(self, guide: Guide) -> Matcher:
        """Return a matcher at the beginning; of the guide that was asked for last it is a copy."""
        if self._compiled is None or self._compiled[0] != guide:
            compiled = try_guide(guide, self.vocabulary)
            assert compiled.error is None, compiled.error
            self._compiled = guide, self.vocabulary.compile(compiled.grammar)
        return self._compiled[1].deep_copy()

    def takes(self, guide: Guide, text: str) -> bool:
        """Return True if a whole text matches, as the tokenizer writes it."""
        matcher = self.compile(guide)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    BACKENDS.append(request.param)
    yield request.param
    BACKENDS.pop()
    matching_of.cache_clear()


@cache
def matching_of(one: str, two: str, tokens: str = "added") -> Matching:
    return Matching(one, two, tokens)


def guide_of(element: tags.Element) -> Guide:
    return Guide("structural_tag", tags.encode(element))


def written(family: str, name: str, arguments: str) -> str:
    """A call in the words of a family, as an answer of it alone."""
    found = tags_of(family)
    call = found.begin.replace("$NAME", name).replace("$NUMBER", "0") + arguments + found.end
    before, first, after = found.section
    return f"{before}{first}{call}{after}"


def tags_of(family: str) -> Any:
    return call_tags(family.partition(" ")[0], MARKS[family] if "[ARGS]" in family else ())


def read(family: str, text: str) -> list[Event]:
    parser = AnswerParser(AnswerPlan(TOOL_FORMATS[family.partition(" ")[0]], TOOLS))
    return parser.push(text) + parser.end()


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_a_family_are_held_and_can_be_read(family: str, tokens: str) -> None:
    matching = matching_of(*MARKS[family], tokens)
    guide = guide_of(calls_alone(tags_of(family), TOOLS, one=True, all_held=True))
    right = {"now": "{}", "weather": '{"city": "Köln </x>"}', "loose": '{"a" : 1, "b": [null]}'}
    for name, arguments in right.items():
        text = written(family, name, arguments)
        assert matching.takes(guide, text)
        begun = [event for event in read(family, text) if isinstance(event, ItemBegun)]
        assert [(event.kind, event.name) for event in begun] == [("tool_call", name)]
    wrong = [
        ("weather", "{}"),
        ("weather", '{"city": 1}'),
        ("now", '{"x": 1}'),
        ("other", "{}"),
        ("loose", '{"a": "x"}'),
    ]
    for name, arguments in wrong:
        assert not matching.takes(guide, written(family, name, arguments))
    assert not matching.takes(guide, "")
    assert not matching.takes(guide, "text " + written(family, "now", "{}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_come_one_after_the_other_unless_one_is_wanted(family: str) -> None:
    matching, found = matching_of(*MARKS[family]), tags_of(family)
    calls = [found.begin.replace("$NAME", "now").replace("$NUMBER", "0") + "{}" + found.end] * 2
    before, first, after = found.section
    text = before + first + found.separator.join(calls) + after
    for one in (True, False):
        guide = guide_of(calls_alone(found, TOOLS, one=one, all_held=True))
        assert matching.takes(guide, text) is not one
    assert (
        sum(isinstance(event, ItemBegun) and event.kind == "tool_call" for event in read(family, text)) == 2
    )


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if tags_of(family).triggers])
def test_in_text_a_trigger_begins_a_call_that_is_held(family: str, tokens: str) -> None:
    matching = matching_of(*MARKS[family], tokens)
    guide = guide_of(calls_in_text(tags_of(family), TOOLS, one=False))
    call = written(family, "weather", '{"city": "Ulm"}')
    assert matching.takes(guide, "")
    assert matching.takes(guide, "Only text: {}")
    assert matching.takes(guide, f"See: {call}")
    assert matching.takes(guide, call + " and more")
    assert matching.takes(guide, written(family, "loose", '{"a": "not strict"}'))
    assert not matching.takes(guide, "See: " + written(family, "weather", '{"city": 1}'))
    assert not matching.takes(guide, "See: " + written(family, "other", "{}"))


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(json=json.loads(CITY)),
        StructuredOutputsParams(regex=r"\{.*\}"),
        StructuredOutputsParams(choice=['{"city": "Ulm"}', "no"]),
        StructuredOutputsParams(grammar='start: "{" /[^}]*/ "}"'),
        StructuredOutputsParams(grammar='root ::= "{" [^}]* "}"'),
        StructuredOutputsParams(json_object=True),
    ],
)
def test_a_guide_begins_behind_reasoning(params: StructuredOutputsParams, tokens: str, backend: str) -> None:
    matching = matching_of("<think>", "</think>", tokens)
    reasoning, value = REASONING_FORMATS["qwen3"], '{"city": "Ulm"}'
    opened = output_guide(params, HeldCalls("none"), reasoning, "open")
    begins = output_guide(params, HeldCalls("none"), reasoning, "may begin")
    after = output_guide(params, HeldCalls("none"), reasoning, "none")
    assert opened is not None
    assert begins is not None
    assert after is not None
    assert after.kind != "structural_tag"
    if after.kind == "lark" and backend == "xgrammar":
        error = try_guide(opened, matching.vocabulary).error
        assert error is not None
        assert error.message == "lark: --grammar-backend xgrammar does not take it; llguidance does"
        return
    for end in ("</think>", "</think>\n\n"):
        assert matching.takes(opened, f"So {{\n{end}{value}")
        assert matching.takes(begins, f"<think>So {{\n{end}{value}")
    assert matching.takes(begins, value)
    for wrong in ("So", value, "So</think>", f"So</think>{value} x", "So</think>So"):
        assert not matching.takes(opened, wrong)
    for wrong in ("So", f"So</think>{value}", "<think>So", "<think>So</think>So"):
        assert not matching.takes(begins, wrong)


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
def test_strict_calls_are_held_behind_reasoning_that_names_their_trigger(tokens: str) -> None:
    matching = matching_of("<think>", "</think>", tokens)
    calls = HeldCalls("hermes", TOOLS, "auto", False, CALL_TAGS["hermes"])
    right, wrong = (written("hermes", "weather", json.dumps({"city": city})) for city in ("Ulm", 1))
    for thinking, begin in zip(THINKING[:2], ("", "<think>"), strict=True):
        guide = output_guide(None, calls, REASONING_FORMATS["qwen3"], thinking)
        assert guide is not None
        assert matching.takes(guide, f"{begin}A <tool_call> helps.</think>\n\nSo: {right}")
        assert not matching.takes(guide, f"{begin}A <tool_call> helps.</think>\n\nSo: {wrong}")


def test_content_and_calls_are_two_ways_to_answer() -> None:
    matching = matching_of("<tool_call>", "</tool_call>")
    calls = HeldCalls("hermes", TOOLS, "auto", False, CALL_TAGS["hermes"])
    guide = output_guide(StructuredOutputsParams(choice=["yes", "no"]), calls, None, "none")
    assert guide is not None
    assert matching.takes(guide, "yes")
    assert matching.takes(guide, written("hermes", "weather", '{"city": "Ulm"}'))
    assert not matching.takes(guide, written("hermes", "weather", '{"city": 1}'))
    assert not matching.takes(guide, "yes " + written("hermes", "now", "{}"))
    assert not matching.takes(guide, "maybe")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (b'{"properties": {"a": {"not": {}}}}', "/properties/a/not"),
        (b'{"properties": {"a": {"$ref": "x.json"}}}', "/properties/a/$ref"),
        (b'{"type": "object", "required": 3}', "/required"),
    ],
)
def test_what_a_schema_of_a_tool_may_not_have_is_named(schema: bytes, place: str) -> None:
    matching = matching_of("<tool_call>", "</tool_call>")
    tools = ToolSet({"now": b"", "f": schema})
    made = calls_alone(CALL_TAGS["hermes"], tools, one=False, all_held=True)
    error = try_guide(guide_of(made), matching.vocabulary).error
    assert error is not None
    assert error.param == "tools[1].function.parameters"
    assert error.message.startswith(f"tools[1].function.parameters: {place}: ")
    assert (
        try_guide(
            guide_of(calls_alone(CALL_TAGS["hermes"], tools, one=False, all_held=False)), matching.vocabulary
        ).error
        is None
    )


@pytest.mark.parametrize(
    "text", ["", "{}", '{"type": "x"}', "[" * 3000, '{"type": "guide", "kind": "structural_tag"}']
)
def test_what_is_no_structural_tag_is_refused(text: str) -> None:
    """The HTTP server writes them, but the wire is anybody's."""
    matching = matching_of("<tool_call>", "</tool_call>")
    error = try_guide(Guide("structural_tag", text), matching.vocabulary).error
    assert error is not None
    assert error.param == "structural_tag"


def test_arguments_are_objects_whatever_their_schema_says() -> None:
    matching = matching_of("<tool_call>", "</tool_call>")
    schema = Raw(
        b'{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "string"}, {"required": ["x"]}]}}}'
    )
    guide = guide_of(tags.JsonSchema(schema, "tools[0].function.parameters"))
    assert matching.takes(guide, '{"x": 1}')
    assert not matching.takes(guide, '"x"')
    assert not matching.takes(guide, "{}")


def test_a_guide_where_a_message_has_begun_is_refused() -> None:
    params = StructuredOutputsParams(json_object=True)
    for thinking in ("open", "none"):
        with pytest.raises(InvalidRequest, match="gpt_oss") as caught:
            output_guide(params, HeldCalls("none"), REASONING_FORMATS["gpt_oss"], thinking)
        assert caught.value.param == "json"


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
def test_content_and_calls_of_gpt_oss_are_messages_behind_reasoning(tokens: str) -> None:
    matching = Matching("<|channel|>", "<|message|>", tokens)
    reasoning = REASONING_FORMATS["gpt_oss"]
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
    params = StructuredOutputsParams(choice=["yes", "no"])
    guide = output_guide(params, HeldCalls("gpt_oss"), reasoning, "may begin")
    assert guide is not None
    for begin in ("", thought):
        assert matching.takes(guide, f"{begin}{final}yes")
        for wrong in (f"{final}maybe", "yes", call, f"{final}yes<|end|>"):
            assert not matching.takes(guide, begin + wrong)
    calls = HeldCalls("gpt_oss", TOOLS, "required", False, CALL_TAGS["gpt_oss"])
    guide = output_guide(None, calls, reasoning, "may begin")
    assert guide is not None
    plan = AnswerPlan(TOOL_FORMATS["gpt_oss"], TOOLS, reasoning_format=reasoning, thinking="may begin")
    for begin in ("", thought):
        assert matching.takes(guide, begin + call)
        for wrong in (call + call, call.replace('Ulm"', "Ulm"), f"{final}yes", "yes"):
            assert not matching.takes(guide, begin + wrong)
        events = AnswerParser(plan).push(begin + call)
        assert [event.kind for event in events if isinstance(event, ItemBegun)] == [
            *(["reasoning"] if begin else []),
            "tool_call",
        ]
    both = HeldCalls("gpt_oss", TOOLS, "auto", False, CALL_TAGS["gpt_oss"])
    guide = output_guide(params, both, reasoning, "may begin")
    assert guide is not None
    assert matching.takes(guide, thought + call)
    assert matching.takes(guide, f"{thought}{final}no")


def held_by(budget: int, thinking: Thinking) -> Guide:
    guide = output_guide(None, HeldCalls("hermes"), REASONING_FORMATS["qwen3"], thinking, budget)
    assert guide is not None
    return guide


@pytest.mark.parametrize("thinking", ["open", "may begin"])
def test_a_budget_bounds_reasoning_and_leaves_the_rest_free(thinking: Thinking) -> None:
    matching = Matching("<think>", "</think>")
    begin = "" if thinking == "open" else "<think>"
    for budget, thought in ((0, ""), (2, ""), (2, "a"), (2, "a\n")):
        assert matching.takes(held_by(budget, thinking), f"{begin}{thought}</think>\n\nHi </think>")
    for thought in ("ab cd ef gh", "a</thin"):
        assert not matching.takes(held_by(2, thinking), f"{begin}{thought}</think>Hi")
    again = matching.takes(held_by(2, thinking), f"{begin}a</think>Hi<think>b")
    assert again is (thinking == "open")
    assert matching.takes(held_by(2, thinking), "Hi there, so.") is (thinking == "may begin")


def test_a_budget_needs_tags_that_are_tokens() -> None:
    matching = Matching("<x>", "<y>")
    compiled = try_guide(held_by(2, "open"), matching.vocabulary)
    assert compiled.error is not None
    assert compiled.error.param == "thinking_token_budget"


# -- arguments between tags ----------------------------------------------------------------------------------

SEVERAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "of any kind"},
        "days": {"type": "integer", "minimum": 1},
        "way": {"enum": ["up", "down"]},
        "maybe": {"type": ["string", "null"]},
        "point": {"$ref": "#/$defs/point"},
        "flag": {"type": "boolean"},
        "any": {},
    },
    "required": ["city", "days"],
    "$defs": {"point": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    "additionalProperties": False,
}
ALL = ToolSet({"now": b"", "several": json.dumps(SEVERAL).encode()})


def tagged(family: str, name: str, values: dict[str, str]) -> str:
    found = CALL_TAGS[family]
    begin, close = found.argument
    line = "\n" if begin.endswith("\n") else ""
    parts = (f"{begin.replace('$NAME', key)}{text}{line}{close}\n" for key, text in values.items())
    return f"{found.begin.replace('$NAME', name)}{''.join(parts)}{found.end}"


@pytest.mark.parametrize("tokens", ["special", "added", "none"])
@pytest.mark.parametrize("family", TAGGED)
def test_arguments_between_tags_are_held(family: str, tokens: str) -> None:
    """Texts that the grammar takes are read as arguments that match the schema."""
    matching = Matching(*MARKS[family], tokens)
    guide = guide_of(calls_alone(CALL_TAGS[family], ALL, one=False, all_held=True))
    least = {"city": "Köln </x> {", "days": "2"}
    right: list[tuple[dict[str, str], dict[str, Any]]] = [
        (least, {"city": "Köln </x> {", "days": 2}),
        ({**least, "way": "up", "maybe": "null"}, {"way": "up", "maybe": None}),
        ({**least, "point": "[1, 2.5]", "flag": "true", "any": "[1]"}, {"point": [1, 2.5], "any": [1]}),
        ({"city": "", "days": "12", "any": "x y"}, {"city": "", "any": "x y"}),
    ]
    for values, expected in right:
        text = tagged(family, "several", values)
        assert matching.takes(guide, text), text
        events = AnswerParser(AnswerPlan(TOOL_FORMATS[family], ALL)).push(text)
        arguments = json.loads("".join(event.text for event in events if isinstance(event, ItemDelta)))
        jsonschema.validate(arguments, SEVERAL)
        assert arguments.items() >= expected.items()
    assert matching.takes(guide, tagged(family, "now", {}))
    assert matching.takes(guide, "\n".join([tagged(family, "now", {}), tagged(family, "several", least)]))
    wrong: list[dict[str, str]] = [
        {"city": "x"},
        {"city": "x", "days": "0"},
        {"city": "x", "days": "two"},
        {**least, "way": "left"},
        {**least, "flag": "True"},
        {**least, "point": "[1, 2, 3]"},
        {**least, "other": "x"},
        {"city": f"x{CALL_TAGS[family].argument[1]}", "days": "1"},
    ]
    for values in wrong:
        assert not matching.takes(guide, tagged(family, "several", values)), values
    assert not matching.takes(guide, "text")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "a"}, "/properties/a"),
        ({"type": ["string", "null"], "maxLength": 3}, "/properties/a"),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}, "/properties/a"),
        ({"enum": ["</parameter>"]}, "/properties/a/enum"),
    ],
)
def test_a_string_that_tags_cannot_hold_is_named(schema: Any, place: str) -> None:
    made = {"type": "object", "properties": {"a": schema}}
    tools = ToolSet({"f": json.dumps(made).encode()})
    guide = guide_of(calls_alone(CALL_TAGS["qwen3_coder"], tools, one=False, all_held=True))
    error = try_guide(guide, Matching("<x>", "<y>").vocabulary).error
    assert error is not None
    assert error.param == "tools[0].function.parameters"
    assert error.message.startswith(f"tools[0].function.parameters: {place}: ")


@pytest.mark.parametrize(
    "change",
    [{"minProperties": 1}, {"required": ["x"]}, {"properties": {"a>": {}}}, {"properties": {" a": {}}}],
)
def test_an_object_that_tags_cannot_hold_is_refused(change: dict[str, Any]) -> None:
    tools = ToolSet({"f": json.dumps({"type": "object", **change}).encode()})
    guide = guide_of(calls_alone(CALL_TAGS["glm45"], tools, one=False, all_held=True))
    error = try_guide(guide, Matching("<x>", "<y>").vocabulary).error
    assert error is not None
    assert error.param == "tools[0].function.parameters"
