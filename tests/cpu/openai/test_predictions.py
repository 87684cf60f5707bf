"""`prediction` and numbers of guesses over HTTP, before a fake ring: what reaches it, what is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.wire.messages import DraftCounts, Finish, GenerateRequest, SequenceOutput, Usage
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import output

CONTENT = "def f(x):\n    return x\n"
DETAILS = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Says of each sequence that it has guessed, unless it was to guess nothing."""
    drafts = None if request.sampling.speculative_num_draft_tokens == 0 else DraftCounts(6, 4, 2, 1)
    end = Finish("stop", Usage(5, 7, 2, drafts))
    return [output(request, "abcdefg", index=index, finish=end) for index in range(request.sampling.n)]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer, speculative_algorithm="NGRAM") as front:
        yield front


@pytest.mark.parametrize(
    "content",
    [CONTENT, [{"type": "text", "text": CONTENT[:5]}, {"type": "text", "text": CONTENT[5:]}]],
)
def test_a_prediction_reaches_the_ring_and_its_counts_come_back(front: Front, content: Any) -> None:
    response = front.chat(prediction={"type": "content", "content": content})
    assert response.status_code == 200, response.text
    assert front.ring.requests[-1].prediction == CONTENT
    assert response.json()["usage"]["completion_tokens_details"] == DETAILS


def test_counts_of_several_sequences_add_up_in_a_stream_too(front: Front) -> None:
    twice = {name: 2 * value for name, value in DETAILS.items()}
    asked: dict[str, Any] = {"prediction": {"type": "content", "content": CONTENT}, "n": 2}
    assert front.chat(**asked).json()["usage"]["completion_tokens_details"] == twice
    response = front.chat(**asked, stream=True, stream_options={"include_usage": True})
    assert events(response)[-2]["usage"]["completion_tokens_details"] == twice


def test_where_nothing_was_guessed_nothing_is_said(front: Front) -> None:
    for response in (
        front.chat(speculative_num_draft_tokens=0),
        front.complete(speculative_num_draft_tokens=0),
    ):
        assert "completion_tokens_details" not in response.json()["usage"]
        assert front.ring.requests[-1].sampling.speculative_num_draft_tokens == 0


def test_generate_tells_steps_and_guesses(front: Front) -> None:
    asked = {"text": "x", "sampling_params": {"speculative_num_draft_tokens": 3}}
    meta = front.post("/generate", **asked).json()["meta_info"]
    assert front.ring.requests[-1].sampling.speculative_num_draft_tokens == 3
    assert (meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (3, 6, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction"),
        ({"prediction": {"type": "content", "content": 7}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x"}, "tools": [{"type": "function"}]}, "tools"),
        ({"speculative_num_draft_tokens": 65}, "speculative_num_draft_tokens"),
        ({"speculative_num_draft_tokens": -1}, "speculative_num_draft_tokens"),
        ({"speculative_num_draft_tokens": "many"}, "speculative_num_draft_tokens"),
        ({"external_draft_tokens_config": {"tokens": [1]}}, "external_draft_tokens_config"),
    ],
)
def test_what_is_wrong_is_refused_by_name(front: Front, fields: dict[str, Any], param: str) -> None:
    response = front.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].partition(".")[0] == param


def test_a_prediction_is_for_conversations(front: Front) -> None:
    response = front.complete(prediction={"type": "content", "content": "x"})
    assert response.status_code == 400
    assert json.loads(response.text)["error"]["param"] == "prediction"
