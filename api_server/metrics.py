"""Metrics: what an operator's Prometheus reads, under SGLang's names.

The counters and latencies are of the sequences that came over HTTP, as their clients see them; the gauges and
the queue times are of the whole runtime, as its scheduler tells them at the moment of the scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from client.result import Delta
from runtime.messages import Usage
from runtime.status_page import Status

LABELS = ("model_name",)
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 400)
ITL_S = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2, 6)
E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 400, 800, 1600)


class Metrics:
    """Owned by the event loop; one for each API process."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._runtime = RuntimeCollector(model)
        self._registry.register(self._runtime)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, LABELS, registry=self._registry).labels(model)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"sglang:{name}", text, LABELS, registry=self._registry, buckets=bounds)
            return metric.labels(model)

        self.requests = counter("num_requests_total", "Sequences asked for over HTTP.")
        self.aborted = counter("num_aborted_requests_total", "Those of them that ended unfinished.")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished sequences.")
        self.cached_tokens = counter("cached_tokens_total", "Those of them that were in the cache.")
        self.generation_tokens = counter("generation_tokens_total", "Output tokens of finished sequences.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the request to the first output, of streams.", TTFT_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two output tokens, of streams.", ITL_S
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the request to the end, of finished sequences.", E2E_S
        )

    def render(self, status: Status, info: Mapping[str, Any]) -> bytes:
        """The text that Prometheus reads, with the scheduler's status and its server_info."""
        self._runtime.status = status
        self._runtime.info = info
        return generate_latest(self._registry)


class SequenceTimer:
    """One sequence from its submission to its end; left without having finished, it counts as aborted."""

    __slots__ = ("_began_s", "_finished", "_last_s", "_metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s = time.perf_counter()
        self._last_s = 0.0
        """When the last token came; 0 before the first."""
        self._finished = False

    def __enter__(self) -> Self:
        self._metrics.requests.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._metrics.aborted.inc()

    def note_delta(self, delta: Delta) -> None:
        """Something came of a stream."""
        num_new = len(delta.token_ids)
        if num_new:
            now = time.perf_counter()
            if self._last_s:
                each = (now - self._last_s) / num_new
                for _ in range(num_new):
                    self._metrics.inter_token_latency.observe(each)
            else:
                self._metrics.time_to_first_token.observe(now - self._began_s)
            self._last_s = now
        if delta.usage is not None and delta.finish_reason != "abort":
            self.note_finished(delta.usage)

    def note_finished(self, usage: Usage) -> None:
        metrics = self._metrics
        self._finished = True
        metrics.e2e_latency.observe(time.perf_counter() - self._began_s)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)


class RuntimeCollector(Collector):
    """The scheduler's figures, as Prometheus types."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.status = Status()
        self.info: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        if not self.info:
            return  # asked for its names when it is registered
        info, page_size = self.info, self.info["page_size"]
        for name, text, value in _gauges(self.status, page_size):
            yield self._single(GaugeMetricFamily, name, text, value)
        evicted = info["num_evicted_pages"] * page_size
        yield self._single(CounterMetricFamily, "evicted_tokens", "Cached tokens that made room.", evicted)
        retracted = info["num_retracted"]
        yield self._single(CounterMetricFamily, "num_retracted_requests", "Retractions.", retracted)
        bounds = [*map(str, info["queue_time_bounds_s"]), "+Inf"]
        waits = HistogramMetricFamily(
            "sglang:queue_time_seconds", "From the scheduler's inbox to a row.", labels=LABELS
        )
        buckets = list(zip(bounds, accumulate(info["queue_time_counts"]), strict=True))
        waits.add_metric([self._model], buckets, info["queue_time_sum_s"])
        yield waits

    def _single(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(f"sglang:{name}", text, labels=LABELS)
        family.add_metric([self._model], value)
        return family


def _gauges(status: Status, page_size: int) -> list[tuple[str, str, float]]:
    num_used = status.num_pages - status.num_free_pages
    share = num_used / status.num_pages if status.num_pages else 0.0
    return [
        ("num_running_reqs", "Sequences that hold a row.", status.num_running),
        ("num_queue_reqs", "Sequences that wait for a row.", status.num_waiting),
        ("num_used_tokens", "Tokens of KV that running sequences use.", num_used * page_size),
        ("max_total_num_tokens", "Tokens of KV that there is room for.", status.num_pages * page_size),
        ("token_usage", "Share of the KV cache that running sequences use.", share),
        ("gen_throughput", "Output tokens per second.", status.tokens_per_s),
    ]
