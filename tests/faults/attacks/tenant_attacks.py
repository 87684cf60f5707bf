"""Costs of one tenant's flood for another at the HTTP server: how long its requests take meanwhile, and how
they end. The ring behind the server is a fake that answers at once: all of it is the HTTP process's doing.

    python -m tests.faults.attacks.tenant_attacks [queue bodies requests texts answers]
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_tenants import authorization, tenants_front
from tests.harness.ring.fake_ring import finish, output, spell

SETTLE_S = 2.0
GIVE_UP_S = 60.0
SMALL = {"prompt": "x"}
LONG_TEXT = "hello world " * 20_000
NUM_LOGPROBS, NUM_TOP = 11_000, 20
LARGE_ANSWER = {
    "text": "large",
    "stream": True,
    "return_logprob": True,
    "top_logprobs_num": NUM_TOP,
    "sampling_params": {"max_new_tokens": NUM_LOGPROBS + 20},
}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "silence":
        return []
    if request.text != "large":
        return spell("abc")(request)

    def logprobs(num_tokens: int, **fields: Any) -> SequenceOutput:
        zeros = np.zeros((num_tokens, NUM_TOP), np.int32).tobytes()
        first = zeros[: 4 * num_tokens]
        return output(
            request, "a", token_ids=first, logprobs=first, top_ids=zeros, top_logprobs=zeros, **fields
        )

    return [logprobs(NUM_LOGPROBS), *(logprobs(1) for _ in range(19)), logprobs(1, finish=finish("length"))]


def serve() -> None:
    """Serve alice and bob until standard input ends; the port is the first line of the output."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("alice", "bob")
        with tenants_front(Path(folder), answer, names=names, context_length=16384) as (front, _):
            print(front.port, flush=True)
            sys.stdin.read()


class Caller:
    """A connection of a tenant."""

    def __init__(self, port: int, name: str) -> None:
        self._port = port
        self._name = name

    async def send(self, path: str, data: bytes, length: int | None = None) -> None:
        """Connect and send a request; `length`: what is said of the body's, which may be more."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 25)
        await self.send_again(path, data, length)

    async def send_again(self, path: str, data: bytes, length: int | None = None) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"{authorization(self._name)}Content-Length: {len(data) if length is None else length}\r\n"
        self.writer.write(f"{head}\r\n".encode() + data)
        await self.writer.drain()

    async def status(self) -> int:
        """The status of the answer, when all of it is there."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split()[1])
        if b"transfer-encoding: chunked" not in head:
            (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            await self.reader.readexactly(int(length.split(b":")[1]))
            return status
        size = 1
        while size:
            size = int((await self.reader.readline()).strip(), 16)
            await self.reader.readexactly(size + 2)
        return status

    async def go_on(self, path: str, data: bytes) -> None:
        """The same request again and again."""
        await self.send(path, data)
        while True:
            await self.status()
            await self.send_again(path, data)


async def timed(port: int, path: str, body: Any, times: int, padding: int = 0) -> str:
    """How long bob's requests take, one after another, and how they end."""
    took, statuses = [], Counter[int]()
    data = json.dumps(body).encode() + b" " * padding
    for _ in range(times):
        caller, began = Caller(port, "bob"), time.perf_counter()
        async with asyncio.timeout(GIVE_UP_S):
            await caller.send(path, data)
            statuses[await caller.status()] += 1
        took.append(time.perf_counter() - began)
        caller.writer.close()
        await asyncio.sleep(0.05)
    ends = ", ".join(f"{count} × {status}" for status, count in statuses.items())
    return f"{median(took):.3f} s, {max(took):.3f} s at most ({ends})"


ATTACKS: dict[str, tuple[str, Any]] = {
    "queue": ("/v1/completions", SMALL),
    "bodies": ("/v1/completions", SMALL),
    "requests": ("/v1/completions", SMALL),
    "texts": ("/tokenize", {"prompt": "hello"}),
    "answers": ("/generate", LARGE_ANSWER),
}
"""By name what bob asks."""


async def flood(port: int, name: str) -> list[asyncio.Task[None]]:
    """Begin an attack by alice."""
    tasks: list[asyncio.Task[None]] = []

    def repeat(times: int, path: str, body: Any) -> None:
        data = json.dumps(body).encode()
        tasks.extend(asyncio.create_task(Caller(port, "alice").go_on(path, data)) for _ in range(times))

    if name == "queue":
        repeat(60, "/v1/completions", {"prompt": "silence", "n": 25})
    elif name == "requests":
        repeat(1000, "/v1/completions", {"prompt": "x", "n": 129})  # refused when they have been read
    elif name == "texts":
        repeat(20, "/tokenize", {"prompt": [LONG_TEXT] * 4})
    elif name == "answers":
        repeat(20, "/generate", LARGE_ANSWER)
    else:
        half = b" " * (4 << 20)
        for _ in range(200):
            caller = Caller(port, "alice")
            tasks.append(asyncio.create_task(caller.send("/v1/completions", half, 8 << 20)))
            KEPT.append(caller)
    await asyncio.sleep(SETTLE_S)
    return tasks


KEPT: list[Caller] = []
"""Connections that are to stay open."""


@contextmanager
def server() -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-m", "tests.faults.attacks.tenant_attacks", "serve"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(GIVE_UP_S)


async def attack(port: int, name: str) -> None:
    path, body = ATTACKS[name]
    padding = 2 << 20 if name == "bodies" else 0
    print(f"{name}: alone {await timed(port, path, body, 5, padding)}", flush=True)
    tasks = await flood(port, name)
    print(f"{name}: beside the flood {await timed(port, path, body, 10, padding)}", flush=True)
    if name == "answers":
        beside = await timed(port, "/v1/completions", SMALL, 10)
        print(f"{name}: a small request beside the flood {beside}", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main(names: list[str]) -> None:
    for name in names or ATTACKS:
        with server() as port:
            asyncio.run(attack(port, name))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main(sys.argv[1:])
