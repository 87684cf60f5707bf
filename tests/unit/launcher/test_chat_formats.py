"""The formats of calls and reasoning that a launch names, or that its chat template has."""

from __future__ import annotations

import logging

import msgspec
import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.checks.chat_formats import with_chat_formats
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from tests.harness.cases import for_each

HERMES = '{% if tools %}<tool_call>{"name": 1, "arguments": 2}</tool_call>{% endif %}'
TEMPLATES = {
    "": ("none", "none"),
    "{{ messages[0].content }}": ("none", "none"),
    '{{ tools }} {{ "parameters" }}: a dictionary, and all other letters': ("none", "none"),
    "<tool_call> {# no list of them #}": ("none", "none"),
    HERMES: ("hermes", "none"),
    HERMES + "<think></think>": ("hermes", "qwen3"),
    HERMES + "<function=f><parameter=x>": ("qwen3_coder", "none"),
    "tools [TOOL_CALLS]": ("mistral", "none"),
    "tools [TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    'tools {"name": function name, "parameters": dictionary of argument name}': ("llama3_json", "none"),
    "tools [func_name1(params_name1=x)]": ("pythonic", "none"),
    "<｜tool▁calls▁begin｜>\n```json {{ tools }}": ("deepseek_v3", "none"),
    # As of DeepSeek-R1: calls in the history, and no tools.
    "<｜tool▁calls▁begin｜>\n```json tool_calls </think> <｜Assistant｜>": ("none", "deepseek_r1"),
    "<｜tool▁calls▁begin｜> tools </think> <｜Assistant｜>": ("deepseek_v31", "deepseek_r1"),
    "tools <tool_call> <arg_key> arguments <|assistant|></think>": ("glm45", "glm45"),
    "tools <|channel|>analysis <|channel|>commentary functions.": ("gpt_oss", "gpt_oss"),
    "tools <|tool_call>call: <|channel>thought <channel|>": ("gemma4", "gemma4"),
    "tools <|tool_calls_section_begin|> </think>": ("kimi_k2", "kimi_k2"),
}


def chosen(template: str, **settings: str) -> tuple[str, str]:
    config = with_chat_formats(msgspec.structs.replace(RuntimeConfig(), **settings), template)
    return config.tool_call_parser, config.reasoning_parser


@for_each("template", TEMPLATES)
def test_auto_goes_by_the_chat_template(template: str) -> None:
    assert chosen(template) == TEMPLATES[template]


def test_the_demo_model_calls_tools() -> None:
    assert chosen((DEMO_MODEL / "chat_template.jinja").read_text()) == ("hermes", "none")


@for_each(
    ("name", "own"),
    [("hermes", "hermes"), ("qwen25", "hermes"), ("llama3", "llama3_json"), ("deepseekv31", "deepseek_v31")],
)
def test_peers_names_mean_the_same(name: str, own: str) -> None:
    assert chosen("{{ tools }}", tool_call_parser=name)[0] == own


def test_reasoning_has_names_too() -> None:
    assert chosen("x", reasoning_parser="deepseek-r1") == ("none", "deepseek_r1")
    assert chosen(HERMES + "</think>", reasoning_parser="none", tool_call_parser="none") == ("none", "none")


@for_each(
    ("template", "settings", "message"),
    [
        (
            "{{ tools }}",
            {"tool_call_parser": "nobody"},
            "tool_call_parser: 'nobody' is unknown; known are hermes",
        ),
        ("x", {"reasoning_parser": "nobody"}, "reasoning_parser: 'nobody' is unknown"),
        ("x", {"tool_call_parser": "hermes"}, "tool_call_parser: the chat template shows the model no tools"),
        ("", {"tool_call_parser": "hermes"}, "tool_call_parser: there is no chat template"),
    ],
)
def test_a_format_that_cannot_be_is_refused(template: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(template, **settings)


def test_the_launch_says_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen(HERMES + "</think>")
    assert "tool calls are parsed as hermes" in caplog.text
    assert "reasoning is parsed as qwen3" in caplog.text
    caplog.clear()
    chosen("{{ messages }}")
    assert "requests with tools are refused: the chat template is of no known format" in caplog.text
