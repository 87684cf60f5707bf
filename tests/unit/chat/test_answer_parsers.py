"""Answers of each family, cut at many places: text, reasoning and calls, none lost and none said twice."""

from __future__ import annotations

import ast
import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from carousel.server.chat.answer import AnswerParser, AnswerPlan
from carousel.server.chat.definitions import read_tools
from carousel.server.chat.events import ItemBegun, ItemDelta
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from carousel.server.chat.reader import Markers
from carousel.server.chat.tools import ANY
from runtime.base.errors import InvalidRequest
from runtime.checkpoint.chat_formats import REASONING, TOOL_CALLS
from tests.harness.cases import for_each
from tests.unit.chat.cases import TOOLS, VALUES, Item, plan, read, spelled

FAMILIES = list(TOOL_FORMATS)
UNMARKED = ("llama3_json", "pythonic")
"""Families of which only a tool's name tells that something is a call."""
JSON_FAMILIES = [family for family in FAMILIES if family not in ("pythonic", "qwen3_coder", "glm45")]
CALLS_WITH = {
    "pythonic": "[weather(days=%s)]",
    "qwen3_coder": "<tool_call><function=weather><parameter=days>%s</parameter></function></tool_call>",
    "glm45": "<tool_call>weather<arg_key>days</arg_key><arg_value>%s</arg_value></tool_call>",
}
_step = 1
"""From one place to the next at which an answer is cut."""


@pytest.fixture(
    autouse=True, params=[8, pytest.param(1, marks=pytest.mark.full)], ids=["some_places", "every_place"]
)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}._step", request.param)


def every_way(how: AnswerPlan, text: str) -> list[Item]:
    """Read it whole, character by character, in two pieces, and cut at random: all must agree.

    Of the places for two pieces other ones for each text, if not all: the same markers stand in many.
    """
    whole = read(how, [text])
    assert read(how, text) == whole
    for cut in range(len(text) % _step, len(text), _step):
        assert read(how, [text[:cut], text[cut:]]) == whole, cut
    rng = random.Random(text)
    for _ in range(20 if _step == 1 else 5):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 8)))
        ends = [0, *cuts, len(text)]
        assert read(how, [text[start:end] for start, end in itertools.pairwise(ends)]) == whole
    return whole


def call(name: str, **values: Any) -> Item:
    return ("call", name, json.dumps(values, ensure_ascii=False))


def as_values(items: list[Item]) -> list[Any]:
    """Arguments decoded, since families space them in their own way."""
    return [(*item[:2], json.loads(item[2])) if item[0] == "call" else item for item in items]


def test_there_is_a_reader_for_each_name_that_a_launch_may_choose() -> None:
    assert list(TOOL_FORMATS) == [each.name for each in TOOL_CALLS]
    assert set(REASONING_FORMATS) == {each.name for each in REASONING}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_with_all_kinds_of_values(family: str) -> None:
    text = spelled(
        family, [("weather", VALUES), ("now", {}), ("mcp.find-it" if family != "pythonic" else "now", {})]
    )
    items = every_way(plan(family), text)
    assert as_values(items) == [
        ("call", "weather", VALUES),
        ("call", "now", {}),
        ("call", items[2][1], {}),
    ]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNMARKED])
def test_text_around_calls_is_content(family: str) -> None:
    calls = spelled(family, [("weather", {"city": "Ulm"})])
    items = every_way(plan(family), f"  Let me see: <b>[x]</b>\n{calls}\n  and < so")
    assert as_values(items) == [
        ("text", "  Let me see: <b>[x]</b>\n"),
        ("call", "weather", {"city": "Ulm"}),
        ("text", "\n  and < so"),
    ]
    assert as_values(every_way(plan(family), f"\n\n{calls}\n\n")) == [("call", "weather", {"city": "Ulm"})]


