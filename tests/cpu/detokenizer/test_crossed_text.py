"""With several processes of every kind, each caller gets its own answer and no other's.

Every request is biased to one token, which no other request in flight has; so an answer that went astray, or
a part of one, is seen at once, whatever the model says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from carousel import AsyncClient, SamplingParams
from runtime.text.tokenizer import Tokenizer
from tests.harness.ring.launched import Launched, free_ports, launched

FRONT_ENDS = 4
NUM_PORTS = 4
FIRST_ID = 300
NUM_IDS = 3000
NUM_TOKENS = 6
AT_A_TIME = 48
STRONG = 100.0
"""The largest bias that is taken, and far beyond what the model's logits differ by."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    workers = ("--tokenizer-workers", "2", "--detokenizer-workers", "2", "--api-workers", str(FRONT_ENDS))
    with launched(
        *workers, "--log-level", "warning", "--zmq-bind", f"tcp://127.0.0.1:{free_ports(NUM_PORTS)}"
    ) as launch:
        yield launch


def token_of(number: int) -> int:
    """Return the token of request `number`; its neighbours, who are in flight with it, have others."""
    return FIRST_ID + number % NUM_IDS


class Sdk:
    """A front end that uses the client library, streaming every other request."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, number: int) -> tuple[str, list[int]]:
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=0.0,
            skip_special_tokens=False,
            logit_bias=((token_of(number), STRONG),),
        )
        prompt = f"request {number} "
        if number % 2:
            done = await self._client.generate(prompt, sampling, timeout=TIMEOUT_S)
            return done.text, list(done.token_ids)
        text, ids = "", []
        async for delta in self._client.stream(prompt, sampling):
            text += delta.text
            ids += delta.token_ids
        return text, ids


class Http:
    """A front end over HTTP. Each request has a connection of its own, so that every API process has some."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = f"{url}/v1/completions"

    async def ask(self, number: int) -> tuple[str, list[int] | None]:
        body = {
            "model": "carousel-demo",
            "prompt": f"request {number} ",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "skip_special_tokens": False,
            "logit_bias": {str(token_of(number)): STRONG},
        }
        reply = await self._client.post(self._url, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"], None


@asynccontextmanager
async def front_ends(launch: Launched) -> AsyncIterator[list[Sdk | Http]]:
    async with (
        AsyncClient(launch.run_dir) as local,
        AsyncClient(launch.run_dir) as second,
        AsyncClient(launch.state()["zmq_bind"], curve_dir=launch.run_dir / "keys" / "client") as remote,
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0)) as http,
    ):
        yield [Sdk(local), Sdk(second), Sdk(remote), Http(http, launch.url)]


async def ask_all(launch: Launched, demo: Tokenizer, num_requests: int) -> list[str]:
    """Ask so many requests in all, over all front ends at once; what came back wrong, in words."""
    wrong: list[str] = []
    expected = {
        token: demo.decode([token] * NUM_TOKENS, skip_special_tokens=False)
        for token in {token_of(number) for number in range(num_requests)}
    }

    async def ask_some(front_end: Sdk | Http, numbers: Iterator[int]) -> None:
        for number in numbers:
            token = token_of(number)
            text, ids = await front_end.ask(number)
            if text != expected[token] or ids not in (None, [token] * NUM_TOKENS):
                wrong.append(f"request {number}: {text!r} {ids}, not {expected[token]!r}")

    async with front_ends(launch) as fronts:
        sources = [iter(range(index, num_requests, len(fronts))) for index in range(len(fronts))]
        await asyncio.gather(
            *(
                ask_some(front_end, numbers)
                for front_end, numbers in zip(fronts, sources, strict=True)
                for _ in range(AT_A_TIME)
            )
        )
    return wrong


def test_no_text_is_crossed(launch: Launched, demo: Tokenizer) -> None:
    assert asyncio.run(ask_all(launch, demo, 400)) == []


@pytest.mark.full
def test_no_text_is_crossed_in_ten_thousand_requests(launch: Launched, demo: Tokenizer) -> None:
    assert asyncio.run(ask_all(launch, demo, 10_000)) == []
