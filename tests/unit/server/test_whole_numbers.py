"""Whole numbers that a body writes with a point where it has integers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.request.decode import SMALL_BODY_BYTES
from carousel.server.request.unknown_fields import FieldFilter
from carousel.server.sglang.generate_types import GenerateBody
from runtime.base.errors import InvalidRequest
from tests.unit.server.test_unknown_fields import USER, decoded, read, refusal


@pytest.mark.parametrize("padding", ["", "x" * SMALL_BODY_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("unknown", [{}, {"odd": 1}])
def test_whole_numbers_with_a_point_are_integers(padding: str, unknown: Any) -> None:
    body, ignored = read(
        CompletionBody,
        prompt="x" + padding,
        max_tokens=16.0,
        n=2.0,
        logprobs=3.0,
        temperature=1.0,
        kv_cache_retention_config={"max_tokens": 1e3},
        **unknown,
    )
    assert (body.max_tokens, body.n, body.logprobs, body.temperature) == (16, 2, 3, 1.0)
    assert all(type(each) is int for each in (body.max_tokens, body.n, body.logprobs))
    assert body.kv_cache_retention_config.max_tokens == 1000
    assert ignored == list(unknown)
    body, _ = read(GenerateBody, text="x" + padding, sampling_params={"max_new_tokens": 7.0})
    assert body.sampling_params.max_new_tokens == 7
    body, _ = read(ChatBody, messages=[{**USER, "content": "x" + padding}], max_completion_tokens=8.0)
    assert body.max_completion_tokens == 8


@pytest.mark.parametrize("spelled", ["9007199254740993.0", "1e3", "1.5e1", "1E+2", "-0.0", "0.0e0"])
def test_whole_numbers_are_read_exactly(spelled: str) -> None:
    body = decoded(b'{"prompt": "x", "seed": %b}' % spelled.encode(), CompletionBody, FieldFilter("warn"))
    assert type(body.seed) is int
    assert body.seed == Decimal(spelled)


@pytest.mark.parametrize(
    "spelled", ["16.5", "1e-3", "1e400", "9e18", "1" * 40 + ".0", '"16"', "[1.0]", "true"]
)
def test_what_is_no_whole_number_is_no_integer(spelled: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(b'{"prompt": "x", "max_tokens": %b}' % spelled.encode(), CompletionBody, FieldFilter("warn"))
    assert caught.value.param == "max_tokens"


def test_a_whole_number_is_still_held_to_its_bounds() -> None:
    assert refusal(CompletionBody, prompt="x", max_tokens=-1.0).param == "max_tokens"
    assert refusal(CompletionBody, prompt="x", n=129.0).param == "n"