@for_each("family", FAMILIES)
@for_each("text", ["", " ", "\n x ", "a {b} [c](d) <e> f(g)", '{"name": 1}', "[1, 2]", "[now, x]"])
def test_what_is_no_call_is_content_as_it_is(family: str, text: str) -> None:
    assert every_way(plan(family), text) == ([("text", text)] if text else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_calls_lose_nothing(family: str) -> None:
    """A cut answer has the calls that were complete, and the one that was not: as content while its
    arguments have not begun, and else with those as far as they came.
    """
    text = spelled(family, [("weather", {"city": "Ulm ü", "days": 3}), ("now", {})])
    whole = as_values(read(plan(family), [text]))
    assert len(whole) == 2
    for cut in range(len(text)):
        items = every_way(plan(family), text[:cut]) if cut % 17 == 0 else read(plan(family), [text[:cut]])
        kinds = [item[0] for item in items]
        assert kinds.count("broken") <= 1
        calls = [item for item in items if item[0] != "text"]
        assert [item for item in as_values(calls) if item[0] == "call"] == whole[: kinds.count("call")]
        # What gpt-oss begins of a header is no text.
        if not calls and text[:cut].strip() and family != "gpt_oss":
            assert items == [("text", text[:cut])]
        for item in calls:
            if item[0] == "broken":
                assert item[2] != ""
                assert not is_json(item[2])


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@for_each("family", FAMILIES)
def test_a_function_that_is_not_offered_is_a_call_where_markers_say_so(family: str) -> None:
    text = spelled(family, [("unknown", {"a": "1"})])
    expected: list[Any] = [("text", text)] if family in UNMARKED else [("call", "unknown", {"a": "1"})]
    assert as_values(every_way(plan(family), text)) == expected


@for_each("family", FAMILIES)
def test_arguments_come_before_the_call_ends(family: str) -> None:
    text = spelled(family, [("weather", {"days": 1, "city": "x" * 200})])
    parser = AnswerParser(plan(family))
    num_deltas = 0
    for char in text:
        num_deltas += sum(isinstance(event, ItemDelta) for event in parser.push(char))
    assert num_deltas >= (1 if family == "pythonic" else 150)


@for_each("family", FAMILIES)
def test_at_most_one_call_where_the_request_says_so(family: str) -> None:
    text = spelled(family, [("weather", {"days": 1}), ("now", {})])
    how = plan(family, max_calls=1)
    assert as_values(every_way(how, text)) == [("call", "weather", {"days": 1})]


def test_ids_are_of_24_characters_and_differ() -> None:
    parser = AnswerParser(plan("hermes"))
    events = parser.push(spelled("hermes", [("now", {})] * 50))
    ids = {event.id for event in events if isinstance(event, ItemBegun)}
    assert len(ids) == 50
    assert all(len(each) == 29 and each.startswith("call_") and each[5:].isalnum() for each in ids)


HERMES = [
    # Arguments before the name; a key more; arguments as text, as null, left out.
    ('{"arguments": {"days": 1}, "name": "weather"}', ("call", "weather", '{"days": 1}')),
    (
        '{"name": "weather", "id": "x", "arguments": {"days": 1e3}, "z": [1]}',
        ("call", "weather", '{"days": 1e3}'),
    ),
    ('{"name": "weather", "arguments": "{\\"days\\": 1}"}', ("call", "weather", '{"days": 1}')),
    ('{"name": "now", "arguments": null}', ("call", "now", "{}")),
    ('{"name": "now"}', ("call", "now", "{}")),
    # Line breaks and lone backslashes in strings are escaped.
    (
        '{"name": "weather", "arguments": {"city": "a\nb\\d"}}',
        ("call", "weather", '{"city": "a\\u000ab\\\\d"}'),
    ),
    # Two members of one name are the model's business.
    (
        '{"name": "weather", "arguments": {"days": null, "city": ""}}',
        ("call", "weather", '{"days": null, "city": ""}'),
    ),
]


@pytest.mark.parametrize(("inside", "expected"), HERMES)
def test_calls_in_json_may_be_spelled_in_several_ways(inside: str, expected: Item) -> None:
    assert every_way(plan("hermes"), f"<tool_call>\n{inside}\n</tool_call>") == [expected]
    assert every_way(plan("hermes"), f"<tool_call>{inside}") == [expected]  # the last tag left out


@for_each(
    "inside",
    [
        "",
        "x",
        "{",
        "{}",
        '{"name": ""}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": 1}',
        "[1]",
        '{"name": "f" "arguments": {}}',
        "{'name': 'f'}",
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": tru}',
    ],
)
def test_what_is_no_call_between_markers_stays_as_it_is(inside: str) -> None:
    text = f"a<tool_call>{inside}</tool_call>b"
    assert every_way(plan("hermes"), text) == [("text", text)]


def test_a_call_that_breaks_off_in_its_arguments_says_the_rest_as_text() -> None:
    items = every_way(plan("hermes"), '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>!')
    assert items == [("broken", "now", '{"a": '), ("text", "x}}</tool_call>!")]


def test_mistral_writes_names_and_arguments_too() -> None:
    text = 'So:[TOOL_CALLS]weather[ARGS]{"days": 1}[TOOL_CALLS]now[CALL_ID]a1b2[ARGS]{}'
    assert every_way(plan("mistral"), text) == [("text", "So:"), call("weather", days=1), call("now")]


def test_llama_puts_calls_behind_a_tag() -> None:
    text = spelled("llama3_json", [("weather", {"days": 1})])
    assert every_way(plan("llama3_json"), f"<|python_tag|>{text}") == [call("weather", days=1)]
    assert every_way(plan("llama3_json"), f"So: <|python_tag|>{text}") == [
        ("text", "So: "),
        call("weather", days=1),
    ]


@for_each(
    ("text", "expected"),
    [
        ("<|python_start|>[now()]<|python_end|>", [call("now")]),
        (" [ now( ) ] ", [call("now")]),
        (
            "[weather(city='''a\n\"b''', flag=true, days=-1)]",
            [call("weather", city='a\n"b', flag=True, days=-1)],
        ),
        ("[weather(city='a\nb', list=(1, 2.5))]", [call("weather", city="a\nb", list=[1, 2.5])]),
        ("[weather(city='\\d\\'')]", [call("weather", city="\\d'")]),
        ("[weather(days=1, days=2)]", [call("weather", days=1)]),
        ("[\n  weather(\n    days=+3,\n  ),\n  now(),\n]\n", [call("weather", days=3), call("now")]),
        ("[now(), ]", [call("now")]),
        ("[now(), x]", [call("now"), ("text", ", x]")]),
        ("[now(1)]", [("text", "[now(1)]")]),
        ("[now(a=open('x'))]", [("text", "[now(a=open('x'))]")]),
        ("[weather(days=1, x)]", [("broken", "weather", '{"days": 1'), ("text", ", x)]")]),
        ("[now(), unknown()] x", [call("now"), ("text", ", unknown()] x")]),
        ("[weather(days=1e999)]", [("text", "[weather(days=1e999)]")]),
    ],
)
def test_pythonic_calls(text: str, expected: list[Item]) -> None:
    assert every_way(plan("pythonic"), text) == expected


@for_each(
    ("key", "text", "expected"),
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("city", "\n x \n", "\n x \n"),
        ("city", "a</parameter>b", "a</parameter>b"),
        ("city", "", ""),
        ("maybe", "null", None),
        ("maybe", "12", "12"),
        ("days", "12", 12),
        ("days", "x", "x"),
        ("ratio", "1e-3", 1e-3),
        ("flag", "True", True),
        ("deep", '{"a": [1]}', {"a": [1]}),
        ("deep", "[1]", "[1]"),
        ("list", "[1]", [1]),
        ("any", "[1]", [1]),
        ("any", "yes", "yes"),
        ("unknown", "12", "12"),
    ],
)
def test_tagged_arguments_have_the_types_of_the_schema(key: str, text: str, expected: Any) -> None:
    answer = (
        f"<tool_call>\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    assert as_values(every_way(plan("qwen3_coder"), answer)) == [("call", "weather", {key: expected})]


def test_qwen3_coder_may_leave_out_the_outer_tag() -> None:
    text = "<function=now>\n</function>\n</tool_call>"
    assert every_way(plan("qwen3_coder"), text) == [call("now")]


# -- reasoning -----------------------------------------------------------------------------------------------


@for_each(
    ("thinking", "text", "expected"),
    [
        ("may begin", "<think>\n hm\n\n</think>\n\n Hi\n", [("reasoning", " hm"), ("text", " Hi\n")]),
        ("may begin", "\n<think>hm</think>Hi", [("reasoning", "hm"), ("text", "Hi")]),
        ("may begin", "<think>\n\n</think>\n\nHi", [("text", "Hi")]),
        ("may begin", "Hi <think>x</think>", [("text", "Hi <think>x</think>")]),
        ("may begin", " <thin", [("text", " <thin")]),
        ("open", "hm\n</think>\nHi", [("reasoning", "hm"), ("text", "Hi")]),
        ("open", "<think>hm</think>Hi", [("reasoning", "hm"), ("text", "Hi")]),
        ("open", "hm\n</thi", [("reasoning", "hm\n</thi")]),
        ("open", "hm <b></b> x", [("reasoning", "hm <b></b> x")]),
        ("none", "Hi </think> x", [("text", "Hi </think> x")]),
    ],
)
@for_each("family", ["", "hermes"])
def test_reasoning_is_told_apart(family: str, thinking: Any, text: str, expected: list[Item]) -> None:
    assert every_way(plan(family, "qwen3", thinking), text) == expected


@for_each(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm\n <|end|><|start|>assistant<|channel|>final<|message|> Hi",
            [("reasoning", "Hm\n "), ("text", " Hi")],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
            "commentary <|constrain|>json<|message|>{}<|call|>",
            [("text", "I look."), ("call", "now", "{}")],
        ),
        (" to=functions.now<|channel|>commentary json<|message|>{}", [("call", "now", "{}")]),
        ("Hi there", [("text", "Hi there")]),
        ("<|channel|>analysis<|message|>Hm", [("reasoning", "Hm")]),
        ("<|channel|>ana", []),
        ("<|channel|>commentary to=functions.now<|message|>x<|call|>", [("text", "x")]),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", [("call", "now", "{}")]),
        (
            "<|channel|>commentary to=functions.now<|message|> <|call|><|start|>assistant<|channel|>final"
            "<|message|>Hi",
            [("call", "now", "{}"), ("text", "Hi")],
        ),
    ],
)
def test_channels_of_gpt_oss(text: str, expected: list[Item]) -> None:
    assert every_way(plan("gpt_oss", "gpt_oss", "may begin"), text) == expected


