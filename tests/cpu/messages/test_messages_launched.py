"""The Messages API of a launch, by Anthropic's clients, beside chat completions of the same prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.harness.ring.launched import Launched

MESSAGES: Any = [{"role": "user", "content": "def fibonacci(n):\n"}]


@pytest.fixture(scope="module")
def client(demo_launch: Launched) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_launch.url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_a_whole_answer_and_a_chat_completion_have_the_same_text(
    client: anthropic.Anthropic, demo_launch: Launched, seed: int
) -> None:
    drawn: dict[str, Any] = {"seed": seed, "temperature": 0.9, "top_p": 0.95, "top_k": 40}
    whole = client.messages.create(model="demo", max_tokens=24, messages=MESSAGES, extra_body=drawn)
    with client.messages.stream(model="demo", max_tokens=24, messages=MESSAGES, extra_body=drawn) as stream:
        texts = "".join(stream.text_stream)
        last = stream.get_final_message()
    body = {"messages": MESSAGES, "max_tokens": 24, **drawn}
    chat = httpx.post(f"{demo_launch.url}/v1/chat/completions", json=body, timeout=60.0).json()
    assert texts == text_of(last) == text_of(whole) == chat["choices"][0]["message"]["content"]
    assert last.stop_reason == whole.stop_reason
    assert (chat["choices"][0]["finish_reason"] == "length") == (whole.stop_reason == "max_tokens")
    for usage in (whole.usage, last.usage):
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == chat["usage"]["prompt_tokens"]
        assert usage.output_tokens == chat["usage"]["completion_tokens"]


def test_tokens_are_counted_as_they_are_used_and_those_in_the_cache_are_told(
    client: anthropic.Anthropic,
) -> None:
    system: Any = [{"type": "text", "text": "import os\n" * 40, "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "system": system}
    count = client.messages.count_tokens(**asked).input_tokens
    first, second = (client.messages.create(**asked, max_tokens=2).usage for _ in range(2))
    for usage in (first, second):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
        assert usage.cache_creation_input_tokens == 0
    assert (second.cache_read_input_tokens or 0) > count // 2


def test_a_stop_sequence_and_an_answer_that_was_begun(client: anthropic.Anthropic) -> None:
    greedy = {"temperature": 0}
    text = text_of(client.messages.create(model="demo", max_tokens=16, messages=MESSAGES, extra_body=greedy))
    stop = text[4:7]
    stopped = client.messages.create(
        model="demo", max_tokens=16, messages=MESSAGES, stop_sequences=[stop], extra_body=greedy
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text[: text.index(stop)]
    begun = [*MESSAGES, {"role": "assistant", "content": text[:4]}]
    assert client.messages.create(model="demo", max_tokens=4, messages=begun).content


def test_async_streams_run_side_by_side(demo_launch: Launched) -> None:
    async def texts() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=demo_launch.url, api_key="none", max_retries=0, timeout=60.0
        ) as client:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"value_{number} = "}]
                async with client.messages.stream(
                    model="demo", max_tokens=6, messages=messages, extra_body={"temperature": 0}
                ) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*(one(number % 2) for number in range(4)))

    got = asyncio.run(texts())
    assert got[0::2] == [got[0]] * 2
    assert got[1::2] == [got[1]] * 2


def test_a_conversation_that_is_too_long_is_refused(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "a b c d " * 4000}]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model="demo", max_tokens=2, messages=long, stream=stream)
        body: Any = caught.value.body
        assert body["error"]["type"] == "invalid_request_error"
        assert body["request_id"]
