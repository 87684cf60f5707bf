"""Prompts of a body as the client library takes them, and what an answer has to know of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from carousel.client.core.request_builder import (
    PART_SEPARATOR,
    Prompt,
    RequestOptions,
    Submission,
    pack_template_kwargs,
)
from carousel.server.http.errors import respelled
from carousel.server.openai.types import MAX_PROMPTS, MessageBody, ToolCallBody
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.messages import MAX_FURTHER_BYTES
from runtime.wire.sampling_params import SamplingParams

# Chat templates know "system"; "developer" is what OpenAI calls the same thing for its newer models.
ROLES = {"developer": "system"}
MAX_CALL_PARTS = 1 << 16
"""Most parts of all tool calls in a conversation, by the brackets and commas in their JSON: 6 ms of work."""
_BEGINNINGS = b'"{n'
"""First bytes of a text, an object and null in JSON."""


def submissions_for(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    options: RequestOptions,
    labels: Sequence[str],
    *,
    stream: bool | None = False,
) -> list[Submission]:
    """Return a submission for each prompt of a request."""
    return [
        Submission(prompt, sampling, bool(stream), RequestOptions({**options, "label": label}))
        for prompt, label in zip(prompts, labels, strict=True)
    ]


def prompts_of(prompt: str | list[Any], name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> list[Prompt]:
    """The prompts of the four forms that OpenAI has, in the field `name`. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"{name} is empty", param=name)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise InvalidRequest(f"{name} must be all text, all token ids or all lists of token ids", param=name)
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"{name}: at most {max_prompts} of them, got {len(prompt)}", param=name)
    return prompt


def conversation(messages: Sequence[MessageBody]) -> list[dict[str, Any]]:
    """The messages as the chat template takes them; text parts become lines. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    turns = []
    size = _CallSize()
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"messages[{index}].content is missing; only a message of the assistant may be without",
                param=f"messages[{index}].content",
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
            turn["tool_calls"] = _tool_calls(message.tool_calls, f"messages[{index}].tool_calls", size)
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
        turns.append(turn)
    return turns


class _CallSize:
    """Bounds what is decoded of all calls of tools in a conversation."""

    def __init__(self) -> None:
        self._num_bytes = self._num_parts = 0

    def add(self, data: memoryview, where: str) -> None:
        """Raises InvalidRequest."""
        self._num_bytes += len(data)
        self._num_parts += sum(map(bytes(data).count, (b"[", b"{", b",")))
        if self._num_bytes > MAX_FURTHER_BYTES or self._num_parts > MAX_CALL_PARTS:
            raise InvalidRequest(
                f"{where}: all calls of tools in a conversation may have {MAX_FURTHER_BYTES} bytes and "
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


def template_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> RequestOptions:
    """A message that is continued is followed by no new turn. Raises InvalidRequest for both, and for
    variables that are too large.
    """
    options = RequestOptions()
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new "
                "one: set only one of them",
                param="continue_final_message",
            )
        options["continue_final_message"] = True
        options["add_generation_prompt"] = False
    if chat_template_kwargs is not None:
        # Where the prompt is encoded here, nothing packs them: the same are refused.
        pack_template_kwargs(chat_template_kwargs)
        options["chat_template_kwargs"] = chat_template_kwargs
    return options


class EncodedPrompts(NamedTuple):
    """Ids of each prompt of a request."""

    ids: list[list[int]]
    are_cut: list[bool]
    """Truncation has left out the beginning."""


async def encode_prompts(
    server: ServerState, submissions: Sequence[Submission], param_names: Mapping[str, str], tenant: str
) -> EncodedPrompts:
    """Return the ids of a tenant's prompts, cut where the request says so.

    Raises: RequestError by the body's names, also for a prompt without tokens; Overloaded.
    """
    sampling = submissions[0].sampling
    is_cut = sampling.truncate_prompt_tokens is not None
    field = param_names.get("prompt", "prompt")
    sampling.check_truncation(server.config.context_length)
    encoded = EncodedPrompts([], [])
    for each in submissions:
        try:
            ids = await server.tokenizer.encode(each.prompt, each.options, tenant, is_cut=is_cut)
        except InvalidRequest as error:
            raise respelled(error, param_names) from None
        if not ids:
            raise InvalidRequest(f"{field} is empty", param=field)
        num_kept = sampling.num_kept(len(ids), server.longest_sequence, server.config.max_prompt_len)
        encoded.ids.append(ids[len(ids) - num_kept :])
        encoded.are_cut.append(num_kept < len(ids))
    return encoded
