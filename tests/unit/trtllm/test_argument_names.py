"""Errors of requests name what callers wrote: arguments of GenerationRequest, arrays of a batch manager."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from carousel import (
    AdditionalModelOutput,
    ExternalDraftTokensConfig,
    GenerationRequest,
    GuidedDecodingParams,
    SamplingParams,
)
from carousel.client.core.request.submission import RequestOptions
from carousel.client.core.result import error_from_info
from carousel.trtllm.inference_request import ARRAY_NAMES, KNOWN
from runtime.base.errors import InvalidRequest, RequestError, RingClosed
from runtime.sampling.table import PARAMETERS
from runtime.wire.messages import ErrorInfo
from tests.harness.cases import for_each

ARGUMENTS = frozenset(inspect.signature(GenerationRequest).parameters)
GUIDE = GuidedDecodingParams.GuideType
EVERYTHING = GenerationRequest(
    [1], query_token_ids=[2], additional_model_outputs=[AdditionalModelOutput("hidden_states")]
)


@for_each(
    ("arguments", "param"),
    [
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"query_token_ids": [-1]}, "query_token_ids"),
        ({"query_token_ids": ["a"]}, "query_token_ids"),
        ({"guided_decoding_params": 7}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams(GUIDE.JSON_SCHEMA)}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams(GUIDE.JSON, "{}")}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams(cast(Any, "YAML"))}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams()}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams(GUIDE.JSON, regex="a")}, "guided_decoding_params"),
        ({"guided_decoding_params": GuidedDecodingParams(json={}, regex="a")}, "guided_decoding_params"),
        (
            {"external_draft_tokens_config": ExternalDraftTokensConfig(cast(Any, [1.5]))},
            "external_draft_tokens_config.tokens",
        ),
        ({"lora_request": "x"}, "lora_request"),
        ({"kv_cache_retention_config": 3}, "kv_cache_retention_config"),
        ({"priority": 5000}, "priority"),
        ({"sampling_params": SamplingParams(n=2, best_of=3), "streaming": True}, "best_of"),
    ],
)
def test_a_mistake_that_needs_no_runtime_is_named(arguments: dict[str, Any], param: str) -> None:
    request = GenerationRequest(**{"prompt_token_ids": [1], **arguments})
    with pytest.raises(InvalidRequest) as caught:
        request.check()
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_a_guide_of_no_kind_is_told_that_its_kind_is_missing() -> None:
    request = GenerationRequest([1], guided_decoding_params=GuidedDecodingParams(guide="[ab]"))
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_params: guide_type is missing"):
        request.check()


@for_each(
    ("request_", "info", "message"),
    [
        (GenerationRequest([1]), ("input_ids: token id 9", "input_ids"), "prompt_token_ids: token id 9"),
        (EVERYTHING, ("input_ids: token id 9", "input_ids"), "input_token_ids: token id 9"),
        (
            EVERYTHING,
            ("json_schema: /properties/a: not kept", "json_schema"),
            "guided_decoding_params: /properties/a: not kept",
        ),
        (
            EVERYTHING,
            ("draft_token_ids: too many", "draft_token_ids"),
            "external_draft_tokens_config.tokens: too many",
        ),
        (EVERYTHING, ("additional_outputs: x", "additional_outputs"), "additional_model_outputs: x"),
        (GenerationRequest([1]), ("additional_outputs: x", "additional_outputs"), "additional_outputs: x"),
        (EVERYTHING, ("max_tokens: x", "max_tokens"), "max_tokens: x"),
        (EVERYTHING, ("no field at all", None), "no field at all"),
    ],
)
def test_what_the_runtime_refuses_is_named(
    request_: GenerationRequest, info: tuple[str, str | None], message: str
) -> None:
    told = ErrorInfo(info[0], "a_code", info[1], 400)
    error = request_.named(error_from_info(told))
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.code, error.status) == (message, "a_code", 400)
    assert error.param is None or message.startswith(error.param)
    assert request_.named(error) is error, "once"


def test_the_end_of_the_runtime_has_no_argument() -> None:
    error = RingClosed("gone")
    assert EVERYTHING.named(error) is error


def test_every_name_is_one_that_a_caller_can_write() -> None:
    """And whatever the client library takes is an argument by its own name, or has one here."""
    names = EVERYTHING._names()
    for name in names.values():
        assert name.partition(".")[0] in ARGUMENTS | {"input_token_ids"}
    options = set(EVERYTHING.submission().options) | {"time_limit", "structured_outputs", "draft_token_ids"}
    assert options <= RequestOptions.__annotations__.keys()
    assert options <= ARGUMENTS | names.keys()
    assert ARRAY_NAMES.keys() <= {p.name for p in PARAMETERS} | names.keys() | set(names.values()) | ARGUMENTS
    assert set(ARRAY_NAMES.values()) <= KNOWN


def test_errors_keep_their_class() -> None:
    for kind in (InvalidRequest, RequestError):
        assert type(EVERYTHING.named(kind("prompt: x", param="prompt"))) is kind
