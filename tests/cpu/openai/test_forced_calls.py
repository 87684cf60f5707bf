"""Calls that are held by a grammar, and guides behind reasoning: a launch with the demo model, which knows
neither, at temperature 1.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from runtime.settings.config import DEMO_MODEL
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.launched import Launched, launched

pytestmark = pytest.mark.timeout(1200)  # the full form, on a machine that does other things

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "move": {
        "type": "object",
        "properties": {
            "way": {"enum": ["up", "down"]},
            "steps": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        },
        "required": ["way", "steps"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
STRICT = ("weather", "move")
TOOLS: list[Any] = [
    *({"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in STRICT),
    {"type": "function", "function": {"name": "now"}},
]
STRICT_TOOLS: list[Any] = [
    {"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS
]
NAMED: Any = {"type": "function", "function": {"name": "move"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "m", "schema": SCHEMAS["move"]}}
USER: Any = [{"role": "user", "content": "def f():"}]
NUM_CALLS = [15, pytest.param(500, marks=pytest.mark.full)]
NUM_AT_ONCE = 24
END_VALUE = {"1": 12.0}
END_THINKING = {"2": 12.0}
END_OF_TEXT = {"0": 20.0}
"""Without it the model goes on with call after call."""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call> arguments {% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
OPENS = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def client_of(launch: Launched) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=120.0)


@pytest.fixture(scope="module")
def client(demo_launch: Launched) -> Iterator[openai.OpenAI]:
    with client_of(demo_launch) as client:
        yield client


@contextmanager
def thinking_launch(
    folder: Path, tokens: dict[str, str], parser: str, reasoning: str = "qwen3", end: str = OPENS
) -> Iterator[openai.OpenAI]:
    """The demo model. `tokens`: what its special tokens are spelled; `end`: of its template, which opens
    reasoning.
    """
    model = folder / "thinker"
    shutil.copytree(DEMO_MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE + end)
    path = model / "tokenizer.json"
    text = path.read_text()
    for old, new in tokens.items():
        text = text.replace(old, new)
    path.write_text(text)
    with (
        launched(
            *("--model", str(model), "--served-model-name", "demo", "--cpu-threads", "1"),
            *(
                "--tool-call-parser",
                parser,
                "--reasoning-parser",
                reasoning,
                "--max-running-requests",
                str(NUM_AT_ONCE),
            ),
        ) as launch,
        client_of(launch) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """With a token of its own for the end of reasoning."""
    tokens = {"<|im_end|>": "</think>"}
    with thinking_launch(tmp_path_factory.mktemp("model"), tokens, "hermes") as client:
        yield client


def test_a_budget_ends_reasoning_at_so_many_tokens(thinker: openai.OpenAI) -> None:
    """Between the tags, the first of which is in the prompt: nothing leads the model to end it sooner."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    free = Answer(thinker, stream=False, **greedy)
    assert (free.content, free.reason, free.num_reasoning) == ("", "length", 60)
    for budget in (0, 1, 7, 30):
        for stream in (False, True):
            more = {"thinking_token_budget": budget}
            answer = Answer(thinker, stream=stream, extra_body=more, **greedy)
            assert answer.num_reasoning == (budget + 1 if budget else 0)  # with the closing tag
            assert answer.content
            assert free.reasoning.startswith(answer.reasoning)
            assert bool(answer.reasoning) is bool(budget)


def test_reasoning_may_end_before_its_budget(thinker: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logit_bias": {"2": 100.0}, "max_tokens": 10}
    answer = Answer(thinker, stream=False, extra_body={"thinking_token_budget": 50}, **options)
    assert answer.content
    assert (answer.reasoning, answer.num_reasoning) == ("", 0)


def test_a_budget_goes_with_calls_and_guides(thinker: openai.OpenAI) -> None:
    budget = {"thinking_token_budget": 5}
    options: dict[str, Any] = {"extra_body": budget, "parallel_tool_calls": False, "tools": TOOLS}
    for answer in answers(thinker, 8, tool_choice="required", **options):
        assert (answer.reason, len(answer.calls)) == ("tool_calls", 1)
        assert answer.num_reasoning <= 6
        answer.check_calls()
    for answer in answers(thinker, 8, response_format=FORMAT, extra_body=budget):
        assert answer.num_reasoning <= 6
        jsonschema.validate(json.loads(answer.content), SCHEMAS["move"])


def test_a_budget_changes_nothing_where_there_is_no_reasoning(thinker: openai.OpenAI) -> None:
    made = [
        Answer(
            thinker,
            stream=False,
            seed=2,
            max_tokens=20,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}, **more},
        )
        for more in ({}, {"thinking_token_budget": 3})
    ]
    assert made[0].content == made[1].content != ""


