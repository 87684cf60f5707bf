"""From what users write to GenerateRequest: forms of a prompt, spellings, checks that name the argument.

What needs the model (lengths, vocabulary, chat template) is checked by the tokenizer; what the wire bounds is
checked here, so that a mistake is an error at the call.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import InvalidRequest
from runtime.messages import ChatMessage, GenerateRequest
from runtime.sampling_params import SamplingParams
from runtime.wire import MAX_LABEL_CHARS, MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, MAX_TURNS, pack_ids

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Conversation: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | TokenIds | Conversation
"""Text, token ids, or chat messages as {"role": ..., "content": ...}."""

MAX_PRIORITY = 1000
MAX_ID = (1 << 31) - 1
MESSAGE_KEYS = frozenset(ChatMessage.__struct_fields__)


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of every generating call."""

    priority: int
    """Higher is served first; -1000 to 1000."""
    cache_salt: str
    """Requests with different salts never share cached prefixes."""
    label: str
    """The caller's own id; echoed in the completion, never used to find anything."""
    add_special_tokens: bool
    """Of a text prompt: let the tokenizer add its begin-of-text token."""
    add_generation_prompt: bool
    """Of a conversation: end with the header of the assistant's turn."""


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """True for one prompt in any form, False for a sequence of prompts."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return True  # what is no prompt at all is refused as one
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)


def one_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Raises InvalidRequest when it is neither, or a sequence of another length than the prompts."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or several, got {type(sampling_params).__name__}",
            param="sampling_params",
        )
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: {len(sampling_params)} for {num_prompts} prompts; give one, or one for each",
            param="sampling_params",
        )
    return sampling_params


def build_request(
    handle: bytes,
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    stream: bool,
    priority: int = 0,
    cache_salt: str = "",
    label: str = "",
    add_special_tokens: bool = True,
    add_generation_prompt: bool = True,
) -> GenerateRequest:
    """One sequence's request. An unseeded one gets its seed here, so that a second attempt draws the same
    tokens.

    Raises: InvalidRequest naming the argument.
    """
    for name, value in (("cache_salt", cache_salt), ("label", label)):
        if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS:
            raise InvalidRequest(
                f"{name} must be a string of at most {MAX_LABEL_CHARS} characters", param=name
            )
    if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    sampling = normalize(SamplingParams() if sampling_params is None else sampling_params)
    text, input_ids, messages = _prompt_forms(prompt)
    return GenerateRequest(
        handle,
        sampling,
        text,
        input_ids,
        messages,
        label=label,
        stream=stream,
        priority=priority,
        cache_salt=cache_salt,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
    )


def normalize(sampling: SamplingParams) -> SamplingParams:
    """Accept one stop string, lists, and a logit_bias mapping; draw a seed; check. Raises InvalidRequest."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, got {type(sampling).__name__}", param="sampling_params"
        )
    stop: Any = sampling.stop
    bias: Any = sampling.logit_bias
    if isinstance(bias, Mapping):
        bias = [
            (int(key) if isinstance(key, str) and key.isdecimal() else key, value)
            for key, value in bias.items()
        ]
    bias = _as_tuple("logit_bias", bias)
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in bias):
        raise InvalidRequest(
            "logit_bias must be a mapping, or pairs of token id and bias", param="logit_bias"
        )
    sampling = msgspec.structs.replace(
        sampling,
        stop=(stop,) if isinstance(stop, str) else _as_tuple("stop", stop),
        stop_token_ids=_as_tuple("stop_token_ids", sampling.stop_token_ids),
        logit_bias=bias,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
    )
    sampling.validate()
    return sampling


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequest(f"{name} must be a sequence, got {type(value).__name__}", param=name)
    return tuple(value)


def _prompt_forms(prompt: Prompt) -> tuple[str | None, bytes | None, tuple[ChatMessage, ...] | None]:
    """(text, packed ids, messages), one of them set."""
    if isinstance(prompt, str):
        if len(prompt) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"prompt: at most {MAX_TEXT_CHARS} characters, got {len(prompt)}", param="prompt"
            )
        return prompt, None, None
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes) or len(prompt) == 0:
        raise InvalidRequest("prompt must be text, token ids or chat messages, and not empty", param="prompt")
    if isinstance(prompt[0], Mapping):
        if len(prompt) > MAX_TURNS:
            raise InvalidRequest(f"messages: at most {MAX_TURNS}, got {len(prompt)}", param="messages")
        return None, None, tuple(_chat_message(message) for message in prompt)
    return None, _pack_prompt_ids(prompt), None


def _pack_prompt_ids(ids: Any) -> bytes:
    if len(ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPT_TOKENS} token ids, got {len(ids)}", param="prompt")
    # A bool is an int to Python and to numpy; as a token id it is a mistake.
    if isinstance(ids, np.ndarray):
        is_integer = ids.ndim == 1 and ids.dtype.kind in "iu"
    else:
        is_integer = all(kind is int or issubclass(kind, np.integer) for kind in set(map(type, ids)))
    if not is_integer:
        raise InvalidRequest("prompt: neither token ids (integers) nor chat messages", param="prompt")
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise InvalidRequest(f"prompt: token ids must be from 0 to {MAX_ID}", param="prompt")
    return pack_ids(ids)


def _chat_message(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages: each must be a mapping with role and content", param="messages")
    unknown = sorted(set(message) - MESSAGE_KEYS)
    if unknown:
        raise InvalidRequest(f"messages: unknown key {unknown[0]!r}", param="messages")
    try:
        return msgspec.convert(dict(message), _MessageFields).to_wire()
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"messages: {error}", param="messages") from None


class _MessageFields(msgspec.Struct, frozen=True):
    """A ChatMessage by field name: on the wire it is an array."""

    role: str
    content: str
    name: str = ""

    def to_wire(self) -> ChatMessage:
        return ChatMessage(self.role, self.content, self.name)
