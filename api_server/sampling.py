"""SamplingParams of an OpenAI body.

A field that the body leaves out takes what the model's generation_config.json recommends, else OpenAI's
default, which is neutral (temperature 1, top_p 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api_server.openai_types import GenerationBody
from client.request_builder import RequestOptions
from runtime.errors import InvalidRequest
from runtime.model_config import SamplingDefaults
from runtime.sampling_params import SamplingParams

OWN_FIELDS = frozenset({"max_tokens", "logprobs", "stop", "logit_bias"})
"""Fields of SamplingParams that a body spells in another way."""


def sampling_params(
    body: GenerationBody, defaults: SamplingDefaults, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """A seed that is not given stays open: each prompt draws its own. Raises InvalidRequest."""
    values = {
        name: getattr(body, name) for name in SamplingParams.__struct_fields__ if name not in OWN_FIELDS
    }
    return checked_sampling(
        defaults,
        values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=body.stop,
        logit_bias=body.logit_bias,
    )


def checked_sampling(
    defaults: SamplingDefaults,
    given: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    stop: str | list[str] | None,
    logit_bias: Mapping[str, float] | None,
) -> SamplingParams:
    """`given`: values by the names of SamplingParams, None where the body has none. Raises InvalidRequest."""
    values = {name: value for name, value in _items(defaults) if value is not None}
    values |= {name: value for name, value in given.items() if value is not None}
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop_strings(stop),
        logit_bias=_logit_bias(logit_bias),
        **values,
    )
    sampling.validate()
    return sampling


def request_options(*, request_id: str, priority: int | None, cache_salt: str | None) -> RequestOptions:
    options = RequestOptions(label=request_id)
    if priority is not None:
        options["priority"] = priority
    if cache_salt is not None:
        options["cache_salt"] = cache_salt
    return options


def include_usage(body: GenerationBody) -> bool:
    """Raises InvalidRequest when usage events are asked for without a stream."""
    wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    if wanted and not body.stream:
        raise InvalidRequest("stream_options is for requests with stream: true", param="stream_options")
    return wanted


def _items(defaults: SamplingDefaults) -> list[tuple[str, Any]]:
    return list(msgspec.structs.asdict(defaults).items())


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """JSON has no integer keys."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key!r:.40} is not a token id", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)
