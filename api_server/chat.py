"""/v1/chat/completions: a conversation in, the assistant's next turn out. Text only."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api_server.body import read_body
from api_server.generation import Generation, Job, usage_body
from api_server.logprobs import TokenText, chat_logprobs
from api_server.openai_types import (
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    ChatResponse,
    MessageBody,
    UsageBody,
    refuse_unsupported,
)
from api_server.sampling import include_usage, request_options, sampling_params
from api_server.server_state import ServerState, new_id
from client.result import Completion, Delta, TokenLogprob
from runtime.errors import InvalidRequest
from runtime.messages import Usage

# Chat templates know "system"; "developer" is what OpenAI calls the same thing for its newer models.
ROLES = {"developer": "system"}


async def create_chat_completion(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, ChatBody)
    refuse_unsupported(body)
    server.check_model(body.model)
    server.check_serving()
    logprobs = _num_logprobs(body)
    streams_usage = include_usage(body)
    options = request_options(
        request_id=request.state.request_id, priority=body.priority, cache_salt=body.cache_salt
    )
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    job = Job(
        [conversation(body.messages)],
        sampling_params(
            body,
            server.defaults,
            max_tokens=_max_tokens(body, server.config.context_length),
            logprobs=logprobs,
        ),
        options,
        stream=bool(body.stream),
    )
    token_text = None if logprobs is None else await server.token_texts.get()
    answer = ChatFormat(server.config.served_model_name, token_text, streams_usage=streams_usage)
    return Generation(server, job, answer)


def conversation(messages: list[MessageBody]) -> list[dict[str, str]]:
    """The messages as the chat template takes them; text parts become lines. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    turns = []
    for index, message in enumerate(messages):
        refuse_unsupported(message, f"messages[{index}].")
        content = message.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        turn = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def _max_tokens(body: ChatBody, context_length: int) -> int:
    """Without a limit, what the context leaves: the scheduler cuts this to it."""
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    return next((limit for limit in both if limit is not None), context_length)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class ChatFormat:
    def __init__(self, model: str, token_text: TokenText | None, *, streams_usage: bool) -> None:
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._token_text = token_text
        self._has_begun = False
        self._streams_usage = streams_usage

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        """As OpenAI: the role comes first and alone, and so does the reason of the end, last."""
        choices = []
        if not self._has_begun:
            self._has_begun = True
            choices.append(ChatChunkChoice(index, ChatDelta("assistant", "")))
        if delta.text or delta.logprobs:
            choices.append(
                ChatChunkChoice(index, ChatDelta(content=delta.text), self._logprobs(delta.logprobs))
            )
        if delta.finish_reason is not None:
            choices.append(ChatChunkChoice(index, ChatDelta(), None, delta.finish_reason, delta.matched_stop))
        return [self._event([choice], None if self._streams_usage else UNSET) for choice in choices]

    def last_events(self, usages: Sequence[Usage]) -> list[msgspec.Struct]:
        return [self._event([], usage_body(usages))] if self._streams_usage else []

    def response(self, completions: Sequence[Completion]) -> ChatResponse:
        choices = [
            ChatChoice(
                index,
                ChatMessageBody("assistant", each.text),
                self._logprobs(each.logprobs),
                each.finish_reason,
                each.matched_stop,
            )
            for index, each in enumerate(completions)
        ]
        usage = usage_body([each.usage for each in completions])
        return ChatResponse(self._id, "chat.completion", self._created, self._model, choices, usage)

    def _event(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage)

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return None if self._token_text is None else chat_logprobs(logprobs, self._token_text)
