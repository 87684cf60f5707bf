"""HttpServer: uvicorn's server without its signal handlers, and with a limit on its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn

from carousel.server.http.body_pace import BodyPace
from carousel.server.http.connection_count import ConnectionCount, PipelinedCount, openable
from carousel.server.http.connection_turns import ACCEPTED_IN_TURN, ConnectionTurns, EndTurns
from carousel.server.http.paced_reader import READ_BYTES, PacedReader
from carousel.server.http.protocol import HttpProtocol
from carousel.server.http.tls.handshake_turns import HandshakeTurns
from carousel.server.http.tls.tls_reader import TlsReader
from carousel.server.tenancy.unread_answers import UnreadAnswers

RETRY_S = 1.0
DATE_S = 1.0
logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Accepts connections from one listening socket, which other processes may share. When it has its maximum
    of connections, it stops accepting: the kernel keeps further ones, or another process accepts them.
    """

    def __init__(
        self,
        app: Any,
        *,
        max_connections: int,
        max_per_address: int,
        body_pace: BodyPace,
        unread: UnreadAnswers,
        own_root_path: str = "",
        **settings: Any,
    ) -> None:
        """`max_per_address` 0 means no limit; one connection too many is answered with 503. `body_pace` and
        `unread` are the application's; the former learns here what is being served. `own_root_path` is the
        prefix that the application removes from paths. `settings` are uvicorn's.
        """
        self._root_path = own_root_path.encode()
        most = openable(max_connections)
        if most < max_connections:
            logger.warning(
                "max_connections: %d instead of %d, because of the limit of file descriptors (ulimit -n)",
                most,
                max_connections,
            )
        self._count = ConnectionCount(
            most, max_per_address, self._close_servers, self._accept_again, ACCEPTED_IN_TURN
        )
        self._turns = ConnectionTurns()
        self._ends = EndTurns()
        self._handshakes = HandshakeTurns()
        self._body_pace = body_pace
        self._unread = unread
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._tls_buffer = memoryview(bytearray(READ_BYTES))
        # Called like a protocol class.
        protocol = cast(type[HttpProtocol], self._read_connection)
        super().__init__(uvicorn.Config(app, http=protocol, **settings))
        body_pace.requests = self.server_state.tasks
        self.servers: list[asyncio.Server] = []
        self._stopped = asyncio.Event()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return self._count.total

    @property
    def pipelined(self) -> PipelinedCount:
        return self._count.pipelined

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process context handles SIGTERM."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting. There is no lifespan to wait for."""
        assert sockets
        (self._listener,) = sockets
        if self.config.ssl is not None:
            self.config.ssl.options |= ssl.OP_NO_RENEGOTIATION
        await self._open_servers()
        self.started = True

    def stop(self) -> None:
        """Make `serve` return."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Renew the date of the answers each second until `stop`. Uvicorn's looks for the end ten times a
        second, which was a quarter of all that an idle process woke for.
        """
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), DATE_S)

    async def _open_servers(self) -> None:
        """Open as many listening servers as there is room for connections in a turn, because connections are
        counted after all have accepted.
        """
        while len(self.servers) < min(ACCEPTED_IN_TURN, self._count.room):
            self.servers.append(await self._create_server())
        self._close_servers()  # for connections that were accepted meanwhile

    async def _create_server(self) -> asyncio.Server:
        """Return a server on a copy of the listening socket, so that pausing closes only copies."""
        assert self._listener is not None
        return await asyncio.get_running_loop().create_server(
            self._make_protocol, sock=self._listener.dup(), backlog=self.config.backlog
        )

    def _close_servers(self) -> None:
        while self.servers and len(self.servers) > self._count.room:
            self.servers.pop().close()
            if not self.servers:
                logger.warning(
                    "all connections are in use; the next is accepted when one ends (--max-connections)"
                )

    def _accept_again(self) -> None:
        if self._accepting is None or self._accepting.done():
            self._accepting = asyncio.create_task(self._open())

    async def _open(self) -> None:
        while not self.should_exit:
            try:
                await self._open_servers()
            except OSError as error:
                logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _read_connection(self, **about: Any) -> asyncio.BufferedProtocol:
        make_protocol = partial(
            HttpProtocol, self._count, self._turns, self._body_pace, self._unread, self._root_path, **about
        )
        reader = PacedReader(make_protocol, self._turns, self._ends, self._buffer)
        context = self.config.ssl
        if context is None:
            return reader
        return TlsReader(reader, context, self._count, self._handshakes, self._turns, self._tls_buffer)

    def _make_protocol(self) -> asyncio.Protocol:
        # The same as at the start of uvicorn.
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
