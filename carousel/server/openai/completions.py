"""Route /v1/completions: takes text or token ids and returns text. A list of prompts gives `n` choices for
each.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.server.answer.generation import Generation
from carousel.server.guides import asked_guide
from carousel.server.openai.completion_format import CompletionFormat, CompletionView
from carousel.server.openai.logprobs import TokenSpeller
from carousel.server.openai.types import CompletionBody
from carousel.server.request.body import read_body
from carousel.server.request.labels import request_labels
from carousel.server.request.prompts import (
    check_prompt_logprobs,
    check_size,
    encode_prompts,
    prompts_of,
    submissions_for,
    with_ids,
)
from carousel.server.request.sampling import (
    PARAM_NAMES,
    check_hidden_states,
    check_min_tokens,
    check_stream_options,
    counts_continuously,
    includes_usage,
    request_options,
    sampling_params,
)
from carousel.server.server_state import ServedModel, ServerState
from carousel.server.tenancy.auth import tenant_of
from carousel.structured_outputs import StructuredOutputsParams
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, CompletionBody)
    model = server.served_model(body.model)
    server.check_serving()
    check_stream_options(body)
    check_hidden_states(body, server.config.additional_outputs)
    max_tokens = _max_tokens(body, server.config.default_max_tokens or DEFAULT_MAX_TOKENS)
    sampling = _sampling(body, server, max_tokens)
    guide = asked_guide(body)
    options = _options(body, guide.params, model)
    prompts = prompts_of(body.prompt)
    labels = request_labels(request.state.request_id, len(prompts))
    asked = submissions_for(prompts, sampling, options, labels, stream=body.stream)
    check_size(asked, server.config.context_length)
    view = CompletionView(
        model=model.name,
        num_choices=sampling.n,
        num_logprobs=_num_logprobs(body),
        num_prompt_logprobs=body.prompt_logprobs,
        skips_special=sampling.skip_special_tokens,
        shows_output=max_tokens > 0,
        shows_ids=_shows_ids(body, server),
        shows_hidden_states=bool(body.return_hidden_states),
        streams_usage=includes_usage(body),
        counts_continuously=counts_continuously(body),
    )
    asked = await _prepare_tokens(server, body, asked, view, tenant_of(request.scope).name)
    return Generation(server, asked, CompletionFormat(view, len(asked)), {**PARAM_NAMES, **guide.names})


async def _prepare_tokens(
    server: ServerState,
    body: CompletionBody,
    asked: list[Submission],
    view: CompletionView,
    tenant: str,
) -> list[Submission]:
    """Fill in what the answer shows of the prompt's tokens, and spell single tokens."""
    tokenizer = server.tokenizer
    shows_logprobs = view.num_logprobs is not None or body.prompt_logprobs is not None
    if shows_logprobs:
        vocabulary = await tokenizer.vocabulary()
        view.speller = TokenSpeller(vocabulary, as_ids=bool(body.return_tokens_as_token_ids))
    # A stream reports the length of its prompt, but the request's other prompts may not have begun yet.
    counts_several = view.counts_continuously and len(asked) > 1
    shows_prompt_tokens = view.shows_ids or counts_several or body.prompt_logprobs is not None
    prompts: list[Any] = [each.prompt for each in asked]
    may_be_cut = body.truncate_prompt_tokens is not None
    if shows_prompt_tokens or (body.echo and (view.num_logprobs is not None or may_be_cut)):
        encoded = await encode_prompts(server, asked, PARAM_NAMES, tenant)
        view.prompt_ids = encoded.ids
        shown = zip(prompts, *encoded, strict=True)
        prompts = [ids if is_cut else prompt for prompt, ids, is_cut in shown]
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        num_tokens = sum(map(len, view.prompt_ids)) * view.num_choices
        check_prompt_logprobs(asked[0].sampling, num_tokens, name)
    if body.echo:
        tokenizer.require("echo")
        # Ids are echoed as given, including special ones unless skip_special_tokens is set.
        skips = bool(body.skip_special_tokens)
        view.prompt_texts = [
            prompt
            if isinstance(prompt, str)
            else await tokenizer.decode(prompt, skip_special_tokens=skips, tenant=tenant)
            for prompt in prompts
        ]
    return with_ids(asked, view.prompt_ids) if view.prompt_ids else asked


def _max_tokens(body: CompletionBody, default: int) -> int:
    """Return the maximum number of output tokens. Raises InvalidRequest."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, except with echo: true", param="max_tokens")
    check_min_tokens(body.min_tokens, "max_tokens", body.max_tokens, default)
    return default if body.max_tokens is None else body.max_tokens


def _num_logprobs(body: CompletionBody) -> int | None:
    """Return the number of logprobs; None for none. False, which some libraries send for "none", is not zero.
    Raises InvalidRequest.
    """
    if body.logprobs is True:
        raise InvalidRequest("logprobs must be a number of tokens here, or null", param="logprobs")
    return None if body.logprobs is False else body.logprobs


def _sampling(body: CompletionBody, server: ServerState, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters. Raises InvalidRequest."""
    logprobs = _num_logprobs(body)
    wanted = (body.prompt_logprobs, logprobs if body.echo else None)
    return sampling_params(
        body,
        server.defaults,
        # Logprobs of the prompt's last position come with the first output token.
        max_tokens=max(1, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=max((each for each in wanted if each is not None), default=None),
    )


def _shows_ids(body: CompletionBody, server: ServerState) -> bool:
    """Return True if the answer shows ids. Without a tokenizer there is nothing else to show."""
    return not server.tokenizer.is_there if body.return_token_ids is None else body.return_token_ids


def _options(
    body: CompletionBody, guide: StructuredOutputsParams | None, model: ServedModel
) -> RequestOptions:
    options = request_options(
        priority=body.priority,
        cache_salt=body.cache_salt,
        time_limit=body.time_limit,
        retention=body.kv_cache_retention_config,
        guide=guide,
        adapter=model.adapter,
        processors=body.logits_processors,
    )
    if body.add_special_tokens is not None:
        options["add_special_tokens"] = body.add_special_tokens
    return options
