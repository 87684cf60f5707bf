"""Route /generate: SGLang's own endpoint. It takes text or token ids, and returns text, token ids and details
about them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.request.submission import Prompt, RequestOptions, Submission
from carousel.client.core.result import respelled
from carousel.server.answer.generation import Generation
from carousel.server.guides import asked_guide_of_sampling
from carousel.server.request.body import read_body
from carousel.server.request.labels import request_labels
from carousel.server.request.prompts import (
    check_logits,
    check_prompt_logprobs,
    check_size,
    encode_prompts,
    prompts_of,
    submissions_for,
    with_ids,
)
from carousel.server.request.sampling import check_min_tokens, given_sampling, request_options
from carousel.server.server_state import ServerState
from carousel.server.sglang.generate_format import GenerateFormat, GenerateView, frames_with_texts
from carousel.server.sglang.generate_types import PARAM_NAMES, SPELLINGS, GenerateBody, GenerateSampling
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest, RequestError
from runtime.sampling.additional_outputs import HIDDEN_STATES, check_asked
from runtime.wire.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128


async def generate(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, GenerateBody)
    sampling_body = body.sampling_params or GenerateSampling()
    server.check_serving()
    field, prompts = _prompts(body)
    is_list = prompts[0] is not getattr(body, field)
    guide = asked_guide_of_sampling(sampling_body)
    names = {**PARAM_NAMES, "prompt": field, **guide.names}
    if body.return_hidden_states:
        names["additional_outputs"] = "return_hidden_states"
    options = request_options(
        priority=body.priority,
        cache_salt=body.cache_salt,
        time_limit=body.time_limit,
        retention=body.kv_cache_retention_config,
        guide=guide.params,
        processors=body.logits_processors,
    )
    try:
        sampling = _sampling(body, sampling_body, server)
        if body.rid is None:
            labels = request_labels(request.state.request_id, len(prompts))
        else:
            labels = _labels(body.rid, len(prompts), is_list=is_list)
        asked = submissions_for(prompts, sampling, options, labels, stream=body.stream)
        asked = _with_adapters(asked, server, body.lora_path)
        check_size(asked, server.config.context_length)
        _check_logits(asked, server, num_prompt_tokens=0)
        view = GenerateView(
            ids=labels,
            is_list=is_list or sampling.n > 1,
            num_choices=sampling.n,
            shows_logprobs=sampling.logprobs is not None,
            num_top=sampling.logprobs or 0,
            shows_hidden_states=bool(body.return_hidden_states),
            room=server.json_room,
        )
        if body.return_text_in_logprobs:
            server.tokenizer.require("return_text_in_logprobs")
            view.frames = frames_with_texts(await server.tokenizer.vocabulary())
        gathers_context = bool(sampling.additional_outputs) and sampling.gather_context
        if sampling.prompt_logprobs is not None or sampling.return_context_logits or gathers_context:
            ids = (await encode_prompts(server, asked, names, tenant_of(request.scope).name)).ids
            _check_logits(asked, server, num_prompt_tokens=sum(map(len, ids)))
            asked = with_ids(asked, ids)
        if sampling.prompt_logprobs is not None:
            view.input_start = body.logprob_start_len or 0
            view.input_ids = ids
            num_shown = sum(max(0, len(ids) - view.input_start) for ids in view.input_ids)
            check_prompt_logprobs(sampling, num_shown * sampling.n)
    except RequestError as error:
        raise respelled(error, names) from None
    return Generation(
        server, asked, GenerateFormat(view, len(prompts)), names, labels_are_chosen=body.rid is not None
    )


def _with_adapters(
    asked: list[Submission], server: ServerState, names: str | list[str | None] | None
) -> list[Submission]:
    """Return the requests, each with its adapter by name. Raises InvalidRequest."""
    if isinstance(names, list) and len(names) != len(asked):
        raise InvalidRequest(
            f"lora_path: {len(names)} for {len(asked)} prompts; give one, or one for each", param="lora_path"
        )
    each = names if isinstance(names, list) else [names] * len(asked)
    adapters = [server.adapter(name) if name else None for name in each]
    return [
        msgspec.structs.replace(
            submission, options=RequestOptions({**submission.options, "lora_request": adapter})
        )
        for submission, adapter in zip(asked, adapters, strict=True)
    ]


def _check_logits(asked: list[Submission], server: ServerState, num_prompt_tokens: int) -> None:
    """Check the number of raw logits in the answer. Raises InvalidRequest by the names of SamplingParams."""
    for name, is_allowed in (
        ("return_context_logits", server.config.gather_context_logits),
        ("return_generation_logits", server.config.gather_generation_logits),
    ):
        if not getattr(asked[0].sampling, name):
            continue
        if asked[0].stream:
            raise InvalidRequest(f"{name} is for requests without stream: true", param=name)
        if not is_allowed:
            flag = name.removeprefix("return_").replace("_", "-")
            raise InvalidRequest(f"{name}: the server was started without --gather-{flag}", param=name)
    if outputs := asked[0].sampling.additional_outputs:
        check_asked(outputs, server.config.additional_outputs)
        if asked[0].stream:
            raise InvalidRequest(
                "additional_outputs is for requests without stream: true", param="additional_outputs"
            )
    check_logits(
        asked, server.config.context_length, server.vocab_size, server.output_width, num_prompt_tokens
    )


def _prompts(body: GenerateBody) -> tuple[str, list[Prompt]]:
    """Return the field of the prompts, and the prompts. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text or input_ids is needed, one of the two", param="text")
    field = "input_ids" if body.text is None else "text"
    prompt: Any = getattr(body, field)
    try:
        return field, prompts_of(prompt)
    except InvalidRequest as error:
        raise respelled(error, {"prompt": field}) from None


