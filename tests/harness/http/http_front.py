"""The API process's `serve` in a thread, in front of a fake ring, on a free port."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from carousel.server.main import serve
from runtime.ring.endpoints import Endpoints
from runtime.ring.tenants import TenantsFile, read_tenants
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.status_page import StatusPage
from tests.harness.ring.fake_ring import WAIT_S, Answer, FakeRing, fake_ring, say_nothing

CONFIG = RuntimeConfig(
    model=str(DEMO_MODEL),
    tokenizer=str(DEMO_MODEL),
    served_model_name="fake",
    device="cpu",
    context_length=64,
    log_level="warning",
    start_timeout=WAIT_S,
)


class Front:
    """A running HTTP server, its ring, and an HTTP client for it."""

    def __init__(self, ring: FakeRing, config: RuntimeConfig) -> None:
        self.ring = ring
        self.config = config
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        # Small, so that a client that does not read is felt soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        listener.listen()
        self.port = listener.getsockname()[1]
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.status = StatusPage(Endpoints(ring.run_dir).status_file)
        context: Any = SimpleNamespace(
            config=config,
            endpoints=Endpoints(ring.run_dir),
            status=self.status,
            listener_fd=listener.detach(),
            index=0,
            stop=self.stop,
            ready=self.ready.set,
            beat=lambda **_: None,
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(context,), name="http-front")
        self._thread.start()
        self.http = self.open_client()

    def _serve(self, context: Any) -> None:
        try:
            uvloop.run(serve(context))
        except Exception as error:
            self.error = error

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": "x", **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "x"}], **body})

    def open_client(self) -> httpx.Client:
        """Another HTTP client."""
        trusted = (
            ssl.create_default_context(cafile=self.config.ssl_certfile) if self.config.ssl_certfile else True
        )
        return httpx.Client(base_url=self.config.http_url(self.port), timeout=WAIT_S, verify=trusted)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def open_raw(self, path: str, *, headers: str = "", **body: Any) -> socket.socket:
        """A socket on which the request has been sent; `headers` are whole lines."""
        connection = self.connect()
        connection.sendall(raw_request(path, headers=headers, **body))
        return connection

    def exchange(self, data: bytes | Iterator[bytes]) -> httpx.Response:
        """Return the server's answer to these bytes, to its end. It may answer before it has them all."""
        received = b""
        with self.connect() as connection:
            with suppress(ConnectionError):
                for piece in [data] if isinstance(data, bytes) else data:
                    connection.sendall(piece)
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
        head, _, body = received.partition(b"\r\n\r\n")
        return httpx.Response(int(head.split()[1]), content=body)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not end"

    def close(self) -> None:
        self.stop.set()
        self.http.close()
        self.join()
        self.status.close()


def raw_request(path: str, *, headers: str = "", **body: Any) -> bytes:
    """`headers` are whole lines."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n{headers}"
    )
    return head.encode() + b"\r\n" + data


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the last one of a whole stream is "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


class HurriedAsyncio:
    """asyncio as uvicorn sees it: the tenths of a second that it sleeps at its end are over at once."""

    @staticmethod
    async def sleep(_: float) -> None:
        await asyncio.sleep(0.005)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


@contextmanager
def unchanged_loggers() -> Iterator[None]:
    """Give uvicorn's loggers back their level and their way up, which a server sets for its process."""
    loggers = [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access", "asgi")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.propagate = propagate


@contextmanager
def http_front(run_dir: Path, answer: Answer = say_nothing, **settings: Any) -> Iterator[Front]:
    config = msgspec.structs.replace(CONFIG, **settings)
    TenantsFile(Endpoints(run_dir).tenants_file).write(read_tenants(config))
    patched = pytest.MonkeyPatch.context()
    with fake_ring(run_dir, answer, config) as ring, unchanged_loggers(), patched as patch:
        patch.setattr("carousel.server.main.TICK_S", 0.005)
        patch.setattr("carousel.client.core.ring_state.TICK_S", 0.005)
        # A fake ring says once that it lives.
        patch.setattr("carousel.client.core.ring_state.SILENCE_S", 3600.0)
        patch.setattr("carousel.server.admin.probes.STALLED_S", 3600.0)
        patch.setattr("uvicorn.server.asyncio", HurriedAsyncio())
        front = Front(ring, config)
        try:
            assert front.ready.wait(WAIT_S), front.error
            yield front
        finally:
            front.close()
