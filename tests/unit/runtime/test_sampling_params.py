"""SamplingParams refuses every value out of range, by the field's name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import ELSEWHERE, NOTHING_ASKED, SamplingParams
from tests.harness.cases import for_each

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 1 << 40),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("top_n_sigma", -0.1),
    ("top_n_sigma", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", -(1 << 63) - 1),
    ("seed", 1 << 64),
    ("seed", False),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("x",) * 17),
    ("stop", (5,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * 1025),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", ((1, 101.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("logprobs", -1),
    ("logprobs", 21),
]


@for_each(("field", "value"), BAD)
def test_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).validate()
    assert caught.value.param == field
    assert field in str(caught.value)
    assert caught.value.status == 400


@for_each(
    "values",
    [
        {},
        {"temperature": 0},
        {"top_k": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"min_tokens": 16},
        {"max_tokens": None, "min_tokens": 99},
        {"seed": 0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": ("\n",), "stop_token_ids": (0,), "logit_bias": ((0, -100.0),)},
    ],
)
def test_good_values_pass(values: dict[str, Any]) -> None:
    SamplingParams(**values).validate()


@pytest.mark.parametrize("values", [{"stop_token_ids": (4096,)}, {"logit_bias": ((4096, 1.0),)}])
def test_ids_outside_the_vocabulary_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        SamplingParams(**values).check_vocabulary(4096)
    SamplingParams(**values).check_vocabulary(4097)


@for_each("name", SamplingParams.__struct_fields__)
def test_none_is_the_default_of_each_parameter_but_max_tokens(name: str) -> None:
    fields: dict[str, Any] = {name: None}
    expected = None if name == "max_tokens" else getattr(SamplingParams(), name)
    assert getattr(SamplingParams(**fields), name) == expected


@for_each("name", ELSEWHERE)
def test_none_for_a_name_of_another_library_asks_for_nothing(name: str) -> None:
    fields: dict[str, Any] = {name: None, "top_p": 0.5}
    assert SamplingParams(**fields) == SamplingParams(top_p=0.5)


def test_defaults_of_other_libraries_ask_for_nothing() -> None:
    assert SamplingParams(top_p=0.5, **NOTHING_ASKED) == SamplingParams(top_p=0.5)
    assert set(NOTHING_ASKED) <= set(ELSEWHERE)


def test_none_for_an_unknown_name_is_refused_as_any_value() -> None:
    with pytest.raises(TypeError, match="'no_such_name'"):
        SamplingParams(no_such_name=None, top_p=None)  # type: ignore[call-arg, arg-type]


@for_each("name", ELSEWHERE)
def test_a_name_of_another_library_is_refused_with_ours(name: str) -> None:
    assert name not in SamplingParams.__struct_fields__
    fields: dict[str, Any] = {name: 0 if NOTHING_ASKED.get(name) is True else 1}
    with pytest.raises(TypeError, match=f"^SamplingParams has no {name}: {re.escape(ELSEWHERE[name])}$"):
        SamplingParams(**fields)


def test_any_other_name_is_refused_too() -> None:
    with pytest.raises(TypeError, match="'no_such_name'"):
        SamplingParams(no_such_name=1)  # type: ignore[call-arg]
