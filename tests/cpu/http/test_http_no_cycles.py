"""Requests and connections of the HTTP server end when their last owner lets go of them. What is left in a
cycle waits for a full collection, which held up the event loop for 40 ms when many connections had ended.
Those in progress are known to be in use, so that no collection is made for them.
"""

from __future__ import annotations

import gc
import logging
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import uvloop

from carousel.server import main as server_main
from carousel.server.footprint import CONNECTION
from carousel.server.garbage import GarbageWatch, Size
from carousel.server.http.protocol import MAX_PIPELINED, HttpProtocol
from runtime.wire.format import pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_bare import BareServer
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.http.http_grammar import make_stream
from tests.harness.ring.fake_ring import failure, finish, output, spell
from tests.harness.ring.launched import wait_until

NUM_CONNECTIONS = 300
FAILURES = {"full": ("overloaded", 503, None), "wrong": ("invalid", 400, "max_tokens")}
"""Answers of the ring to prompts that begin so: code, status, the parameter at fault."""
USER = {"role": "user", "content": "x"}
OWN_OBJECTS, OWN_BLOCKS = 5, 10
"""Objects and blocks of the test and the fake ring for each prompt: its socket, and messages of the ring."""
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
        for _ in range(0):
            with front.connect() as connection:
                connection.sendall(LIVE)
                assert b" 200 " in connection.recv(1 << 16)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: num_connections() <= before, 10.0, "connections are let go")


def begin(request: GenerateRequest) -> list[SequenceOutput]:
    """A token of each sequence; none of them ends."""
    ids = pack_ids([5])
    return [output(request, "x", index=index, token_ids=ids) for index in range(request.sampling.n)]


@pytest.mark.parametrize(
    ("num_callers", "path", "body", "num_prompts"),
    [
        (64, "/v1/chat/completions", {"messages": [USER]}, 1),
        (64, "/v1/responses", {"input": "x"}, 1),
        (64, "/v1/messages", {"messages": [USER], "max_tokens": 1, "model": "fake"}, 1),
        (1, "/v1/completions", {"prompt": ["x"] * 512}, 512),
        (1, "/generate", {"text": ["x"] * 512}, 512),
        (4, "/v1/chat/completions", {"messages": [USER], "n": 128}, 1),
    ],
    ids=["chats", "responses", "messages", "prompts", "texts", "sequences"],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_is_in_progress_is_no_garbage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_callers: int,
    path: str,
    body: dict[str, Any],
    num_prompts: int,
    *,
    stream: bool,
) -> None:
    """Four streams of a thousand prompts looked like garbage, and so did many chats: they were looked through
    for 60 to 430 ms of the event loop, when they began and when they left.
    """
    with http_front_watched(tmp_path, monkeypatch) as (front, in_use):
        front.post(path, **body | {"stream": 1})  # which is refused; what the first request makes stays
        wait_until(lambda: in_use() == CONNECTION, 10.0, "the request has ended, its connection is left")
        before, used_before = there_is(), in_use()
        with ExitStack() as stack:
            for _ in range(num_callers):
                caller = stack.enter_context(front.connect())
                caller.sendall(raw_request(path, stream=stream, **body))
            wanted = num_callers * num_prompts
            wait_until(lambda: len(front.ring.requests) == wanted, 10.0, "all have begun")
            await_known(in_use, before, used_before, wanted)
        wait_until(lambda: in_use().num_objects <= used_before.num_objects, 10.0, "all have left")


@pytest.mark.parametrize("ends", [False, True], ids=["left", "answered"])
def test_pipelined_requests_that_wait_are_no_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """Sixteen requests waited on each of 640 connections that were hardly read. A full collection looked
    through them for 39 ms.
    """
    num_callers = 40
    pipelined = (MAX_PIPELINED - 1) * LIVE + raw_request("/live", text=1000 * "x")
    with http_front_watched(tmp_path, monkeypatch) as (front, in_use):
        assert front.exchange(LIVE.replace(b"Host", b"Connection: close\r\nHost")).status_code == 200
        wait_until(lambda: in_use() == Size(), 10.0, "the first request has ended")
        before = there_is()
        with ExitStack() as stack:
            callers = [stack.enter_context(front.connect()) for _ in range(num_callers)]
            for caller in callers:
                caller.sendall(raw_request("/v1/completions", prompt="x", stream=True) + pipelined)
            wait_until(lambda: len(front.ring.requests) == num_callers, 10.0, "all have begun")
            await_known(in_use, before, Size(), num_callers)
            if ends:
                front.ring.send(*(output(request, "", finish=finish()) for request in front.ring.requests))
                idle = Size().plus(CONNECTION, num_callers)
                wait_until(lambda: in_use() == idle, 10.0, "none waits any more")
        wait_until(lambda: in_use() == Size(), 10.0, "all have left")


@contextmanager
def http_front_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Front, Callable[[], Size]]]:
    """A front whose ring never ends a sequence, and the function that returns its footprint."""
    found: list[Callable[[], Size]] = []

    class Watch(GarbageWatch):
        def __init__(self, in_use: Callable[[], Size]) -> None:
            super().__init__(in_use)
            found.append(in_use)

    monkeypatch.setattr(server_main, "GarbageWatch", Watch)
    with http_front(tmp_path, begin, max_queued_requests=1024) as front:
        wait_until(lambda: bool(found), 10.0, "the front watches its garbage")
        yield front, found[0]


def await_known(in_use: Callable[[], Size], before: Size, used_before: Size, num_prompts: int) -> None:
    """Wait until the footprint has grown by about as much as the process has."""

    def is_right() -> bool:
        there, used = there_is(), in_use()
        objects = there.num_objects - before.num_objects - OWN_OBJECTS * num_prompts
        blocks = there.num_blocks - before.num_blocks - OWN_BLOCKS * num_prompts
        return (
            0.7 * objects < used.num_objects - used_before.num_objects < 1.1 * objects
            and 0.6 * blocks < used.num_blocks - used_before.num_blocks < 1.1 * blocks
        )

    wait_until(is_right, 5.0, "as much is known as there is, once the outputs have come")


def there_is() -> Size:
    gc.collect()
    return Size(len(gc.get_objects()), sys.getallocatedblocks())
