"""Siblings: messages between the HTTP processes of a launch. Each listens on a socket in the run directory,
which only the launch's own user can open.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from carousel.server.running import AbortOrder
from runtime.base.errors import Overloaded
from runtime.wire.transport import DECODE_ERRORS

MAX_BYTES = 1 << 14
RETRY_S = 0.01
NUM_TRIES = 100

_decode = msgspec.json.Decoder(AbortOrder).decode


class Siblings:
    """Connection of this HTTP process to the others. It belongs to one event loop."""

    def __init__(self, places: list[Path], index: int, take: Callable[[AbortOrder], None]) -> None:
        """Listen at `places[index]`, where an earlier process may have left its socket. `take` is called with
        the orders of the others. Raises OSError.
        """
        self._others = [str(place) for number, place in enumerate(places) if number != index]
        self._take = take
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        places[index].unlink(missing_ok=True)
        self._socket.bind(str(places[index]))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def tell(self, order: AbortOrder) -> None:
        """Send an order to all others. Raises Overloaded if one of them does not read."""
        data = msgspec.json.encode(order)
        for place in self._others:
            await self._send(data, place)

    async def _send(self, data: bytes, place: str) -> None:
        for _ in range(NUM_TRIES):
            try:
                self._socket.sendto(data, place)
                return
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            except (FileNotFoundError, ConnectionRefusedError):
                return  # it is being replaced, and its requests have ended
        raise Overloaded("a process of the HTTP server does not answer; send it again", retry_after_s=1.0)

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return
        try:
            order = _decode(data)
        except DECODE_ERRORS:
            return  # not sent by an HTTP process
        self._take(order)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
