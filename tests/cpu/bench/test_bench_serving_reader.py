"""Many streams at once, from a server that writes as fast as it can: every token is read, once, and in its
stream. How fast that goes is what benchmarks/bench_load_client.py measures.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from bench_serving.metrics import compute_metrics
from benchmarks.bench_load_client import read_streams
from benchmarks.canned_server import PROMPT_TOKENS, canned_server, text_of


@pytest.mark.parametrize("rate", [0.0, 20_000.0])
def test_every_token_of_64_streams_is_read(rate: float) -> None:
    with canned_server(rate) as (port, _):
        # Raises when a text differs or a chunk's tokens were not counted one by one.
        result = asyncio.run(read_streams(port, 64, 50))
    found = compute_metrics(result, slo_ms={}, num_retokenized=None)
    assert (found.completed, found.failed) == (64, 0)
    assert (found.total_output_tokens, found.total_input_tokens) == (64 * 50, 64 * PROMPT_TOKENS)
    assert (found.itl_source, found.tokens_per_chunk) == ("token counts", 1.0)
    assert found.max_concurrent_requests == 64
    if rate:
        assert found.output_throughput <= rate * 1.1


def test_an_answer_of_one_token_is_whole() -> None:
    with canned_server() as (port, _):
        (record,) = asyncio.run(read_streams(port, 1, 1)).records
    assert (record.output_len, record.text) == (1, text_of(1))


def test_the_canned_server_ends_with_its_block() -> None:
    with canned_server() as (port, _):
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
