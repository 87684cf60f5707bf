"""The last of an answer comes when its pages, its rows and its name are free, however it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from carousel import AsyncClient, Client, GenerationExecutor, GenerationRequest, SamplingParams
from tests.harness.ring.launched import Launched, launched

PROMPT = "def f(x):\n    return x\n"
NUM_ROUNDS = 4
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module", params=["radix", "no_radix"])
def launch(request: pytest.FixtureRequest) -> Iterator[Launched]:
    # So few rows that one which is still taken is missing at once.
    flags = ["--dtype", "float32", "--max-running-requests", "4"]
    with launched(*flags, *([] if request.param == "radix" else ["--disable-radix-cache"])) as launch:
        yield launch


def check_free(info: dict[str, Any], cache: dict[str, Any]) -> None:
    """`cache`: the answer of a flush, which takes only pages that nobody holds."""
    assert (info["num_running"], info["num_waiting"]) == (0, 0)
    assert info["num_accepted"] == info["num_terminated"]
    assert cache["num_pages_in_use"] == 0


@pytest.fixture(scope="module")
def endings(launch: Launched) -> dict[str, SamplingParams]:
    """Requests whose sequences end, each in its own way."""
    with Client(launch.run_dir) as client:
        free = client.generate(PROMPT, GREEDY)
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    return {
        "length": GREEDY,
        "stop token": SamplingParams(stop_token_ids=(free.token_ids[5],), **common),
        "stop string": SamplingParams(stop=(free.text[6:9],), **common),
        "stop word": SamplingParams(stop_words_ids=(tuple(free.token_ids[4:6]),), **common),
        "several sequences": SamplingParams(n=4, **common),
        "logprobs": SamplingParams(logprobs=2, prompt_logprobs=1, **common),
    }


@pytest.mark.parametrize(
    "ending",
    ["length", "stop token", "stop string", "stop word", "several sequences", "logprobs"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_at_the_end_everything_is_free(
    launch: Launched, endings: dict[str, SamplingParams], ending: str, stream: bool
) -> None:
    with Client(launch.run_dir) as client:
        for _ in range(NUM_ROUNDS):
            if stream:
                list(client.stream(PROMPT, endings[ending], label="again"))
            else:
                client.generate(PROMPT, endings[ending], label="again")
            # In this order: a flush that came first would give the scheduler time.
            info = client.server_info()
            check_free(info, client.flush_cache())


def test_the_end_of_an_abort_and_of_a_time_limit_too(launch: Launched) -> None:
    async def run() -> None:
        async with AsyncClient(launch.run_dir) as client:
            for time_limit in [None, 0.02] * 5:
                options: dict[str, Any] = {} if time_limit is None else {"time_limit": time_limit}
                stream = client.stream(PROMPT, LONG, label="again", **options)
                reason = None
                async for delta in stream:
                    reason = delta.finish_reason
                    if time_limit is None:
                        client.abort(stream)
                assert reason == ("abort" if time_limit is None else "timeout")
                info = await client.server_info()
                check_free(info, await client.flush_cache())

    asyncio.run(run())


def test_as_many_as_there_are_rows_can_follow_at_once(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        for _ in range(NUM_ROUNDS):
            client.generate([PROMPT] * 4, GREEDY)
            assert client.server_info()["num_running"] == 0


def test_a_final_response_of_the_executor_comes_after_everything_is_free(launch: Launched) -> None:
    with GenerationExecutor.create(run_dir=launch.run_dir) as executor, Client(launch.run_dir) as client:
        for streaming in [False, True] * (NUM_ROUNDS // 2):
            request_id = executor.enqueue_request(GenerationRequest([5, 6, 7], GREEDY, streaming=streaming))
            is_final = False
            while not is_final:
                for response in executor.await_responses(request_id, timeout=10.0):
                    is_final = response.is_final
            info = client.server_info()
            check_free(info, client.flush_cache())


def test_over_http_the_same_id_can_be_sent_again_at_once(launch: Launched) -> None:
    body = {
        "text": PROMPT,
        "rid": "again",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    with httpx.Client(base_url=launch.url, timeout=30.0) as http:
        for _ in range(NUM_ROUNDS):
            answer = http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["id"] == "again"
            info = http.get("/server_info").json()
            check_free(info, http.post("/flush_cache").json())
