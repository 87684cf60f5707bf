"""One request to a server with SGLang's /generate: times, token counts, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bench_serving.backends.base import BenchPrompt, GenerationOptions
from bench_serving.backends.sglang import SglangBackend
from bench_serving.records import RequestRecord
from carousel.http_client import HttpClient, RequestFailure
from tests.harness.http.scripted_server import HEAD, LAST, Step, chunked, event, plain, scripted_server
from tests.harness.ring.launched import SLACK

DONE = chunked(event(b"[DONE]")) + LAST


def ask(
    steps: Sequence[Step], *, prompt: BenchPrompt = "x", **changes: Any
) -> tuple[RequestRecord, dict[str, Any], str]:
    """(record, body, head) of one request that is answered by `steps`."""
    values: dict[str, Any] = {"stream": True, "ignore_eos": True, "add_special_tokens": True, "extra": {}}
    options = GenerationOptions(**(values | changes))

    async def run() -> tuple[RequestRecord, dict[str, Any], str]:
        async with scripted_server(lambda _: steps) as server:
            url = f"http://127.0.0.1:{server.port}"
            client = HttpClient(url, {}, timeout_s=5.0 * SLACK, clock=server.clock)
            record = RequestRecord(input_len=1, asked_output_len=4)
            await SglangBackend(client, options, server.clock).generate(prompt, 4, record)
            return record, server.bodies[0], server.heads[0]

    return asyncio.run(run())


def text_so_far(text: str, num_tokens: int, reason: str | None = None, **meta: Any) -> dict[str, Any]:
    finish = None if reason is None else {"type": reason}
    return {"text": text, "meta_info": {"completion_tokens": num_tokens, "finish_reason": finish, **meta}}


def chunk(*given: Any, **meta: Any) -> bytes:
    return chunked(event(text_so_far(*given, **meta)))


def test_events_that_repeat_the_text_are_cut_into_chunks_with_their_tokens() -> None:
    record, body, head = ask(
        [
            (1.0, HEAD),
            (2.0, chunk("a", 1)),
            (3.0, chunk("abc", 3)),
            (4.0, chunk("abc", 4, "length", prompt_tokens=7, cached_tokens=2) + DONE),
        ]
    )
    assert head.startswith("POST /generate HTTP/1.1\r\n")
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    assert body == {"text": "x", "sampling_params": sampling, "stream": True}
    assert (record.ttft_s, record.latency_s, record.itls_s()) == (2.0, 4.0, [0.5, 0.5, 1.0])
    assert (record.text, record.input_len, record.cached_len, record.output_len) == ("abc", 7, 2, 4)
    assert record.has_token_counts


def test_ids_and_fields_of_ones_own_are_sent() -> None:
    extra = {"priority": 1, "sampling_params": {"top_k": 5}}
    _, body, _ = ask([(1.0, HEAD + chunk("a", 4, "stop") + DONE)], prompt=[3, 4], extra=extra)
    assert (body["input_ids"], body["priority"]) == ([3, 4], 1)
    assert body["sampling_params"]["top_k"] == 5
    assert body["sampling_params"]["max_new_tokens"] == 4


def test_a_whole_answer_has_its_counts() -> None:
    answer = msgspec.json.encode(text_so_far("abc", 4, "length", prompt_tokens=7))
    record, body, _ = ask([(1.0, plain(200, answer))], stream=False)
    assert body["stream"] is False
    assert (record.text, record.input_len, record.output_len) == ("abc", 7, 4)
    assert record.received_bytes == len(answer)


def test_logprobs_are_those_of_the_last_event() -> None:
    one, two = [[-0.5, 1, None]], [[-0.5, 1, None], [-0.25, 2, None]]
    record, body, _ = ask(
        [
            (1.0, HEAD + chunk("a", 1, output_token_logprobs=one)),
            (2.0, chunk("ab", 2, "stop", output_token_logprobs=two) + DONE),
        ],
        num_logprobs=0,
    )
    assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 0)
    assert record.extra_bytes == len("[[-0.5, 1, null], [-0.25, 2, null]]")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (HEAD + chunk("a", 1) + LAST, "without a finish_reason"),
        (HEAD + chunk("a", 1, "abort") + DONE, "ended the request early"),
        (HEAD + chunked(event({"error": {"message": "no room"}})) + DONE, "no room"),
        (HEAD + chunked(event({"choices": []})) + DONE, "it has no meta_info"),
        (HEAD + chunked(event(b"nonsense")) + DONE, "not an answer"),
        (plain(400, b"wrong"), "HTTP 400: wrong"),
    ],
)
def test_what_is_no_complete_answer_fails(answer: bytes, says: str) -> None:
    with pytest.raises(RequestFailure, match=says):
        ask([(1.0, answer)])
