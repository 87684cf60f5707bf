"""HttpClient: one HTTP/1.1 exchange for each connection, with asyncio's transports and httptools' parser.

A connection is opened for each request, and its time is part of the request's. The body of a good answer is
passed on as it arrives, with the time at which the socket gave it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from bench_serving.records import Clock, RequestFailure
from runtime.base.errors import ConfigError

OnBody = Callable[[bytes, float], None]
MAX_ERROR_BYTES = 1 << 12


class HttpClient:
    def __init__(self, base_url: str, headers: Mapping[str, str], *, timeout_s: float, clock: Clock) -> None:
        """Set the server's address. Raises ConfigError if `base_url` is not an http or https address."""
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url: {error}") from None
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"--base-url: {base_url!r} is not an http or https address")
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
        await self._exchange(
            f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), parts_of(parts)
        )
        return b"".join(parts)

    async def post(self, path: str, body: bytes, on_body: OnBody) -> None:
        """Send JSON. The answer's body goes to `on_body` piece by piece. Returns at its end.

        Raises: RequestFailure if there is no complete answer with status 200, or if `on_body` raises it.
        """
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._exchange(head.encode() + body, on_body)

    async def _exchange(self, request: bytes, on_body: OnBody) -> None:
        loop = asyncio.get_running_loop()
        exchange = _Exchange(on_body, self._clock, loop.create_future())
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                transport, _ = await loop.create_connection(
                    lambda: exchange, self._host, self._port, ssl=self._tls
                )
                transport.write(request)
                await exchange.done
        except TimeoutError:
            raise RequestFailure(f"no complete answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise RequestFailure(f"{self._host}:{self._port}: {error.strerror or error}") from None
        finally:
            if transport is not None:
                transport.close()


def parts_of(parts: list[bytes]) -> OnBody:
    """Return an `on_body` that collects the pieces in `parts`."""
    return lambda data, _: parts.append(data)


class _Exchange(asyncio.Protocol):
    def __init__(self, on_body: OnBody, clock: Clock, done: asyncio.Future[None]) -> None:
        self._forward = on_body
        self._clock = clock
        self.done = done
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._is_good = False
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
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._has_headers = True
        self._is_good = self._parser.get_status_code() == 200

    def on_body(self, data: bytes) -> None:
        if self._is_good:
            self._forward(data, self._now)
        elif len(self._error_body) < MAX_ERROR_BYTES:
            self._error_body += data

    def on_message_complete(self) -> None:
        if self._is_good:
            self.done.set_result(None)
        else:
            detail = self._error_body.decode(errors="replace").strip()
            self._fail(f"HTTP {self._parser.get_status_code()}: {detail}")

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RequestFailure(message))
