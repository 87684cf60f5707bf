"""Prompts of a body in the client library's form, and facts about their tokens that an answer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from carousel.client.core.request_builder import Prompt, RequestOptions, Submission, pack_template_kwargs
from carousel.client.core.result import respelled
from carousel.server.openai.types import MAX_PROMPTS
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams


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
    """Return the prompts in the field `name`, in any of OpenAI's four forms. Raises InvalidRequest."""
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


def template_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
    defaults: dict[str, Any],
) -> RequestOptions:
    """Return the options of the chat template. A message that is continued is followed by no new turn.
    defaults: variables of the launch, which those of the request go before. Raises InvalidRequest if both are
    asked for, and for variables that are too large.
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
    if chat_template_kwargs is not None or defaults:
        variables = {**defaults, **(chat_template_kwargs or {})}
        # Packing checks them. A prompt encoded in this process is not packed; the limits are the same.
        pack_template_kwargs(variables)
        options["chat_template_kwargs"] = variables
    return options


class EncodedPrompts(NamedTuple):
    """Ids of each prompt of a request."""

    ids: list[list[int]]
    are_cut: list[bool]
    """True for each prompt whose beginning was cut off."""


async def encode_prompts(
    server: ServerState, submissions: Sequence[Submission], param_names: Mapping[str, str], tenant: str
) -> EncodedPrompts:
    """Return the ids of a tenant's prompts, cut if the request says so.

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
