"""One request to a server with OpenAI's API: exact times, token counts, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from bench_serving.backends.base import BenchPrompt, GenerationOptions
from bench_serving.backends.openai import Api, OpenAIBackend
from bench_serving.backends.over_http import served_model, tokenizer_path
from bench_serving.records import RequestRecord
from carousel.http_client import HttpClient, RequestFailure
from runtime.base.errors import ConfigError
from tests.harness.http.scripted_server import (
    HEAD,
    LAST,
    Step,
    chunked,
    end,
    event,
    plain,
    scripted_server,
    text_chunk,
)
from tests.harness.ring.launched import SLACK

TIMEOUT_S = 5.0 * SLACK


def options(**changes: Any) -> GenerationOptions:
    values: dict[str, Any] = {"stream": True, "ignore_eos": True, "add_special_tokens": True, "extra": {}}
    return GenerationOptions(**(values | changes))


def ask(
    steps: Sequence[Step],
    *,
    prompt: BenchPrompt = "x",
    api: Api = "completions",
    timeout_s: float = TIMEOUT_S,
    **changes: Any,
) -> tuple[RequestRecord, dict[str, Any], str]:
    """(record, body, head) of one request that is answered by `steps`."""

    async def run() -> tuple[RequestRecord, dict[str, Any], str]:
        async with scripted_server(lambda _: steps) as server:
            client = HttpClient(
                f"http://127.0.0.1:{server.port}/base/",
                {"X-Key": "k"},
                timeout_s=timeout_s,
                clock=server.clock,
            )
            backend = OpenAIBackend(client, api, "m", options(**changes), server.clock)
            record = RequestRecord(input_len=1, asked_output_len=4)
            await backend.generate(prompt, 4, record)
            return record, server.bodies[0], server.heads[0]

    return asyncio.run(run())


def fail(steps: Sequence[Step], **changes: Any) -> str:
    with pytest.raises(RequestFailure) as caught:
        ask(steps, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("info", "path"),
    [(b"", ""), (b"[]", ""), (b'{"tokenizer_path": "/models/x"}', "/models/x")],
)
def test_a_server_may_say_where_its_tokenizer_is(info: bytes, path: str) -> None:
    async def ask() -> str:
        async with scripted_server(lambda _: []) as server:
            server.model_info = info
            url = f"http://127.0.0.1:{server.port}"
            return await tokenizer_path(HttpClient(url, {}, timeout_s=TIMEOUT_S, clock=server.clock))

    assert asyncio.run(ask()) == path


def test_times_are_those_at_which_each_chunk_arrived() -> None:
    record, body, head = ask(
        [
            (1.0, HEAD),
            (2.0, text_chunk("a")),
            (2.5, text_chunk("b")),
            (4.0, text_chunk("c", "length")),
            (9.0, end(7, 3)),
        ]
    )
    assert (record.start_s, record.ttft_s, record.latency_s) == (0.0, 2.0, 4.0)
    assert record.itls_s() == [0.5, 1.5]
    assert record.tpot_s == 1.0
    assert (record.input_len, record.output_len, record.text) == (7, 3, "abc")
    assert not record.has_token_counts
    assert head.startswith("POST /base/v1/completions HTTP/1.1\r\n")
    assert "X-Key: k\r\n" in head
    assert body == {
        "prompt": "x",
        "model": "m",
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_stream_cut_at_any_byte_gives_the_same_answer() -> None:
    data = HEAD + text_chunk("ä") + text_chunk("b", "stop") + end(2, 2)
    for cut in range(1, len(data)):
        record, _, _ = ask([(1.0, data[:cut]), (2.0, data[cut:])])
        assert (record.text, record.output_len, len(record.chunk_times_s)) == ("äb", 2, 2)


def test_the_tokens_of_a_chunk_share_its_gap_where_the_server_counts_them() -> None:
    by_ids, _, _ = ask(
        [
            (1.0, HEAD + text_chunk("a", token_ids=[1])),
            (4.0, text_chunk("bcd", "length", token_ids=[2, 3, 4])),
            (5.0, end(1, 4)),
        ]
    )
    assert by_ids.itls_s() == [1.0, 1.0, 1.0]
    by_usage, _, _ = ask(
        [
            (1.0, HEAD + text_chunk("a", usage={"completion_tokens": 1})),
            (2.0, text_chunk("", usage={"completion_tokens": 2})),
            (4.0, text_chunk("cd", "length", usage={"completion_tokens": 4})),
            (5.0, end(1, 4)),
        ]
    )
    assert by_usage.itls_s() == [1.0, 1.0, 1.0]
    assert by_ids.has_token_counts
    assert by_usage.has_token_counts


def test_a_server_that_can_is_asked_to_count_the_tokens_of_each_chunk() -> None:
    steps = [(1.0, HEAD + text_chunk("a", "stop") + end(1, 1))]
    _, body, _ = ask(steps, counts_tokens=True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    answer = b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}'
    _, body, _ = ask([(1.0, plain(200, answer))], counts_tokens=True, stream=False)
    assert "stream_options" not in body


def test_bytes_are_those_of_the_body_and_logprobs_are_counted_as_they_are_spelled() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5]}
    spelled = len(json.dumps(logprobs))
    first = event({"choices": [{"text": "a", "logprobs": logprobs}]})
    last = event({"choices": [{"text": "b", "logprobs": None, "finish_reason": "length"}]})
    record, body, _ = ask([(1.0, HEAD + chunked(first)), (2.0, chunked(first) + chunked(last) + LAST)])
    assert "logprobs" not in body
    assert (record.received_bytes, record.extra_bytes) == (2 * len(first) + len(last), 2 * spelled)
    choice = {"text": "ab", "logprobs": logprobs, "finish_reason": "length"}
    whole = json.dumps({"choices": [choice], "usage": {"completion_tokens": 2}}).encode()
    record, _, _ = ask([(1.0, plain(200, whole))], stream=False)
    assert (record.received_bytes, record.extra_bytes) == (len(whole), spelled)


@pytest.mark.parametrize(
    ("api", "num_logprobs", "fields"),
    [
        ("completions", 0, {"logprobs": 0}),
        ("completions", 3, {"logprobs": 3}),
        ("chat", 3, {"logprobs": True, "top_logprobs": 3}),
    ],
)
def test_logprobs_are_asked_for_as_each_api_spells_them(
    api: Api, num_logprobs: int, fields: dict[str, Any]
) -> None:
    _, body, _ = ask([(1.0, HEAD + text_chunk("a", "stop") + end(1, 1))], api=api, num_logprobs=num_logprobs)
    assert fields.items() <= body.items()
    assert "top_logprobs" in body or api == "completions"


def test_usage_in_the_last_chunk_alone_is_no_count_of_its_chunk() -> None:
    record, _, _ = ask(
        [
            (1.0, HEAD + text_chunk("a")),
            (2.0, text_chunk("b", "length", usage={"prompt_tokens": 1, "completion_tokens": 9})),
            (3.0, chunked(event(b"[DONE]")) + LAST),
        ]
    )
    assert (record.chunk_tokens, record.output_len, record.has_token_counts) == ([1, 1], 9, False)


def test_a_chunk_without_text_is_no_first_token() -> None:
    delta: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    said: dict[str, Any] = {"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]}
    last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    messages = [{"role": "user", "content": "x"}]
    record, body, head = ask(
        [
            (1.0, HEAD + chunked(event(delta))),
            (2.0, chunked(event(said))),
            (3.0, chunked(event(last))),
            (4.0, end(1, 1)),
        ],
        prompt=messages,
        api="chat",
    )
    assert (record.ttft_s, record.latency_s, record.text) == (2.0, 3.0, "hi")
    assert head.startswith("POST /base/v1/chat/completions ")
    assert (body["messages"], body["max_completion_tokens"]) == (messages, 4)


def test_an_answer_that_is_not_streamed_has_a_latency_and_nothing_else() -> None:
    answer = {
        "choices": [{"text": "abc", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    record, body, _ = ask([(3.0, plain(200, json.dumps(answer).encode()))], stream=False)
    assert (record.latency_s, record.ttft_s, record.tpot_s, record.itls_s()) == (3.0, None, None, [])
    assert (record.input_len, record.output_len, record.cached_len) == (5, 3, 4)
    assert body["stream"] is False
    assert "stream_options" not in body


def test_extra_fields_win_and_options_are_sent() -> None:
    steps = [(1.0, HEAD + text_chunk("a", "stop") + end(1, 1))]
    _, body, _ = ask(
        steps,
        ignore_eos=False,
        add_special_tokens=False,
        extra={"temperature": 0.5, "top_k": 3},
        prompt=[1, 2],
    )
    assert "ignore_eos" not in body
    assert (body["prompt"], body["temperature"], body["top_k"]) == ([1, 2], 0.5, 3)
    assert body["add_special_tokens"] is False


def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    record, _, _ = ask([(1.0, head + event({"choices": [{"text": "a", "finish_reason": "stop"}]})[:-2])])
    assert record.text == "a"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (plain(503, b'{"error":{"message":"queue is full"}}'), "HTTP 503: .*queue is full"),
        (HEAD + text_chunk("a"), "ended before the answer was complete"),
        (HEAD + text_chunk("a") + LAST, "without a finish_reason"),
        (HEAD + chunked(event({"error": {"message": "worker died"}})) + LAST, "^worker died$"),
        (HEAD + text_chunk("a", "abort") + end(1, 1), "finish_reason abort"),
        (HEAD + chunked(event(b"{nonsense")) + LAST, "not an answer of OpenAI's API"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
        (b"", "ended before the answer was complete"),
    ],
)
def test_whatever_is_not_a_whole_answer_is_a_failure_that_says_why(answer: bytes, says: str) -> None:
    with pytest.raises(RequestFailure, match=says):
        ask([(1.0, answer)] if answer else [])


def test_a_whole_answer_without_usage_is_a_failure() -> None:
    body = b'{"choices":[{"text":"a"}]}'
    assert "no usage" in fail([(1.0, plain(200, body))], stream=False)
    assert "no choices" in fail([(1.0, plain(200, b"{}"))], stream=False)


def test_a_server_that_never_answers_is_given_up() -> None:
    async def run() -> None:
        async with scripted_server(lambda _: [(0.0, b"")]) as server:
            client = HttpClient(f"127.0.0.1:{server.port}", {}, timeout_s=0.01, clock=float)
            with pytest.raises(RequestFailure, match=r"within 0\.01 s"):
                await client.post("/", b"{}", lambda data, now: None)

    asyncio.run(run())


def test_a_refused_connection_names_the_address() -> None:
    with pytest.raises(RequestFailure, match=r"127\.0\.0\.1:1: "):
        asyncio.run(HttpClient("http://127.0.0.1:1", {}, timeout_s=TIMEOUT_S, clock=float).get("/"))


def test_the_served_model_is_the_first_that_the_server_names() -> None:
    async def run() -> str:
        async with scripted_server(lambda _: []) as server:
            url = f"http://127.0.0.1:{server.port}"
            return await served_model(HttpClient(url, {}, timeout_s=TIMEOUT_S, clock=server.clock))

    assert asyncio.run(run()) == "scripted"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:notaport"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url, {}, timeout_s=TIMEOUT_S, clock=float)
