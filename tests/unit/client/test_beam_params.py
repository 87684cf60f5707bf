"""Parameters of a beam search as callers write them and as the wire has them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from runtime.base.errors import InvalidRequest
from runtime.wire.handle import make_handle
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each


def wired(stream: bool = False, **fields: Any) -> SamplingParams:
    sampling = SamplingParams(**fields)
    return build_request(make_handle(1, 1), Submission([1, 2], sampling, stream)).sampling


@for_each(
    ("fields", "width", "n"),
    [
        ({"beam_width": 4}, 4, 1),
        ({"beam_width": 4, "n": 2}, 4, 2),
        ({"best_of": 3}, 3, 1),
        ({"n": 2}, 2, 2),
        ({"beam_width": 5, "best_of": 3}, 5, 1),
        ({"beam_width_array": [2, 4, 3]}, 4, 1),
        ({"beam_width_array": (4, 8), "beam_width": 8, "n": 2}, 8, 2),
    ],
)
def test_the_width_is_said_or_that_of_best_of_or_n(fields: dict[str, Any], width: int, n: int) -> None:
    got = wired(use_beam_search=True, **fields)
    assert (got.num_beams, got.n, got.best_of, got.temperature) == (width, n, None, 0.0)


def test_a_search_is_streamed_to_who_takes_all_each_time() -> None:
    sampling = SamplingParams(use_beam_search=True, beam_width=2)
    request = build_request(make_handle(1, 1), Submission([1], sampling, True, is_cumulative=True))
    assert (request.stream, request.sampling.num_beams) == (True, 2)


def test_a_search_of_width_one_is_greedy() -> None:
    got = wired(use_beam_search=True, beam_width=1, length_penalty=2.0, early_stopping=True)
    assert not got.use_beam_search
    assert got.temperature == 0.0


def test_without_use_beam_search_a_width_means_nothing() -> None:
    got = wired(use_beam_search=False, beam_width=4, n=6, temperature=0.7)
    assert (got.num_beams, got.n, got.temperature) == (1, 6, 0.7)


@for_each(
    ("given", "on_the_wire"), [(False, 0), (0, 0), (True, 1), (1, 1), (2, 2), (7, 2), (-1, 2), ("never", 2)]
)
def test_forms_of_early_stopping(given: Any, on_the_wire: int) -> None:
    assert wired(use_beam_search=True, n=2, early_stopping=given).early_stopping == on_the_wire


@for_each(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"n": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"n": 2, "length_penalty": math.inf}, "length_penalty"),
        ({"n": 2, "early_stopping": "x"}, "early_stopping"),
        ({"n": 2, "early_stopping": 0.5}, "early_stopping"),
        ({"n": 2, "temperature": 0.7}, "temperature"),
        ({"n": 2, "stream": True}, "stream"),
        ({"beam_search_diversity_rate": math.nan}, "beam_search_diversity_rate"),
        ({"beam_width_array": [0]}, "beam_width_array"),
        ({"beam_width_array": [65]}, "beam_width_array"),
        ({"beam_width_array": [2] * 9}, "beam_width_array"),
        ({"beam_width_array": [2, 4], "beam_width": 8}, "beam_width_array"),
        ({"beam_width_array": [2, 4], "n": 5}, "n"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wired(use_beam_search=True, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["length_penalty", "early_stopping"])
def test_what_is_of_a_search_is_refused_without_one(name: str) -> None:
    assert wired(length_penalty=1.0, early_stopping=False).num_beams == 1
    with pytest.raises(InvalidRequest, match="set use_beam_search"):
        build_request(make_handle(1, 1), Submission([1], SamplingParams(**{name: 2})))  # type: ignore[arg-type]