class Answer:
    """One answer, whole or put together from its stream."""

    def __init__(self, client: openai.OpenAI, *, stream: bool, **options: Any) -> None:
        options = {"model": "demo", "messages": USER, "temperature": 1.0, "max_tokens": 300, **options}
        self.content, self.reasoning = "", ""
        self.calls: list[list[str]] = []
        if not stream:
            whole = client.chat.completions.create(**options)
            self._count(whole.usage)
            choice = whole.choices[0]
            self.reason = choice.finish_reason
            self._add(choice.message)
            for call in choice.message.tool_calls or ():
                self.calls.append([call.function.name, call.function.arguments])
            return
        options["stream_options"] = {"include_usage": True}
        for chunk in client.chat.completions.create(stream=True, **options):
            if chunk.usage is not None:
                self._count(chunk.usage)
                continue
            (choice,) = chunk.choices
            self.reason = choice.finish_reason or ""
            self._add(choice.delta)
            for call in choice.delta.tool_calls or ():
                if call.index == len(self.calls):
                    self.calls.append([call.function.name, ""])
                self.calls[call.index][1] += call.function.arguments or ""

    def _count(self, usage: Any) -> None:
        details = usage.completion_tokens_details
        self.num_reasoning = 0 if details is None else details.reasoning_tokens

    def _add(self, message: Any) -> None:
        self.content += message.content or ""
        self.reasoning += getattr(message, "reasoning_content", None) or ""

    def check_calls(self) -> None:
        for name, arguments in self.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def answers(client: openai.OpenAI, count: int, **options: Any) -> list[Answer]:
    """So many answers that the length has not cut, streamed and not by turns."""
    ended: list[Answer] = []
    seeds = iter(range(3 * count))
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        while missing := list(islice(seeds, count - len(ended))):
            made = pool.map(lambda seed: Answer(client, stream=bool(seed % 2), seed=seed, **options), missing)
            ended += [answer for answer in made if answer.reason != "length"]
    assert len(ended) == count, "too few say anything"
    return ended


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("count", NUM_CALLS)
def test_forced_calls_match_their_schemas(client: openai.OpenAI, choice: Any, one: bool, count: int) -> None:
    options: dict[str, Any] = {"parallel_tool_calls": False} if one else {"logit_bias": END_OF_TEXT}
    got = answers(client, count, tools=TOOLS, tool_choice=choice, **options)
    for answer in got:
        assert answer.reason == "tool_calls"
        assert answer.content == ""
        assert answer.calls
        answer.check_calls()
    if choice == NAMED:
        assert {name for answer in got for name, _ in answer.calls} == {"move"}
    if one or choice == NAMED:
        assert all(len(answer.calls) == 1 for answer in got)


@pytest.mark.parametrize("stream", [True, False])
def test_forced_calls_that_are_cut_off_leave_no_content(client: openai.OpenAI, stream: bool) -> None:
    """Markers of a call are nothing that a caller should show."""
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "logit_bias": END_OF_TEXT}
    cut = [Answer(client, stream=stream, max_tokens=most, seed=most, **options) for most in range(1, 40, 9)]
    assert {answer.content for answer in cut} == {""}
    assert {answer.reason for answer in cut} >= {"length"}
    assert not cut[0].calls
    assert cut[-1].calls


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("count", NUM_CALLS)
def test_forced_calls_come_behind_reasoning(
    thinker: openai.OpenAI, choice: Any, thinks: bool, count: int
) -> None:
    more: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    got = answers(
        thinker,
        count,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        logit_bias=END_THINKING,
        extra_body=more,
    )
    for answer in got:
        assert (answer.reason, answer.content, len(answer.calls)) == ("tool_calls", "", 1)
        assert thinks or not answer.reasoning
        answer.check_calls()
    assert any(answer.reasoning for answer in got) is thinks


TAGGED_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "way": {"enum": ["up", "down"]},
        "steps": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "deep": {"type": "object", "properties": {"a": {"type": ["boolean", "null"]}}, "required": ["a"]},
    },
    "required": ["text", "way", "steps"],
    "additionalProperties": False,
}
SCHEMAS["write"] = TAGGED_SCHEMA


@pytest.mark.parametrize(
    ("family", "close", "count"),
    [
        ("glm45", "</arg_value>", 15),
        pytest.param("glm45", "</arg_value>", 500, marks=pytest.mark.full),
        pytest.param("qwen3_coder", "</parameter>", 500, marks=pytest.mark.full),
    ],
)
def test_forced_calls_of_families_with_tags_around_arguments(
    tmp_path: Path, family: str, close: str, count: int
) -> None:
    """The end of a text is a token of its own here: spelled out, the model would not find it."""
    tools = [TOOLS[2], {"type": "function", "function": {"name": "write", "parameters": TAGGED_SCHEMA}}]
    tokens = {"<|im_end|>": "</think>", "<|im_start|>": close}
    with thinking_launch(tmp_path, tokens, family) as client:
        for thinks in (True, False):
            got = answers(
                client,
                count,
                tools=tools,
                tool_choice="required",
                parallel_tool_calls=False,
                logit_bias={**END_THINKING, **END_VALUE},
                extra_body={"chat_template_kwargs": {"enable_thinking": thinks}, "thinking_token_budget": 40},
            )
            for answer in got:
                seen = (answer.reason, answer.content, len(answer.calls))
                assert seen == ("tool_calls", "", 1), vars(answer)
                answer.check_calls()
            assert "write" in {name for answer in got for name, _ in answer.calls}
            assert any(answer.reasoning for answer in got) is thinks


