"""Answers that a model has made to cost time: reading them takes time in proportion to their length."""

from __future__ import annotations

import time

import pytest

from carousel.server.chat.answer import AnswerParser
from tests.unit.chat.cases import plan

HOSTILE = [
    # The family, what the answer begins with, and what is said again and again behind it.
    ("hermes", "", " "),
    ("hermes", "", "<tool_call>"),
    ("hermes", "", '<tool_call>{",":"'),
    ("hermes", "", '<tool_call>{"name":"now"}</tool_call>x'),
    ("hermes", '<tool_call>{"a":"', "a"),
    ("hermes", '<tool_call>{"a":', "1"),
    ("hermes", '<tool_call>{"a":', "["),
    ("hermes", '<tool_call>{"name":"now","arguments":{"a":', "1"),
    ("hermes", '<tool_call>{"name":"now","arguments":{"a":[', "{},"),
    ("hermes", '<tool_call>{"name":"now","arguments":{"a":"', "\\x"),
    ("llama3_json", '{"a":"', "a"),
    ("llama3_json", '{"name":"now","parameters":{}', ', "x":1'),
    ("pythonic", "[", "a"),
    ("pythonic", '[weather(city="', "a"),
    ("pythonic", "[weather(city=", "1"),
    ("pythonic", "[weather(city=[", "1,"),
    ("mistral", "[TOOL_CALLS]", "a"),
    ("qwen3_coder", "<function=weather><parameter=city>", "</parameter>"),
    ("qwen3_coder", "<function=weather><parameter=city></parameter>", " "),
    ("qwen3_coder", "<function=weather>", "<parameter=a>1</parameter>"),
    ("glm45", "<tool_call>", "<arg_key>a"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>", "a"),
    ("kimi_k2", "<|tool_call_begin|>", ":1"),
    ("gpt_oss", "<|channel|>", "to=functions."),
    ("gemma4", "<|tool_call>call:now{", "a"),
    ("gemma4", "<|tool_call>call:now{a:", "["),
    ("", "<think>", "\n"),
    ("", "<think>", "</thin"),
]


def time_of(family: str, head: str, unit: str, size: int, *, whole: bool) -> float:
    """CPU time of this thread for an answer of so many characters."""
    text = head + unit * (size // len(unit))
    parser = AnswerParser(plan(family, "gpt_oss" if family == "gpt_oss" else "qwen3", "may begin"))
    began_s = time.thread_time()
    for piece in [text] if whole else text:
        parser.push(piece)
    parser.end()
    return time.thread_time() - began_s


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("family", "head", "unit"), HOSTILE)
@pytest.mark.parametrize("size", [1 << 17, pytest.param(1 << 20, marks=pytest.mark.full)])
def test_time_is_in_proportion_to_the_length(
    family: str, head: str, unit: str, size: int, whole: bool
) -> None:
    short, factor = size // 16, 16
    most_s = 3 * factor * max(time_of(family, head, unit, short, whole=whole), short * 1e-6)
    assert time_of(family, head, unit, size, whole=whole) < most_s
