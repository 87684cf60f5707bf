"""Calls that are held in every family: required, named and strict, with thinking on and off, of the demo
model at temperature 1. What begins a call, and what ends reasoning, are tokens of their own here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.openai.test_forced_calls import (
    END_THINKING,
    NAMED,
    OPENS,
    STRICT_TOOLS,
    TOOLS,
    Answer,
    answers,
    thinking_launch,
)


@dataclass(frozen=True, slots=True)
class Family:
    begin: str = ""
    """Text that begins a call, where strict tools can be held with `auto`."""
    reasoning: str = "qwen3"
    think: tuple[str, str] = ("<think>", "</think>")


FAMILIES = {
    "hermes": Family("<tool_call>"),
    "llama3_json": Family(),
    "mistral": Family("[TOOL_CALLS]", "mistral", ("[THINK]", "[/THINK]")),
    "deepseek_v3": Family("<｜tool▁calls▁begin｜>", "deepseek_r1"),
    "deepseek_v31": Family("<｜tool▁calls▁begin｜>", "deepseek_r1"),
    "kimi_k2": Family("<|tool_calls_section_begin|>", "kimi_k2"),
}
"""Those that can be held, but for families with tags around arguments and gpt_oss (test_forced_calls.py)."""
BEGIN = {"1": 14.0}
"""Bias towards what begins a call: the model knows no tools."""
BUDGET = 20
"""Most tokens of reasoning."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "total"),
    [
        *(("mistral", 24), ("kimi_k2", 24)),
        *(pytest.param(family, 500, marks=pytest.mark.full) for family in FAMILIES),
    ],
)
def test_calls_of_a_family_are_held(tmp_path: Path, family: str, total: int) -> None:
    format = FAMILIES[family]
    count = -(-total // (6 if format.begin else 4))
    opens, closes = format.think
    end = OPENS.replace("<think>", opens).replace("</think>", closes)
    tokens = {"<|im_end|>": closes}
    if format.begin:
        tokens["<|im_start|>"] = format.begin
    with thinking_launch(tmp_path, tokens, family, format.reasoning, end=end) as client:
        for thinks in (True, False):
            options: dict[str, Any] = {
                "parallel_tool_calls": False,
                "extra_body": {
                    "chat_template_kwargs": {"enable_thinking": thinks},
                    "thinking_token_budget": BUDGET,
                },
            }
            for choice in ("required", NAMED):
                got = answers(
                    client, count, tools=TOOLS, tool_choice=choice, logit_bias=END_THINKING, **options
                )
                assert all(answer.calls and not answer.content for answer in got)
                check(got, thinks=thinks)
            if format.begin:
                got = answers(client, count, tools=STRICT_TOOLS, logit_bias=BEGIN, **options)
                assert sum(bool(answer.calls) for answer in got) > count // 2
                check(got, thinks=thinks)


def check(got: list[Answer], *, thinks: bool) -> None:
    for answer in got:
        assert answer.reason == ("tool_calls" if answer.calls else "stop"), vars(answer)
        assert len(answer.calls) <= 1
        answer.check_calls()
    assert any(answer.reasoning for answer in got) is thinks
