"""Callers that go away: what they had is given back within a second, nothing is counted twice or lost."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from typing import Any

import pytest

from carousel import Client, SamplingParams
from tests.launched import Launched, launched

NUM_STREAMS = 200
ROUNDS = 3
MAX_LIFE_S = 1.5
# A reset instead of an orderly end: on, with no time to linger.
RESET = struct.pack("ii", 1, 0)


def request_bytes(rng: random.Random) -> bytes:
    """A request that would run far longer than its caller stays."""
    body = json.dumps(
        {
            "model": "carousel-demo",
            "prompt": [rng.randrange(3, 4000) for _ in range(rng.choice([4, 40, 900]))],
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
        }
    ).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def come_and_go(port: int, rng: random.Random) -> None:
    """Ask, listen for a while, leave: with FIN or RST, queued, in prefill or in decode, as it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(rng))
    leave_at = time.monotonic() + rng.random() * MAX_LIFE_S
    while (left := leave_at - time.monotonic()) > 0:
        try:
            if not await asyncio.wait_for(reader.read(65536), left):
                break
        except TimeoutError:
            break
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort() if rng.random() < 0.2 else writer.close()


async def storm(port: int, seed: int) -> None:
    await asyncio.gather(*(come_and_go(port, random.Random(seed * 1000 + n)) for n in range(NUM_STREAMS)))


def is_at_rest(info: dict[str, Any]) -> bool:
    return (
        info["num_running"] == 0
        and info["num_waiting"] == 0
        and info["num_free_pages"] + info["num_cached_pages"] == info["num_pages"]
        and info["num_accepted"] == info["num_terminated"] + info["num_replaced"]
    )


def check_rest_within_a_second(client: Client) -> dict[str, Any]:
    began = time.monotonic()
    while not is_at_rest(info := client.server_info()):
        assert time.monotonic() - began <= 1.0, info
    return info


@pytest.fixture(scope="module")
def launch() -> Any:
    with launched(
        "--max-running-requests",
        "32",
        "--max-queued-requests",
        "400",
        "--max-total-tokens",
        "16384",
        "--log-level",
        "warning",
    ) as launch:
        yield launch


def test_rows_and_pages_come_back_within_a_second(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        accepted = 0
        for round_number in range(ROUNDS):
            asyncio.run(storm(launch.state()["port"], round_number))
            info = check_rest_within_a_second(client)
            accepted_now = info["num_accepted"] - accepted
            assert NUM_STREAMS // 2 < accepted_now <= NUM_STREAMS + 1, "the storm did not reach the scheduler"
            accepted = info["num_accepted"]
            answer = client.generate("def f(", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            assert len(answer.token_ids) == 4
        check_rest_within_a_second(client)
    assert "Traceback" not in launch.log()
