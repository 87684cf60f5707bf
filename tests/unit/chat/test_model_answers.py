"""Answers of the families' models, and others in their manner, with what they mean (tests/data/README.md):
read as meant, whole and in pieces.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from carousel.server.chat.answer import AnswerPlan
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from carousel.server.chat.tools import ToolSet
from runtime.checkpoint.chat_formats import TOOL_CALLS
from tests.unit.chat.cases import Item, read

DATA = Path(__file__).parents[2] / "data"


def answers_in(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


RECORDED, WRITTEN = answers_in("model_answers.jsonl"), answers_in("written_answers.jsonl")
UNSEEN = answers_in("unseen_answers.jsonl")
ANSWERS = RECORDED + WRITTEN + UNSEEN


def plan_of(answer: dict[str, Any]) -> AnswerPlan:
    family = answer.get("family", "")
    tools = {name: json.dumps(schema).encode() for name, schema in answer.get("tools", {"f": {}}).items()}
    return AnswerPlan(
        TOOL_FORMATS.get(family),
        ToolSet(tools if family else {}),
        reasoning_format=REASONING_FORMATS.get(answer.get("reasoning", "")),
        thinking=answer.get("thinking", "none"),
    )


def what_differs(answer: dict[str, Any], items: list[Item]) -> str:
    """Return "" for an answer that is read as meant. Space around texts is left to each project."""
    calls = [[item[1], json.loads(item[2])] for item in items if item[0] == "call"]
    cut = [list(item[1:]) for item in items if item[0] == "broken"]
    if calls != answer.get("calls", []) or cut != ([answer["cut"]] if "cut" in answer else []):
        return "calls"
    text = "".join(item[1] for item in items if item[0] == "text")
    # Some drop the text behind calls.
    first = itertools.takewhile(lambda item: item[0] != "call", items)
    before = "".join(item[1] for item in first if item[0] == "text")
    if answer.get("content", "").strip() not in (text.strip(), before.strip()):
        return "content"
    thoughts = "".join(item[1] for item in items if item[0] == "reasoning")
    return "" if answer.get("thoughts", "").strip() == thoughts.strip() else "thoughts"


@pytest.mark.parametrize("family", ["", *(each.name for each in TOOL_CALLS)])
def test_answers_of_models_are_read_as_they_are_meant(family: str) -> None:
    answers = [answer for answer in ANSWERS if answer.get("family", "") == family]
    assert answers
    for answer in answers:
        how, text = plan_of(answer), answer["text"]
        whole = read(how, [text])
        assert what_differs(answer, whole) == answer.get("differs", ""), (text, whole)
        assert read(how, text) == whole
        draw = random.Random(text)
        for _ in range(4):
            cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 6)))
            ends = [0, *cuts, len(text)]
            assert read(how, [text[start:end] for start, end in itertools.pairwise(ends)]) == whole


def test_few_are_read_otherwise_than_elsewhere() -> None:
    assert len(RECORDED) > 300
    assert len(WRITTEN) > 200
    assert len(UNSEEN) > 100
    for answers in (RECORDED, WRITTEN, UNSEEN):
        assert sum("differs" in answer for answer in answers) <= len(answers) // 20
