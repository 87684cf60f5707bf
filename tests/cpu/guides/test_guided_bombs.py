"""Guides that explode, 200 at once over HTTP: all end in time, others go on, who leaves is waited for no
longer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from grammar_proc.compiler import MAX_COMPILE_S, MAX_WAIT_S
from tests.harness.guides.bombs import bomb
from tests.harness.ring.launched import SLACK, launched

NUM_BOMBS = 200
JSON = {"Content-Type": "application/json"}
REFUSALS = {"invalid_guide", "unsupported_schema", "guide_too_large", "guide_too_complex", "invalid_value"}
TIMEOUT_S = 2 * (MAX_COMPILE_S + MAX_WAIT_S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in whose queue all of them find a place, so that only guides are refused."""
    queue = ("--max-running-requests", "8", "--max-queued-requests", str(4 * NUM_BOMBS))
    with launched("--cpu-threads", "1", *queue) as launch:
        yield launch.url


async def explode(client: httpx.AsyncClient, body: bytes) -> tuple[float, httpx.Response]:
    began = time.monotonic()
    try:
        response = await client.post("/v1/completions", content=body, headers=JSON)
    except (httpx.ReadError, httpx.WriteError):
        assert len(body) > 1 << 20  # refused before it was read
        response = httpx.Response(413)
    # A machine with much else to do may not have read the largest ones within the time for a body.
    assert response.status_code != 408 or len(body) > 1 << 20
    return time.monotonic() - began, response


async def wait_of_plain(client: httpx.AsyncClient) -> float:
    began = time.monotonic()
    response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 8, "ignore_eos": True})
    assert response.status_code == 200, response.text
    return time.monotonic() - began


def test_200_bombs_at_once_end_in_time_and_hold_up_no_plain_request(url: str) -> None:
    bodies = [bomb(number) for number in range(NUM_BOMBS)]

    async def go() -> tuple[list[tuple[float, httpx.Response]], list[float]]:
        limits = httpx.Limits(max_connections=NUM_BOMBS + 8)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
            exploding = [asyncio.create_task(explode(client, body)) for body in bodies]
            waits: list[float] = []
            while len(waits) < 8 or not all(each.done() for each in exploding):
                waits.append(await wait_of_plain(client))
                await asyncio.sleep(0.05)
            return await asyncio.gather(*exploding), waits

    ended, waits = asyncio.run(go())
    statuses = {response.status_code for _, response in ended}
    assert statuses <= {200, 400, 408, 413, 503}
    refused = [response for _, response in ended if response.status_code == 503]
    for response in refused:
        assert int(response.headers["Retry-After"]) > 0
    codes = {response.json()["error"]["code"] for response in refused}
    assert "too_many_guides" in codes
    assert codes <= {"too_many_guides", "client_overloaded"}  # or too many bodies were on their way
    reasons = [response.json()["error"] for _, response in ended if response.status_code == 400]
    assert {error["code"] for error in reasons} <= REFUSALS, reasons
    assert max(seconds for seconds, _ in ended) < MAX_COMPILE_S + MAX_WAIT_S + 5.0 * SLACK
    assert (
        max(waits) < 10.0 * SLACK
    )  # some megabytes of bodies are read meanwhile, and all this is one machine
    assert sorted(waits)[len(waits) // 2] < 2.0
    assert kept(url, "still here") == "still here"


def kept(url: str, choice: str) -> str:
    """The output of a guide that is compiled now; asked again while others are."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        body = {"prompt": "x", "max_tokens": 30, "guided_choice": [choice]}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        if response.status_code != 503:
            text: str = response.json()["choices"][0]["text"]
            return text
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_compilations_whose_callers_have_left_end(url: str) -> None:
    """There are as many as may wait, each of which would take the whole of its time."""

    async def go() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            leaving = [asyncio.create_task(explode(client, bomb(1 + 8 * number))) for number in range(30, 39)]
            await asyncio.sleep(0.5)
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)

    asyncio.run(go())
    began = time.monotonic()
    assert kept(url, json.dumps(began)) == json.dumps(began)
    assert time.monotonic() - began < 5 * MAX_COMPILE_S  # of the nine times as long that they would take
