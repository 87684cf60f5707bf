"""A caller that stops reading in the middle of a long stream: nothing grows for it, nobody waits for it, and
it gets everything when it reads again.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.models.tiny_llama import save_llama_32k
from tests.harness.ring.launched import Launched, launched

NUM_TOKENS = 2000
# What a process may take meanwhile for its other work; the stream itself is half a MB of events.
MAX_GROWTH_KB = 16 * 1024


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = tmp_path_factory.mktemp("model")
    save_llama_32k(model, max_len=8192)
    with launched("--model", str(model), "--cpu-threads", "1", "--served-model-name", "tiny") as launch:
        yield launch


class StalledStream:
    """A streaming request on a socket of its own, read only when asked to."""

    def __init__(self, url: str, num_tokens: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        body = {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((host, int(port)))
        self._socket.sendall(head.encode() + data)

    def read_to_end(self) -> list[dict[str, object]]:
        self._socket.settimeout(60.0)
        received = bytearray()
        while piece := self._socket.recv(1 << 16):
            received += piece
        self._socket.close()
        head, _, body = received.decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200 "), received.decode() or "closed without an answer"
        events = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
        assert events[-1:] == ["[DONE]"], body[-1000:]
        return [json.loads(event) for event in events[:-1]]


def memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def short_answer(url: str) -> str:
    body = {"model": "tiny", "prompt": [9, 8], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def stall(ring: Launched, num_answers: int) -> None:
    """Let as many short answers be given beside a stream that nobody reads, 20 steps each."""
    alone = StalledStream(ring.url, NUM_TOKENS).read_to_end()
    expected = short_answer(ring.url)
    pids = [pid for pid in ring.pids() if pid != os.getpid()]
    before = {pid: memory_kb(pid) for pid in pids}
    stalled = StalledStream(ring.url, NUM_TOKENS)
    for _ in range(num_answers):
        assert short_answer(ring.url) == expected
    growth = {pid: memory_kb(pid) - before[pid] for pid in pids}
    assert max(growth.values()) < MAX_GROWTH_KB, growth
    events = stalled.read_to_end()
    assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS  # type: ignore[index]
    assert text_of(events) == text_of(alone)


def text_of(events: list[dict[str, object]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])  # type: ignore[index]


def test_a_reader_that_stalls_costs_nothing_and_gets_everything(ring: Launched) -> None:
    stall(ring, 40)


@pytest.mark.full
def test_a_reader_that_stalls_for_long_costs_nothing_and_gets_everything(ring: Launched) -> None:
    stall(ring, 1000)
