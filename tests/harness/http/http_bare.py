"""BareServer: the HTTP server's protocol without sockets, models or time, and checks of its invariants."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from carousel.server.http.body_pace import BodyPace
from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.connection_turns import TURN_COST, ConnectionTurns
from carousel.server.http.protocol import MAX_HEADERS, MAX_PIPELINED, HttpProtocol
from carousel.server.tenancy.unread_answers import UnreadAnswers
from tests.harness.http.http_grammar import Stream
from tests.harness.http.numbered_app import NumberedApp, Visit, check_answers

MAX_READ = 256_000
PIECE_COST = 2048
"""More than any 8 KiB cost."""
MAX_TURNS = 3000
"""Turns of the event loop until a connection has done all it can do with what has come."""
PEER = ("192.0.2.1", 1)
HELD_BYTES = 2 * MAX_READ
"""Bytes that one connection may hold: what is not parsed, and bodies that nobody has read."""


class Turns(ConnectionTurns):
    """Remembers the most that was done in a piece and in a turn."""

    most_in_piece = most_in_turn = 0

    @property
    def is_idle(self) -> bool:
        return not (self._line or self._new or self._probes or self._requests)

    def spend(self, cost: int) -> None:
        super().spend(cost)
        self.most_in_piece = max(self.most_in_piece, cost)
        self.most_in_turn = max(self.most_in_turn, self._spent)


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.protocol: HttpProtocol | None = None
        self.written = bytearray()
        self.is_paused = self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return PEER if name == "peername" else default

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        assert not self._is_closing, "written to a closed connection"
        self.written += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            assert self.protocol is not None
            # As the event loop's own transports do, it lets go of the protocol.
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
            self.protocol = None


class BareServer:
    """Takes streams one after another."""

    def __init__(self) -> None:
        self._app = NumberedApp()
        self._config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._count = ConnectionCount(1 << 20, 0, lambda: None, lambda: None)
        self._turns = Turns()
        # There is always something else to serve, and a rest takes no time.
        self._pace = BodyPace(lambda: -1, cpu_time=lambda: 0.0)

    async def take(self, stream: Stream) -> None:
        """Serve one connection, and check all that must be true of it. Raises AssertionError."""
        visit = self._app.visits[PEER] = Visit(stream.is_wild)
        transport = Transport()
        protocol = HttpProtocol(
            self._count,
            self._turns,
            self._pace,
            UnreadAnswers(),
            b"",
            config=self._config,
            server_state=self._state,
            app_state={},
        )
        transport.protocol = protocol
        protocol.connection_made(transport)
        for piece, num_turns in stream.pieces:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await self._until_read(transport)
            if transport.is_closing():
                break
            protocol.data_received(piece)
            self._check_bounds(protocol)
        await self._settle(transport, protocol)
        written = bytes(transport.written)
        check_answers(stream, written, visit.served, is_closed=transport.is_closing())
        if not transport.is_closing():
            assert _has_a_limit(protocol), "nothing would ever end this connection"
            protocol.eof_received()
            transport.close()
        await self._settle(transport, protocol)
        assert not self._state.tasks, "somebody works for a client that has left"
        assert not self._count.total
        assert not self._count.pipelined.num_requests
        assert not self._count.pipelined.num_bytes
        assert not self._state.connections

    async def _until_read(self, transport: Transport) -> None:
        for _ in range(MAX_TURNS):
            if not transport.is_paused or transport.is_closing():
                return
            await asyncio.sleep(0)
        raise AssertionError("the connection is never read again")

    async def _settle(self, transport: Transport, protocol: HttpProtocol) -> None:
        """Let pass turns until nobody works, or those who do wait for what has not come."""
        num_quiet, before = 0, None
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            now = (len(transport.written), len(protocol._unparsed), len(self._app.visits[PEER].served))
            num_quiet = num_quiet + 1 if now == before else 0
            before = now
            is_idle = self._turns.is_idle and not self._state.tasks and not protocol._unparsed
            is_ending = transport.is_closing() and self._count.total
            if num_quiet == 6 or (is_idle and not is_ending):
                return
        raise AssertionError("there is no end to what the connection does")

    def _check_bounds(self, protocol: HttpProtocol) -> None:
        assert len(protocol.pipeline) <= MAX_PIPELINED
        assert protocol.headers is None or len(protocol.headers) <= MAX_HEADERS
        cycles = [cycle for cycle, _ in protocol.pipeline]
        if protocol._in_work is not None:
            cycles.append(protocol._in_work)
        assert len(protocol._unparsed) + sum(len(cycle.body) for cycle in cycles) <= HELD_BYTES
        assert self._turns.most_in_piece <= PIECE_COST
        assert self._turns.most_in_turn <= TURN_COST + PIECE_COST


def _has_a_limit(protocol: HttpProtocol) -> bool:
    """Return True if a timer runs, or a request is in work, whose application has limits of its own."""
    timers = (protocol._head_timer, protocol._unread_timer, protocol.timeout_keep_alive_task)
    is_working = protocol._in_work is not None and not protocol._in_work.response_complete
    return is_working or any(timer is not None and not timer.cancelled() for timer in timers)


class Complaints(logging.Handler):
    """Collector of what is logged as an error: uvicorn logs what an application raises."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(f"{record.getMessage()} {record.exc_info}")
