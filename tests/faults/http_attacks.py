"""Attacks of callers without a key on the HTTP server: `python -m tests.faults.http_attacks` sends a launch
trailers without end, thousands of pipelined requests, and half bodies on many connections, while /live is
asked all the time. Prints what each attack did to the server's memory and to the answers of /live.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from tests.harness.ring.launched import launched
from tests.harness.ring.resources import memory_mb

SETTINGS = ("--max-total-tokens=4096", "--context-length=128", "--cpu-threads=1", "--log-level=warning")
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"GET /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
TRAILERS = b"a: b\r\n" * 11_000
TRAILER_BYTES = 24 << 20
NUM_PIPELINES = 30
NUM_PIPELINED = 8000
NUM_BODIES = 150
BODY = b" " * (8 << 20)
BODY_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
BODIES_S = 12.0
PROBE_S = 0.02
QUIET_S = 2.0


class Probe(threading.Thread):
    """Asks /live all the time, each time on a new connection."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._took_ms: list[float] = []

    def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", self._port)) as connection:
                    connection.sendall(LIVE)
                    connection.recv(4096)
            except ConnectionError:
                return  # the launch has ended
            self._took_ms.append(1000 * (time.monotonic() - began))
            time.sleep(PROBE_S)

    def take_ms(self) -> dict[str, float]:
        """Median and longest since the last time."""
        took, self._took_ms = sorted(self._took_ms), []
        return {"p50": round(took[len(took) // 2], 1), "most": round(took[-1], 1)} if took else {}


def trailers(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ConnectionError):
        connection.sendall(CHUNKED)
        for _ in range(TRAILER_BYTES // len(TRAILERS)):
            connection.sendall(TRAILERS)
        time.sleep(QUIET_S)


def pipelines(port: int) -> None:
    with ExitStack() as held:
        for _ in range(NUM_PIPELINES):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(ConnectionError):
                connection.sendall(LIVE * NUM_PIPELINED)
        time.sleep(QUIET_S)


def half_bodies(port: int) -> None:
    """On each connection all of a body but its last bytes, a part at a time."""
    data = memoryview(BODY_HEAD % len(BODY) + BODY)[:-10]
    with ExitStack() as held:
        sent = {
            held.enter_context(socket.create_connection(("127.0.0.1", port))): 0 for _ in range(NUM_BODIES)
        }
        end = time.monotonic() + BODIES_S
        while time.monotonic() < end:
            for connection, at in sent.items():
                with suppress(OSError):  # it takes no more now, or is closed
                    sent[connection] = at + connection.send(data[at : at + (256 << 10)], socket.MSG_DONTWAIT)
            time.sleep(0.002)


ATTACKS: tuple[Callable[[int], None], ...] = (trailers, pipelines, half_bodies)


def main() -> None:
    report: dict[str, Any] = {}
    with launched(*SETTINGS) as launch:
        port, api = launch.state()["port"], launch.pid_of("api")
        probe = Probe(port)
        probe.start()
        time.sleep(QUIET_S)
        report["before"] = {"memory_mb": memory_mb([api])[api], "live_ms": probe.take_ms()}
        for attack in ATTACKS:
            attack(port)
            report[attack.__name__] = {"memory_mb": memory_mb([api])[api], "live_ms": probe.take_ms()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
