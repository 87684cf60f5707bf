"""Requests and connections of the HTTP server end when their last owner lets go of them. What is left in a
cycle waits for a full collection, which held up the event loop for 40 ms when many connections had ended.
"""

from __future__ import annotations

import gc
import logging
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import uvloop

from carousel.server.http.protocol import HttpProtocol
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_bare import BareServer
from tests.harness.http.http_front import http_front
from tests.harness.http.http_grammar import make_stream
from tests.harness.ring.fake_ring import failure, output, spell
from tests.harness.ring.launched import wait_until

NUM_CONNECTIONS = 300
FAILURES = {"full": ("overloaded", 503, None), "wrong": ("invalid", 400, "max_tokens")}
"""Answers of the ring to prompts that begin so: code, status, the parameter at fault."""
USER = {"role": "user", "content": "x"}
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Fail as the prompt says, or after a token."""
    what, _, when = (request.text or "").partition(" ")
    if what not in FAILURES:
        return spell("abc")(request)
    return [*([output(request, "a")] if when else []), failure(request, *FAILURES[what])]


@contextmanager
def cycles() -> Iterator[Counter[str]]:
    """Counts, when the block has ended, of the objects that it has left in cycles, by type."""
    left: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left.update(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_connections_of_every_kind_leave_no_cycles(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def serve(server: BareServer, first: int) -> None:
        for seed in range(first, first + NUM_CONNECTIONS):
            await server.take(make_stream(seed))

    async def main() -> Counter[str]:
        server = BareServer()
        await serve(server, 0)
        with cycles() as left:
            await serve(server, NUM_CONNECTIONS)
        return left

    left = uvloop.run(main())
    assert sum(left.values()) < NUM_CONNECTIONS / 10, left.most_common(20)


def test_requests_leave_no_cycles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure refers to all that the request had, by its traceback: 120 to 150 objects of each request that
    the ring refused, or ended, had waited for the collector.
    """
    caplog.set_level(logging.CRITICAL)
    with http_front(tmp_path, answer) as front:

        def call() -> None:
            for body in ({}, {"stream": True}, {"no": "such field"}):
                front.complete(**body)
            front.chat(stream=True)
            for stream in (False, True):
                front.post("/v1/messages", max_tokens=1, messages=[USER], stream=stream)
                front.post("/v1/responses", input=[USER], stream=stream)
            for prompt, stream in product(("full", "full later", "wrong", ["x", "full"]), (False, True)):
                front.complete(prompt=prompt, stream=stream)
                front.post("/generate", text=prompt, stream=stream)
            for path in ("/live", "/nowhere", "/v1/models", "/version"):
                front.http.get(path)
            front.post("/tokenize", prompt="x")
            for data in (LIVE * 30, b"nonsense\r\n\r\n", LIVE[:9]):
                with front.connect() as connection:
                    connection.sendall(data)
                    connection.settimeout(0.05)
                    read_some(connection)

        for _ in range(3):
            call()
        with cycles() as left:
            for _ in range(10):
                call()
    ours = {name: number for name, number in left.items() if is_ours(name)}
    assert not ours, left.most_common(20)


def is_ours(name: str) -> bool:
    return name.startswith(("carousel.", "uvicorn.", "starlette.", "asyncio.locks", "importlib.metadata"))


def read_some(connection: Any) -> None:
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        pass


def test_a_connection_that_was_reset_is_let_go_at_once(tmp_path: Path) -> None:
    """Its keep-alive timer had held it for 20 s, and full collections looked through thousands of them."""

    def num_connections() -> int:
        return sum(type(each) is HttpProtocol for each in gc.get_objects())

    with http_front(tmp_path, spell("abc")) as front:
        gc.collect()  # of those that tests before this one have left
        before = num_connections()
        for _ in range(20):
            with front.connect() as connection:
                connection.sendall(LIVE)
                assert b" 200 " in connection.recv(1 << 16)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: num_connections() <= before, 10.0, "connections are let go")
