"""/v1/completions: text or token ids in, text out; a list of prompts gives one choice for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api_server.body import read_body
from api_server.generation import Generation, Job, usage_body
from api_server.logprobs import TokenText, completion_logprobs
from api_server.openai_types import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    UsageBody,
    refuse_unsupported,
)
from api_server.sampling import include_usage, request_options, sampling_params
from api_server.server_state import ServerState, new_id
from client.request_builder import Prompt
from client.result import Completion, Delta, TokenLogprob
from runtime.errors import InvalidRequest
from runtime.messages import Usage
from runtime.sampling_params import SamplingParams

MAX_PROMPTS = 64


async def create_completion(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, CompletionBody)
    refuse_unsupported(body)
    server.check_model(body.model)
    server.check_serving()
    # OpenAI's default is SamplingParams' own; false, which some libraries send for "none", is not zero.
    max_tokens = SamplingParams().max_tokens if body.max_tokens is None else body.max_tokens
    logprobs = None if body.logprobs is False else body.logprobs
    streams_usage = include_usage(body)
    options = request_options(
        request_id=request.state.request_id, priority=body.priority, cache_salt=body.cache_salt
    )
    if body.add_special_tokens is not None:
        options["add_special_tokens"] = body.add_special_tokens
    job = Job(
        prompts_of(body.prompt),
        sampling_params(body, server.defaults, max_tokens=max_tokens, logprobs=logprobs),
        options,
        stream=bool(body.stream),
    )
    token_text = None if logprobs is None else await server.token_texts.get()
    answer = CompletionFormat(
        server.config.served_model_name, token_text, len(job.prompts), streams_usage=streams_usage
    )
    return Generation(server, job, answer)


def prompts_of(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of the four forms that OpenAI has. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise InvalidRequest(
            "prompt must be all text, all token ids or all lists of token ids", param="prompt"
        )
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    return prompt


class CompletionFormat:
    def __init__(
        self, model: str, token_text: TokenText | None, num_choices: int, *, streams_usage: bool
    ) -> None:
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._model = model
        self._token_text = token_text
        self._offsets = [0] * num_choices
        self._streams_usage = streams_usage

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return []
        return [self._body([self._choice(index, delta)], None if self._streams_usage else UNSET)]

    def last_events(self, usages: Sequence[Usage]) -> list[msgspec.Struct]:
        return [self._body([], usage_body(usages))] if self._streams_usage else []

    def response(self, completions: Sequence[Completion]) -> CompletionResponse:
        choices = [self._choice(index, each) for index, each in enumerate(completions)]
        return self._body(choices, usage_body([each.usage for each in completions]))

    def _choice(self, index: int, part: Delta | Completion) -> CompletionChoice:
        logprobs = self._logprobs(index, part.logprobs)
        return CompletionChoice(index, part.text, logprobs, part.finish_reason, part.matched_stop)

    def _body(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(self._id, "text_completion", self._created, self._model, choices, usage)

    def _logprobs(self, index: int, logprobs: list[TokenLogprob]) -> CompletionLogprobs | None:
        if self._token_text is None:
            return None
        columns = completion_logprobs(logprobs, self._token_text, self._offsets[index])
        self._offsets[index] += sum(map(len, columns.tokens))
        return columns
