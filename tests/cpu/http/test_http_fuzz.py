"""The protocol of the HTTP server against connections that a grammar makes up: no exception, no hang, what is
held and what is parsed in one piece are bounded, no request has two answers, no body is taken for a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import uvloop

from carousel.server.http.piece_writer import PieceWriter
from carousel.server.http.tls.tls_writer import TlsWriter
from tests.harness.http.http_bare import BareServer, Complaints
from tests.harness.http.http_grammar import make_stream
from tests.harness.http.http_sockets import serve_streams

MAX_RESET_PART = 0.1


async def serve(first: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    server = BareServer()
    for seed in range(first, first + count):
        stream = make_stream(seed)
        try:
            await server.take(stream)
            assert not raised, raised
        except AssertionError as error:
            error.add_note(f"make_stream({seed}): {stream.pieces}"[:3000])
            raise


@contextmanager
def without_complaints() -> Iterator[None]:
    """Fail if an error is logged meanwhile; lesser lines, one for each connection, are left out."""
    complaints = Complaints()
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(complaints)
    level, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.removeHandler(complaints)
        logger.setLevel(level)
    assert not complaints.records


def fuzz(first: int, count: int) -> None:
    with without_complaints():
        uvloop.run(serve(first, count))


def fuzz_sockets(first: int, count: int, *, has_tls: bool = False) -> None:
    """Serve so many connections of the grammar, whose answers go out in many pieces."""
    streams = ((seed, make_stream(seed)) for seed in range(first, first + count))
    with without_complaints(), patch.object(TlsWriter if has_tls else PieceWriter, "piece_bytes", 16):
        kinds = serve_streams(streams, has_tls=has_tls)
    assert kinds.total() == count
    assert kinds["closed"]
    assert kinds["kept"]
    assert kinds["reset"] <= MAX_RESET_PART * count, "answers of these are not checked to their end"


def test_20_000_connections() -> None:
    fuzz(0, 20_000)


def test_2_000_connections_over_sockets() -> None:
    fuzz_sockets(0, 2000)


def test_400_connections_over_tls() -> None:
    fuzz_sockets(0, 400, has_tls=True)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_million_connections() -> None:
    fuzz(20_000, 1_000_000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_million_connections_over_sockets() -> None:
    fuzz_sockets(2_000_000, 1_000_000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_100_000_connections_over_tls() -> None:
    fuzz_sockets(4_000_000, 100_000, has_tls=True)
