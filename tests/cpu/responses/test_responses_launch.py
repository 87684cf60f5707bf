"""/v1/responses against a whole launch: the same tokens as a chat, and what only a real ring refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.harness.ring.launched import Launched

TEXT = "def fibonacci(n):\n"
SAME: dict[str, Any] = {"seed": 7, "temperature": 0.9}
LONG = "word " * 5000


@pytest.fixture(scope="module")
def client(demo_launch: Launched) -> Iterator[openai.OpenAI]:
    url = f"{demo_launch.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def spelled(logprobs: Any) -> list[Any]:
    return [
        (each.token, each.logprob, [(top.token, top.logprob) for top in each.top_logprobs])
        for each in logprobs
    ]


def test_a_response_is_a_chat_by_another_name(client: openai.OpenAI) -> None:
    """A response, its stream and a chat draw the same tokens, and give the same logprobs."""
    asked: Any = {"model": "demo", "input": TEXT, "max_output_tokens": 24, "extra_body": SAME}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    chat: Any = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
        extra_body=SAME,
    )
    (choice,) = chat.choices
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    first, final = whole.output[0], events[-1].response
    assert whole.output_text == "".join(event.delta for event in deltas) == choice.message.content
    assert whole.status == ("incomplete" if choice.finish_reason == "length" else "completed")
    for told in (
        first.content[0].logprobs,
        final.output[0].content[0].logprobs,
        [each for event in deltas for each in event.logprobs],
    ):
        assert spelled(told) == spelled(choice.logprobs.content)
    for usage in (whole.usage, final.usage):
        assert (usage.input_tokens, usage.output_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
        )


def test_a_conversation_that_is_too_long_is_refused_or_cut(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": "x"}, {"role": "user", "content": LONG}]
    for given in (LONG, items):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="demo", input=given, max_output_tokens=2)
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    cut = client.responses.create(model="demo", input=items, max_output_tokens=2, truncation="auto")
    assert cut.usage is not None
    assert cut.usage.input_tokens > 100


def test_a_schema_that_is_not_supported_is_refused_by_its_place(demo_launch: Launched) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    response = httpx.post(f"{demo_launch.url}/v1/responses", json=body, timeout=60.0)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "text.format"
    assert "/properties/a" in response.json()["error"]["message"]
