"""translate: the request of the Messages API as a chat request, and that request's errors by the names of the
Messages API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw

from carousel.conversation import FunctionBody, MessageBody, TextPart, ToolCallBody
from carousel.server.anthropic.types import (
    FIELDS_OF_BLOCKS,
    OPTIONAL_FIELDS,
    BlockBody,
    CountTokensBody,
    InputTool,
    MessagesBody,
    OutputConfigBody,
    ThinkingBody,
    ToolUseChoiceBody,
    TurnBody,
)
from carousel.server.chat.definitions import check_reach, decode_part, definitions_of
from carousel.server.guides import JsonSchemaBody, ResponseFormatBody
from carousel.server.openai.chat_plan import SWITCHES
from carousel.server.openai.types import ChatBody, NamedFunctionBody, ToolChoiceBody
from runtime.base.errors import InvalidRequest, RequestError

DIFFERENT = {"messages", "tools", "tool_choice"}
SAME_FIELDS = tuple(
    name
    for name in MessagesBody.__struct_fields__
    if name in ChatBody.__struct_fields__ and name not in DIFFERENT
)
"""Fields that mean the same in a chat request."""
RENAMED = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of chat requests -> names in the Messages API."""
WORDS = {**RENAMED, "tool_choice: required": "tool_choice: any"}
"""Words in errors of chat requests -> words of the Messages API."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Values of tool_choice -> those of chat requests."""
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
BILLING = "x-anthropic-billing-header:"
"""Beginning of a line that Claude Code writes in front of the system prompt, for Anthropic's accounts. It
differs in each request, so no prefix would ever be found in the cache.
"""
OWN_FIELDS = frozenset({*InputTool.__struct_fields__, "parameters"})
"""Fields of a tool that its definition in a chat request has, or needs not."""
ERROR = "Error: "
"""Beginning of a result with is_error. Chat templates have no other place for that."""
ROLES_OF_BLOCKS = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
"""Roles of the messages that may have blocks of a type; others may be in all."""


def _foreign(kind: str) -> tuple[Callable[[BlockBody], Any], Any, list[str]]:
    """Return a function that gets the fields that a block of a type has not, their values if they are absent,
    and their names.
    """
    known = {"type", "cache_control", *FIELDS_OF_BLOCKS[kind], *OPTIONAL_FIELDS.get(kind, ())}
    names = [name for name in BlockBody.__struct_fields__ if name not in known]
    values_of = attrgetter(*names)
    return values_of, values_of(BlockBody(type="text")), names


_FOREIGN = {kind: _foreign(kind) for kind in FIELDS_OF_BLOCKS}

_TURN = re.compile(
    r"messages\[(?P<turn>\d+)\](?:\.content|(?P<call>\.tool_calls\[\d+\])\.function\.arguments)?"
)
_TOOL = re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<parameters>\.parameters)?")
_FIELDS = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in WORDS))


