"""SocketServer: the HTTP server on a real socket, and clients that send the connections of a grammar."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import uvloop

from carousel.server.http import protocol
from carousel.server.http.body_pace import BodyPace
from carousel.server.http.server import HttpServer
from carousel.server.tenancy.unread_answers import UnreadAnswers
from tests.harness.http.http_grammar import Stream
from tests.harness.http.numbered_app import NumberedApp, Visit, check_answers, is_cut
from tests.harness.http.tls import CERTIFICATE, FILES

HOST = "127.0.0.1"
NUM_AT_ONCE = 64
WAIT_S = 120.0
"""Longest time that what must come may take."""
LIMIT_S = 3600
"""The server's own limits on what clients take their time for, here: none of these does, but the machine may.
"""
SILENCE_S = 0.03
"""Time without an answer after which no more is expected of what nobody can foresee."""
OK = b"HTTP/1.1 200 "
REFUSAL = b"\r\nconnection: close\r\n"
"""Part of the answer after which the server closes a connection."""


class Client(asyncio.Protocol):
    """One connection, and what has come on it."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.is_closed = self.is_reset = False
        self._transport: asyncio.Transport | None = None
        self._has_news = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._has_news.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed, self.is_reset = True, exc is not None
        self._may_write.set()
        self._has_news.set()

    async def say(self, stream: Stream) -> None:
        """Send its pieces, as far as the server takes them."""
        assert self._transport is not None
        for piece, num_turns in stream.pieces:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await self._may_write.wait()
            if self.is_closed:
                return
            self._transport.write(piece)

    async def listen(self, stream: Stream) -> None:
        """Wait for all that must come of a stream, or for a silence if nobody knows what that is. Raises
        AssertionError when it does not come.
        """
        while not self.is_closed and not self._has_all(stream):
            self._has_news.clear()
            is_over_in_silence = stream.is_wild and REFUSAL not in self.received and not is_cut(self.received)
            try:
                async with asyncio.timeout(SILENCE_S if is_over_in_silence else WAIT_S):
                    await self._has_news.wait()
            except TimeoutError:
                assert is_over_in_silence, "no answer, or no end"
                if not self._has_news.is_set():  # something may have come since the time was over
                    return

    def _has_all(self, stream: Stream) -> bool:
        must_close = stream.is_last or stream.is_wrong
        if stream.is_wild or must_close or self.received.count(OK) < len(stream.bodies):
            return False
        return not is_cut(self.received)


class SocketServer:
    """Serves streams, NUM_AT_ONCE at a time."""

    def __init__(self, *, has_tls: bool = False) -> None:
        self._trust = ssl.create_default_context(cafile=str(CERTIFICATE)) if has_tls else None
        self.app = NumberedApp()
        self._http = HttpServer(
            self.app,
            max_connections=8192,
            max_per_address=0,
            body_pace=BodyPace(lambda: 0),
            unread=UnreadAnswers(),
            interface="asgi3",
            timeout_keep_alive=LIMIT_S,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            **(FILES if has_tls else {}),
        )
        self.num_kinds: Counter[str] = Counter()
        """How many connections have ended in which way."""
        self._port = 0

    async def serve(self, streams: Iterator[tuple[int, Stream]]) -> None:
        """Serve all of them, and check what must be true of each, and of the server in the end. Raises
        AssertionError that names the number of the stream.
        """
        with socket.create_server((HOST, 0), backlog=NUM_AT_ONCE) as listener:
            self._port = listener.getsockname()[1]
            listener.setblocking(False)
            serving = asyncio.create_task(self._http.serve([listener]))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(NUM_AT_ONCE):
                        group.create_task(self._take_all(streams))
                await self._settle()
            finally:
                self._http.stop()
                await serving

    async def _take_all(self, streams: Iterator[tuple[int, Stream]]) -> None:
        for number, stream in streams:
            try:
                await self._take(stream)
            except AssertionError as error:
                error.add_note(f"make_stream({number}): {stream.pieces}"[:3000])
                raise

    async def _take(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(Client, HOST, self._port, ssl=self._trust)
        address = transport.get_extra_info("sockname")
        visit = self.app.visits[address] = Visit(stream.is_wild)
        try:
            await client.say(stream)
            await client.listen(stream)
            check_answers(
                stream,
                bytes(client.received),
                visit.served,
                is_closed=client.is_closed,
                is_reset=client.is_reset,
            )
        finally:
            transport.abort()
            if self.app.visits.get(address) is visit:  # who came since its end may have the same port
                del self.app.visits[address]
        self.num_kinds["reset" if client.is_reset else "closed" if client.is_closed else "kept"] += 1

    async def _settle(self) -> None:
        """Wait until nothing is left of any connection. Raises AssertionError."""
        state = self._http.server_state
        try:
            async with asyncio.timeout(WAIT_S):
                while state.tasks or state.connections or self._http.num_connections:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(
                f"{len(state.connections)} connections, {len(state.tasks)} requests are left"
            ) from None


def serve_streams(streams: Iterator[tuple[int, Stream]], *, has_tls: bool = False) -> Counter[str]:
    """Serve them on a loop like that of the HTTP process; return how many connections ended in which way.
    Raises AssertionError.
    """

    async def main() -> Counter[str]:
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        server = SocketServer(has_tls=has_tls)
        await server.serve(streams)
        assert not raised, raised
        return server.num_kinds

    with patch.multiple(protocol, HEAD_TIMEOUT_S=LIMIT_S, UNREAD_TIMEOUT_S=LIMIT_S):
        return uvloop.run(main())
