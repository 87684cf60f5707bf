"""/generate: SGLang's own endpoint. Text or token ids in; text, token ids and an account of them out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api_server.body import read_body
from api_server.completions import prompts_of
from api_server.errors import respelled
from api_server.generate_types import (
    NEUTRAL,
    FinishInfo,
    GenerateBody,
    GenerateResponse,
    GenerateSampling,
    Logprob,
    MetaInfo,
)
from api_server.generation import Generation, Job
from api_server.logprobs import TokenText
from api_server.openai_types import refuse_unsupported
from api_server.sampling import checked_sampling, request_options
from api_server.server_state import ServerState
from client.request_builder import Prompt
from client.result import Completion, Delta
from runtime.errors import InvalidRequest, RequestError
from runtime.messages import Usage
from runtime.model_config import SamplingDefaults
from runtime.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Fields of SamplingParams that go by another name here."""
PARAM_NAMES = {
    **{name: f"sampling_params.{SPELLINGS.get(name, name)}" for name in SamplingParams.__struct_fields__},
    "logprobs": "top_logprobs_num",
    "label": "rid",
}


async def generate(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, GenerateBody)
    sampling_body = body.sampling_params or GenerateSampling()
    refuse_unsupported(body, neutral_values=NEUTRAL)
    refuse_unsupported(sampling_body, "sampling_params.", NEUTRAL)
    server.check_serving()
    field, prompts = _prompts(body)
    names = {**PARAM_NAMES, "prompt": field}
    request_id = request.state.request_id if body.rid is None else body.rid
    try:
        sampling = _sampling(sampling_body, server.defaults, _num_logprobs(body))
    except RequestError as error:
        raise respelled(error, names) from None
    options = request_options(request_id=request_id, priority=body.priority, cache_salt=body.cache_salt)
    job = Job(prompts, sampling, options, bool(body.stream), names)
    answer = GenerateFormat(
        request_id,
        len(prompts),
        is_list=prompts[0] is not getattr(body, field),
        shows_logprobs=sampling.logprobs is not None,
        num_top=sampling.logprobs or 0,
        token_text=await server.token_texts.get() if body.return_text_in_logprobs else None,
    )
    return Generation(server, job, answer)


def _prompts(body: GenerateBody) -> tuple[str, list[Prompt]]:
    """The field they are in, and the prompts. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text or input_ids is needed, one of the two", param="text")
    field = "input_ids" if body.text is None else "text"
    prompt: Any = getattr(body, field)
    try:
        return field, prompts_of(prompt)
    except InvalidRequest as error:
        raise respelled(error, {"prompt": field}) from None


def _num_logprobs(body: GenerateBody) -> int | None:
    if body.return_logprob:
        return body.top_logprobs_num or 0
    for name in ("top_logprobs_num", "return_text_in_logprobs"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs return_logprob: true", param=name)
    return None


def _sampling(body: GenerateSampling, defaults: SamplingDefaults, logprobs: int | None) -> SamplingParams:
    """Raises InvalidRequest by the names of SamplingParams."""
    given = {
        "min_tokens": body.min_new_tokens,
        "seed": body.sampling_seed,
        "include_stop_str_in_output": body.no_stop_trim,
    }
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
    ):
        given[name] = getattr(body, name)
    return checked_sampling(
        defaults,
        given,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if body.max_new_tokens is None else body.max_new_tokens,
        logprobs=logprobs,
        stop=body.stop,
        logit_bias=body.logit_bias,
    )


class _Sequence:
    """All that has come of one sequence so far."""

    __slots__ = ("ids", "logprobs", "text", "top")

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.top: list[list[Logprob]] = []


class GenerateFormat:
    def __init__(
        self,
        request_id: str,
        num_prompts: int,
        *,
        is_list: bool,
        shows_logprobs: bool,
        num_top: int,
        token_text: TokenText | None,
    ) -> None:
        self._began_s = time.perf_counter()
        self._id = request_id
        self._is_list = is_list
        self._shows_logprobs = shows_logprobs
        self._num_top = num_top
        self._token_text = token_text
        self._sequences = [_Sequence() for _ in range(num_prompts)]

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        self._take(index, delta)
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return []
        return [self._body(index, delta, index if self._is_list else UNSET)]

    def last_events(self, usages: Sequence[Usage]) -> list[msgspec.Struct]:
        """None: every sequence has told its own."""
        return []

    def response(self, completions: Sequence[Completion]) -> msgspec.Struct | list[msgspec.Struct]:
        bodies: list[msgspec.Struct] = []
        for index, completion in enumerate(completions):
            self._take(index, completion)
            bodies.append(self._body(index, completion, UNSET))
        return bodies if self._is_list else bodies[0]

    def _take(self, index: int, part: Delta | Completion) -> None:
        sequence = self._sequences[index]
        sequence.text += part.text
        sequence.ids += part.token_ids
        for entry in part.logprobs:
            sequence.logprobs.append(self._logprob(entry.logprob, entry.token_id))
            sequence.top.append([self._logprob(value, token_id) for token_id, value in entry.top])

    def _body(self, index: int, part: Delta | Completion, shown_index: int | UnsetType) -> GenerateResponse:
        sequence = self._sequences[index]
        meta = MetaInfo(self._id, _finish_info(part, len(sequence.ids)), len(sequence.ids))
        if part.usage is not None:
            meta.prompt_tokens = part.usage.prompt_tokens
            meta.completion_tokens = part.usage.completion_tokens
            meta.cached_tokens = part.usage.cached_tokens
            meta.e2e_latency = time.perf_counter() - self._began_s
        if self._shows_logprobs:
            meta.input_token_logprobs = []
            meta.output_token_logprobs = sequence.logprobs
            if self._num_top:
                meta.output_top_logprobs = sequence.top
        return GenerateResponse(sequence.text, sequence.ids, meta, shown_index)

    def _logprob(self, value: float, token_id: int) -> Logprob:
        return Logprob(value, token_id, None if self._token_text is None else self._token_text(token_id))


def _finish_info(part: Delta | Completion, num_tokens: int) -> FinishInfo | None:
    if part.finish_reason == "stop":
        return FinishInfo("stop", matched=part.matched_stop)
    return FinishInfo("length", length=num_tokens) if part.finish_reason == "length" else None
