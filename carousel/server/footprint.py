"""Footprint: the part of an HTTP process that is known to be in use.

Garbage collections are due to growth beyond that (`garbage.py`). The numbers for each kind are a little less
than what was counted, so that no growth stays unseen.
"""

from __future__ import annotations

from carousel.server.garbage import Size
from carousel.server.http.server import HttpServer
from carousel.server.server_state import ServerState

CONNECTION = Size(24, 42, 6 << 10)
TLS = Size(20, 30, 36 << 10)
"""Addition to a connection that has TLS."""
WAITING = Size(6, 20, 5 << 9)
"""An HTTP request that waits on its connection behind another one, without its head and body."""
REQUEST = Size(90, 135, 11 << 10)
"""An HTTP request that is read or answered."""
GENERATION = Size(43, 68, 13 << 10)
"""Addition to a request that generates, without its prompts."""
PROMPT = Size(24, 46, 6 << 10)
"""One prompt of such a request, without its text and its sequences."""
CHARACTER = Size(0, 0, 1)
"""One character of such a text, which takes one to four bytes, or one id, which takes four."""
SEQUENCE = Size(5, 12, 1 << 9)


class Footprint:
    """Connections and requests of one HTTP process."""

    def __init__(self, state: ServerState, server: HttpServer) -> None:
        self._state = state
        self._server = server
        has_tls = bool(state.config.ssl_certfile)
        self._connection = CONNECTION.plus(TLS) if has_tls else CONNECTION

    def now(self) -> Size:
        """Return the size of connections, requests, their texts, bodies that wait or are read, and unread
        answers.
        """
        state, waiting = self._state, self._server.pipelined
        total = Size(0, 0, waiting.num_bytes + state.bodies.num_bytes + state.unread.num_bytes)
        for count, size in (
            (self._server.num_connections, self._connection),
            (waiting.num_requests, WAITING),
            (len(self._server.server_state.tasks), REQUEST),
            (state.running.num_requests, GENERATION),
            (state.running.num_prompts, PROMPT),
            (state.running.num_chars, CHARACTER),
            (state.places.num_sequences, SEQUENCE),
        ):
            total = total.plus(size, count)
        return total
