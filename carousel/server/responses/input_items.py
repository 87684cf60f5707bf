"""messages_of: the items of a request as the messages of a chat.

What the assistant has said in one turn is several items here and one message there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from msgspec import Raw
from msgspec.json import encode

from carousel.conversation import PART_SEPARATOR, FunctionBody, MessageBody, ToolCallBody
from carousel.server.responses.tool_names import arguments_of, name_in_chat
from carousel.server.responses.types import InputItem, InputPart, ResponsesBody
from runtime.base.errors import InvalidRequest
from runtime.wire.messages import MAX_FURTHER_BYTES

TakeTurn: TypeAlias = Callable[[], Awaitable[None]]
ITEMS_AT_ONCE = 1024
"""Number of items that are translated in one turn of the event loop: 5 ms."""
FIELDS = {
    "message": frozenset({"role", "content", "name"}),
    "function_call": frozenset({"call_id", "name", "namespace", "arguments"}),
    "function_call_output": frozenset({"call_id", "output", "name", "namespace"}),
    "custom_tool_call": frozenset({"call_id", "name", "namespace", "input"}),
    "custom_tool_call_output": frozenset({"call_id", "output", "name", "namespace"}),
    "reasoning": frozenset({"content", "summary"}),
}
"""Fields of each type of items."""
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": ("type", "summary"),
}
RESULTS = ("function_call_output", "custom_tool_call_output")
OTHERS = {
    kind: tuple(name for name in InputItem.__struct_fields__ if name != "type" and name not in fields)
    for kind, fields in FIELDS.items()
}
_needed_of = {kind: attrgetter(*names) for kind, names in NEEDED.items()}
_others_of = {kind: attrgetter(*names) for kind, names in OTHERS.items()}


@dataclass(slots=True)
class TranslatedMessages:
    """Messages of a chat, and the place in the request that each comes from."""

    bodies: list[MessageBody] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, body: MessageBody, place: str) -> MessageBody:
        self.bodies.append(body)
        self.places.append(place)
        return body


@dataclass(slots=True)
class _Turn:
    """Turn of the assistant, of one item or several."""

    message: MessageBody
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallBody] = field(default_factory=list)

    def takes(self, kind: str) -> bool:
        """Return True if the next item may belong to it: reasoning comes first in a turn, and a message does
        not follow another one.
        """
        if kind == "reasoning":
            return not self.texts and not self.calls
        return kind != "message" or not self.texts or bool(self.calls)

    def end(self) -> None:
        """Complete the message. Each text is joined once, however many items it comes from."""
        if self.texts:
            self.message.content = "".join(self.texts)
        if self.reasoning:
            self.message.reasoning_content = "".join(self.reasoning)
        if self.calls:
            self.message.tool_calls = self.calls


async def messages_of(body: ResponsesBody, take_turn: TakeTurn) -> TranslatedMessages:
    """Return the conversation of a request. `take_turn` is awaited after every few items. Raises
    InvalidRequest.
    """
    made = TranslatedMessages()
    if body.instructions is not None:
        made.add(MessageBody(role="system", content=body.instructions), "instructions")
    if isinstance(body.input, str):
        made.add(MessageBody(role="user", content=body.input), "input")
        return made
    if not body.input:
        raise InvalidRequest("input is empty", param="input")
    turns: list[_Turn] = []
    is_open = False
    """True if the next item may belong to the last turn."""
    num_chars = 0
    for number, item in enumerate(body.input):
        if number and not number % ITEMS_AT_ONCE:
            await take_turn()
        place = f"input[{number}]"
        kind = _checked(item, place)
        if kind in RESULTS:
            made.add(MessageBody(role="tool", content=_text(item.output), tool_call_id=item.call_id), place)
            is_open = False
        elif kind == "message" and item.role != "assistant":
            made.add(MessageBody(role=item.role or "", content=_text(item.content), name=item.name), place)
            is_open = False
        else:
            num_chars += len(item.arguments or item.input or "")
            if num_chars > MAX_FURTHER_BYTES:
                where = f"{place}.{'input' if item.arguments is None else 'arguments'}"
                raise InvalidRequest(
                    f"{where}: those of all calls may have {MAX_FURTHER_BYTES} bytes together",
                    param=where,
                )
            if not is_open or not turns[-1].takes(kind):
                turns.append(_Turn(made.add(MessageBody(role="assistant"), place)))
                is_open = True
            _add(item, kind, turns[-1])
    for turn in turns:
        turn.end()
    return made


def _checked(item: InputItem, place: str) -> str:
    """Return the type of an item. Raises InvalidRequest if it lacks a field or has one of another type."""
    kind = item.type or "message"
    if kind == "item_reference":
        raise InvalidRequest(
            f"{place}: this server keeps no items that could be referred to; send the item itself",
            param=place,
            code="unsupported_parameter",
        )
    if None in _needed_of[kind](item):
        (name, *_) = (name for name in NEEDED[kind] if getattr(item, name) is None)
        raise InvalidRequest(
            f"{place}.{name} is missing", param=f"{place}.{name}", code="missing_required_parameter"
        )
    others = _others_of[kind](item)
    if others.count(None) < len(others):
        (name, *_) = (name for name in OTHERS[kind] if getattr(item, name) is not None)
        raise InvalidRequest(
            f"{place}.{name}: an item of the type {kind} has no such field", param=f"{place}.{name}"
        )
    return kind


def _add(item: InputItem, kind: str, turn: _Turn) -> None:
    if kind == "message":
        turn.texts.append(_text(item.content))
        turn.message.name = item.name
    elif kind == "reasoning":
        turn.reasoning.append(_text(item.content) or _text(item.summary))
    else:
        arguments = item.arguments if kind == "function_call" else arguments_of(item.input or "")
        name = name_in_chat(item.name or "", item.namespace)
        function = FunctionBody(name=name, arguments=Raw(encode(arguments)))
        turn.calls.append(ToolCallBody(function=function, id=item.call_id, type="function"))


def _text(content: str | Sequence[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return PART_SEPARATOR.join(part.text or part.refusal for part in content)
