"""Conversations for the model's chat template: OpenAI's messages as the HTTP server decodes them and as a
program has them, what becomes of them as a prompt, and that prompt on the wire.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct, field

from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_TURNS, Label, Text, check_template_kwargs
from runtime.wire.messages import (
    FURTHER_FIELDS,
    MAX_FURTHER_BYTES,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOLS_BYTES,
    ChatMessage,
    ChatRole,
)

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = bytes | Sequence[Mapping[str, Any]]
"""Definitions of tools: a list, or its JSON."""

CHAT_NAMES = {"prompt": "messages"}
"""Names that callers of `chat` have for what the library calls otherwise."""
PART_SEPARATOR = "\n"
# Chat templates know "system"; "developer" is what OpenAI calls the same thing for its newer models.
ROLES = {"developer": "system"}
MESSAGE_KEYS = frozenset({"role", "content", "name", *FURTHER_FIELDS})
IGNORED_KEYS = frozenset({"annotations", "cache_control", "refusal"})
"""Keys of OpenAI's messages that change no answer: an answer has some that is sent back as it came."""
MAX_CALL_PARTS = 1 << 16
"""Maximum number of parts of all tool calls in a conversation, by the brackets and commas in their JSON: 6 ms
of work.
"""
_BEGINNINGS = b'"{n'
"""First bytes of a text, an object and null in JSON."""
TEXT_ONLY = "this server takes text only"
_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_PART = re.compile(r"\.content\[\d+\](\.type)?$")


# -- OpenAI's messages ---------------------------------------------------------------------------------------


