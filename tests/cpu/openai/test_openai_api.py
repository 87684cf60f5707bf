"""The HTTP server with all processes behind it and the demo model, as OpenAI's own client library sees it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import ProcessStatus, StatusPage
from tests.harness.ring.launched import ROOT, SLACK, Launched, wait_until

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def launch(demo_launch: Launched) -> Launched:
    return demo_launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[openai.OpenAI]:
    # The library retries by itself, which would hide a fault.
    with openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def scheduler_status(launch: Launched) -> ProcessStatus:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    try:
        return page.read("scheduler")
    finally:
        page.close()


def wait_idle(launch: Launched, timeout_s: float = 5.0) -> float:
    def idle() -> bool:
        status = scheduler_status(launch)
        return status.num_running == 0 and status.num_waiting == 0

    return wait_until(idle, timeout_s, "the scheduler has nothing to do")


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def metric(launch: Launched, name: str) -> float:
    text = httpx.get(f"{launch.url}/metrics", timeout=60.0).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
    return float(line.rpartition(" ")[2])


def test_both_dialects_give_the_same_tokens_and_are_counted(launch: Launched) -> None:
    names = ("num_requests_total", "e2e_request_latency_seconds_count", "queue_time_seconds_count")
    before = [metric(launch, name) for name in (*names, "generation_tokens_total")]
    with httpx.Client(base_url=launch.url, timeout=60.0) as http:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        body = {
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
            "return_logprob": True,
        }
        whole = http.post("/generate", json=body).json()
        lines = http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: "))
    assert whole["text"] == last["text"] == choice["text"]
    assert whole["output_ids"] == last["output_ids"]
    logprobs = [value for value, _, _ in whole["meta_info"]["output_token_logprobs"]]
    # A prompt that is cached is computed in other pieces.
    assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    after = [metric(launch, name) for name in (*names, "generation_tokens_total")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, 3, 3, 24]


def test_the_cache_can_be_flushed_and_the_settings_read(launch: Launched) -> None:
    with httpx.Client(base_url=launch.url, timeout=60.0) as http:
        wait_idle(launch)
        assert http.post("/flush_cache").json()["num_pages_in_use"] == 0
        info = http.get("/server_info").json()
        assert info["num_cached_pages"] == 0
        assert info["settings"]["max_running_requests"] == 8


def test_a_greedy_completion_is_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    events = list(
        client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.choices[0].text
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": PROMPT, "temperature": 0, "stop": ["return"]},
        {"prompt": PROMPT, "temperature": 0, "stop": ["urn"], "include_stop_str_in_output": True},
        {"prompt": PROMPT, "temperature": 0, "stop": ["longer than all of the output" * 5], "max_tokens": 3},
        {"prompt": "# 中文 😀 ", "temperature": 2, "logprobs": 2},
        {"prompt": "\u00e9" * 9, "temperature": 2, "min_tokens": 40},
        {"prompt": [7] * 2046, "temperature": 0, "logprobs": 1},
        {"prompt": ["a", "b", "a"], "temperature": 1},
    ],
    ids=lambda body: f"{body['prompt']!r:.12}",
)
def test_a_stream_agrees_with_the_whole_answer(launch: Launched, body: dict[str, Any]) -> None:
    body = {"max_tokens": 40, "seed": 3, **body}
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        whole = http.post("/v1/completions", json=body).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = http.post("/v1/completions", json={**body, **options}).text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    last = json.loads(usage.removeprefix("data: "))
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    for choice in whole["choices"]:
        own = [each for each in choices if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["matched_stop"] == choice["matched_stop"]
        if choice["logprobs"] is not None:
            tokens = [token for each in own for token in each["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("num_tokens", [2047, 2048, 2049])
def test_a_prompt_leaves_room_for_a_token_or_is_refused(client: openai.OpenAI, num_tokens: int) -> None:
    def complete() -> openai.types.Completion:
        return client.completions.create(model="demo", prompt=[7] * num_tokens, max_tokens=5)

    if num_tokens == 2047:
        completion = complete()
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 1
    else:
        with pytest.raises(openai.BadRequestError) as refused:
            complete()
        assert refused.value.code == "context_length_exceeded"


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "import os\n"}]
    whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=16, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        completion = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=24, temperature=1.0, top_p=1.0, seed=seed
        )
        return str(completion.choices[0].text)

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_several_prompts_answer_each_in_its_place(client: openai.OpenAI) -> None:
    prompts = ["class Stack:\n", "import sys\n", "def main():\n"]
    together = client.completions.create(model="demo", prompt=prompts, max_tokens=8, temperature=0)
    for prompt, choice in zip(prompts, together.choices, strict=True):
        alone = client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0)
        assert choice.text == alone.choices[0].text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model="demo", prompt=PROMPT, max_tokens=32, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=32, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs_spell_the_text_and_are_greedy_at_temperature_zero(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "import os\n"}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == completion.choices[0].message.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )


def test_a_second_request_with_the_same_prefix_finds_it_cached(client: openai.OpenAI) -> None:
    prompt = "# the same long beginning of a file\n" * 20
    for cached in (False, True):
        usage = client.completions.create(model="demo", prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == cached


def test_errors_are_the_exceptions_of_the_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="demo", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 5000)
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as id_error:
        client.completions.create(model="demo", prompt=[1, 1 << 30])
    assert id_error.value.param == "prompt"


def test_many_streams_at_once_all_end(client: openai.OpenAI, launch: Launched) -> None:
    def stream(number: int) -> int:
        events = client.completions.create(
            model="demo",
            prompt=f"value_{number} = ",
            max_tokens=16,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        *_, last = events
        assert last.usage is not None
        return int(last.usage.completion_tokens)

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(stream, range(24))) == [16] * 24
    wait_idle(launch)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(launch: Launched, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=launch.url) as http:
        request = http.build_request("POST", "/v1/completions", json=body)
        connection = socket.create_connection((request.url.host, request.url.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(request.content)}\r\n\r\n"
        connection.sendall(head.encode() + request.content)
        wait_until(lambda: scheduler_status(launch).num_running == 1, 5.0, "the request runs")
        connection.close()
        assert wait_idle(launch) < 1.5 * SLACK


def test_the_probes_answer(launch: Launched) -> None:
    for path in ("/live", "/ready", "/health"):
        assert httpx.get(launch.url + path).status_code == 200


def test_the_example_runs(launch: Launched) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/openai_client.py"), "--base-url", f"{launch.url}/v1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CompletionUsage" in done.stdout