def _labels(rid: str | list[str], num_prompts: int, *, is_list: bool) -> list[str]:
    """Return a label for each prompt. Raises InvalidRequest."""
    if isinstance(rid, str):
        return request_labels(rid, num_prompts) if is_list else [rid]
    if not is_list:
        raise InvalidRequest("rid: several are for a list of prompts; give one", param="rid")
    if len(rid) != num_prompts:
        raise InvalidRequest(
            f"rid: {len(rid)} for {num_prompts} prompts; give one, or one for each", param="rid"
        )
    twice = [name for name, number in Counter(rid).items() if number > 1]
    if twice:
        message = f"rid: {twice[0]!r:.100} is there twice; each prompt needs its own"
        raise InvalidRequest(message, code="duplicate_label", param="rid")
    return rid


def _num_logprobs(body: GenerateBody) -> int | None:
    """Return the number of logprobs; None for none. Raises InvalidRequest."""
    if body.return_logprob:
        return body.top_logprobs_num or 0
    for name in ("top_logprobs_num", "return_text_in_logprobs"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs return_logprob: true", param=name)
    if body.logprob_start_len is not None and body.logprob_start_len >= 0:
        raise InvalidRequest("logprob_start_len needs return_logprob: true", param="logprob_start_len")
    return None


def _sampling(body: GenerateBody, sampling: GenerateSampling, server: ServerState) -> SamplingParams:
    """Return the sampling parameters. Raises InvalidRequest by the names of SamplingParams."""
    logprobs = _num_logprobs(body)
    given = {
        name: getattr(sampling, SPELLINGS.get(name, name), None) for name in SamplingParams.__struct_fields__
    }
    if sampling.max_new_tokens is None:
        default = server.config.default_max_tokens or DEFAULT_MAX_NEW_TOKENS
        check_min_tokens(sampling.min_new_tokens, "max_new_tokens", None, default)
        given["max_tokens"] = default
    given["logprobs"] = logprobs
    if body.logprob_start_len is not None and body.logprob_start_len >= 0:
        given["prompt_logprobs"] = logprobs
        given["prompt_logprobs_start"] = body.logprob_start_len
    if body.return_hidden_states:
        if sampling.additional_outputs:
            raise InvalidRequest(
                "return_hidden_states: additional_outputs is given, too; name hidden_states there",
                param="return_hidden_states",
            )
        given["additional_outputs"] = (HIDDEN_STATES,)
        given["gather_context"] = True
    return given_sampling(server.defaults, given)
