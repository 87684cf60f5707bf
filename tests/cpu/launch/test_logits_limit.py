"""Raw logits beyond the limit of a launch: refused by name, over everything that answers, and nobody else
notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from carousel import Client, GenerationExecutor, GenerationRequest, SamplingParams
from carousel.server.request.prompts import MAX_LOGITS
from runtime.base.errors import InvalidRequest
from tests.harness.ring.launched import Launched, launched

BYTES_PER_POSITION = 4096 * 4
MAX_POSITIONS = 64


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(
        "--gather-context-logits",
        "--gather-generation-logits",
        "--max-logits-bytes",
        str(MAX_POSITIONS * BYTES_PER_POSITION),
    ) as launch:
        yield launch


def asking(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **fields)


HUGE = [
    ([5] * 10, asking(1500, return_generation_logits=True), "return_generation_logits"),
    ([5] * 65, asking(1, return_context_logits=True), "return_context_logits"),
    (
        [5] * 60,
        asking(5, return_context_logits=True, return_generation_logits=True),
        "return_generation_logits",
    ),
]


@pytest.mark.parametrize(("prompt", "sampling", "field"), HUGE)
def test_too_much_is_refused_with_the_limit_while_others_go_on(
    launch: Launched, prompt: list[int], sampling: SamplingParams, field: str
) -> None:
    with Client(launch.run_dir) as client:
        bystander = client.stream("import os\n", SamplingParams(max_tokens=200, ignore_eos=True))
        next(bystander)
        for _ in range(5):
            with pytest.raises(InvalidRequest, match="--max-logits-bytes") as caught:
                client.generate(prompt, sampling)
            assert (caught.value.param, caught.value.status) == (field, 400)
            assert str(MAX_POSITIONS * BYTES_PER_POSITION) in str(caught.value)
        assert list(bystander)[-1].finish_reason == "length"


def test_the_executor_gets_it_as_the_one_response(launch: Launched) -> None:
    prompt, sampling, field = HUGE[0]
    with GenerationExecutor.create(run_dir=launch.run_dir) as executor:
        request_id = executor.enqueue_request(GenerationRequest(prompt, sampling))
        (response,) = executor.await_responses(request_id, timeout=10.0)
        assert response.is_final
        assert isinstance(response.error, InvalidRequest)
        assert response.error.param == field


def test_as_much_as_is_allowed_is_given(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        done = client.generate([5] * 60, asking(4, return_context_logits=True, return_generation_logits=True))
    assert done.context_logits is not None
    assert done.context_logits.shape == (60, 4096)
    assert done.outputs[0].generation_logits is not None
    assert done.outputs[0].generation_logits.shape == (4, 4096)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x"}, "return_generation_logits"),
        ("/v1/completions", {"prompt": "x"}, "return_context_logits"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "return_context_logits"),
        # It has them, as a sampling parameter.
        ("/generate", {"text": "x"}, "return_generation_logits"),
    ],
)
def test_raw_logits_are_refused_where_http_has_none(
    launch: Launched, path: str, body: dict[str, object], param: str
) -> None:
    response = httpx.post(launch.url + path, json={**body, param: True}, timeout=30.0)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_generate_over_http_gives_the_raw_logits_of_the_client(launch: Launched) -> None:
    """With the prompt cut. Of several sequences the first one has those of the prompt."""
    ids = list(range(300, 320))
    sampling = asking(4, return_context_logits=True, return_generation_logits=True)
    with Client(launch.run_dir) as client:
        expected = client.generate(ids[-6:], sampling, timeout=60)
    wanted = {"return_context_logits": True, "return_generation_logits": True, "truncate_prompt_tokens": 6}

    def ask(**asked: Any) -> Any:
        asked = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0, **wanted, **asked}
        body = {"input_ids": ids, "sampling_params": asked}
        return httpx.post(f"{launch.url}/generate", json=body, timeout=60).json()

    alone = ask()
    assert alone["output_ids"] == expected.token_ids
    assert expected.context_logits is not None
    np.testing.assert_array_equal(np.array(alone["context_logits"], np.float32), expected.context_logits)
    generated = expected.outputs[0].generation_logits
    assert generated is not None
    np.testing.assert_array_equal(np.array(alone["generation_logits"], np.float32), generated)
    first, second = ask(n=2)
    assert "context_logits" not in second
    assert np.shape(first["context_logits"]) == (6, 4096)
    assert np.shape(first["generation_logits"]) == np.shape(second["generation_logits"]) == (4, 4096)


@pytest.mark.parametrize(
    ("length", "asked", "name"),
    [
        (5, {"max_new_tokens": 513, "return_generation_logits": True}, "return_generation_logits"),
        (5, {"max_new_tokens": 65, "n": 8, "return_generation_logits": True}, "return_generation_logits"),
        (520, {"max_new_tokens": 1, "return_context_logits": True}, "return_context_logits"),
        (5, {"max_new_tokens": 1, "return_context_logits": True, "stream": True}, "return_context_logits"),
    ],
)
def test_more_logits_than_an_answer_may_have_are_refused_with_the_number(
    launch: Launched, length: int, asked: dict[str, Any], name: str
) -> None:
    stream = asked.pop("stream", False)
    body = {"input_ids": [5] * length, "sampling_params": asked, "stream": stream}
    response = httpx.post(f"{launch.url}/generate", json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"sampling_params.{name}")
    assert ("stream" if stream else str(MAX_LOGITS)) in error["message"]