@dataclass(slots=True)
class Translation:
    body: ChatBody
    places: dict[str, str] = field(default_factory=dict)
    """Places in the chat request -> those in the request of the Messages API."""

    def error(self, error: RequestError) -> RequestError:
        """Return the error of the chat request by the names of the Messages API."""
        if error.param is None:
            return error
        message, param = self._text(error.message), self._text(error.param)
        return type(error)(message, param=param, code=error.code, status=error.status)

    def names(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the names of the client library's parameters, of those in the chat request."""
        return RENAMED | {name: RENAMED.get(each, each) for name, each in names.items()}

    def _text(self, text: str) -> str:
        text = _TURN.sub(self._place, text)
        text = _TOOL.sub(lambda found: found["tool"] + (".input_schema" if found["parameters"] else ""), text)
        return _FIELDS.sub(lambda found: WORDS[found[0]], text)

    def _place(self, found: re.Match[str]) -> str:
        turn = f"messages[{found['turn']}]"
        if found["call"]:
            return f"{self.places.get(turn + found['call'], turn)}.input"
        return self.places.get(turn, found[0])


def translate(body: CountTokensBody) -> Translation:
    """Return what a request asks of the chat endpoint. Raises InvalidRequest that names the field."""
    turns = _Turns()
    turns.add_system(body)
    for number, turn in enumerate(body.messages):
        turns.add(f"messages[{number}]", turn)
    made: dict[str, Any] = {name: getattr(body, name) for name in SAME_FIELDS if hasattr(body, name)}
    chat = ChatBody(messages=turns.messages, **made)
    if body.messages and body.messages[-1].role == "assistant":
        if turns.messages[-1].tool_calls:
            place = f"messages[{len(body.messages) - 1}]"
            raise InvalidRequest(f"{place}: its tool calls have no results", param=place)
        chat.continue_final_message = True
    if len(body.tools):
        chat.tools = Raw(_tools(body.tools))
    if body.tool_choice is not None:
        _choose(chat, body.tool_choice)
    if body.thinking is not None:
        _think(chat, body.thinking, body.max_tokens if isinstance(body, MessagesBody) else None)
    if body.output_config is not None:
        _configure(chat, body.output_config)
    if isinstance(body, MessagesBody) and body.stop_sequences:
        chat.stop = body.stop_sequences
    return Translation(chat, turns.places)


class _Turns:
    """Messages of the chat request, and their places in the other one."""

    def __init__(self) -> None:
        self.messages: list[MessageBody] = []
        self.places: dict[str, str] = {}

    def add_system(self, body: CountTokensBody) -> None:
        if body.system is None:
            return
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        texts = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
        if texts := [text for text in texts if text]:
            self._append("system", MessageBody(role="system", content=_parts(texts)))

    def add(self, place: str, turn: TurnBody) -> None:
        if isinstance(turn.content, str):
            self._append(place, MessageBody(role=turn.role, content=turn.content))
            return
        for number, block in enumerate(turn.content):
            _check(block, turn.role, f"{place}.content[{number}]")
        if turn.role == "assistant":
            self._add_answer(place, turn.content)
        else:
            self._add_input(place, turn.role, turn.content)

    def _add_answer(self, place: str, blocks: list[BlockBody]) -> None:
        """Add an answer. Its texts are one, as they were when they were generated."""
        texts: list[str] = []
        calls: list[ToolCallBody] = []
        thoughts: list[str] = []
        turn = f"messages[{len(self.messages)}]"
        for number, block in enumerate(blocks):
            if block.type == "text":
                texts.append(block.text or "")
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            else:
                self.places[f"{turn}.tool_calls[{len(calls)}]"] = f"{place}.content[{number}]"
                function = FunctionBody(name=block.name or "", arguments=block.input)
                calls.append(ToolCallBody(function=function, id=block.id))
        message = MessageBody(role="assistant", content="".join(texts))
        if calls:
            message.tool_calls = calls
        if thoughts:
            message.reasoning_content = "\n".join(thoughts)
        self._append(place, message)

    def _add_input(self, place: str, role: Any, blocks: list[BlockBody]) -> None:
        """Add texts and results in their order: texts side by side are one message, each result is one."""
        texts: list[str] = []
        for block in blocks:
            if block.type == "text":
                texts.append(block.text or "")
                continue
            if texts:
                self._append(place, MessageBody(role=role, content=_parts(texts)))
                texts = []
            result = MessageBody(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
            self._append(place, result)
        if texts or not blocks:
            self._append(place, MessageBody(role=role, content=_parts(texts)))

    def _append(self, place: str, message: MessageBody) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)


def _check(block: BlockBody, role: str, where: str) -> None:
    """Check that a block has the fields of its type, and is in a message that may have it. Raises
    InvalidRequest.
    """
    owner = ROLES_OF_BLOCKS.get(block.type, role)
    if owner != role:
        raise InvalidRequest(
            f"{where}: a block of type {block.type} is for messages of the role {owner}", param=where
        )
    for name in FIELDS_OF_BLOCKS[block.type]:
        if not _is_given(getattr(block, name)):
            raise InvalidRequest(
                f"{where}.{name} is missing", param=f"{where}.{name}", code="missing_required_parameter"
            )
    foreign, absent, names = _FOREIGN[block.type]
    if foreign(block) != absent:
        for name in names:
            if _is_given(getattr(block, name)):
                raise InvalidRequest(
                    f"{where}.{name} is no field of a block of type {block.type}", param=f"{where}.{name}"
                )
    if block.type == "tool_use" and bytes(memoryview(block.input)[:1]) != b"{":
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")


def _is_given(value: Any) -> bool:
    if isinstance(value, Raw):
        return len(value) > 0 and bytes(memoryview(value)[:5]) != b"null"
    return value is not None


def _parts(texts: list[str]) -> str | list[TextPart]:
    return texts[0] if len(texts) == 1 else [TextPart(text, "text") for text in texts]


def _result(block: BlockBody) -> str | list[TextPart]:
    content = block.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if block.is_error:
        texts[:1] = [ERROR + (texts[0] if texts else "")]
    return _parts(texts)


def _tools(tools: Raw) -> bytes:
    """Return the definitions of tools in OpenAI's form. Raises InvalidRequest."""
    made = []
    for number, definition in enumerate(definitions_of(tools)):
        where = f"tools[{number}]"
        tool: InputTool = decode_part(definition, InputTool, where)
        check_reach(where, defer_loading=tool.defer_loading, allowed_callers=tool.allowed_callers)
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict is not None:
            function["strict"] = tool.strict
        further: dict[str, Raw] = decode_part(definition, dict[str, Raw], where)
        if _is_given(further.get("parameters")):
            raise InvalidRequest(
                f"{where}.parameters: the tool has an input_schema; leave parameters out",
                param=f"{where}.parameters",
            )
        function |= {name: value for name, value in further.items() if name not in OWN_FIELDS}
        made.append({"type": "function", "function": function})
    return msgspec.json.encode(made) if made else b""


def _choose(chat: ChatBody, choice: ToolUseChoiceBody) -> None:
    """Set which tools may be called. Raises InvalidRequest."""
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name is needed with type tool, and only there", param="tool_choice")
    if choice.name is not None:
        chat.tool_choice = ToolChoiceBody(type="function", function=NamedFunctionBody(choice.name))
    else:
        chat.tool_choice = CHOICES[choice.type]  # type: ignore[assignment]
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _think(chat: ChatBody, thinking: ThinkingBody, max_tokens: int | None) -> None:
    """Switch reasoning on or off, and limit it. Raises InvalidRequest."""
    budget, name = thinking.budget_tokens, "thinking.budget_tokens"
    if (thinking.type == "enabled") != (budget is not None):
        raise InvalidRequest(f"{name} is needed with type enabled, and only there", param=name)
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        raise InvalidRequest(f"{name} is {budget}; it must be less than max_tokens", param=name)
    chat.thinking_token_budget = budget
    chat.chat_template_kwargs = {
        **dict.fromkeys(SWITCHES, THINKS[thinking.type]),
        **(chat.chat_template_kwargs or {}),
    }
    if thinking.display == "omitted":
        chat.include_reasoning = False


def _configure(chat: ChatBody, config: OutputConfigBody) -> None:
    chat.reasoning_effort = config.effort
    if config.format is not None:
        schema = JsonSchemaBody(schema=config.format.schema)
        chat.response_format = ResponseFormatBody(type="json_schema", json_schema=schema)
