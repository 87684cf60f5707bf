"""Events of a chat that may have calls: for text they are those of a chat without."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from carousel.client.core.result import Delta
from carousel.server.chat.answer import AnswerPlan
from carousel.server.chat.reader import Markers
from carousel.server.openai.chat_format import ChatCompletionFormat, ChatView
from runtime.wire.messages import Usage
from tests.harness.cases import for_each
from tests.unit.chat.cases import plan

TEXT = "Words, (a < b) and x[0], and <b>more</b> of <tool and\n  so on."


def pieces(seed: int) -> list[Delta]:
    """Deltas of one to four characters, of which each is a token, and an end."""
    rng, deltas, at = random.Random(seed), list[Delta](), 0
    while at < len(TEXT):
        size = rng.randint(1, 4)
        text = TEXT[at : at + size]
        deltas.append(Delta(text, [7] * len(text), []))
        at += size
    deltas.append(Delta("", [], [], "length", usage=Usage(3, len(TEXT), 0)))
    return deltas


def told(
    how: AnswerPlan | None, deltas: list[Delta], *, continuous: bool, ids: bool
) -> list[tuple[Any, Any]]:
    """Choices and usage of each event."""
    view = ChatView(
        "m",
        plan=how,
        counts_continuously=continuous,
        streams_usage=continuous,
        shows_ids=ids,
        prompt_ids=[1, 2, 3],
    )
    answer, found = ChatCompletionFormat(view), list[tuple[Any, Any]]()
    for delta in deltas:
        for event in b"".join(answer.events(0, delta)).split(b"\n\n")[:-1]:
            body = msgspec.json.decode(event.removeprefix(b"data: "))
            found.append((body["choices"], body.get("usage")))
    return found


@for_each("continuous", [False, True])
@for_each("ids", [False, True])
def test_text_that_begins_no_marker_has_the_events_of_a_chat_without_tools(
    *, continuous: bool, ids: bool
) -> None:
    how = plan("hermes", left_out=Markers("<|end|>"))
    # Where a piece is held back, events differ in how the text is cut.
    deltas = [delta for delta in pieces(1) if "<" not in delta.text]
    assert told(how, deltas, continuous=continuous, ids=ids) == told(
        None, deltas, continuous=continuous, ids=ids
    )


@pytest.mark.parametrize("continuous", [False, True])
def test_no_text_and_no_token_is_lost_on_the_way(*, continuous: bool) -> None:
    for seed in range(20):
        found = told(plan("hermes"), pieces(seed), continuous=continuous, ids=True)
        choices = [choice for choices, _ in found for choice in choices]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT, seed
        assert sum(len(choice.get("token_ids") or []) for choice in choices) == len(TEXT), seed
        assert choices[-1]["finish_reason"] == "length"
