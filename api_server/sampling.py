"""SamplingParams of an OpenAI body.

A field that the body leaves out takes what the model's generation_config.json recommends, else OpenAI's
default, which is neutral (temperature 1, top_p 1).
"""

from __future__ import annotations

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
    values: dict[str, Any] = {name: value for name, value in _items(defaults) if value is not None}
    for name in SamplingParams.__struct_fields__:
        value = None if name in OWN_FIELDS else getattr(body, name)
        if value is not None:
            values[name] = value
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop_strings(body.stop),
        logit_bias=_logit_bias(body.logit_bias),
        **values,
    )
    sampling.validate()
    return sampling


def request_options(body: GenerationBody) -> RequestOptions:
    options = RequestOptions()
    if body.priority is not None:
        options["priority"] = body.priority
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
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


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """JSON has no integer keys."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key!r:.40} is not a token id", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)
