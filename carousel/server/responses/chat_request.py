"""chat_request: a request to /v1/responses as a body of chat completions, and the names of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from carousel.server.guides import JsonSchemaBody, ResponseFormatBody
from carousel.server.openai.types import ChatBody, GenerationBody, NamedFunctionBody, ToolChoiceBody
from carousel.server.responses.input_items import TakeTurn, messages_of
from carousel.server.responses.tool_names import CalledTool, name_in_chat, read_tools_of
from carousel.server.responses.types import LOGPROBS, ResponsesBody, TextFormatBody
from runtime.base.errors import InvalidRequest

NO_PLACE: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_hidden_states": (None, False),
}
"""Fields of chats for which an answer here has no place, with the values that ask for nothing."""
SAME = tuple(
    name
    for name in GenerationBody.__struct_fields__
    if name not in NO_PLACE and name not in ("stream_options", "response_format")
)
"""Fields that mean the same in a chat."""
_same_of = attrgetter(*SAME)
_NAMES = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
}
"""Names in a ChatBody -> names here."""
_PLACE = re.compile(r"(?P<field>messages|tools)\[(?P<number>\d+)\](?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    chat: ChatBody
    names: ChatNames
    called: Mapping[str, CalledTool]
    """Tools that the chat calls by other names, or whose calls have another form, by their names there."""


class ChatNames(Mapping[str, str]):
    """Names of parameters here, by those in the chat that a request was translated to, for errors."""

    def __init__(
        self, messages: Sequence[str], tools: Sequence[str], names: Mapping[str, str] | None = None
    ) -> None:
        """`messages` and `tools` have the place of each in the request. `names` has the chat's own names of
        parameters.
        """
        self._messages = messages
        self._tools = tools
        self._names = names or {}

    def behind(self, names: Mapping[str, str]) -> ChatNames:
        """Return the names of what goes by these names in the chat."""
        return ChatNames(self._messages, self._tools, names)

    def __getitem__(self, name: str) -> str:
        in_chat = self._names.get(name, name)
        place = _PLACE.fullmatch(in_chat)
        if place is None:
            return _NAMES[in_chat] if in_chat == name else _NAMES.get(in_chat, in_chat)
        number, rest = int(place["number"]), place["rest"]
        if place["field"] == "tools":
            return self._tools[number] + rest.removeprefix(".function")
        item = self._messages[number]
        return item + rest if item.startswith("input[") and rest == ".content" else item

    def __iter__(self) -> Iterator[str]:
        return iter({**self._names, **_NAMES})

    def __len__(self) -> int:
        return len({**self._names, **_NAMES})


async def chat_request(body: ResponsesBody, take_turn: TakeTurn) -> ChatRequest:
    """Return the chat that a request stands for. `take_turn` is awaited between pieces of work. Raises
    InvalidRequest.
    """
    _check(body)
    tools = read_tools_of(body.tools, body.tool_choice)
    messages = await messages_of(body, take_turn)
    chat = ChatBody(
        **dict(zip(SAME, _same_of(body), strict=True)),
        messages=messages.bodies,
        max_tokens=body.max_output_tokens,
        tools=tools.definitions,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_response_format(body),
    )
    if LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    if body.truncation == "auto" and chat.truncate_prompt_tokens is None:
        chat.truncate_prompt_tokens = -1
    return ChatRequest(chat, ChatNames(messages.places, tools.places), tools.called)


def _check(body: ResponsesBody) -> None:
    for name, neutral in NO_PLACE.items():
        if getattr(body, name) not in neutral:
            raise InvalidRequest(
                f"{name} is not supported by this endpoint; /v1/chat/completions has it",
                param=name,
                code="unsupported_parameter",
            )
    if body.response_format is not None:
        raise InvalidRequest(
            "response_format: it is called text.format here",
            param="response_format",
            code="unsupported_parameter",
        )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f'top_logprobs needs "{LOGPROBS}" in include', param="top_logprobs")


def _response_format(body: ResponsesBody) -> ResponseFormatBody | None:
    given = None if body.text is None else body.text.format
    if given is None:
        return None
    has_schema = bytes(given.schema) not in (b"", b"null")
    if has_schema != (given.type == "json_schema"):
        raise InvalidRequest(
            "text.format.schema is needed with the type json_schema, and only there",
            param="text.format.schema",
        )
    if given.type == "json_schema" and given.name is None:
        raise _missing("text.format.name")
    return ResponseFormatBody(type=given.type, json_schema=_json_schema(given) if has_schema else None)


def _json_schema(given: TextFormatBody) -> JsonSchemaBody:
    return JsonSchemaBody(
        name=given.name, description=given.description, strict=given.strict, schema=given.schema
    )


def _tool_choice(body: ResponsesBody) -> Any:
    """Return the choice as a chat has it. Raises InvalidRequest."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        if choice.mode is None:
            raise _missing("tool_choice.mode")
        return choice.mode
    if choice.name is None:
        raise _missing("tool_choice.name")
    name = name_in_chat(choice.name, choice.namespace)
    return ToolChoiceBody(type="function", function=NamedFunctionBody(name))


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
