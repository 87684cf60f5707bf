"""A launch that is sent mutated requests and frames at once: no process ends, none makes a mistake."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
import zmq

from runtime.ring.endpoints import Endpoints
from tests.harness.mutants.mutated_requests import mutated_requests
from tests.harness.ring.hostile_frames import hostile_frames
from tests.harness.ring.launched import Launched, launched
from tests.harness.ring.resources import memory_mb, num_descriptors

NUM_CALLERS = 8
PATIENCE_S = 0.02
"""After so long without a word, a caller whose request may have no end says that nothing more will come."""
NO_ANSWER = 0
"""The connection was closed: of a request that has no end, or none to answer to."""
EXPECTED = {NO_ANSWER, 200, 400, 403, 404, 405, 408, 413, 415, 431, 503}
# A small KV cache is soon full of prefixes: its memory is taken page by page, when each is written first, and
# is not what is looked for here.
KV_CACHE = ("--max-total-tokens", "4096")
SETTINGS = ("--context-length", "128", "--served-model-name", "demo", "--cpu-threads", "1", *KV_CACHE)
GOOD = {"prompt": "x", "max_tokens": 2, "temperature": 0}
WAIT_S = 60.0
MAX_GROWTH_MB = 24


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(*SETTINGS, "--max-running-requests", "16", "--log-level", "warning") as launch:
        yield launch


async def exchange(port: int, data: bytes, *, is_whole: bool) -> bytes:
    """All that is answered to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    with suppress(OSError):  # the server may have closed it already
        writer.write(data)
        if not is_whole:
            with suppress(TimeoutError):
                received += await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
            writer.write_eof()
        while part := await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
            received += part
    writer.close()
    return bytes(received)


def check(request: bytes, answer: bytes) -> int:
    """The status of an answer that the server may give."""
    if not answer:
        return NO_ANSWER
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    about = (request[:2000], answer[:2000])
    assert status in EXPECTED, about
    assert status != 503 or b"retry-after: " in head.lower(), about
    assert b'"internal_error"' not in body, about
    assert b'"api_error"' not in body, about
    if status != 200 and body:
        answered = json.loads(body)
        anthropics = {"type", "message"} if answered.get("type") == "error" else None
        assert set(answered["error"]) == (anthropics or {"message", "type", "param", "code"}), about
    return status


class Nonsense(threading.Thread):
    """Callers who send so many mutated requests."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self.statuses: Counter[int] = Counter()
        self.error: BaseException | None = None
        self._port, self._count = port, count

    def run(self) -> None:
        try:
            asyncio.run(self._send_all())
        except BaseException as error:
            self.error = error

    async def _send_all(self) -> None:
        await asyncio.gather(*(self._send(seed) for seed in range(NUM_CALLERS)))

    async def _send(self, seed: int) -> None:
        for request, is_whole in mutated_requests(self._count // NUM_CALLERS, random.Random(seed)):
            answer = await exchange(self._port, request, is_whole=is_whole)
            self.statuses[check(request, answer)] += 1


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


@pytest.mark.parametrize(
    "count",
    [1000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
    ids=["short", "long"],
)
def test_mutated_requests_and_frames_end_nothing(launch: Launched, count: int) -> None:
    pids = launch.pids()
    send_frames(launch, count, 1)
    nonsense = Nonsense(launch.state()["port"], count)
    began = time.monotonic()
    held: list[tuple[dict[int, int], dict[int, int]]] = []
    texts: set[str] = set()
    num_good = 0
    with httpx.Client(base_url=launch.url, timeout=WAIT_S) as http:
        nonsense.start()
        while nonsense.is_alive() or not texts:
            answer = http.post("/v1/completions", json=GOOD)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
            num_good += 1
            nonsense.join(0.05)
            if nonsense.statuses.total() > count // 4:
                held.append((memory_mb(pids), num_descriptors(pids)))
    assert nonsense.error is None, nonsense.error
    assert len(texts) == 1
    assert nonsense.statuses[400] > count // 3
    assert nonsense.statuses[200] > count // 20
    assert launch.process.poll() is None
    assert launch.pids() == pids
    assert "Traceback" not in launch.log()
    growth = {pid: mb - held[0][0][pid] for pid, mb in memory_mb(pids).items()}
    assert max(growth.values()) < MAX_GROWTH_MB, growth
    print(
        f"{nonsense.statuses.total()} requests in {time.monotonic() - began:.0f} s: "
        f"{dict(nonsense.statuses)}; {num_good} good ones; growth {max(growth.values())} MB"
    )
