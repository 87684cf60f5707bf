"""SamplingParams: what a user may ask of one generation. `validate()` refuses bad values by the field's name.

Field names and neutral values are those that users of vLLM, SGLang and TensorRT-LLM type; the order in which
the sampler applies them is in docs/sampling.md.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from runtime.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1 << 24
MAX_TOP_K = 1 << 24

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """How to choose the next tokens and when to stop. Neutral values change nothing.

    Raises InvalidRequest from `validate()`; constructing one checks nothing, so that a caller sees every
    error in one place.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)] = 16
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] = 0
    temperature: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] = -1
    """Keep the k most likely tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Seed of this request's noise; None lets the client library draw one."""
    stop: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_STOP_CHARS)], ...], Meta(max_length=MAX_STOP_STRINGS)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    """Go on past the model's own end tokens; the caller's stop_token_ids still stop."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """None: no logprobs. k: the chosen token's and the k most likely ones'."""

    def validate(self) -> None:
        """Check every range and combination that needs no model.
        Raises InvalidRequest naming the first field at fault.
        """
        self._check_counts()
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        self._check_stops()
        self._check_logit_bias()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against the model. Raises InvalidRequest."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [i for i, _ in self.logit_bias]),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is not below the vocabulary size {vocab_size}", param=name
                    )

    def _check_counts(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, (1 << 63) - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop: at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"stop: each must be a string of 1 to {MAX_STOP_CHARS} characters", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, (1 << 31) - 1)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias: at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        seen: set[int] = set()
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, (1 << 31) - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)
            if token in seen:
                raise InvalidRequest(f"logit_bias: token id {token} is given twice", param="logit_bias")
            seen.add(token)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=name)


def _check_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {type(value).__name__}", param=name)
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bounds = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)
