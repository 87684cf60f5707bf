"""PieceWriter and TlsWriter: pieces in order, a bound on what a turn passes on, and an end after the last
piece.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from carousel.server.http.piece_writer import TURN_BYTES, PieceWriter
from carousel.server.http.tls import tls_writer
from carousel.server.http.tls.tls_writer import BYTES_BELOW, TlsWriter
from tests.harness.ring.fake_ring import WAIT_S

KINDS = [PieceWriter, TlsWriter]


class Below(asyncio.Transport):
    """The event loop's transport. It is full after so many pieces."""

    def __init__(self, connection: socket.socket, num_pieces: int) -> None:
        super().__init__()
        self.connection = connection
        self.pieces: list[bytes] = []
        self.room = num_pieces
        self.writer: PieceWriter | None = None
        self.is_closed = self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_read_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.connection

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def pause_reading(self) -> None:
        pass

    def write(self, data: Any) -> None:
        assert not self.is_closing()
        self.pieces.append(bytes(data))
        self.room -= 1
        if not self.room:
            assert self.writer is not None
            self.writer.pause_writing()

    def give_room(self, num_pieces: int) -> None:
        self.room = num_pieces
        assert self.writer is not None
        self.writer.resume_writing()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


class Reader:
    """Reader for the transport below."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Connection:
    """A writer and what it has said. The kernel of `near` takes what is written until `fill`."""

    def __init__(self, num_pieces: int, kind: type[PieceWriter] = TlsWriter) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.below = Below(self.near, num_pieces)
        self.said: list[str] = []
        self.reader = Reader()
        pause, resume = partial(self.said.append, "pause"), partial(self.said.append, "resume")
        if kind is TlsWriter:
            self.writer: PieceWriter = TlsWriter(self.below, self.reader, pause, resume)
        else:
            self.writer = kind(self.below, pause, resume)
        self.below.writer = self.writer

    def fill(self) -> None:
        try:
            while True:
                self.near.send(bytes(1 << 16))
        except BlockingIOError:
            pass

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.far.close()


DATA = bytes(range(256)) * (TlsWriter.piece_bytes // 128) + b"end"
"""A little more than two pieces over TLS."""


@pytest.mark.parametrize(
    ("kind", "below"), [(PieceWriter, PieceWriter.piece_bytes), (TlsWriter, BYTES_BELOW)]
)
def test_what_finds_no_room_waits_counts_and_comes_in_order(kind: type[PieceWriter], below: int) -> None:
    size = kind.piece_bytes
    data = DATA[-2 * size - 3 :]

    async def main() -> None:
        with Connection(num_pieces=2, kind=kind) as made:
            writer, pieces = made.writer, made.below.pieces
            writer.write(b"head")
            assert not writer.get_write_buffer_size()
            writer.write(data)
            writer.write(b"tail")
            assert made.said == ["pause"]
            assert [len(piece) for piece in pieces] == [4, size]
            assert writer.get_write_buffer_size() == below + len(data) - size + 4
            made.below.give_room(2)
            assert made.said == ["pause"]
            made.below.give_room(2)
            assert made.said == ["pause", "resume"]
            assert max(len(piece) for piece in pieces) == size
            assert b"".join(pieces) == b"head" + data + b"tail"
            assert not writer.get_write_buffer_size()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_between_cork_and_uncork_is_sent_as_one(kind: type[PieceWriter]) -> None:
    size = kind.piece_bytes

    async def main() -> None:
        with Connection(num_pieces=5, kind=kind) as made:
            writer, pieces = made.writer, made.below.pieces
            writer.cork()
            writer.write(b"head")
            writer.write(b"first")
            assert not pieces
            assert writer.get_write_buffer_size() == 9
            writer.uncork()
            assert pieces == [b"headfirst"]
            writer.uncork()
            writer.write(b"next")
            writer.cork()
            writer.write(b"a")
            writer.write(DATA[:size])
            writer.uncork()
            assert [len(piece) for piece in pieces] == [9, 4, 1, size], "no larger piece than always"
            writer.write(b"fills it")
            writer.cork()
            writer.write(b"last")
            writer.close()
            writer.write(b"too late")
            writer.uncork()
            assert made.said == ["pause"]
            assert len(pieces) == 5
            made.below.give_room(9)
            assert pieces[5:] == [b"last"]
            assert made.below.is_closed

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_of_the_loop_passes_on_a_part_of_a_long_answer(kind: type[PieceWriter]) -> None:
    """All of 15 MB would be encrypted in one turn."""

    async def main() -> None:
        with Connection(num_pieces=1 << 20, kind=kind) as made:
            made.writer.write(bytes(3 * TURN_BYTES))
            made.writer.write(b"next")
            for num_turns in (1, 2, 3):
                assert sum(map(len, made.below.pieces)) == num_turns * TURN_BYTES
                assert made.said == ["pause"]
                await asyncio.sleep(0)
            assert made.below.pieces[-1] == b"next"
            assert made.said == ["pause", "resume"]

    asyncio.run(main())


def test_it_closes_after_the_last_piece_and_once_the_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_writer, "CLOSE_CHECK_S", 0.001)

    async def main() -> None:
        with Connection(num_pieces=1) as made:
            made.fill()
            made.writer.write(DATA)
            made.writer.close()
            made.writer.write(b"too late")
            assert made.writer.is_closing()
            made.below.give_room(9)
            await asyncio.sleep(0.01)
            assert not made.below.is_closed, "the transport below may hold what the kernel has no room for"
            assert b"".join(made.below.pieces) == DATA
            assert made.said == ["pause"]
            made.far.close()
            async with asyncio.timeout(10):
                while not made.below.is_closed:
                    await asyncio.sleep(0.001)

    asyncio.run(main())


def test_who_sends_nothing_more_still_gets_what_waits_of_a_plain_answer() -> None:
    async def main() -> None:
        with Connection(num_pieces=1, kind=PieceWriter) as made:
            made.writer.write(DATA)
            assert made.writer.eof_received(), "the event loop would close it"
            made.writer.write(b"too late")
            assert not made.below.is_closed
            made.below.give_room(99)
            assert made.below.is_closed
            assert b"".join(made.below.pieces) == DATA
            assert not made.writer.eof_received()

    asyncio.run(main())


def test_nothing_is_kept_but_what_is_unread(tmp_path: Path) -> None:
    """The event loop kept a whole answer until its last byte was sent: 2,000 callers with windows of 4 KiB,
    who read nothing of 140 KB each, were 307 MB.
    """
    size = 1 << 20

    async def main() -> None:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[PieceWriter] = loop.create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.writer = PieceWriter(cast(asyncio.Transport, transport), lambda: None, lambda: None)
                made.set_result(self.writer)

            def pause_writing(self) -> None:
                self.writer.pause_writing()

            def resume_writing(self) -> None:
                self.writer.resume_writing()

            def connection_lost(self, exc: Exception | None) -> None:
                self.writer.connection_lost()

        path = str(tmp_path / "socket")
        server = await loop.create_unix_server(Protocol, path)
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(path)
            far.setblocking(False)
            async with asyncio.timeout(WAIT_S):
                writer = await made
                data = bytes(range(256)) * (size // 256)
                num_references = sys.getrefcount(data)
                writer.write(data)
                assert sys.getrefcount(data) == num_references, "all of it is kept"
                kept, received = writer.get_write_buffer_size(), bytearray()
                assert size // 2 < kept < size, "the kernel takes a part"
                while kept > size // 4:
                    received += await loop.sock_recv(far, 1 << 16)
                    await asyncio.sleep(0)
                    kept = writer.get_write_buffer_size()
                    assert kept <= size - len(received) + PieceWriter.piece_bytes
                while len(received) < size:
                    received += await loop.sock_recv(far, 1 << 16)
            assert received == data
            assert not writer.get_write_buffer_size()
        server.close()

    uvloop.run(main())


@pytest.mark.parametrize("how", ["abort", "forget", "connection_lost"])
def test_nothing_is_passed_on_once_the_connection_ends(how: str) -> None:
    async def main() -> None:
        with Connection(num_pieces=1 << 20) as made:
            made.writer.write(bytes(2 * TURN_BYTES))
            cast(Any, getattr(made.writer, how))()
            assert not made.writer.get_write_buffer_size()
            assert made.below.is_aborted == (how == "abort")
            await asyncio.sleep(0.01)
            made.writer.resume_writing()
            assert sum(map(len, made.below.pieces)) == TURN_BYTES
            assert made.said == ["pause"]

    asyncio.run(main())


def test_a_connection_that_ends_between_two_looks_is_looked_at_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop's transport knows of the end a turn earlier, and has no socket then."""
    monkeypatch.setattr(tls_writer, "CLOSE_CHECK_S", 0.001)

    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        with Connection(num_pieces=9) as made:
            made.fill()
            made.writer.close()
            made.below.is_aborted = True
            monkeypatch.setattr(made.below, "connection", None)
            await asyncio.sleep(0.01)
            assert not faults
            assert not made.below.is_closed

    asyncio.run(main())


def test_a_caller_that_goes_on_not_reading_is_looked_at_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten looks a second at each of 8,192 connections take a sixth of the event loop: 2 us each."""

    looks: list[tuple[float, Callable[[], None]]] = []

    class Loop:
        def call_later(self, delay_s: float, look: Callable[[], None]) -> None:
            looks.append((delay_s, look))

    with Connection(num_pieces=9) as made:
        made.fill()
        monkeypatch.setattr(asyncio, "get_running_loop", Loop)
        made.writer.close()
        for _ in range(6):
            looks[-1][1]()
        assert [delay_s for delay_s, _ in looks] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        assert not made.below.is_closed
