"""Whatever build_request makes of what a caller wrote is within the bounds of its receiver, which drops the
rest and answers nobody.
"""

from __future__ import annotations

import enum
import itertools
import random
from typing import Any

import numpy as np
import pytest

from carousel.client.core.request.request_builder import build_request, no_text
from carousel.client.core.request.submission import Submission
from carousel.lora import LoRARequest
from carousel.structured_outputs import StructuredOutputsParams
from runtime.base.errors import InvalidRequest
from runtime.sampling.table import PARAMETERS
from runtime.wire.handle import make_handle
from runtime.wire.messages import UNIONS
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import MessageCodec
from tests.harness.cases import for_each

CODEC = MessageCodec(UNIONS["tokenizer_in"], 0)
HANDLE = make_handle(1, 1)


class Numbered(enum.IntEnum):
    BELOW = -5
    SOME = 3


NUMBERS = (
    -(1 << 64),
    -(1 << 63),
    -2,
    -1,
    -0.5,
    0,
    0.5,
    1,
    2,
    20,
    21,
    128,
    129,
    1 << 24,
    1 << 31,
    1 << 63,
    1 << 64,
)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(True, False, None, "", "x", "x" * 257, b"x", float("nan"), float("inf"), 1 + 2j, object()),
    *(Numbered.BELOW, Numbered.SOME, np.float64(0.5), np.int64(3), np.float32(0.5), np.arange(3)),
    *([], [1], [-1], [1 << 31], [True], ["x"], [""], [None], ["x" * 300], ["x"] * 2000, [7] * 5000),
    *([[1]], [[]], [[7] * 65], [[-1]], [[1, 0.5]], [[1, 500.0]], [[1, "x"]], [("1", 1.0)], [[[1]]]),
    *({"1": 0.5}, {1: 0.5}, {"x": 1.0}, {"1": None}, {1: True}, {(1,): 1.0}, set()),
)


def reaches(prompt: Any = "x", sampling: dict[str, Any] | None = None, **options: Any) -> bool:
    """Return True if it is sent; False: the caller is told what is wrong."""
    try:
        params = SamplingParams(**(sampling or {}))
        request = build_request(HANDLE, Submission(prompt, params, options=options))  # type: ignore[arg-type]
        frame = CODEC.encode(request)
    except (InvalidRequest, TypeError, ValueError):
        return False
    assert CODEC.decode(frame).handle == HANDLE
    return True


def test_each_value_of_a_parameter_is_refused_or_received() -> None:
    for p in PARAMETERS:
        sent = [reaches(sampling={p.name: value}) for value in VALUES]
        assert any(sent), p.name
        assert not all(sent), p.name


def test_parameters_together_are_refused_or_received() -> None:
    rng = random.Random(3)
    sent = 0
    for _ in range(2000):
        chosen = rng.sample(PARAMETERS, 3)
        values = {p.name: rng.choice((p.example, p.neutral, rng.choice(VALUES))) for p in chosen}
        sent += reaches(sampling=values)
    assert 200 < sent < 1900


@for_each(
    "name",
    [
        *("priority", "cache_salt", "label", "add_special_tokens", "continue_final_message", "time_limit"),
        *("arrival_time", "task", "add_generation_prompt", "kv_cache_retention_config"),
    ],
)
def test_each_option_is_refused_or_received(name: str) -> None:
    sent = [
        reaches([{"role": "user", "content": "x"}], **{name: value})
        for value in (*VALUES, "embed", "generate", 1e300, 4000)
    ]
    assert any(sent)
    assert not all(sent)


@for_each(
    ("prompt", "sampling", "options", "field"),
    [
        ("a\ud800", {}, {}, "prompt"),
        ([{"role": "user", "content": "\udfff"}], {}, {}, "messages[0].content"),
        ("x", {"stop": ["a", "\ud83d"]}, {}, "stop[1]"),
        ("x", {}, {"prediction": "\ud83d"}, "prediction"),
        ("x", {}, {"cache_salt": "\ud83d"}, "cache_salt"),
        ("x", {}, {"structured_outputs": StructuredOutputsParams(regex="\ud83d")}, "structured_outputs"),
        ("x", {}, {"lora_request": LoRARequest("\ud83d", 1)}, "lora_request"),
        ("x", {}, {"logits_processors": [{"name": "\ud83d"}]}, "logits_processors[0].name"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    prompt: Any, sampling: dict[str, Any], options: Any, field: str
) -> None:
    request = build_request(HANDLE, Submission(prompt, SamplingParams(**sampling), options=options))
    with pytest.raises(UnicodeEncodeError) as raised:
        CODEC.encode(request)
    error = no_text(request, raised.value)
    assert (error.param, error.message.split(":")[0]) == (field, field)
    assert "surrogate" in error.message


def test_each_message_is_refused_or_received() -> None:
    keys = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    texts: tuple[Any, ...] = (
        "",
        "x",
        "x" * 65,
        "x" * 257,
        "x" * 5000,
        None,
        5,
        [],
        [{"a": 1}],
        {"a": object()},
    )
    sent = [
        reaches([{"role": "user", "content": "x", key: value}])
        for key, value in itertools.product(keys, texts)
    ]
    assert any(sent)
    assert not all(sent)
    assert not reaches([{"role": "r" * 65, "content": "x"}])
    assert reaches([{"role": "user", "content": "x"}], chat_template_kwargs={"a": [1]})
