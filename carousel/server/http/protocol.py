"""HttpProtocol: uvicorn's protocol with limits on all that is read from a connection: heads, framing,
trailers, pipelined requests, and bodies that nobody reads. No application sees most of this.

Uvicorn's parser would keep a head of any size and wait for its end for ever. Refusals are answered in the
form of all other errors.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from carousel.server.http.body_pace import BodyPace
from carousel.server.http.body_pool import SMALL_BYTES
from carousel.server.http.connection_count import ConnectionCount, Pipeline
from carousel.server.http.connection_turns import (
    BYTES_PER_COST,
    ESCAPES_PER_COST,
    HEAD_COST,
    REQUEST_COST,
    ConnectionTurns,
)
from carousel.server.http.errors import error_body, error_headers
from carousel.server.http.flow import Flow, has_begun, note_departure, with_short_cuts
from carousel.server.tenancy.auth import tenant_of
from carousel.server.tenancy.unread_answers import UnreadAnswers
from runtime.base.errors import Overloaded, RequestError

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 64
HEAD_TIMEOUT_S = 10.0
MAX_PIPELINED = 16
"""Maximum number of requests that wait on a connection while another one is being served."""
MAX_FRAMING_BYTES = 16 << 10
"""Maximum number of bytes of chunk sizes, extensions and trailers of a body, beyond as many bytes as the
chunks hold.
"""
UNREAD_TIMEOUT_S = 5.0
"""Longest time between an answer and the end of its request, which nobody reads."""
PIECE_BYTES = 8 << 10
"""Number of bytes that are parsed at a time."""
# Called every few seconds by other programs; a line for each call would be most of the log.
UNLOGGED_PATHS = frozenset({b"/live", b"/ready", b"/health", b"/metrics"})
# Who runs a server ends it where they are answered too late, whatever else it has to do.
PROBE_PATHS = UNLOGGED_PATHS - {b"/metrics"}

UNREAD = "\0"
"""Line (`BodyPace`) of bodies that nobody reads, or not yet: no tenant has this name."""
SCHEMES = ("http", "https")
ASTERISK = b"*"
"""Target of `OPTIONS *`, which names no path."""
_OTHER_SCHEME = (
    "the target has another scheme than this connection, {}; --forwarded-allow-ips names proxies that may "
    "send it, or let the proxy send the path alone"
)
_ADDRESS = re.compile(rb"([a-z][a-z0-9+.-]*)://([^/?#@]+)(|[/?#].*)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """Protocol of one connection. Its reading, parsing and beginning of requests take turns with those of all
    other connections.
    """

    flow: Flow

    def __init__(
        self,
        count: ConnectionCount,
        turns: ConnectionTurns,
        pace: BodyPace,
        unread: UnreadAnswers,
        root_path: bytes,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """`count`, `turns`, `pace` and `unread` are shared by all connections of this process. `root_path` is
        the prefix that the application removes from paths.
        """
        super().__init__(*args, **kwargs)
        self._root_path = root_path
        self._count = count
        self.pipeline: Pipeline = Pipeline(count.pipelined)
        self._logs_access: bool = self.access_log
        self._turns = turns
        self._pace = pace
        self._unread = unread
        self._unparsed = b""
        """Received bytes that wait for a turn."""
        self._cost = 0
        """Number of calls of the parser for the piece that is being parsed."""
        self._awaits_head = True
        self._is_all_head = False
        """True if the piece that is being parsed neither begins nor completes a head."""
        self._head_bytes = 0
        """Bytes received of an incomplete head, after the piece in which it began."""
        self._is_all_body = False
        """True if the piece that is being parsed belongs to one body, apart from that body's framing."""
        self._chunk_bytes = 0
        """Bytes of a body in the piece that is being parsed."""
        self._body_bytes = 0
        """Bytes received of the body that is being parsed."""
        self._framing_room = 0
        """Bytes of framing that may still come before further bytes of the body."""
        self._plain_head = b""
        """Head of a request that asks for another protocol, without the headers that ask for it."""
        self._waiting_bytes = 0
        """Bytes of the bodies of requests that came while another one was being served."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_work: RequestResponseCycle | None = None
        """The latest request that was begun; `cycle` is the latest one that was read."""
        self._refusal: RequestError | None = None
        self._last_words: RequestError | None = None
        """Refusal that is sent after the answers to earlier requests; nothing more is parsed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._start_head_timer()
        if not self._count.add(self._address):
            self._refuse(
                Overloaded("this address has too many connections; close some", code="too_many_connections")
            )

    @property
    def is_new(self) -> bool:
        """Return True until the head of a first request has been read."""
        return self.cycle is None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._count.remove(self._address)
        self._unread.resume(self.transport)
        self._stop_head_timer()
        self._stop_unread_timer()
        self._unset_keepalive_if_required()
        self._tell_of_the_end()
        super().connection_lost(exc)
        # They refer to this object, too: a cycle for the collector.
        self.pipeline.clear()
        self.cycle = self._in_work = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        # Not `cycle`, which may be a request behind it that nobody has looked at.
        tenant = "" if self._in_work is None else tenant_of(cast(Any, self._in_work.scope)).name
        self._unread.pause(self.transport, tenant)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.resume(self.transport)

    def eof_received(self) -> None:
        """End the connection, because the client has left. The request's handler is told at once: the loss of
        the connection is noticed a few turns later, and until then a request that came with it would begin.
        """
        self._tell_of_the_end()

    # Passing of data to the parser, piece by piece

    def data_received(self, data: bytes | memoryview) -> None:
        """Take received data. `data` may be a view of memory that is not valid after this call."""
        self._unset_keepalive_if_required()
        if self._awaits_head and self._head_timer is None and self._last_words is None:
            self._start_head_timer()
        if self._turns.has_room() and not self._unparsed:
            self._parse(memoryview(data))
        else:
            self._unparsed += data
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        if not self.flow.is_held:
            self.flow.is_held = True
            self._turns.wait(self._begin_turn, is_new=self.is_new)

    def _begin_turn(self) -> None:
        if self.parser is not None:  # the connection is not lost
            self.flow.is_held = False
            data, self._unparsed = self._unparsed, b""
            self._parse(memoryview(data))

    def _parse(self, data: memoryview) -> None:
        """Parse a piece, and more while this turn of the loop has room. The rest waits for another turn."""
        if self._is_in_large_body:
            self._pace.begin()
        at = 0
        while at < len(data) and not self.transport.is_closing():
            if at and not self._turns.has_room():
                self._unparsed = bytes(data[at:])
                self._wait_for_turn()
                return
            piece = data[at : at + PIECE_BYTES]
            self._cost = 1 + len(piece) // BYTES_PER_COST
            # Data after a refusal is dropped, no faster than it would be parsed.
            at += self._feed(piece) if self._last_words is None else len(piece)
            self._turns.spend(self._cost)
        if self._is_in_large_body and not self._pace.is_alone:
            self._rest()

    @property
    def _is_in_large_body(self) -> bool:
        return self._body_bytes > SMALL_BYTES

    def _rest(self) -> None:
        """Stop reading a large body until the loop has time for its next piece."""
        if not (self.flow.is_resting or self.transport.is_closing()):
            self.flow.is_resting = True
            self._wait_in_line()

    def _wait_in_line(self) -> None:
        """Wait in the line of the tenant that reads the body, which is known as soon as the request has
        begun. The scope of an answered one names no tenant any more, nor does that of a wrong key.
        """
        if self.parser is None:  # the connection is lost
            return
        cycle, line = self.cycle, UNREAD
        if not (cycle.response_complete or cycle.disconnected or self.pipeline):
            if not has_begun(cycle):
                self._turns.wait(self._wait_in_line_soon)
                return
            line = tenant_of(cast(Any, cycle.scope)).name
        self._pace.wait(self._end_rest, line)

    def _wait_in_line_soon(self) -> None:
        self.loop.call_soon(self._wait_in_line)  # behind the first step of the request's task

    def _end_rest(self) -> None:
        if self.parser is not None:  # the connection is not lost
            self.flow.is_resting = False

    def _feed(self, piece: memoryview) -> int:
        """Parse a piece. Returns the number of bytes that were parsed."""
        self._chunk_bytes = 0
        self._is_all_head, self._is_all_body = self._awaits_head, not self._awaits_head
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._go_on_without_upgrade(upgrade.args[0])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse_parsed(self._refusal or _invalid("Invalid HTTP request received."))
        else:
            self._bound_piece(len(piece))
        return len(piece)

    def _bound_piece(self, num_bytes: int) -> None:
        if self._is_all_head:
            self._head_bytes += num_bytes
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        elif self._is_all_body:
            room = self._framing_room + 2 * self._chunk_bytes - num_bytes
            self._framing_room = min(room, MAX_FRAMING_BYTES)
            if room < 0:
                self._refuse(_invalid("the body is mostly chunk sizes, extensions or trailers"))

    def _go_on_without_upgrade(self, parsed: int) -> int:
        """Parse a request as if it had not asked for another protocol, which a server need not support. The
        parser has stopped after its head, and would take its body for the next request.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        head, self._plain_head = self._plain_head, b""
        self._awaits_head = True
        self._feed(memoryview(head))
        return parsed

    # Callbacks of the parser. An exception of one ends the parsing.

    def _stop(self, error: RequestError) -> NoReturn:
        """End parsing with a refusal. The refusal itself is not raised, because an exception would refer to
        this object.
        """
        self._refusal = error
        raise ValueError("refused")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(
                Overloaded(
                    f"more than {MAX_PIPELINED} requests wait on this connection; send others on another one",
                    code="too_many_pipelined",
                )
            )
        super().on_message_begin()
        self._unset_keepalive_if_required()
        if self._head_timer is None:
            self._start_head_timer()
        self._cost += HEAD_COST
        self._is_all_head = False
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._cost += 1
        if not self._awaits_head:
            self._stop(_invalid("trailers are not supported: send no fields behind the last chunk"))
        if len(self.headers) >= MAX_HEADERS:
            self._stop(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_all_head = False
        self._check_head()
        if self.parser.should_upgrade():
            self._plain_head = self._head_without_upgrade()
            return
        self._awaits_head = False
        self._framing_room = MAX_FRAMING_BYTES
        self._stop_head_timer()
        path = self.url.partition(b"?")[0]
        self._cost += path.count(b"%") // ESCAPES_PER_COST
        path = path.removeprefix(self._root_path)
        self.access_log = self._logs_access and path not in UNLOGGED_PATHS
        super().on_headers_complete()
        self._read_on_behind_pipeline()

    def _check_head(self) -> None:
        size, num_hosts, codings = len(self.url), 0, list[bytes]()
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"host":
                num_hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value.lower())
        if size > MAX_HEAD_BYTES:
            self._stop(_head_too_large())
        is_old = self.parser.get_http_version() == "1.0"
        if num_hosts > 1 or not (num_hosts or is_old):
            self._stop(_invalid("a request of HTTP/1.1 has one Host header"))
        if is_old:  # which knows no answer before the answer (RFC 9110, 10.1.1)
            self.expect_100_continue = False
        # The parser would notice only after the request has begun.
        if codings and (is_old or codings != [b"chunked"]):
            self._stop(_invalid("Transfer-Encoding is chunked, in HTTP/1.1, or left out"))
        if not self.url.startswith(b"/") and self.url != ASTERISK:
            self._take_address()

    def _take_address(self) -> None:
        """Take the host from a target that is a whole address, in the place of the Host header (RFC 9112,
        3.2.2), so that what checks that header checks the host which is asked for.
        """
        match = _ADDRESS.fullmatch(self.url)
        if match is None:
            self._stop(_invalid("the target is a path, or an address with a host and without a user"))
        scheme, host, path = match[1].lower().decode(), match[2], match[3]
        if scheme != self.scheme:
            if scheme not in SCHEMES or not self._is_from_proxy():
                self._stop(_invalid(_OTHER_SCHEME.format(self.scheme)))
            self.scope["scheme"] = scheme
        self.url = path if path.startswith(b"/") else b"/" + path
        self.headers[:] = [(b"host", host), *(field for field in self.headers if field[0] != b"host")]

    def _is_from_proxy(self) -> bool:
        """Return True if this connection is that of a proxy which is believed (RFC 9110, 7.4)."""
        believed = self.config.forwarded_allow_ips if self.config.proxy_headers else None
        if believed is None or isinstance(believed, str):
            return believed == "*"
        address = ip_address(self._address)
        return any(address in ip_network(each) for each in believed)

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._stop(_invalid("CONNECT is for proxies"))
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_body(self, body: bytes) -> None:
        self._cost += 1
        self._chunk_bytes += len(body)
        self._body_bytes += len(body)
        super().on_body(body)
        if self.pipeline:
            self._waiting_bytes += len(body)
            self.pipeline.note_body(len(body))
            if self._waiting_bytes > HIGH_WATER_LIMIT:
                self.flow.pause_reading()

    def _read_on_behind_pipeline(self) -> None:
        """Read on although a request waits. Uvicorn would stop reading then, and not notice that the client
        leaves.
        """
        if not self.pipeline:
            self._waiting_bytes = 0
        elif self._waiting_bytes <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._is_all_body = False
        self._body_bytes = 0
        if self._plain_head:
            return
        self._awaits_head = True
        super().on_message_complete()
        self._stop_unread_timer()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._start_keep_alive_timer()

    # Begin and end of answers, and end of the connection

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._in_work = cycle
        path = cycle.scope["raw_path"].removeprefix(self._root_path)
        self._turns.begin(partial(self._begin_request, cycle, app), is_probe=path in PROBE_PATHS)

    def _begin_request(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not cycle.disconnected:
            self._turns.spend(REQUEST_COST)
            super()._start_asgi_task(cycle, with_short_cuts(app, cycle))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline or not self.cycle.response_complete or self.transport.is_closing():
            return
        # Drop the part of a body that the application has not read.
        self.cycle.body = bytearray()
        if self._last_words is not None:
            self._refuse(self._last_words)
        elif not self._awaits_head:
            self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.close)

    def _start_keep_alive_timer(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is on its way. The data after its request may be only a line break.
            self._start_head_timer()
            return
        self._refuse(
            RequestError(f"no request came within {HEAD_TIMEOUT_S:.0f} s", code="timeout", status=408)
        )

    def _refuse_parsed(self, error: RequestError) -> None:
        """Refuse the request at which the parser has stopped. If it is one too many, the requests before it
        are still answered.
        """
        if self.pipeline and isinstance(error, Overloaded):
            self._stop_head_timer()
            self._last_words = error
        else:
            self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        """Answer with a refusal and close the connection. There is no answer if the request has one already,
        or if others wait for theirs.
        """
        cycle = self.cycle
        has_answer = cycle is not None and cycle.response_started
        is_next = cycle is not None and cycle.response_complete and self._awaits_head
        if (is_next or not has_answer) and not self.pipeline:
            self.transport.write(_answer_of(error))
        self.transport.close()
        self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        """Tell the handlers of this connection's requests that nobody waits for the answer."""
        for cycle in (self._in_work, self.cycle):
            if cycle is not None and not cycle.response_complete:
                note_departure(cycle)


def _answer_of(error: RequestError) -> bytes:
    body = error_body(error)
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error_headers(error),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_http", status=400)


def _head_too_large() -> RequestError:
    return RequestError(
        f"the request line and headers are more than {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} fields",
        code="headers_too_large",
        status=431,
    )
