"""Whole numbers that a body writes with a point where it has integers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.request.decode import SMALL_BODY_BYTES
from carousel.server.request.large_fields import GROUP_BYTES
from carousel.server.request.unknown_fields import FieldFilter
from carousel.server.sglang.generate_types import GenerateBody
from carousel.server.sglang.tokenize_types import DetokenizeBody
from runtime.base.errors import InvalidRequest
from tests.harness.cases import for_each
from tests.unit.server.test_unknown_fields import USER, decoded, no_wait, read, refusal


@for_each("padding", ["", "x" * SMALL_BODY_BYTES])
@for_each("unknown", [{}, {"odd": 1}])
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


@pytest.mark.parametrize("padding", ["", " " * SMALL_BODY_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("length", [3, GROUP_BYTES // 4], ids=["few", "many"])
def test_lists_of_token_ids_are_read_alike(padding: str, length: int) -> None:
    def read_ids(kind: Any, name: str, text: str, more: str = "") -> Any:
        data = f'{{"{name}": {padding}{text}{more}}}'.encode()
        return getattr(decoded(data, kind, FieldFilter("warn", no_wait)), name)

    ids = [5, 2, 1000] + [7] * (length - 3)
    spelled = "[5, 2.0, 1e3" + ", 7.0" * (len(ids) - 3) + "]"
    for kind, name in ((CompletionBody, "prompt"), (GenerateBody, "input_ids"), (DetokenizeBody, "tokens")):
        assert read_ids(kind, name, spelled) == ids
        assert read_ids(kind, name, f"[{spelled}, [6]]") == [ids, [6]]
        assert {type(each) for each in read_ids(kind, name, spelled)} == {int}
    if length == 3:
        for name in ("stop_token_ids", "allowed_token_ids"):
            assert read_ids(CompletionBody, name, spelled, ', "prompt": ["1.0"]') == ids
        assert read_ids(CompletionBody, "bad_words_ids", f"[{spelled}]", ', "prompt": "x"') == [ids]


@for_each("wrong", ["2.5", "true", '"2.0"', "9e18", "-1.0", "null"])
@for_each("padding", ["", " " * SMALL_BODY_BYTES])
def test_what_is_no_token_id_is_named(padding: str, wrong: str) -> None:
    data = b'{"input_ids": %b[5.0, %b]}' % (padding.encode(), wrong.encode())
    with pytest.raises(InvalidRequest) as caught:
        decoded(data, GenerateBody, FieldFilter("warn", no_wait))
    assert caught.value.param == "input_ids[1]"


@for_each("spelled", ["9007199254740993.0", "1e3", "1.5e1", "1E+2", "-0.0", "0.0e0"])
def test_whole_numbers_are_read_exactly(spelled: str) -> None:
    body = decoded(
        b'{"prompt": "x", "seed": %b}' % spelled.encode(), CompletionBody, FieldFilter("warn", no_wait)
    )
    assert type(body.seed) is int
    assert body.seed == Decimal(spelled)


@for_each("spelled", ["16.5", "1e-3", "1e400", "9e18", "1" * 40 + ".0", '"16"', "[1.0]", "true"])
def test_what_is_no_whole_number_is_no_integer(spelled: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(
            b'{"prompt": "x", "max_tokens": %b}' % spelled.encode(),
            CompletionBody,
            FieldFilter("warn", no_wait),
        )
    assert caught.value.param == "max_tokens"


def test_a_whole_number_is_still_held_to_its_bounds() -> None:
    assert refusal(CompletionBody, prompt="x", max_tokens=-1.0).param == "max_tokens"
    assert refusal(CompletionBody, prompt="x", n=129.0).param == "n"
