"""Prompts as vLLM's objects."""

from __future__ import annotations

from typing import Any

import pytest

from carousel import InvalidRequest
from carousel.client.prompt_objects import without_objects
from tests.harness.cases import for_each

TALK = [{"role": "user", "content": "a"}]


@for_each(
    ("given", "meant"),
    [
        ({"prompt": "a"}, "a"),
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"prompt": "a", "prompt_token_ids": [1, 2]}, [1, 2]),
        ([{"prompt": "a"}, {"prompt": "b", "multi_modal_data": None}], ["a", "b"]),
        ([{"prompt": "a"}, "b"], ["a", "b"]),
        ("a", "a"),
        ([1, 2], [1, 2]),
        (["a", "b"], ["a", "b"]),
        (TALK, TALK),
        ([TALK, TALK], [TALK, TALK]),
        ([{"role": "user"}], [{"role": "user"}]),
    ],
)
def test_an_object_is_the_text_or_the_ids_that_it_has(given: Any, meant: Any) -> None:
    assert without_objects(given) == meant


@for_each(
    ("given", "reason"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": b"x"}}, "multi_modal_data .* for text only"),
        ({"prompt_embeds": [0.5]}, "prompt_embeds .* for text only"),
        ({"prompt": "a", "cache_salt": "x"}, "cache_salt .* give it to generate"),
        ([{"prompt": "a", "colour": "red"}], "colour .* prompt and prompt_token_ids"),
        ({"prompt": None}, "an object has prompt, or prompt_token_ids"),
    ],
)
def test_what_an_object_has_besides_is_refused_by_name(given: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        without_objects(given)
