"""Items of /v1/responses: those of a request as messages of a chat, and those of an answer with logprobs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from carousel.client.core.logprobs import TokenLogprob
from carousel.server.chat.events import ItemDelta
from carousel.server.openai.chat_format import ChatView
from carousel.server.responses import input_items
from carousel.server.responses.input_items import messages_of
from carousel.server.responses.item_reader import ItemReader
from carousel.server.responses.types import ResponsesBody
from runtime.base.errors import InvalidRequest
from tests.harness.cases import for_each
from tests.unit.chat.cases import plan

TEXT = 'Well, <b>.<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> And so on.'


class Speller:
    """A speller of tokens that are characters."""

    def num_chars(self, token_id: int, *, skips_special: bool) -> int:
        return 1


def translated(*items: dict[str, Any], **body: Any) -> Any:
    given = msgspec.json.decode(msgspec.json.encode({"input": items, **body}), type=ResponsesBody)
    turns: list[None] = []

    async def take_turn() -> None:
        turns.append(None)

    made = asyncio.run(messages_of(given, take_turn))
    assert len(turns) == (len(items) - 1) // input_items.ITEMS_AT_ONCE
    return made


def said(made: Any) -> list[tuple[Any, ...]]:
    return [
        (
            each.role,
            each.content,
            each.reasoning_content,
            [call.id for call in each.tool_calls or ()] or each.tool_call_id,
        )
        for each in made.bodies
    ]


def message(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "output_text", "text": text}]}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "done"}


def test_items_of_one_turn_are_one_message() -> None:
    made = translated(
        message("x", "user"),
        *(reasoning("r"), message("a"), call("c"), message("b"), call("d"), result("c"), result("d")),
        *(message("e"), message("f"), reasoning("s"), call("g")),
        instructions="i",
    )
    assert said(made) == [
        ("system", "i", None, None),
        ("user", "x", None, None),
        ("assistant", "ab", "r", ["c", "d"]),
        ("tool", "done", None, "c"),
        ("tool", "done", None, "d"),
        ("assistant", "e", None, None),
        ("assistant", "f", None, None),
        ("assistant", None, "s", ["g"]),
    ]
    assert made.places == ["instructions", *(f"input[{number}]" for number in (0, 1, 6, 7, 8, 9, 10))]


def test_a_summary_stands_in_for_reasoning() -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    (turn,) = translated({"type": "reasoning", "summary": summary}).bodies
    assert turn.reasoning_content == "a\nb"


def test_many_items_of_one_turn_take_turns_and_have_a_limit() -> None:
    (turn,) = translated(*[call("c")] * 4096).bodies
    assert len(turn.tool_calls) == 4096
    long = {**call("c"), "arguments": "x" * (1 << 19)}
    with pytest.raises(InvalidRequest, match=r"input\[2\].arguments"):
        translated(long, long, call("d"))


def told(pieces: list[str], reason: str) -> tuple[str, str]:
    """The text of an answer, and the tokens whose logprobs are with it."""
    view: Any = ChatView("m", shows_logprobs=True, plan=plan("hermes"))
    view.speller = Speller()
    reader, text, tokens = ItemReader(view, skips_special=True), "", ""
    for number, piece in enumerate(pieces):
        ids = [ord(char) for char in piece]
        logprobs = [TokenLogprob(each, -1.0, ()) for each in ids]
        last = reason if number == len(pieces) - 1 else None
        for event, its in filter(None, reader.read(piece, ids, logprobs, last)):
            if isinstance(event, ItemDelta) and event.kind == "text":
                text += event.text
                tokens += "".join(chr(each.token_id) for each in its)
            else:
                assert not its
    return text, tokens


def test_parts_of_a_delta_without_text_give_their_logprobs_at_once() -> None:
    reader = ItemReader(ChatView("m", shows_logprobs=True), skips_special=True)
    entry = TokenLogprob(7, -1.0, ())
    sizes = [
        sum(len(its) for _, its in filter(None, reader.read(text, [7] * 50, [entry] * 50, None)))
        for text in ("ab", "", "")
    ]
    assert sizes == [50, 50, 50]


@for_each("reason", ["stop", "length"])
@for_each("seed", range(8))
def test_text_has_the_logprobs_of_its_tokens_and_of_no_others(seed: int, reason: str) -> None:
    rng, pieces, rest = random.Random(seed), list[str](), TEXT
    while rest and seed:
        size = rng.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    text, tokens = told(pieces or [TEXT], reason)
    assert text == tokens == "Well, <b>. And so on."
