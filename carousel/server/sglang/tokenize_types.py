"""The bodies of /tokenize and /detokenize, as vLLM spells them; SGLang's clients find theirs too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from carousel.server.openai.types import MAX_PROMPTS, Messages
from runtime.wire.sampling_params import TokenId

TextList: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
IdLists: TypeAlias = Annotated[list[TokenId | list[TokenId]], Meta(max_length=1 << 22)]


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of prompt and messages. Null is the same as absent."""

    model: str | None = None
    prompt: str | TextList | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true of a prompt; false of messages, whose template writes its own."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(Struct):
    """Answer of /tokenize. For a list of prompts each field but the length is a list."""

    count: int | list[int]
    max_model_len: int
    tokens: Sequence[int | Sequence[int]]
    token_strs: Sequence[str | Sequence[str]] | None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: IdLists
    model: str | None = None
    skip_special_tokens: bool | None = None
    """Default: false, so that the text says all that the tokens do."""


class DetokenizeResponse(Struct):
    prompt: str | list[str]
    """Text by vLLM's name."""
    text: str | list[str]
    """Text by SGLang's name."""