class TextPart(Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"]


class FunctionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: Raw = field(default_factory=Raw)
    """JSON as a text, as OpenAI has it, or an object."""


class ToolCallBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant has made earlier in the conversation."""

    function: FunctionBody
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class MessageBody(Struct, forbid_unknown_fields=True, kw_only=True):
    role: ChatRole
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by vLLM's name."""


def conversation_of(messages: Any, where: str = "messages") -> list[dict[str, Any]]:
    """Return a conversation that a program has in OpenAI's form as `conversation` does. Values of None and
    IGNORED_KEYS are left out. `where`: how the caller calls it. Raises InvalidRequest.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(
            f'{where} must be a list of messages, {{"role": ..., "content": ...}} each, got '
            f"{type(messages).__name__}",
            param=where,
        )
    return conversation([_body_of(each, f"{where}[{i}]") for i, each in enumerate(messages)], where)


def conversations_of(messages: Any) -> list[dict[str, Any]] | list[list[dict[str, Any]]]:
    """Return `conversation_of` of one conversation, or of each of several. Raises InvalidRequest."""
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], list | tuple):
        return conversation_of(messages)
    return [conversation_of(each, f"messages[{number}]") for number, each in enumerate(messages)]


def _body_of(message: Any, where: str) -> MessageBody:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f'{where} must be a mapping, {{"role": ..., "content": ...}}, got {type(message).__name__}',
            param=where,
        )
    given = {key: value for key, value in message.items() if value is not None and key not in IGNORED_KEYS}
    for key in given:
        if key not in MessageBody.__struct_fields__:
            raise InvalidRequest(f"{where}.{key} is not supported", param=f"{where}.{key}")
    try:
        return msgspec.json.decode(msgspec.json.encode(given), type=MessageBody)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT.search(text)
        path, reason = (f"{where}{at['path']}", text[: at.start()]) if at else (where, text)
        if _PART.search(path):
            reason = f"{TEXT_ONLY}: {reason}"
        raise InvalidRequest(f"{path}: {reason}", param=path) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{where} cannot be written as JSON: {error}", param=where) from None


def conversation(messages: Sequence[MessageBody], where: str = "messages") -> list[dict[str, Any]]:
    """Return the messages as the client library's own prompts have them; text parts become lines. `where`:
    how the caller calls them. Raises InvalidRequest.
    """
    if not messages:
        raise InvalidRequest(f"{where} is empty", param=where)
    turns = []
    size = _CallSize()
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"{where}[{index}].content is missing; only a message of the assistant may be without",
                param=f"{where}[{index}].content",
                code="missing_required_parameter",
            )
        content = message.content or ""
        if not isinstance(content, str):
            content = PART_SEPARATOR.join(part.text for part in content)
        turn: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = _tool_calls(message.tool_calls, f"{where}[{index}].tool_calls", size)
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
        turns.append(turn)
    return turns


class _CallSize:
    """Bounds the decoded size of all tool calls in a conversation."""

    def __init__(self) -> None:
        self._num_bytes = self._num_parts = 0

    def add(self, data: memoryview, where: str) -> None:
        """Count one call's JSON. Raises InvalidRequest when all calls are too much."""
        self._num_bytes += len(data)
        self._num_parts += sum(map(bytes(data).count, (b"[", b"{", b",")))
        if self._num_bytes > MAX_FURTHER_BYTES or self._num_parts > MAX_CALL_PARTS:
            raise InvalidRequest(
                f"{where}: all tool calls in a conversation may have {MAX_FURTHER_BYTES} bytes and "
                f"{MAX_CALL_PARTS} brackets and commas together",
                param=where,
            )


def _tool_calls(calls: Sequence[ToolCallBody], where: str, size: _CallSize) -> list[dict[str, Any]]:
    """Return the calls as the client library takes them. Raises InvalidRequest."""
    made = []
    for index, call in enumerate(calls):
        path = f"{where}[{index}].function.arguments"
        raw = memoryview(call.function.arguments)
        size.add(raw, path)
        if len(raw) and raw[0] not in _BEGINNINGS:
            raise InvalidRequest(f"{path} must be a text or an object", param=path)
        try:
            arguments: Any = msgspec.json.decode(raw) if len(raw) else None
        except RecursionError:
            raise InvalidRequest(f"{path}: lists and objects are nested too deeply", param=path) from None
        function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
        made.append(
            {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}
        )
    return made


# -- on the wire ---------------------------------------------------------------------------------------------


def wire_messages(messages: Conversation) -> tuple[ChatMessage, ...]:
    """Return a conversation as the wire carries it. Raises InvalidRequest."""
    if len(messages) > MAX_TURNS:
        raise InvalidRequest(f"messages: at most {MAX_TURNS}, got {len(messages)}", param="messages")
    made = tuple(_chat_message(message) for message in messages)
    if sum(len(message.further) for message in made) > MAX_FURTHER_BYTES:
        raise InvalidRequest(
            f"messages: at most {MAX_FURTHER_BYTES} bytes of tool calls and reasoning together",
            param="messages",
        )
    return made


def _chat_message(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages: each must be a mapping with role and content", param="messages")
    unknown = sorted(set(message) - MESSAGE_KEYS)
    if unknown:
        raise InvalidRequest(f"messages: unknown key {unknown[0]!r}", param="messages")
    try:
        return msgspec.convert(dict(message), _MessageFields).to_wire()
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from None


class _MessageFields(Struct, frozen=True):
    """Fields of a ChatMessage by name; on the wire it is an array."""

    role: ChatRole
    content: Text | list[TextPart]
    name: Label = ""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def to_wire(self) -> ChatMessage:
        values = {name: getattr(self, name) for name in sorted(FURTHER_FIELDS)}
        given = {name: value for name, value in values.items() if value is not None}
        further = msgspec.msgpack.encode(given) if given else b""
        content = self.content
        if not isinstance(content, str):
            content = PART_SEPARATOR.join(part.text for part in content)
            msgspec.convert(content, Text)
        return ChatMessage(self.role, content, self.name, further)


def pack_tools(tools: Any) -> bytes:
    """Return definitions of tools as JSON; empty for none. Raises InvalidRequest."""
    if tools is None:
        return b""
    if isinstance(tools, Sequence) and not isinstance(tools, str | bytes):
        if not all(isinstance(each, Mapping) for each in tools):
            raise InvalidRequest("tools: each must be a mapping with type and function", param="tools")
        try:
            tools = msgspec.json.encode([dict(each) for each in tools]) if tools else b""
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"tools cannot be written as JSON: {error}", param="tools") from None
    if not isinstance(tools, bytes) or len(tools) > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools must be a list of definitions, or its JSON, of at most {MAX_TOOLS_BYTES} bytes",
            param="tools",
        )
    return tools


def pack_template_kwargs(values: Any) -> bytes:
    """Return variables of a chat template as a msgpack map; empty for none. Raises InvalidRequest for values
    that cannot be sent.
    """
    name = "chat_template_kwargs"
    if not values and (values is None or isinstance(values, Mapping)):
        return b""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise InvalidRequest(f"{name} must be a mapping of names to JSON-like values", param=name)
    try:
        packed = msgspec.msgpack.encode(dict(values))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from None
    if len(packed) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(f"{name}: at most {MAX_TEMPLATE_KWARGS_BYTES} bytes", param=name)
    check_template_kwargs(values)
    return packed