@for_each(
    "reasoning",
    [name for name, each in REASONING_FORMATS.items() if each.read is None and not each.ends_at_call],
)
def test_calls_follow_reasoning(reasoning: str) -> None:
    tags = REASONING_FORMATS[reasoning]
    inside = spelled("hermes", [("weather", {"days": 1})])
    text = f"{tags.begin}\n{inside}\n{tags.end}\n\n{spelled('hermes', [('now', {})])}"
    items = every_way(plan("hermes", reasoning, "may begin"), text)
    assert items == [("reasoning", inside), call("now")]


def test_calls_of_kimi_end_reasoning() -> None:
    text = f"hm\n{spelled('kimi_k2', [('now', {})])}"
    assert every_way(plan("kimi_k2", "kimi_k2", "open"), text) == [("reasoning", "hm\n"), call("now")]


# -- anything ------------------------------------------------------------------------------------------------

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=weather>", "<parameter=city>", "</parameter>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<think>",
        "</think>",
    ),
    *(
        '{"name": "now", ',
        '"arguments": {',
        '"parameters": {"a": 1',
        "}",
        "}}",
        "[now(",
        "a=1",
        ")]",
        ", ",
        ";",
    ),
    *("weather", "now", '"', "\\", "\n", " ", "[", "]", "{", "\u2028", "\U0001f600", "null", "1e", "<"),
    *("<|tool_call>", "<tool_call|>", "call:now{", '<|"|>', "a:", "<|channel|>", "<|message|>", "<|end|>"),
    *("analysis", "commentary to=functions.now ", "<|start|>"),
]


