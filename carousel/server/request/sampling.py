"""Conversion of OpenAI bodies to SamplingParams and options.

A field that the body leaves out has the value that the model's generation_config.json recommends, or else
OpenAI's default, which is neutral.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

import msgspec

from carousel.client.core.request.submission import RequestOptions
from carousel.lora import LoRARequest
from carousel.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from carousel.server.openai.types import GenerationBody, LogitsProcessorBody, RetentionBody
from carousel.structured_outputs import StructuredOutputsParams
from runtime.base.errors import InvalidRequest
from runtime.checkpoint.checkpoint_config import SamplingDefaults
from runtime.sampling.additional_outputs import HIDDEN_STATES
from runtime.sampling.features import DRAWABLE
from runtime.sampling.kinds import IdKind, TextsKind
from runtime.sampling.table import GREEDY_BELOW, PARAMETERS
from runtime.wire.sampling_params import SamplingParams

PARAM_NAMES = {
    "label": "X-Request-Id",
    "lora_request": "model",
    "additional_outputs": "return_hidden_states",
}
"""Parameters of the client library -> names in OpenAI's bodies."""

_lists_of = attrgetter(*[p.name for p in PARAMETERS if isinstance(p.kind, IdKind | TextsKind)])

CHARS_OF_ENTRY = 8

OF_DRAWS = frozenset(
    p.name for p in PARAMETERS if p.example is not None and not p.feature(p.example) & ~DRAWABLE
)
"""Recommendations that a beam search ignores, because it draws nothing."""


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters of a body. Without a seed, each prompt draws its own."""
    names, values_of = _shared_fields(type(body))
    values = values_of(body)
    # Most are None. A comprehension would take ten bytecodes for each.
    given: dict[str, Any] = dict(compress(zip(names, values, strict=True), map(is_not, values, repeat(None))))
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    if body.return_hidden_states:
        given["additional_outputs"] = (HIDDEN_STATES,)
    return given_sampling(defaults, given)


@cache
def _shared_fields(body_type: type[GenerationBody]) -> tuple[tuple[str, ...], Callable[[Any], Sequence[Any]]]:
    """Return the names of the fields that bodies of a type share with SamplingParams, and a function that
    gets their values.
    """
    names = tuple(name for name in SamplingParams.__struct_fields__ if name in body_type.__struct_fields__)
    return names, attrgetter(*names)


def given_sampling(defaults: SamplingDefaults, given: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters for the client library, which checks them on submission. `given` has values
    by the names of SamplingParams in JSON's types; None means not given. Raises InvalidRequest for a
    temperature in a beam search.
    """
    recommended = msgspec.structs.asdict(defaults)
    searches = bool(given.get("use_beam_search"))
    if searches and (given.get("temperature") or 0.0) >= GREEDY_BELOW:
        raise InvalidRequest(
            f"temperature is {given['temperature']:g}: a beam search draws nothing; leave it out, or 0",
            param="temperature",
        )
    values = {
        name: value
        for name, value in recommended.items()
        if value is not None and not (searches and name in OF_DRAWS)
    }
    values |= {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**values)


def num_entries(sampling: SamplingParams) -> int:
    """Return how much is in the lists of the parameters: an id is one entry, a bias two, a text one for each
    CHARS_OF_ENTRY characters begun.
    """
    return sum(map(_num_in, filter(None, _lists_of(sampling))))


def _num_in(value: Any) -> int:
    if isinstance(value, Mapping):
        return 2 * len(value)
    return _num_of_text(value) if isinstance(value, str) else sum(map(_num_of, value))


def _num_of(item: Any) -> int:
    if isinstance(item, str):
        return _num_of_text(item)
    return len(item) if isinstance(item, Sequence) else 1


def _num_of_text(text: str) -> int:
    return len(text) // CHARS_OF_ENTRY + 1


def check_hidden_states(body: GenerationBody, served: Collection[str]) -> None:
    """Check that the server returns hidden states. `served` has the additional outputs of the launch. Raises
    InvalidRequest.
    """
    if not body.return_hidden_states:
        return
    name = "return_hidden_states"
    if body.stream:
        raise InvalidRequest(f"{name} is for requests without stream: true", param=name)
    if HIDDEN_STATES not in served:
        raise InvalidRequest(
            f"{name}: the server was started without --additional-output {HIDDEN_STATES}",
            param=name,
            code="unsupported_parameter",
        )


def check_min_tokens(min_tokens: int | None, name: str, given: int | None, default: int) -> None:
    """Check min_tokens against the limit, which is called `name` in the body. Raises InvalidRequest if no
    limit was given and the default one is below the minimum.
    """
    if given is None and min_tokens is not None and min_tokens > default:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, more than the {default} tokens that this server generates where "
            f"{name} is left out; set {name}",
            param="min_tokens",
        )


def request_options(
    *,
    priority: int | None,
    cache_salt: str | None,
    time_limit: float | None,
    retention: RetentionBody | None = None,
    guide: StructuredOutputsParams | None = None,
    adapter: LoRARequest | None = None,
    processors: Sequence[LogitsProcessorBody] | None = None,
) -> RequestOptions:
    options = RequestOptions()
    if priority is not None:
        options["priority"] = priority
    if cache_salt is not None:
        options["cache_salt"] = cache_salt
    if time_limit is not None:
        options["time_limit"] = time_limit
    if retention is not None:
        options["kv_cache_retention_config"] = _retention(retention)
    if guide is not None:
        options["structured_outputs"] = guide
    if adapter is not None:
        options["lora_request"] = adapter
    if processors:
        options["logits_processors"] = [_given(each) for each in processors]
    return options


def _retention(body: RetentionBody) -> KvCacheRetentionConfig:
    ranges = [TokenRangeRetentionConfig(**_given(each)) for each in body.token_range_retention_configs or ()]
    return KvCacheRetentionConfig(**{**_given(body), "token_range_retention_configs": ranges})


def _given(body: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are not left out."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}


def check_stream_options(body: GenerationBody) -> None:
    """Check options of streams. Raises InvalidRequest for options that only a stream, or only a whole answer,
    can have.
    """
    if body.stream_options is not None and not body.stream:
        wanted = body.stream_options
        if wanted.include_usage or wanted.continuous_usage_stats:
            raise InvalidRequest("stream_options is for requests with stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is for requests without stream: true", param="prompt_logprobs")


def includes_usage(body: GenerationBody) -> bool:
    """Return True if the stream ends with an event with the usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def counts_continuously(body: GenerationBody) -> bool:
    """Return True if every event has the usage so far."""
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
