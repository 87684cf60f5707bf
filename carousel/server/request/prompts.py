"""Prompts of a body in the client library's form, facts about their tokens that an answer needs, and limits
of what a request may ask for beside text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from carousel.client.core.request.submission import Prompt, RequestOptions, Submission
from carousel.client.core.result import respelled
from carousel.conversation import pack_template_kwargs
from carousel.server.openai.types import MAX_PROMPTS
from carousel.server.request.sampling import num_entries
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_PROMPT_TOKENS
from runtime.wire.sampling_params import SamplingParams

EncodingOption: TypeAlias = Literal[
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"
]
ENCODING_OPTIONS: tuple[EncodingOption, ...] = get_args(EncodingOption)
MAX_SEQUENCES = 1024
"""Maximum number of sequences of one HTTP request, over all of its prompts."""
MAX_LOGPROB_ENTRIES = 1 << 18
"""Maximum number of log-probabilities in the output of one HTTP request, and as many of its prompts. Each
takes 8 bytes until the answer is complete, and the bytes of its spelling.
"""
MAX_ENTRIES = 1 << 16
"""Maximum number of entries (`num_entries`) of the sampling parameters for all prompts of one HTTP request.
Each prompt has a copy in every process, where an entry takes up to 60 bytes, and 1 us to check.
"""
MAX_LOGITS = 1 << 21
"""Maximum number of raw logits in the answer to one HTTP request: up to 22 bytes of JSON each."""


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


def with_ids(submissions: Sequence[Submission], ids: Sequence[Prompt]) -> list[Submission]:
    """Return the requests with ids instead of prompts, which are encoded and cut already, and without the
    options for that.
    """
    made = []
    for submission, prompt in zip(submissions, ids, strict=True):
        options = submission.options.copy()
        for name in ENCODING_OPTIONS:
            options.pop(name, None)
        sampling = msgspec.structs.replace(submission.sampling, truncate_prompt_tokens=None)
        made.append(msgspec.structs.replace(submission, prompt=prompt, options=options, sampling=sampling))
    return made


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
    field = param_names.get("prompt", "prompt")
    sampling.check_truncation(server.config.context_length)
    num_last = None
    if sampling.truncate_prompt_tokens is not None:
        longest, max_prompt_len = server.longest_sequence, server.config.max_prompt_len
        num_last = sampling.num_kept(MAX_PROMPT_TOKENS, longest, max_prompt_len)
    encoded = EncodedPrompts([], [])
    for each in submissions:
        try:
            ids, is_cut = await server.tokenizer.encode(each.prompt, each.options, tenant, num_last=num_last)
        except InvalidRequest as error:
            raise respelled(error, param_names) from None
        if not ids:
            raise InvalidRequest(f"{field} is empty", param=field)
        encoded.ids.append(ids)
        encoded.are_cut.append(is_cut)
    return encoded


def check_size(submissions: Sequence[Submission], context_length: int) -> None:
    """Check how large the request is to all processes, and how large its answer could be. Raises
    InvalidRequest by the names of SamplingParams if that is too large.
    """
    sampling, num_each = submissions[0].sampling, submissions[0].num_sequences
    num_sequences = len(submissions) * num_each
    if num_sequences > MAX_SEQUENCES:
        raise InvalidRequest(
            f"n: {len(submissions)} prompts with {num_each} sequences each are more than {MAX_SEQUENCES}",
            param="n",
        )
    entries = num_entries(sampling)
    if len(submissions) > max(1, MAX_ENTRIES // max(1, entries)):
        raise InvalidRequest(
            f"prompt: {len(submissions)} prompts, each with {entries} entries in lists of parameters "
            f"(a bias is two), are more than {MAX_ENTRIES} of them; send fewer prompts in a request",
            param="prompt",
        )
    num_tokens = min(sampling.max_tokens or context_length, context_length) * num_sequences
    if sampling.logprobs is not None and num_tokens * (sampling.logprobs + 1) > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"logprobs: {sampling.logprobs} for {num_tokens} tokens are more than "
            f"{MAX_LOGPROB_ENTRIES} entries; ask for fewer, or for fewer tokens or choices",
            param="logprobs",
        )


def check_logits(
    submissions: Sequence[Submission],
    context_length: int,
    vocab_size: int,
    output_width: int,
    num_prompt_tokens: int,
) -> None:
    """Check how many raw logits and numbers of additional outputs the answer could have; `num_prompt_tokens`
    is the total of all prompts. Raises InvalidRequest by the names of SamplingParams if there could be too
    many.
    """
    sampling, num_rows, name = submissions[0].sampling, 0, ""
    num_output = min(sampling.max_tokens or context_length, context_length)
    num_output *= len(submissions) * submissions[0].num_sequences
    if sampling.return_context_logits:
        num_rows, name = num_prompt_tokens, "return_context_logits"
    if sampling.return_generation_logits:
        num_rows += num_output
        name = "return_generation_logits"
    if num_rows * vocab_size > MAX_LOGITS:
        raise InvalidRequest(
            f"{name}: {num_rows} positions of {vocab_size} logits each are more than the {MAX_LOGITS} "
            "that an answer may have; ask for fewer tokens or choices, or use the client library",
            param=name,
        )
    num_output += num_prompt_tokens if sampling.gather_context else 0
    num_numbers = num_output * output_width * len(sampling.additional_outputs)
    if num_rows * vocab_size + num_numbers > MAX_LOGITS:
        raise InvalidRequest(
            f"additional_outputs: {num_output} rows of {output_width} numbers each are, with all else, more "
            f"than the {MAX_LOGITS} that an answer may have; ask for fewer tokens, choices or outputs, or "
            "use the client library",
            param="additional_outputs",
        )


def check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, name: str = "prompt_logprobs") -> None:
    """Check how many logprobs of prompts the answer would have. `num_tokens` counts the prompts' tokens as
    often as they are shown, and `name` is the field that asks for them. Raises InvalidRequest if there could
    be too many.
    """
    num_top = sampling.prompt_logprobs
    if num_top is not None and num_tokens * (num_top + 1) > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"{name}: {num_top} for {num_tokens} tokens of the prompts are more than "
            f"{MAX_LOGPROB_ENTRIES} entries; ask for fewer, or for fewer prompts or choices",
            param=name,
        )
