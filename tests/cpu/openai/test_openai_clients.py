"""Other people's clients against a launch: benchmark clients' requests, openai, langchain-openai, litellm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.ring.launched import Launched

REQUESTS = json.loads((Path(__file__).resolve().parents[2] / "data/benchmark_requests.json").read_text())
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def launch(demo_launch: Launched) -> Launched:
    return demo_launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.mark.parametrize("request_file", REQUESTS, ids=lambda request: request["client"])
def test_what_benchmark_clients_send_is_answered(launch: Launched, request_file: dict[str, Any]) -> None:
    body = request_file["body"]
    response = httpx.post(launch.url + request_file["path"], json=body, timeout=60.0)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        choices = response.json()["choices"]
        assert len(choices) == len(body["prompt"])
        assert all(len(choice["logprobs"]["tokens"]) >= 4 for choice in choices)
        return
    *blocks, last, _ = response.text.split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    if request_file["path"] == "/generate":
        assert chunks[-1]["meta_info"]["completion_tokens"] == 8
        assert {chunk["index"] for chunk in chunks if "index" in chunk} in (set(), {0, 1})
    elif "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] <= 8
        assert chunks[-1]["choices"] == []
    if body.get("ignore_eos") and "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] == 8


# -- openai --------------------------------------------------------------------------------------------------


def test_openai_gets_n_choices_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], n=3, max_tokens=6, seed=1
    )
    texts: dict[int, str] = {}
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], n=3, max_tokens=6, seed=1, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) > 1  # each draws with a seed of its own
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 18


def test_openai_gets_the_likelihood_of_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert values is not None
    assert tops is not None
    assert values[0] is None
    assert all(value < 0 for value in values[1:])
    assert all(max(top.values()) >= value for top, value in zip(tops[1:], values[1:], strict=True))


def test_what_comes_next_is_as_likely_as_when_it_stands_in_the_prompt(client: openai.OpenAI) -> None:
    first = client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=4,
        logprobs=0,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).choices[0]
    extra: Any = first.model_extra
    ids = [*extra["prompt_token_ids"], *extra["token_ids"]]
    second = client.completions.create(model="demo", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert first.logprobs is not None
    assert second.choices[0].logprobs is not None
    values = first.logprobs.token_logprobs or []
    assert len(values) == len(extra["token_ids"])
    echoed = second.choices[0].logprobs.token_logprobs or []
    assert echoed[-len(values) :] == pytest.approx(values, abs=1e-3)


def test_openai_async_streams_several_requests_at_once(launch: Launched) -> None:
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="demo", prompt=f"value_{number} = ", max_tokens=6, temperature=0, stream=True
                )
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

            return await asyncio.gather(*(one(number % 2) for number in range(6)))

    got = asyncio.run(texts())
    assert got[0::2] == [got[0]] * 3
    assert got[1::2] == [got[1]] * 3


def test_openai_gets_logprobs_stop_and_usage(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "import os\n"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = free.choices[0].logprobs
    assert content is not None
    entries = content.content or []
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert spelled == free.choices[0].message.content
    stop = spelled[3:5]
    stopped = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "import os\n"}],
        max_tokens=12,
        temperature=0,
        stop=[stop],
    )
    assert stopped.choices[0].message.content == spelled[: spelled.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.total_tokens == stopped.usage.prompt_tokens + stopped.usage.completion_tokens


# -- libraries on top of it ----------------------------------------------------------------------------------


def test_langchain_answers_and_streams(launch: Launched) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    settings: dict[str, Any] = {"model": "demo", "base_url": f"{launch.url}/v1", "api_key": "none"}
    settings |= {"temperature": 0, "max_tokens": 8, "max_retries": 0}
    chat = ChatOpenAI(**settings)
    whole = chat.invoke("import os\n")
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(str(part.content) for part in chat.stream("import os\n")) == whole.content
    completion = OpenAI(**settings)
    assert isinstance(completion.invoke(PROMPT), str)


def test_litellm_answers_and_streams(launch: Launched, litellm: Any) -> None:
    call: dict[str, Any] = {
        "model": "openai/demo",
        "api_base": f"{launch.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "import os\n"}],
        "max_tokens": 8,
        "temperature": 0,
        "num_retries": 0,
    }
    whole: Any = litellm.completion(**call)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens <= 8
    stream: Any = litellm.completion(**call, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
