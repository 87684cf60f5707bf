"""Answers over TLS that are not read, or slowly: they count, and come whole, as over plain HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from carousel.server.garbage import GarbageWatch, Size
from carousel.server.http.paced_reader import READ_BYTES
from carousel.server.http.protocol import MAX_PIPELINED, HttpProtocol
from carousel.server.http.tls import tls_reader
from carousel.server.tenancy import unread_answers
from carousel.server.tenancy.unread_answers import UnreadAnswers
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.http.tls import CERTIFICATE, FILES
from tests.harness.ring.fake_ring import WAIT_S, finish, output
from tests.harness.ring.launched import wait_until

MIB = 1 << 20
LONG = 4 * MIB
PIECE = 16 << 10
NUM_CALLERS = 6
ROOM = 2 * LONG
SLACK_BYTES = 512 << 10
"""Bytes of an answer that a connection's kernel has, and what TLS adds to it."""


def long_answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Answer with LONG characters, in many pieces if streamed."""
    if not request.stream:
        return [output(request, "x" * LONG, token_ids=b"", finish=finish())]
    pieces = [output(request, "x" * PIECE, token_ids=b"") for _ in range(LONG // PIECE)]
    return [*pieces, SequenceOutput(request.handle, finish=finish())]


@dataclass(slots=True)
class Noted:
    """The server's limit of unread answers."""

    pool: UnreadAnswers | None = None
    counted: list[int] = field(default_factory=list)
    """Number of unread bytes of each connection on which more was written than read, when that began."""

    @property
    def num_bytes(self) -> int:
        assert self.pool is not None
        return self.pool.num_bytes


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """The limit is ROOM, and is enforced in no time."""
    noted = Noted()
    make, pause = UnreadAnswers.__init__, UnreadAnswers.pause

    def note(self: UnreadAnswers) -> None:
        noted.pool = self
        make(self, ROOM)

    def note_pause(self: UnreadAnswers, transport: asyncio.Transport, tenant: str) -> None:
        noted.counted.append(transport.get_write_buffer_size())
        pause(self, transport, tenant)

    monkeypatch.setattr(UnreadAnswers, "__init__", note)
    monkeypatch.setattr(UnreadAnswers, "pause", note_pause)
    monkeypatch.setattr(unread_answers, "GRACE_S", 0.1)
    monkeypatch.setattr(unread_answers, "CHECK_S", 0.02)
    return noted


@pytest.fixture
def front(tmp_path: Path, unread: Noted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setattr(tls_reader, "CLOSE_TIMEOUT_S", 0.2)
    with http_front(tmp_path, long_answer, **FILES) as front:
        yield front


@contextmanager
def secure_caller(front: Front) -> Iterator[ssl.SSLSocket]:
    """A connection whose kernel takes little of what it does not read."""
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        raw.settimeout(WAIT_S)
        raw.connect(("127.0.0.1", front.port))
        with trusted.wrap_socket(raw, server_hostname="localhost") as caller:
            yield caller


def ask(caller: ssl.SSLSocket, *, is_stream: bool = False, headers: str = "") -> None:
    caller.sendall(raw_request("/v1/completions", headers=headers, prompt="x", stream=is_stream))


def read_all(caller: ssl.SSLSocket) -> bytes:
    received = bytearray()
    while part := caller.recv(1 << 16):
        received += part
    return bytes(received)


def test_whole_answers_that_nobody_reads_are_counted(front: Front, unread: Noted) -> None:
    """They did not: the event loop's TLS took each at once, so callers who read nothing grew the process."""
    with ExitStack() as stack:
        for _ in range(NUM_CALLERS):
            ask(stack.enter_context(secure_caller(front)))
        wait_until(lambda: len(unread.counted) == NUM_CALLERS, 5.0, "each answer counts")
        assert min(unread.counted) > LONG - SLACK_BYTES
        wait_until(lambda: unread.num_bytes <= ROOM, 5.0, "who reads nothing is closed")
    wait_until(lambda: not unread.num_bytes, 5.0, "nothing is left of those who have gone")
    assert front.http.get("/live").status_code == 200


def test_small_answers_that_nobody_reads_pause_the_next_as_early_as_without_tls(
    front: Front, unread: Noted
) -> None:
    """There was half a MiB of them more, which the event loop's TLS takes by default."""
    size = len(front.http.get("/openapi.json").content)
    with secure_caller(front) as caller:
        caller.sendall(MAX_PIPELINED * b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: bool(unread.counted), 5.0, "the next answer waits")
        assert unread.counted[0] <= size + (192 << 10)
        received = 0
        while received < MAX_PIPELINED * size:
            received += len(caller.recv(1 << 16))
    assert MAX_PIPELINED * size > MIB


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_slow_reader_gets_all_of_the_last_answer(front: Front, *, is_stream: bool) -> None:
    """All that had not left within the time for closing was cut off."""
    with secure_caller(front) as caller:
        ask(caller, is_stream=is_stream, headers="Connection: close\r\n")
        received = caller.recv(1 << 10)
        time.sleep(3 * tls_reader.CLOSE_TIMEOUT_S)
        received += read_all(caller)
    assert received.count(b"x") >= LONG
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if is_stream else b"}")


def test_answers_of_a_kept_connection_come_one_after_another(front: Front) -> None:
    with front.open_client() as http:
        for _ in range(3):
            (choice,) = http.post("/v1/completions", json={"prompt": "x"}).json()["choices"]
            assert choice["text"] == "x" * LONG


def test_little_is_taken_of_what_comes_while_a_connection_is_not_read(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 150 bodies that waited for room had half a MiB, beyond the limit that they all share."""
    made: list[Any] = []
    connection_made = HttpProtocol.connection_made

    def paused(self: HttpProtocol, transport: asyncio.Transport) -> None:
        connection_made(self, transport)
        self.flow.is_held = True
        made.append(cast(Any, transport)._transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", paused)
    with secure_caller(front) as caller:
        caller.settimeout(1.0)
        with pytest.raises(TimeoutError):
            caller.sendall(bytes(4 * MIB))
        (transport,) = made
        assert transport.get_read_buffer_size() <= READ_BYTES


@pytest.mark.parametrize(("settings", "num_bytes", "num_objects"), [({}, 6 << 10, 24), (FILES, 42 << 10, 44)])
def test_what_tls_adds_to_connections_is_no_garbage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    num_bytes: int,
    num_objects: int,
) -> None:
    """A thousand looked like as much garbage as starts a full collection, which holds up the event loop."""
    watches: list[Callable[[], Size]] = []

    class Watch(GarbageWatch):
        def __init__(self, in_use: Callable[[], Size]) -> None:
            super().__init__(in_use)
            watches.append(in_use)

    monkeypatch.setattr("carousel.server.main.GarbageWatch", Watch)
    with http_front(tmp_path, long_answer, **settings) as front, ExitStack() as stack:
        for _ in range(NUM_CALLERS):
            stack.enter_context(front.connect())
        (in_use,) = watches
        wait_until(lambda: in_use().num_objects == NUM_CALLERS * num_objects, 5.0, "they are connected")
        assert in_use().num_bytes == NUM_CALLERS * num_bytes