@pytest.mark.parametrize("count", NUM_CALLS)
def test_messages_of_gpt_oss_are_held(tmp_path: Path, count: int) -> None:
    """Calls, and content in a form, perhaps behind reasoning, whose end is a token of its own."""
    tokens = {"<|im_start|>": "<|end|>", "<|im_end|>": "<|channel|>"}
    with thinking_launch(tmp_path, tokens, "gpt_oss", "gpt_oss", end="<|start|>assistant") as client:
        got = answers(client, count, tools=TOOLS, tool_choice="required", logit_bias=END_VALUE)
        for answer in got:
            assert (answer.reason, answer.content, len(answer.calls)) == ("tool_calls", "", 1)
            answer.check_calls()
        assert any(answer.reasoning for answer in got)
        got = answers(client, count, response_format=FORMAT, logit_bias=END_VALUE)
        for answer in got:
            assert answer.reason == "stop"
            jsonschema.validate(json.loads(answer.content), SCHEMAS["move"])
        assert any(answer.reasoning for answer in got)


@pytest.mark.parametrize("thinks", [True, False])
def test_a_response_format_holds_what_is_behind_reasoning(thinker: openai.OpenAI, thinks: bool) -> None:
    got = answers(
        thinker,
        16,
        response_format=FORMAT,
        logit_bias=END_THINKING,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
    )
    for answer in got:
        assert answer.reason == "stop"
        jsonschema.validate(json.loads(answer.content), SCHEMAS["move"])
        assert thinks or not answer.reasoning
    assert any(answer.reasoning for answer in got) is thinks


def test_reasoning_that_is_left_in_the_text_is_no_part_of_the_format(thinker: openai.OpenAI) -> None:
    for answer in answers(
        thinker,
        6,
        response_format=FORMAT,
        logit_bias=END_THINKING,
        extra_body={"separate_reasoning": False, "skip_special_tokens": False},
    ):
        thought, end, content = answer.content.partition("</think>")
        assert end, thought
        jsonschema.validate(json.loads(content), SCHEMAS["move"])


def test_a_format_beside_tools_leaves_content_or_calls(client: openai.OpenAI) -> None:
    """Without a bias towards "<" the model would hardly begin a call."""
    bias = {"30": 4.0, **END_OF_TEXT}
    got = answers(client, 16, tools=STRICT_TOOLS, response_format=FORMAT, logit_bias=bias)
    assert any(answer.calls for answer in got)
    for answer in got:
        assert bool(answer.calls) is (answer.reason == "tool_calls")
        answer.check_calls()
        if not answer.calls:
            jsonschema.validate(json.loads(answer.content), SCHEMAS["move"])


def test_strict_tools_beside_text(client: openai.OpenAI) -> None:
    """The model writes text, which may be any; where it begins a call, the call is held."""
    for stream in (True, False):
        answer = Answer(client, stream=stream, tools=STRICT_TOOLS, seed=3, max_tokens=40)
        assert answer.content
        assert answer.calls == []


def refused(client: openai.OpenAI, **body: Any) -> Any:
    response = httpx.post(
        f"{client.base_url}chat/completions", json={"messages": USER, "max_tokens": 20, **body}, timeout=60
    )
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "/properties/a/uniqueItems"),
    ],
)
@pytest.mark.parametrize(
    "change",
    [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {}],
)
def test_a_schema_that_cannot_be_held_is_named(
    client: openai.OpenAI, schema: Any, place: str, change: dict[str, Any]
) -> None:
    function = {"name": "f", "parameters": schema, "strict": not change}
    error = refused(client, tools=[*TOOLS, {"type": "function", "function": function}], **change)
    assert error["param"] == "tools[3].function.parameters"
    assert error["message"].startswith(f"tools[3].function.parameters: {place}: "), error


def test_what_a_compiler_says_of_a_pattern_names_the_field(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert refused(client, tools=tools, tool_choice="required")["param"] == "tools"
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 300_000]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    assert refused(client, tools=tools, tool_choice="required")["param"] == "tools"


@pytest.fixture(scope="module", params=["pythonic", "none"])
def without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server that cannot hold calls: for their family, or for all."""
    backend: Any = {"grammar_backend": "none"} if request.param == "none" else {}
    parser = "hermes" if request.param == "none" else request.param
    run_dir = tmp_path_factory.mktemp("run")
    with http_front(run_dir, lambda _: [], tool_call_parser=parser, **backend) as front:
        yield front


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOLS[2], STRICT_TOOLS[0]]}, "tools[1].function.strict"),
    ],
)
def test_where_calls_cannot_be_held_the_request_says_so(
    without: Front, change: dict[str, Any], param: str
) -> None:
    response = without.chat(**change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert "--grammar-backend none" in error["message"] or "--tool-call-parser pythonic" in error["message"]
