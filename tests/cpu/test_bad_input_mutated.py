"""A launch that is sent mutated bodies and frames at once: no process ends, none makes a mistake."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import zmq

from runtime.endpoints import Endpoints
from tests.hostile_frames import hostile_frames
from tests.launched import Launched, launched
from tests.mutated_bodies import mutated_bodies

NUM_THREADS = 4
# What openapi.json says of these endpoints; 503 is for want of room.
EXPECTED = {200, 400, 404, 503}
SETTINGS = ("--context-length", "128", "--served-model-name", "demo", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(*SETTINGS, "--max-running-requests", "16") as launch:
        yield launch


def send_bodies(launch: Launched, count: int, seed: int) -> Counter[int]:
    """Statuses of so many mutated bodies. Raises AssertionError with the body of an unexpected one."""
    statuses: Counter[int] = Counter()
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=launch.url, timeout=60.0, headers=headers) as http:
        for path, body in mutated_bodies(count, random.Random(seed)):
            response = http.post(path, content=body)
            assert response.status_code in EXPECTED, (seed, path, body, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert '"internal_error"' not in response.text, (seed, path, body)
            statuses[response.status_code] += 1
    return statuses


def send_frames(launch: Launched, count: int, seed: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.connect(Endpoints(launch.run_dir).tokenizer_in())
        epoch = launch.state()["epoch"]
        for frames in hostile_frames("tokenizer_in", epoch, count, random.Random(seed)):
            socket.send_multipart(frames)
    finally:
        context.destroy(linger=5000)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_bodies_and_frames_end_nothing(launch: Launched, count: int) -> None:
    pids = launch.pids()
    with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
        frames = pool.submit(send_frames, launch, count, 1)
        parts = [pool.submit(send_bodies, launch, count // NUM_THREADS, seed) for seed in range(NUM_THREADS)]
        statuses = sum((part.result() for part in parts), Counter[int]())
        frames.result()
    assert statuses[400] > count // 3
    assert statuses[200] > count // 20
    assert launch.process.poll() is None
    assert launch.pids() == pids
    assert "Traceback" not in launch.log()
    good = httpx.post(f"{launch.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60.0)
    assert good.status_code == 200, good.text
