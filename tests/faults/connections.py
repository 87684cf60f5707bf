"""Many callers at once: `python -m tests.faults.connections` opens 5,000 connections that idle between two
requests, then 1,000 streams beside them, then sends bodies that take long; /live is asked all the time.
Prints a report; exits with 1 when a connection was lost or a stream had no end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from tests.faults.load import body
from tests.harness.ring.launched import Launched, launched
from tests.harness.ring.resources import memory_mb

REFRESH_S = 10.0
"""The server closes a connection that idles for longer than its keep-alive time."""
PROBE_S = 0.02
MAX_TOKENS = 32
NUM_LONG = 16
AT_ONCE = 200
"""Connections that are opened at a time."""
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
NESTED = b'{"model":"x","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LONG_PROMPT = json.dumps({"model": "carousel-demo", "prompt": "word " * 1_400_000, "max_tokens": 1}).encode()
LONG_TALK = json.dumps(
    {"model": "carousel-demo", "messages": [{"role": "user", "content": "x" * 70}] * 60_000, "max_tokens": 1}
).encode()


def post(path: str, data: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Caller:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)

    async def ask(self, request: bytes) -> int:
        """The status of the answer, which is read to its end."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self._reader.readexactly(int(line.partition(b":")[2]))
        return int(head.split()[1])

    async def stream(self) -> bool:
        """Return True if a streamed answer came to its end."""
        data = json.dumps(body("Once", MAX_TOKENS, stream=True)).encode()
        self._writer.write(post("/v1/completions", data))
        is_whole = (await self._reader.readuntil(b"data: [DONE]\n\n")).count(b"data: ") > 1
        await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return is_whole

    def close(self) -> None:
        self._writer.close()


class Probe:
    """Asks /live all the time: what it takes is how long the server's event loop was held up."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.took_s: list[float] = []

    async def run(self) -> None:
        caller = Caller(self._port)
        await caller.open()
        while True:
            began = time.monotonic()
            assert await caller.ask(LIVE) == 200
            self.took_s.append(time.monotonic() - began)
            await asyncio.sleep(PROBE_S)

    def take_ms(self) -> dict[str, float]:
        """Median, 99.9th percentile and longest since the last time; nothing without an answer since then."""
        took, self.took_s = sorted(self.took_s), []
        parts = {"p50": 0.5, "p99.9": 0.999, "most": 1.0}
        return {
            name: round(1000 * took[int(part * (len(took) - 1))], 1) for name, part in parts.items() if took
        }


async def run(launch: Launched, num_streams: int, num_idle: int) -> dict[str, Any]:
    port, api = launch.state()["port"], launch.pid_of("api")
    report: dict[str, Any] = {"memory_mb": {"before": memory_mb([api])[api]}, "live_ms": {}}
    probe = Probe(port)
    probing = asyncio.create_task(probe.run())
    await asyncio.sleep(2.0)
    report["live_ms"]["alone"] = probe.take_ms()

    idle = [Caller(port) for _ in range(num_idle)]
    streaming = [Caller(port) for _ in range(num_streams)]
    await _open(idle)
    refreshing = asyncio.create_task(_refresh(idle))
    await _open(streaming)
    report["live_ms"]["connecting"] = probe.take_ms()
    began = time.monotonic()
    ended = await asyncio.gather(*(caller.stream() for caller in streaming), return_exceptions=True)
    report["streams"] = {
        "ended": ended.count(True),
        "lost": [repr(each) for each in ended if each is not True][:5],
        "seconds": round(time.monotonic() - began, 1),
    }
    report["memory_mb"]["streaming"] = memory_mb([api])[api]
    report["live_ms"]["streams"] = probe.take_ms()

    long = streaming[:NUM_LONG]
    requests = [
        ("/v1/completions", NESTED),
        ("/v1/completions", LONG_PROMPT),
        ("/v1/chat/completions", LONG_TALK),
    ]
    for path, data in requests:
        await _reopen(long)
        statuses = await asyncio.gather(*(caller.ask(post(path, data)) for caller in long))
        report.setdefault("long_bodies", []).append(
            {str(each): statuses.count(each) for each in set(statuses)}
        )
    report["live_ms"]["long bodies"] = probe.take_ms()

    refreshing.cancel()
    alive = await asyncio.gather(*(caller.ask(LIVE) for caller in idle), return_exceptions=True)
    report["idle"] = {"alive": alive.count(200), "lost": [repr(each) for each in alive if each != 200][:5]}
    report["memory_mb"]["after"] = memory_mb([api])[api]
    probing.cancel()
    return report


async def _open(callers: list[Caller]) -> None:
    for at in range(0, len(callers), AT_ONCE):
        await asyncio.gather(*(caller.open() for caller in callers[at : at + AT_ONCE]))
        await asyncio.gather(*(caller.ask(LIVE) for caller in callers[at : at + AT_ONCE]))


async def _reopen(callers: list[Caller]) -> None:
    """They may have idled too long, or a refusal has ended them."""
    for caller in callers:
        caller.close()
        await caller.open()


async def _refresh(callers: list[Caller]) -> None:
    groups = [callers[at : at + AT_ONCE] for at in range(0, len(callers), AT_ONCE)]
    while groups:
        for group in groups:
            await asyncio.gather(*(caller.ask(LIVE) for caller in group))
            await asyncio.sleep(REFRESH_S / len(groups))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.connections", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=5000)
    arguments = parser.parse_args()
    rows = f"--max-running-requests={arguments.streams}"
    with launched(rows, "--max-total-tokens=65536", "--log-level=warning") as launch:
        report = asyncio.run(run(launch, arguments.streams, arguments.idle))
    print(json.dumps(report, indent=1))
    return int(report["streams"]["ended"] < arguments.streams or report["idle"]["alive"] < arguments.idle)


if __name__ == "__main__":
    sys.exit(main())
