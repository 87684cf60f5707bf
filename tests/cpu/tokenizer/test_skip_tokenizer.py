"""A launch with --skip-tokenizer-init, on a model without tokenizer files: ids in and ids out, over all that
answers. Another launch of the same model with its tokenizer says what the ids should be.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from carousel import Client, GenerationExecutor, SamplingParams
from runtime.base.errors import InvalidRequest
from runtime.settings.config import DEMO_MODEL
from runtime.text.tokenizer import load
from tests.harness.http.http_front import events
from tests.harness.ring.launched import Launched, launched

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = load(DEMO_MODEL).encode_batch(["def f(x):\n"])[0].tolist()
    return ids


@pytest.fixture(scope="module")
def expected(prompt: list[int], demo_launch: Launched) -> list[int]:
    with Client(demo_launch.run_dir) as client:
        return client.generate(prompt, GREEDY).token_ids


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = tmp_path_factory.mktemp("models") / "bare"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(Path(DEMO_MODEL) / name, model)
    with launched("--model", str(model), "--skip-tokenizer-init", "--dtype", "float32") as launch:
        yield launch


def post(launch: Launched, path: str, **body: Any) -> httpx.Response:
    return httpx.post(launch.url + path, json=body, timeout=30.0)


def complete(launch: Launched, prompt: Any, **body: Any) -> httpx.Response:
    greedy = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    return post(launch, "/v1/completions", prompt=prompt, **(greedy | body))


def test_the_client_library_takes_and_gives_ids(
    launch: Launched, prompt: list[int], expected: list[int]
) -> None:
    with Client(launch.run_dir) as client:
        whole = client.generate(prompt, GREEDY)
        assert (whole.text, whole.token_ids) == ("", expected)
        deltas = list(client.stream(prompt, GREEDY))
        assert [each for delta in deltas for each in delta.token_ids] == expected
        assert not any(delta.text for delta in deltas)
        with_logprobs = client.generate(
            prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=2)
        )
        assert [entry.token_id for entry in with_logprobs.logprobs] == expected[:2]


def test_a_sequence_stops_at_and_avoids_what_is_said_in_ids(
    launch: Launched, prompt: list[int], expected: list[int]
) -> None:
    with Client(launch.run_dir) as client:
        at_token = client.generate(
            prompt, SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(expected[2],))
        )
        first = expected.index(expected[2])
        assert at_token.token_ids == expected[: first + 1]
        assert at_token.matched_stop == expected[2]
        at_word = client.generate(
            prompt,
            SamplingParams(
                max_tokens=8, ignore_eos=True, temperature=0.0, stop_words_ids=(tuple(expected[:3]),)
            ),
        )
        assert at_word.token_ids == expected[:3]
        assert at_word.matched_stop == " ".join(f"token_id:{each}" for each in expected[:3])
        without = client.generate(
            prompt, SamplingParams(max_tokens=8, temperature=0.0, bad_words_ids=((expected[0],),))
        )
        assert expected[0] not in without.token_ids


@pytest.mark.parametrize(
    ("prompt_of_text", "sampling", "param"),
    [
        ("x", SamplingParams(), "prompt"),
        ([{"role": "user", "content": "x"}], SamplingParams(), "messages"),
        ([5], SamplingParams(stop=("x",)), "stop"),
        ([5], SamplingParams(bad_words=("x",)), "bad_words"),
    ],
)
def test_the_client_library_is_told_what_needs_a_tokenizer(
    launch: Launched, prompt_of_text: Any, sampling: SamplingParams, param: str
) -> None:
    with (
        Client(launch.run_dir) as client,
        pytest.raises(InvalidRequest, match="--skip-tokenizer-init") as caught,
    ):
        client.generate(prompt_of_text, sampling)
    assert (caught.value.param, caught.value.code) == (param, "no_tokenizer")


def test_the_executor_takes_and_gives_ids(launch: Launched, prompt: list[int], expected: list[int]) -> None:
    with GenerationExecutor.create(run_dir=launch.run_dir) as executor:
        assert executor.generate(prompt, GREEDY).outputs[0].token_ids == expected
        last = None
        for last in executor.generate_async(prompt, GREEDY, streaming=True):
            assert last.text_diff == ""
        assert last is not None
        assert last.token_ids == expected


def test_completions_give_ids_and_logprobs_without_texts(
    launch: Launched, prompt: list[int], expected: list[int]
) -> None:
    (choice,) = complete(launch, prompt, logprobs=1, prompt_logprobs=0).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", expected, prompt)
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in expected]
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1][str(prompt[1])]
    assert entry["decoded_token"] == f"token_id:{prompt[1]}"
    (choice,) = complete(launch, prompt, return_token_ids=False).json()["choices"]
    assert choice["token_ids"] is None


def test_a_stream_of_completions_has_every_id_once(
    launch: Launched, prompt: list[int], expected: list[int]
) -> None:
    *chunks, done = events(complete(launch, prompt, stream=True))
    assert done == "[DONE]"
    assert [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]] == expected


def test_generate_takes_and_gives_ids(launch: Launched, prompt: list[int], expected: list[int]) -> None:
    body = post(
        launch,
        "/generate",
        input_ids=prompt,
        sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
    ).json()
    assert (body["text"], body["output_ids"]) == ("", expected)
    logprobs = body["meta_info"]["output_token_logprobs"]
    assert [(token, text) for _, token, text in logprobs] == [(each, None) for each in expected]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x"}, "prompt"),
    ("/v1/completions", {"prompt": ["x", "y"]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "return_token_ids": False}, "prompt"),
    ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop"),
    ("/v1/completions", {"prompt": [5], "bad_words": ["x"]}, "bad_words"),
    ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "return_token_ids": True},
        "messages",
    ),
    ("/generate", {"text": "x"}, "text"),
    ("/generate", {"text": "x", "return_logprob": True, "logprob_start_len": 0}, "text"),
    ("/generate", {"input_ids": [5], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    (
        "/generate",
        {"input_ids": [5], "return_logprob": True, "return_text_in_logprobs": True},
        "return_text_in_logprobs",
    ),
    ("/tokenize", {"prompt": "x"}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ("/detokenize", {"tokens": [5]}, "tokens"),
    ("/detokenize", {"tokens": []}, "tokens"),
]
STREAMED = [
    (path, {**body, "stream": True}, param) for path, body, param in REFUSED if "tokenize" not in path
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED + STREAMED)
def test_what_needs_a_tokenizer_is_refused_by_its_name(
    launch: Launched, path: str, body: dict[str, Any], param: str
) -> None:
    response = post(launch, path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "no_tokenizer")
    assert error["message"].startswith(f"{param}: ")
    assert "--skip-tokenizer-init" in error["message"]
