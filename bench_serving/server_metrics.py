"""Figures of a run from the server's own /metrics, beside those of the client. Knows the names of SGLang,
which are also this server's, and of vLLM.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench_serving.metrics import LoadMetrics
from carousel.http_client import HttpClient, RequestFailure

MAX_DIFFERENCE = 0.03
"""Largest accepted relative difference of the means."""
MAX_OUTSIDE_MS = 2.0
"""Largest accepted difference of the means: connecting and the way there and back, which the server's clock
does not see. Measured with both sides on the same two cores: 1 to 2 ms (2026-11-20).
"""
PREFIXES = ("sglang:", "vllm:")


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all requests that have finished since the server started or, after subtraction, during a
    run. Times in seconds.
    """

    finished: float
    prompt_tokens: float
    output_tokens: float
    ttft_count: float
    ttft_sum: float
    e2e_sum: float

    def since(self, before: ServerFigures) -> ServerFigures:
        return ServerFigures(**{name: getattr(self, name) - getattr(before, name) for name in SAMPLES})


# Sums and counts, never buckets, whose bounds are too coarse.
SAMPLES = {
    "finished": "e2e_request_latency_seconds_count",
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
    "ttft_count": "time_to_first_token_seconds_count",
    "ttft_sum": "time_to_first_token_seconds_sum",
    "e2e_sum": "e2e_request_latency_seconds_sum",
}


class Comparison(NamedTuple):
    name: str
    client: float
    server: float
    is_exact: bool

    @property
    def difference(self) -> float:
        """Return the difference between the client's figure and the server's, relative to the server's."""
        if self.client == self.server:
            return 0.0
        return self.client / self.server - 1.0 if self.server else math.inf

    @property
    def agrees(self) -> bool:
        if self.is_exact:
            return self.client == self.server
        return abs(self.difference) <= MAX_DIFFERENCE or abs(self.client - self.server) <= MAX_OUTSIDE_MS


async def scrape(http: HttpClient) -> ServerFigures:
    """Read the server's /metrics. Raises RequestFailure if it has none, or none of a known kind."""
    return parse(await http.get("/metrics"))


def parse(body: bytes) -> ServerFigures:
    """Return the figures of a Prometheus text, over all its label sets. Raises RequestFailure if it
    has none.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                if sample.name.startswith(PREFIXES):
                    sums[sample.name.partition(":")[2]] += sample.value
    except ValueError as error:
        raise RequestFailure(f"/metrics is not what Prometheus reads: {error}") from None
    # A metric may be absent until a request was counted, but not all of them.
    if not sums:
        raise RequestFailure("/metrics has nothing that begins with " + " or ".join(PREFIXES))
    return ServerFigures(**{name: sums[sample] for name, sample in SAMPLES.items()})


def compare(metrics: LoadMetrics, server: ServerFigures) -> list[Comparison]:
    """Return the client's figures of a run, each beside the server's. Means in ms, if both sides
    have them.
    """
    found = [
        Comparison("Finished requests", metrics.completed, server.finished, True),
        Comparison("Input tokens", metrics.total_input_tokens, server.prompt_tokens, True),
        Comparison("Generated tokens", metrics.total_output_tokens, server.output_tokens, True),
    ]
    if metrics.ttft.mean is not None and server.ttft_count:
        server_ms = 1e3 * server.ttft_sum / server.ttft_count
        found.append(Comparison("Mean TTFT (ms)", metrics.ttft.mean, server_ms, False))
    if metrics.e2e_latency.mean is not None and server.finished:
        server_ms = 1e3 * server.e2e_sum / server.finished
        found.append(Comparison("Mean E2E Latency (ms)", metrics.e2e_latency.mean, server_ms, False))
    return found
