"""HttpClient: one HTTP/1.1 exchange for each connection, with asyncio's transports and httptools' parser. The
load generator and the batch command use it.

A connection is opened for each request, and its time is part of the request's. The body of an answer is
passed on as it arrives, with the time at which the socket gave it.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

import httptools

from runtime.base.errors import ConfigError

OnBody: TypeAlias = Callable[[bytes, float], None]
MAX_ERROR_BYTES = 1 << 12
MAX_OPEN_FILES = 65535


class RequestFailure(Exception):
    """Raised if a request did not complete. The text is shown to the user."""


class NotConnected(RequestFailure):
    """Raised if there was no connection, so the server has seen nothing of the request."""


class AnswerTimeout(RequestFailure):
    """Raised if the answer was not complete in time."""


@dataclass(slots=True)
class HttpAnswer:
    """Answer of a server, whatever its status."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    """Values of headers by their names in small letters; the last one where a name comes twice."""
    body: bytes = b""


class HttpClient:
    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
        option: str = "--base-url",
    ) -> None:
        """Set the server's address.

        option: name of the address in errors. Raises ConfigError if it is not an http or https address.
        """
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"{option}: {base_url!r} is not an http or https address")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._timeout_s = timeout_s
        self._clock = clock

    async def get(self, path: str) -> bytes:
        """Return the body of the answer. Raises RequestFailure."""
        parts: list[bytes] = []
        request = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode()
        await self._exchange(request, parts_of(parts), wants_any=False)
        return b"".join(parts)

    async def post(self, path: str, body: bytes, on_body: OnBody) -> None:
        """Send JSON. The answer's body goes to `on_body` piece by piece. Returns at its end.

        Raises: RequestFailure if there is no complete answer with status 200, or if `on_body` raises it.
        """
        await self._exchange(self._post(path, body), on_body, wants_any=False)

    async def ask(self, path: str, body: bytes) -> HttpAnswer:
        """Send JSON and return the answer, whatever its status. Raises RequestFailure if none is complete."""
        parts: list[bytes] = []
        answer = await self._exchange(self._post(path, body), parts_of(parts), wants_any=True)
        answer.body = b"".join(parts)
        return answer

    def _post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _exchange(self, request: bytes, on_body: OnBody, *, wants_any: bool) -> HttpAnswer:
        """Return the head of the answer once all of its body has gone to `on_body`."""
        exchange = _Exchange(on_body, self._clock, wants_any=wants_any)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                transport = await self._connect(exchange)
                transport.write(request)
                return await exchange.done
        except TimeoutError:
            raise AnswerTimeout(f"no complete answer within {self._timeout_s:g} s") from None
        finally:
            if transport is not None:
                transport.close()

    async def _connect(self, exchange: _Exchange) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(
                lambda: exchange, self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            reason = error.strerror or error
            raise NotConnected(f"{self._host}:{self._port}: {reason}") from None
        return transport


def parts_of(parts: list[bytes]) -> OnBody:
    """Return an `on_body` that collects the pieces in `parts`."""
    return lambda data, _: parts.append(data)


def raise_file_limit() -> None:
    """Raise the limit of open files: a connection for each request in flight is more than the usual soft
    limit of 1024 allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Exchange(asyncio.Protocol):
    def __init__(self, on_body: OnBody, clock: Callable[[], float], *, wants_any: bool) -> None:
        """wants_any: False if an answer with another status than 200 is a failure."""
        self._forward = on_body
        self._clock = clock
        self._wants_any = wants_any
        self.done: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._answer = HttpAnswer(0)
        self._is_wanted = False
        self._has_headers = False
        # Without a length and without chunks, the end of the connection is the end of the body.
        self._ends_with_connection = True
        self._error_body = b""

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(str(cause) if isinstance(cause, RequestFailure) else f"not HTTP: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None and self._has_headers and self._ends_with_connection:
            self.on_message_complete()
        else:
            what = f": {error}" if error else ""
            self._fail(f"the connection ended before the answer was complete{what}")

    # -- httptools' callbacks ----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        self._answer.headers[name.decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_headers = True
        self._answer.status = self._parser.get_status_code()
        self._is_wanted = self._wants_any or self._answer.status == 200

    def on_body(self, data: bytes) -> None:
        if self._is_wanted:
            self._forward(data, self._now)
        elif len(self._error_body) < MAX_ERROR_BYTES:
            self._error_body += data

    def on_message_complete(self) -> None:
        if self._is_wanted:
            self.done.set_result(self._answer)
        else:
            detail = self._error_body.decode(errors="replace").strip()
            self._fail(f"HTTP {self._answer.status}: {detail}")

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RequestFailure(message))
