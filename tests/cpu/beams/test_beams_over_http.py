"""Beam search over HTTP, before a fake ring: what reaches it, what is told, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.wire.messages import Finish, GenerateRequest, SequenceOutput, Usage
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import output


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Hypotheses, best first."""
    return [
        output(
            request,
            "abcdefg"[index:],
            index=index,
            finish=Finish("stop", Usage(5, 7), cumulative_logprob=-2.0 - index, score=-0.5 - index)
            if request.sampling.num_beams > 1
            else Finish("stop", Usage(5, 7)),
        )
        for index in range(request.sampling.n)
    ]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        yield front


SEARCH: dict[str, Any] = {"use_beam_search": True, "beam_width": 4, "n": 2, "length_penalty": 0.5}


@pytest.mark.parametrize(
    ("given", "on_the_wire"), [(False, 0), (1, 1), (True, 1), ("never", 2), (None, None)]
)
def test_a_search_reaches_the_ring_and_its_scores_come_back(
    front: Front, given: Any, on_the_wire: int | None
) -> None:
    for response in (
        front.complete(**SEARCH, early_stopping=given),
        front.chat(**SEARCH, early_stopping=given),
    ):
        assert response.status_code == 200, response.text
        sampling = front.ring.requests[-1].sampling
        assert (sampling.num_beams, sampling.n, sampling.temperature) == (4, 2, 0.0)
        assert (sampling.length_penalty, sampling.early_stopping) == (0.5, on_the_wire)
        choices = response.json()["choices"]
        assert [choice["score"] for choice in choices] == [-0.5, -1.5]
        assert [choice["cumulative_logprob"] for choice in choices] == [-2.0, -3.0]


def test_diversity_and_widths_reach_the_ring(front: Front) -> None:
    asked = {"use_beam_search": True, "beam_search_diversity_rate": -0.5, "beam_width_array": [2, 4, 8]}
    for response in (front.complete(**asked), front.chat(**asked)):
        assert response.status_code == 200, response.text
        sampling = front.ring.requests[-1].sampling
        assert (sampling.num_beams, sampling.beam_width_array) == (8, (2, 4, 8))
        assert sampling.beam_search_diversity_rate == -0.5


def test_generate_searches_too(front: Front) -> None:
    answers = front.post("/generate", text="x", sampling_params=SEARCH).json()
    assert front.ring.requests[-1].sampling.num_beams == 4
    assert [each["meta_info"]["score"] for each in answers] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("fields", "width"), [({"best_of": 3}, 3), ({"n": 2}, 2), ({"n": 2, "best_of": 3, "beam_width": 5}, 5)]
)
def test_without_a_width_it_is_best_of_or_n(front: Front, fields: dict[str, Any], width: int) -> None:
    response = front.complete(use_beam_search=True, **fields)
    assert front.ring.requests[-1].sampling.num_beams == width
    assert len(response.json()["choices"]) == fields.get("n", 1)


def test_what_does_not_search_samples_and_is_told_no_score(front: Front) -> None:
    asked = {"use_beam_search": False, "beam_width": 4, "length_penalty": 1.0, "early_stopping": False}
    (choice,) = front.complete(**asked, temperature=0.7).json()["choices"]
    assert front.ring.requests[-1].sampling.num_beams == 1
    assert front.ring.requests[-1].sampling.temperature == 0.7
    assert "score" not in choice


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": 1.0}, "temperature"),
        ({"stream": True}, "stream"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "x"}, "early_stopping"),
        ({"early_stopping": 1.5}, "early_stopping"),
        ({"beam_search_diversity_rate": "x"}, "beam_search_diversity_rate"),
        ({"beam_width_array": [2, 8]}, "beam_width_array"),
        ({"beam_width_array": [4, 0]}, "beam_width_array[1]"),
        ({"beam_width_array": [4] * 9}, "beam_width_array"),
        ({"beam_width_array": [[4]]}, "beam_width_array[0]"),
        ({"use_beam_search": False, "beam_width_array": [2, 4]}, "beam_width_array"),
        ({"use_beam_search": False, "beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
@pytest.mark.parametrize("call", ["complete", "chat"])
def test_what_is_wrong_is_named(front: Front, call: str, fields: dict[str, Any], param: str) -> None:
    response = getattr(front, call)(**{"use_beam_search": True, "beam_width": 4, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text
