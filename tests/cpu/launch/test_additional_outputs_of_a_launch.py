"""Additional outputs of a launch: over HTTP what the client gets, refusals that say what there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from carousel import AdditionalModelOutput, Client, GenerationExecutor, GenerationRequest, SamplingParams
from runtime.base.errors import InvalidRequest
from tests.harness.ring.launched import Launched, launched

NAMES = ("hidden_states:1", "mlp:0")
IDS = list(range(300, 312))
WIDTH = 256


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    served = ",".join((*NAMES, "hidden_states"))
    with launched("--additional-output", served, "--max-logits-bytes", str(64 * WIDTH * 4)) as launch:
        yield launch


def generate(launch: Launched, **body: Any) -> Any:
    return httpx.post(f"{launch.url}/generate", json={"input_ids": IDS, **body}, timeout=60)


def post(launch: Launched, path: str, **body: Any) -> Any:
    return httpx.post(f"{launch.url}{path}", json=body, timeout=60)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}


def test_over_http_come_the_rows_of_the_client(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        params = SamplingParams(
            max_tokens=4, ignore_eos=True, temperature=0.0, additional_outputs=NAMES, gather_context=True
        )
        expected = client.generate(IDS, params, timeout=60)
        served = client.server_info()
    assert served["additional_output"] == ",".join((*NAMES, "hidden_states"))
    asked = sampling(additional_outputs=NAMES, gather_context=True)
    body = generate(launch, sampling_params=asked).json()
    assert body["output_ids"] == expected.token_ids
    for field, rows, num_rows in (
        ("additional_context_outputs", expected.additional_context_outputs, len(IDS)),
        ("additional_generation_outputs", expected.outputs[0].additional_generation_outputs, 3),
    ):
        assert set(body[field]) == set(rows) == set(NAMES)
        for name in NAMES:
            assert rows[name].shape == (num_rows, WIDTH)
            # One came from the other's cache; chunks may be rounded otherwise.
            np.testing.assert_allclose(np.array(body[field][name], np.float32), rows[name], atol=0.05)
    first, second = generate(launch, sampling_params={**asked, "n": 2, "temperature": 1}).json()
    assert set(first["additional_context_outputs"]) == set(NAMES)
    assert "additional_context_outputs" not in second
    assert np.shape(second["additional_generation_outputs"]["mlp:0"]) == (3, WIDTH)


def test_hidden_states_in_the_shape_of_sglang(launch: Launched) -> None:
    body = generate(launch, sampling_params=sampling(), return_hidden_states=True).json()
    states = body["meta_info"]["hidden_states"]
    assert [np.shape(rows) for rows in states] == [(len(IDS), WIDTH), *[(1, WIDTH)] * 3]
    named = sampling(additional_outputs=["hidden_states"])
    rows = generate(launch, sampling_params=named).json()["additional_generation_outputs"]["hidden_states"]
    np.testing.assert_allclose(np.array(states[1:], np.float32)[:, 0], np.array(rows, np.float32), atol=0.05)
    assert "additional_generation_outputs" not in body
    assert (
        generate(launch, sampling_params=sampling(max_new_tokens=1), return_hidden_states=True).json()[
            "meta_info"
        ]["hidden_states"][1:]
        == []
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_openai_answer_has_the_row_of_its_last_token(launch: Launched, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": IDS}
    body = {**prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "return_hidden_states": True}
    choices = post(launch, path, **body, n=2).json()["choices"]
    assert [np.shape(choice["hidden_states"]) for choice in choices] == [(WIDTH,)] * 2
    if "chat" not in path:
        rows = generate(launch, sampling_params=sampling(), return_hidden_states=True).json()
        last = np.array(rows["meta_info"]["hidden_states"][-1][0], np.float32)
        np.testing.assert_allclose(np.array(choices[0]["hidden_states"], np.float32), last, atol=0.05)
    (one,) = post(launch, path, **{**body, "max_tokens": 1}).json()["choices"]
    assert one["hidden_states"] == []
    (without,) = post(launch, path, **{**body, "return_hidden_states": False}).json()["choices"]
    assert "hidden_states" not in without
    refused = post(launch, path, **body, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_hidden_states")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"sampling_params": {"additional_outputs": ["mlp:1"]}},
            "sampling_params.additional_outputs",
            "mlp:1",
        ),
        (
            {"sampling_params": {"gather_context": True}},
            "sampling_params.gather_context",
            "additional_outputs",
        ),
        (
            {"sampling_params": {"additional_outputs": ["mlp:0"], "max_new_tokens": 90}},
            "sampling_params.additional_outputs",
            "--max-logits-bytes",
        ),
        (
            {"sampling_params": {"additional_outputs": ["mlp:0"]}, "return_hidden_states": True},
            "return_hidden_states",
            "additional_outputs",
        ),
        ({"return_hidden_states": True, "stream": True}, "return_hidden_states", "stream"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    launch: Launched, body: dict[str, Any], param: str, words: str
) -> None:
    response = generate(launch, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_the_executor_gives_them_with_the_last_result(launch: Launched) -> None:
    asked = [AdditionalModelOutput("mlp:0"), AdditionalModelOutput("hidden_states", gather_context=True)]
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    with GenerationExecutor.create(run_dir=launch.run_dir) as executor:
        request = GenerationRequest(IDS, params, additional_model_outputs=asked)
        (response,) = executor.await_responses(executor.enqueue_request(request), timeout=60.0)
        shapes = {each.name: each.output.shape for each in response.result.additional_outputs}
        assert shapes == {
            "mlp:0": (1, 3, WIDTH),
            "hidden_states": (1, 3, WIDTH),
            "context_hidden_states": (len(IDS), WIDTH),
        }
        done = executor.generate_async(IDS, params, additional_model_outputs=asked).result(60)
        assert done.additional_generation_outputs["mlp:0"].shape == (3, WIDTH)
        assert done.additional_context_outputs["hidden_states"].shape == (len(IDS), WIDTH)
    with pytest.raises(InvalidRequest, match="additional_model_outputs"):
        GenerationRequest(IDS, params, additional_model_outputs=["mlp:0"])  # type: ignore[list-item]


def test_the_ring_itself_refuses_what_is_not_served(launch: Launched) -> None:
    with Client(launch.run_dir) as client, pytest.raises(InvalidRequest, match="'mlp:1'; it has") as caught:
        client.generate(IDS, SamplingParams(additional_outputs=("mlp:1",)), timeout=60)
    assert caught.value.param == "additional_outputs"
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        response = httpx.post(launch.url + path, json={**body, "additional_outputs": ["mlp:0"]}, timeout=30.0)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "additional_outputs")


def test_a_name_that_the_model_does_not_have_ends_the_launch() -> None:
    launch = Launched("--additional-output", "mlp:99")
    try:
        assert launch.wait_exit(60) != 0
        assert "additional_output: this model has no 'mlp:99'; it has hidden_states" in launch.log()
    finally:
        launch.close()
