"""HTTP server that writes given bytes at given times of its own clock.

It runs in the client's event loop. A step ends when the client has read the clock for it, so times are exact
and nothing waits for real time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Step = tuple[float, bytes]
"""Seconds of the clock, and what is written then."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"data":[{"id":"scripted"}]}'


class ScriptedClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.was_read = asyncio.Event()

    def __call__(self) -> float:
        self.was_read.set()
        return self.now


@dataclass
class ScriptedServer:
    clock: ScriptedClock
    script: Callable[[dict[str, Any]], Sequence[Step]]
    """The steps of the answer to a request body; the connection is closed after the last one."""
    waits: bool = True
    """A step is over only when the client has read the clock; False for a client with a clock of its own."""
    metrics: Callable[[int], bytes] | None = None
    """Text of /metrics after so many requests; None: there is none."""
    model_info: bytes = b""
    """Answer of /get_model_info, as of SGLang; empty: there is none."""
    port: int = 0
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def stop(self) -> None:
        """End what a client has left unread."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            await self.answer(reader, writer)
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET /v1/models "):
            writer.write(plain(200, MODELS))
        elif head.startswith("GET /get_model_info ") and self.model_info:
            writer.write(plain(200, self.model_info))
        elif head.startswith("GET /metrics ") and self.metrics is not None:
            writer.write(plain(200, self.metrics(len(self.bodies))))
        elif head.startswith("GET "):
            writer.write(plain(404, b"not here"))
        else:
            length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length"))
            body = json.loads(await reader.readexactly(int(length.partition(":")[2])) or b"{}")
            self.bodies.append(body)
            for at_s, data in self.script(body):
                self.clock.now = at_s
                self.clock.was_read.clear()
                writer.write(data)
                if self.waits:
                    await self.clock.was_read.wait()


@asynccontextmanager
async def scripted_server(
    script: Callable[[dict[str, Any]], Sequence[Step]],
    *,
    waits: bool = True,
    metrics: Callable[[int], bytes] | None = None,
) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(ScriptedClock(), script, waits, metrics)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        try:
            yield server
        finally:
            await server.stop()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def text_chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    """A completion chunk, in its event and its HTTP chunk."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    usage = more.pop("usage", None)
    return chunked(event({"choices": [choice | more], "usage": usage}))


def end(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The usage event, [DONE] and the end of the body."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return chunked(event({"choices": [], "usage": usage}) + event(b"[DONE]")) + LAST


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
