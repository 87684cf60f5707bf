"""Speed at which bench_serving reads 64 streams of a server of canned events, which has a process of its own.

Two cases: at the target rate, where nearly every token is a read of its own; and as fast as client and server
go together. The cost of one token shows what share of a core the client needs at other rates.

Run: python -m benchmarks.bench_load_client
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import time

import uvloop

from bench_serving.backends.base import GenerationOptions
from bench_serving.backends.openai import OpenAIBackend
from bench_serving.datasets.base import LoadConversation, Turn
from bench_serving.load import LoadResult, Traffic, as_text, run_load
from benchmarks.canned_server import canned_server, text_of
from benchmarks.process_cpu import cpu_of
from carousel.http_client import HttpClient

BAR_TOKENS_PER_S = 40_000
TIMEOUT_S = 120.0


async def read_streams(port: int, num_streams: int, num_tokens: int) -> LoadResult:
    """Read the streams. Raises RuntimeError if an answer is not what the server sent."""
    http = HttpClient(f"http://127.0.0.1:{port}", {}, timeout_s=TIMEOUT_S, clock=time.perf_counter)
    options = GenerationOptions(
        stream=True, ignore_eos=True, add_special_tokens=True, extra={}, counts_tokens=True
    )
    backend = OpenAIBackend(http, "completions", "canned", options, time.perf_counter)
    conversations = [LoadConversation((Turn("x", 1, num_tokens),))] * num_streams
    traffic = Traffic(math.inf, None, seed=1)
    result = await run_load(backend, as_text, conversations, traffic, on_record=lambda _: None)
    text = text_of(num_tokens)
    for record in result.records:
        if record.error is not None or record.text != text or record.chunk_tokens != [1] * num_tokens:
            raise RuntimeError(f"a stream was not read as it was sent: {record.error}")
    return result


def measure(rate: float, num_streams: int, num_tokens: int) -> dict[str, float]:
    with canned_server(rate) as (port, pid):
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(read_streams(port, num_streams, num_tokens))
        server_s = cpu_of(pid)
    num_read = num_streams * num_tokens
    return {
        "tokens_per_s": round(num_read / result.duration_s),
        "client_cpu_share": round(result.client_cpu_share, 3),
        "client_us_per_token": round(1e6 * result.client_cpu_share * result.duration_s / num_read, 2),
        "server_us_per_token": round(1e6 * server_s / num_read, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000, help="of each stream")
    args = parser.parse_args()
    report: dict[str, object] = {
        "streams": args.streams,
        "tokens": args.tokens,
        "bar_tokens_per_s": BAR_TOKENS_PER_S,
    }
    for name, rate in (("at_the_bar", float(BAR_TOKENS_PER_S)), ("unlimited", 0.0)):
        found = measure(rate, args.streams, args.tokens)
        print(
            f"{name:>12}: {found['tokens_per_s']:8,.0f} tok/s; CPU per token: client "
            f"{found['client_us_per_token']:.2f} us ({found['client_cpu_share']:.0%} of a core), "
            f"server {found['server_us_per_token']:.2f} us"
        )
        report[name] = found
    print(json.dumps(report))


if __name__ == "__main__":
    main()