def check_garbage(family: str, thinking: Any, pieces: list[str], seed: int) -> None:
    how = plan(family, "qwen3", thinking)
    text = "".join(pieces)
    whole = read(how, [text])
    assert read(how, text) == whole
    assert read(how, pieces) == whole
    assert read(how, list(_cut(text, random.Random(seed)))) == whole
    for item in whole:
        if item[0] == "call":
            assert isinstance(json.loads(item[2]), dict)


THINKING = ["open", "may begin", "none"]


def drawn_garbage(rng: random.Random, family: str) -> list[str]:
    """Pieces of any families' markers, or, more often, calls of this one that have been damaged."""
    if not family or rng.random() < 0.3:
        letters = ["".join(map(chr, rng.choices(range(32, 0x2100), k=rng.randrange(5)))) for _ in range(4)]
        return rng.choices(PIECES * 2 + letters * 20, k=rng.randrange(15))
    values = {key: VALUES[key] for key in rng.sample(list(VALUES), rng.randrange(4))}
    text = spelled(family, [("weather", values), ("now", {})])
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        new = rng.choice(["", "\\", "\\u00e9", rng.choice(PIECES)])
        text = text[:at] + new + text[at + rng.randrange(4) :]
    return list(_cut(text, rng))


def test_garbage_is_read_alike_however_it_is_cut() -> None:
    for seed in range(400 if _step > 1 else 2000):
        rng = random.Random(seed)
        family = rng.choice([*FAMILIES, ""])
        check_garbage(family, rng.choice(THINKING), drawn_garbage(rng, family), seed)


