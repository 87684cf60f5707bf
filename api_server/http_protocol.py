"""HttpProtocol: uvicorn's protocol with bounds on a request's head, which no application has seen yet.

The parser below it keeps a head of any size and waits for its end for ever. What is refused here is answered
in the shape that all other errors have.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api_server.errors import error_body
from runtime.errors import RequestError

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 64
HEAD_TIMEOUT_S = 10.0
# Asked every few seconds by machines; a line for each would be most of the log.
UNLOGGED_PATHS = frozenset({b"/live", b"/ready", b"/health", b"/metrics"})


class HttpProtocol(HttpToolsProtocol):
    """One connection. The scope's state gets two ways past what stands in front of the endpoints, which looks
    at heads only: `send_body`, the innermost `send`, and `write_chunk`, which does not wait; and `has_left`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logs_access: bool = self.access_log
        self._awaits_head = True
        self._is_all_head = False
        """The piece being parsed neither begins nor completes a head."""
        self._head_bytes = 0
        """Received of a head that is not complete, after the piece in which it began."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: RequestError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client has left, which ends the connection. Who works for it hears of it now: until the
        connection is lost a few turns of the loop pass, in which a request that came with it would begin.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._awaits_head and self._head_timer is None:
            self._start_head_timer()
        self._is_all_head = self._awaits_head
        super().data_received(data)
        if self._is_all_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_all_head = False
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._awaits_head = self._is_all_head = False
        self._stop_head_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            # Whatever a callback raises ends the parsing, and then `send_400_response` is called.
            self._refusal = _head_too_large()
            raise self._refusal
        self.access_log = self._logs_access and self.url.partition(b"?")[0] not in UNLOGGED_PATHS
        super().on_headers_complete()
        self.scope["state"]["send_body"] = self.cycle.send
        self.scope["state"]["write_chunk"] = partial(_write_chunk, self.cycle)
        self.scope["state"]["has_left"] = partial(_has_left, self.cycle)

    def on_message_complete(self) -> None:
        self._awaits_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or RequestError(msg, code="invalid_http", status=400))

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is on its way; what has come behind its request may be no more than a line break.
            self._start_head_timer()
            return
        self._refuse(
            RequestError(f"no request came within {HEAD_TIMEOUT_S:.0f} s", code="timeout", status=408)
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer, unless that would fall into the answer to an earlier request, and close the connection."""
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = error_body(error)
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _write_chunk(cycle: RequestResponseCycle, chunk: bytes) -> bool:
    """Write a chunk of a response whose head is out, the same bytes as `send`. False: nothing was written;
    the client does not read, has gone, or gets no chunks, which `send` knows to handle.
    """
    assert chunk, "an empty chunk ends the response"
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    return True


def _has_left(cycle: RequestResponseCycle) -> bool:
    """The client has closed the connection, as far as the event loop has seen."""
    return cycle.disconnected


def _head_too_large() -> RequestError:
    return RequestError(
        f"the request line and headers are more than {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} fields",
        code="headers_too_large",
        status=431,
    )
