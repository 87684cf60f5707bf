"""Reading of an answer over HTTP into a record: as a whole, or by a StreamReader that takes server-sent
events one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from bench_serving.records import Clock, RequestRecord
from bench_serving.sse import EventParser
from carousel.http_client import HttpClient, RequestFailure, parts_of


class StreamReader(ABC):
    """Reader of one answer, event by event. A subclass interprets the events."""

    __slots__ = ("_has_ended", "_last_s", "_num_bytes", "_parser", "_record")

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._parser = EventParser()
        self._num_bytes = 0
        self._has_ended = False
        self._last_s = 0.0

    def on_body(self, data: bytes, now: float) -> None:
        self._last_s = now
        self._num_bytes += len(data)
        for event in self._parser.feed(data):
            self._take(event, now)

    def finish(self) -> None:
        """Note that the body is complete. Raises RequestFailure if the answer is not."""
        self._record.received_bytes = self._num_bytes
        for event in self._parser.finish():
            self._take(event, self._last_s)
        if not self._has_ended:
            raise RequestFailure("the stream ended without a finish_reason and without [DONE]")

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._has_ended = True
        else:
            self._take_answer(event, now)

    @abstractmethod
    def _take_answer(self, event: bytes, now: float) -> None:
        """Record an event, and note whether it is the last. Raises RequestFailure."""


async def ask_streamed(
    client: HttpClient, path: str, body: bytes, reader: StreamReader, record: RequestRecord, clock: Clock
) -> None:
    """Send a request and read its stream. Raises RequestFailure."""
    record.start_s = clock()
    await client.post(path, body, reader.on_body)
    reader.finish()


async def ask_whole(
    client: HttpClient,
    path: str,
    body: bytes,
    take: Callable[[bytes, RequestRecord], None],
    record: RequestRecord,
    clock: Clock,
) -> None:
    """Send a request and give the body of its answer to `take`. Raises RequestFailure."""
    parts: list[bytes] = []
    record.start_s = clock()
    await client.post(path, body, parts_of(parts))
    record.end_s = clock()
    take(b"".join(parts), record)