@pytest.mark.full
def test_hypothesis_finds_no_garbage_that_is_read_differently_when_cut() -> None:
    from hypothesis import given, settings  # half a second, for this one
    from hypothesis import strategies as st

    settings(max_examples=2000, deadline=None)(
        given(
            family=st.sampled_from([*FAMILIES, ""]),
            thinking=st.sampled_from(THINKING),
            pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14),
            seed=st.integers(0, 1 << 30),
        )(check_garbage)
    )()


def _cut(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        size = rng.randint(1, 5)
        yield text[:size]
        text = text[size:]


def test_special_tokens_that_are_in_the_text_for_a_parser_are_left_out() -> None:
    how = plan("mistral", left_out=Markers("<s>", "[INST]"))
    text = "a<s>b[INST]c[TOOL_CALLS]now[ARGS]{}<s>[INS"
    assert every_way(how, text) == [("text", "abc"), call("now"), ("text", "[INS")]
    assert TOOLS.names


@pytest.mark.parametrize("left_out", [Markers(), Markers("<|end|>", "[INST]")])
def test_text_that_cannot_begin_a_marker_need_not_be_read(left_out: Markers) -> None:
    parser = AnswerParser(plan("hermes", left_out=left_out))
    has_special = left_out.search("<|end|>") is not None
    parser.push("Some")
    assert all(map(parser.is_plain, (" text", " a[0]", "x < y")))
    assert not parser.is_plain("<tool_call>")
    for end, is_plain in (("x <", False), ("x <|en", not has_special), ("<|end|>", not has_special)):
        assert parser.is_plain(end) is is_plain, end
    parser.push("<|e")
    assert parser.is_plain("nd") is not has_special, "with what is held back it may be a marker"


@for_each("reasoning", [name for name, each in REASONING_FORMATS.items() if each.ends_at_call])
@for_each("family", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_ends_reasoning_whose_closing_tag_is_left_out(reasoning: str, family: str) -> None:
    tags = REASONING_FORMATS[reasoning]
    text = f"{tags.begin}\nI write <tool_call> and then\n\n{spelled(family, [('weather', {'days': 1})])}"
    items = every_way(plan(family, reasoning, "may begin"), text)
    assert items == [("reasoning", "I write <tool_call> and then\n\n"), call("weather", days=1)]
    closed = f"{tags.begin}\nI write <tool_call>\n{tags.end}\n\n{spelled(family, [('now', {})])}"
    assert every_way(plan(family, reasoning, "may begin"), closed) == [
        ("reasoning", "I write <tool_call>"),
        call("now"),
    ]


def test_a_call_in_the_middle_of_a_text_needs_the_name_of_a_tool_and_its_arguments_next() -> None:
    how = plan("llama3_json")
    inside = '{"name": "weather", "parameters": {"days": 1}}'
    assert every_way(how, f"I call: {inside}") == [("text", "I call: "), call("weather", days=1)]
    for text in (
        'Such as {"name": "other", "parameters": {}}',
        'Such as {"x": {"name": "weather"}} or {"name": "weather", "x": 1}',
        'a { b {"name": "weather"',
    ):
        assert every_way(how, text) == [("text", text)]


def test_tags_of_gemma_that_nothing_belongs_to_are_left_out() -> None:
    how = plan("gemma4", "gemma4", "may begin")
    again = "<|channel><|channel>thought\na<channel|>b<channel|>c<|channel>thought\nd<channel|>"
    assert every_way(how, again) == [("reasoning", "a"), ("text", "bc"), ("reasoning", "d")]
    assert every_way(plan("gemma4"), "<|tool_call>call:weather{ratio:2.}") == [call("weather", ratio=2.0)]


@pytest.mark.parametrize("family", FAMILIES)
def test_many_markers_take_time_in_proportion(family: str) -> None:
    for marker in PIECES:
        few, many = (num_calls_of_functions(plan(family), marker * count) for count in (20, 80))
        assert many < 5 * few, marker


def test_definitions_have_only_so_many_parts() -> None:
    """Types of parameters are read from them when an answer names them, in one piece: 131,072 parts took
    44 ms. Of these only what names types is decoded.
    """
    choices = ",".join(['{"type":"integer"}'] * 30_000)
    definition = (
        '{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"anyOf":[%s]}}}}}'
    )
    tools = f"[{definition % choices}]".encode()
    assert read_tools(tools).types_of("f", "a") == ANY
    with pytest.raises(InvalidRequest, match="at most 65536 brackets and commas") as caught:
        read_tools(f"[{definition % (choices + ',{}' * 3000)}]".encode())
    assert caught.value.param == "tools"


@pytest.mark.parametrize("family", ["pythonic", "qwen3_coder", "glm45"])
def test_of_long_arguments_written_as_python_none_is_parsed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 16,384 characters takes up to 30 ms, in which nobody is served."""
    parsed: list[int] = []
    parse = ast.parse

    def noted(source: str, mode: str) -> ast.AST:
        parsed.append(len(source))
        return parse(source, mode=mode)

    with monkeypatch.context() as noting:
        noting.setattr(ast, "parse", noted)
        for num_items in (1000, 2000, 4000):
            value = "[" + ",".join(["()"] * num_items) + "]"
            read(plan(family), [CALLS_WITH[family] % value])
    assert parsed
    assert max(parsed) <= 8192


def test_markers_of_mistral_that_no_call_follows_are_text() -> None:
    first, last = "[TOOL_CALLS][TOOL_CALLS] [TOOL_CALLS]\n? ", "[TOOL_CALLS] [TOOL_CALLS] "
    broken = first + last + '{"name": "now"'
    assert every_way(plan("mistral"), broken) == [("text", broken)]
    assert every_way(plan("mistral"), first + last + "now{}") == [("text", first), call("now")]


def num_calls_of_functions(how: AnswerPlan, text: str) -> int:
    """Return the work that a text is, the same however busy the machine is."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    parser = AnswerParser(how)
    sys.setprofile(note)
    try:
        parser.push(text)
        parser.end()
    finally:
        sys.setprofile(None)
    return count
