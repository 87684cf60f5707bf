"""Bodies of /tokenize and /detokenize, with vLLM's names and those that SGLang's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from carousel.server.openai.types import MAX_PROMPTS, Messages
from runtime.wire.sampling_params import TokenId

TextList: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
IdLists: TypeAlias = Annotated[list[TokenId | list[TokenId]], Meta(max_length=1 << 22)]


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Request of /tokenize, with either prompt or messages. Null means the same as absent."""

    model: str | None = None
    prompt: str | TextList | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """True to add special tokens. Default: true for a prompt; false for messages, whose template has them."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(Struct):
    """Answer of /tokenize. For a list of prompts each field except max_model_len is a list."""

    count: int | list[int]
    max_model_len: int
    tokens: Sequence[int | Sequence[int]]
    token_strs: Sequence[str | Sequence[str]] | None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: IdLists
    model: str | None = None
    skip_special_tokens: bool | None = None
    """True to leave special tokens out of the text; default false."""


class DetokenizeResponse(Struct):
    prompt: str | list[str]
    """Text under vLLM's name."""
    text: str | list[str]
    """Text under SGLang's name."""
