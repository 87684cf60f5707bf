"""Route /v1/chat/completions: takes a conversation and returns `n` versions of the assistant's next turn.

`prepare_chat` serves every endpoint of conversations: each translates its own body to a ChatBody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.conversation import conversation
from carousel.server.answer.generation import Generation
from carousel.server.guides import asked_guide
from carousel.server.openai.chat_format import ChatCompletionFormat, ChatView
from carousel.server.openai.chat_plan import add_effort, plan_answer
from carousel.server.openai.logprobs import TokenSpeller
from carousel.server.openai.types import ChatBody
from carousel.server.request.body import ignore_hints, read_body
from carousel.server.request.labels import request_labels
from carousel.server.request.prompts import (
    check_prompt_logprobs,
    check_size,
    encode_prompts,
    submissions_for,
    template_options,
    with_ids,
)
from carousel.server.request.sampling import (
    PARAM_NAMES,
    check_hidden_states,
    check_stream_options,
    counts_continuously,
    includes_usage,
    request_options,
    sampling_params,
)
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest

NAMES = {**PARAM_NAMES, "prompt": "messages", "structural_tag": "tools"}


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """Conversation that is ready to be answered, in the form of any endpoint."""

    server: ServerState
    asked: list[Submission]
    view: ChatView
    names: Mapping[str, str]
    """Names of parameters in a ChatBody, for errors."""
    ignored: Mapping[str, str]
    """Hints of a ChatBody that have no effect here, with the reasons."""


async def create_chat_completion(request: Request) -> Response:
    chat = await prepare_chat(request, await read_body(request, ChatBody))
    ignore_hints(request, chat.ignored)
    return Generation(chat.server, chat.asked, ChatCompletionFormat(chat.view), chat.names)


async def prepare_chat(request: Request, body: ChatBody) -> PreparedChat:
    """Return what a body asks for. Raises RequestError by the names of a ChatBody."""
    server: ServerState = request.app.state.server
    model = server.served_model(body.model)
    server.check_serving()
    check_stream_options(body)
    check_hidden_states(body, server.config.additional_outputs)
    sampling = sampling_params(
        body,
        server.defaults,
        max_tokens=_max_tokens(body, server),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    guide = asked_guide(body)
    options = request_options(
        priority=body.priority,
        cache_salt=body.cache_salt,
        time_limit=body.time_limit,
        retention=body.kv_cache_retention_config,
        guide=guide.params,
        adapter=model.adapter,
        processors=body.logits_processors,
    )
    options.update(
        template_options(
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            server.config.template_defaults,
        )
    )
    ignored = await _take_hints(server, body, options)
    tenant = tenant_of(request.scope).name
    answer = await plan_answer(server, body, sampling, options, guide, tenant)
    sampling = answer.sampling
    labels = request_labels(request.state.request_id, 1)
    asked = submissions_for([conversation(body.messages)], sampling, options, labels, stream=body.stream)
    check_size(asked, server.config.context_length)
    view = ChatView(
        model=model.name,
        num_choices=sampling.n,
        shows_logprobs=sampling.logprobs is not None,
        num_prompt_logprobs=body.prompt_logprobs,
        shows_ids=bool(body.return_token_ids),
        shows_hidden_states=bool(body.return_hidden_states),
        streams_usage=includes_usage(body),
        counts_continuously=counts_continuously(body),
        plan=answer.plan,
        vocabulary=answer.vocabulary,
    )
    if view.shows_logprobs or view.num_prompt_logprobs is not None:
        vocabulary = await server.tokenizer.vocabulary()
        view.speller = TokenSpeller(vocabulary, as_ids=bool(body.return_tokens_as_token_ids))
    if view.shows_ids or view.num_prompt_logprobs is not None:
        ids = (await encode_prompts(server, asked, NAMES, tenant)).ids
        (view.prompt_ids,) = ids
        check_prompt_logprobs(sampling, len(view.prompt_ids))
        asked = with_ids(asked, ids)
    return PreparedChat(server, asked, view, {**NAMES, **guide.names}, ignored)


async def _take_hints(server: ServerState, body: ChatBody, options: RequestOptions) -> dict[str, str]:
    """Add to the options what the body hints at. Returns the hints without an effect here, with reasons."""
    ignored: dict[str, str] = {}
    if body.prediction is not None:
        if server.config.speculative_algorithm == "none":
            ignored["prediction"] = "the server was started without --speculative-algorithm NGRAM"
        else:
            options["prediction"] = body.prediction.text
    effort, own = body.reasoning_effort, body.chat_template_kwargs or {}
    if effort is not None and not await add_effort(server, effort, own, options):
        ignored["reasoning_effort"] = "the model's chat template has no variable for it"
    return ignored


def _max_tokens(body: ChatBody, server: ServerState) -> int:
    """Return the maximum number of output tokens: the body's limit, else --default-max-tokens, else the
    recommendation in the model's files, else the rest of the context, to which the scheduler cuts it. Raises
    InvalidRequest.
    """
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    given = next((limit for limit in both if limit is not None), None)
    if given is not None:
        return given
    limit = server.config.context_length
    default = server.config.default_max_tokens or server.defaults.max_tokens or limit
    return max(min(default, limit), body.min_tokens or 0)  # min_tokens takes precedence


def _num_logprobs(body: ChatBody) -> int | None:
    """Return the number of logprobs for each token; None for no logprobs. Raises InvalidRequest."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
