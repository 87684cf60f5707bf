"""Metrics for an operator's Prometheus, under SGLang's names.

Counters and latencies are about sequences that came over HTTP, as their clients see them, whichever process
of the HTTP server they came to. Gauges and queue times are about the whole runtime, as the scheduler reports
them at the moment of the scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from carousel.client.core.result import Delta
from carousel.server.admin.metric_file import Counter, CounterSpec, HistogramSpec, MetricFile
from carousel.server.admin.metric_names import ALIASES
from runtime.base.errors import CarouselError
from runtime.ring.process import FIRST_EPOCH
from runtime.wire.messages import Usage
from runtime.wire.status_page import ProcessStatus

PREFIX = "sglang:"
VLLM_PREFIX = "vllm:"
OWN_PREFIX = "carousel:"
"""Prefix of metrics for which SGLang has no name."""
LABELS = ("model_name",)
EndReason: TypeAlias = Literal["stop", "length", "timeout", "abort", "error"]
REASONS: tuple[EndReason, ...] = ("stop", "length", "timeout", "abort", "error")
COUNTERS = (
    CounterSpec("num_requests", "Sequences asked for over HTTP."),
    CounterSpec("num_aborted_requests", "Those of them that ended unfinished."),
    CounterSpec("prompt_tokens", "Prompt tokens of finished requests."),
    CounterSpec("cached_tokens", "Those of them that were in the cache."),
    CounterSpec("generation_tokens", "Output tokens of finished sequences."),
    *(
        CounterSpec(
            "finished_sequences",
            "Sequences that have ended, unfinished ones included.",
            OWN_PREFIX,
            (("finish_reason", reason),),
        )
        for reason in REASONS
    ),
    CounterSpec("trace_spans_exported", "Spans that the collector has taken.", OWN_PREFIX),
    CounterSpec("trace_spans_failed", "Spans that it has not, or not in time.", OWN_PREFIX),
    CounterSpec("trace_spans_dropped", "Spans that came faster than they were sent.", OWN_PREFIX),
)
HISTOGRAMS = (
    HistogramSpec(
        "time_to_first_token_seconds",
        "From the request to the first output, of streams.",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 400),
    ),
    HistogramSpec(
        "inter_token_latency_seconds",
        "Between two output tokens, of streams.",
        (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2, 6),
    ),
    HistogramSpec(
        "e2e_request_latency_seconds",
        "From the request to the end, of finished sequences.",
        (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 400, 800, 1600),
    ),
)


class Metrics:
    """Metrics of one API process. Owned by the event loop."""

    def __init__(self, model: str, folder: Path, index: int = 0, *, has_vllm_names: bool = False) -> None:
        """`folder` is the same for all API processes of a launch; `index` is this one's number."""
        self._model = model
        self._has_vllm_names = has_vllm_names
        self._file = MetricFile(folder, index, COUNTERS, HISTOGRAMS)
        (
            self.requests,
            self.aborted,
            self.prompt_tokens,
            self.cached_tokens,
            self.generation_tokens,
            *ended,
            self.spans_exported,
            self.spans_failed,
            self.spans_dropped,
        ) = self._file.counters
        self.ended: dict[EndReason, Counter] = dict(zip(REASONS, ended, strict=True))
        """Number of sequences by how they ended."""
        self.time_to_first_token, self.inter_token_latency, self.e2e_latency = self._file.histograms

    def render(
        self,
        status: ProcessStatus,
        info: Mapping[str, Any],
        processes: Mapping[str, ProcessStatus] = MappingProxyType({}),
    ) -> bytes:
        """Return the text that Prometheus reads. `status` and `info` are the scheduler's status and its
        server_info; `processes` has the slots of the status page by the names of the processes.
        """
        registry = CollectorRegistry(auto_describe=False)
        families = _Families(self._model)
        counters, histograms = self._file.totals()
        for spec, value in zip(COUNTERS, counters, strict=True):
            families.add_counter(spec.name, spec.text, value, spec.prefix, spec.labels)
        for each, total in zip(HISTOGRAMS, histograms, strict=True):
            families.add_histogram(each.name, each.text, each.bounds, total.counts, total.sum)
        by_name = {spec.name: value for spec, value in zip(COUNTERS, counters, strict=True)}
        hit_rate = by_name["cached_tokens"] / by_name["prompt_tokens"] if by_name["prompt_tokens"] else 0.0
        families.add_gauge("cache_hit_rate", "Share of the prompt tokens that were in the cache.", hit_rate)
        _add_runtime(families, status, info)
        families.add_processes(processes)
        if self._has_vllm_names:
            families.add_vllm_names()
        registry.register(families)
        return generate_latest(registry)


class RequestTimer:
    """Timer of one prompt, from `received_s` (time.perf_counter(), when its request had been read) to the end
    of its sequences. Sequences that have not finished when the timer is left count as aborted.
    """

    __slots__ = ("_last_s", "_metrics", "_num_sequences", "_num_unfinished", "_received_s")

    def __init__(self, metrics: Metrics, received_s: float, num_sequences: int = 1) -> None:
        self._metrics = metrics
        self._received_s = received_s
        self._num_sequences = num_sequences
        self._num_unfinished = num_sequences
        self._last_s = [0.0] * num_sequences
        """Time of the last token of each sequence; 0 before the first."""

    def __enter__(self) -> Self:
        self._metrics.requests.inc(self._num_sequences)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_unfinished:
            self._metrics.aborted.inc(self._num_unfinished)
            is_failure = isinstance(error, CarouselError) and getattr(error, "code", "") != "aborted"
            self._metrics.ended["error" if is_failure else "abort"].inc(self._num_unfinished)

    def note_delta(self, delta: Delta) -> None:
        """Record that a delta of a stream has come."""
        num_new = len(delta.token_ids)
        if num_new:
            now = time.perf_counter()
            last = self._last_s[delta.index]
            if last:
                self._metrics.inter_token_latency.observe((now - last) / num_new, num_new)
            else:
                self._metrics.time_to_first_token.observe(now - self._received_s)
            self._last_s[delta.index] = now
        if delta.usage is not None and delta.finish_reason != "abort":
            # The sequences of a request share its prompt.
            usage = delta.usage if delta.index == 0 else Usage(0, delta.usage.completion_tokens, 0)
            self._note_ended(usage, 1)
            self._metrics.ended[delta.finish_reason or "error"].inc()

    def note_finished(self, usage: Usage, reasons: Sequence[EndReason]) -> None:
        """Record that all sequences have ended at once, with the reason of each."""
        self._note_ended(usage, self._num_sequences)
        for reason in reasons:
            self._metrics.ended[reason].inc()

    def _note_ended(self, usage: Usage, num_sequences: int) -> None:
        metrics = self._metrics
        self._num_unfinished -= num_sequences
        metrics.e2e_latency.observe(time.perf_counter() - self._received_s, num_sequences)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)


class RequestTimers:
    """Timers of all prompts of a request."""

    __slots__ = ("_timers",)

    def __init__(self, timers: Sequence[RequestTimer]) -> None:
        self._timers = timers

    def __enter__(self) -> Sequence[RequestTimer]:
        for timer in self._timers:
            timer.__enter__()
        return self._timers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.__exit__(kind, error, trace)


class _Families(Collector):
    """Metrics of one scrape in the form of Prometheus' client."""

    def __init__(self, model: str) -> None:
        self._labels = [model]
        self._families: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return self._families

    def add_counter(
        self,
        name: str,
        text: str,
        value: float,
        prefix: str = PREFIX,
        labels: tuple[tuple[str, str], ...] = (),
    ) -> None:
        last = self._families[-1] if self._families else None
        if labels and isinstance(last, CounterMetricFamily) and last.name == prefix + name:
            family = last
        else:
            family = CounterMetricFamily(prefix + name, text, labels=(*LABELS, *dict(labels)))
            self._families.append(family)
        family.add_metric([*self._labels, *dict(labels).values()], value)

    def add_processes(self, processes: Mapping[str, ProcessStatus]) -> None:
        labels = (*LABELS, "process")
        ready = GaugeMetricFamily(OWN_PREFIX + "process_ready", "1: the process is ready.", labels=labels)
        epoch = GaugeMetricFamily(
            OWN_PREFIX + "process_epoch",
            "Restarts of the launch by when it was started.",
            labels=labels,
        )
        newest = FIRST_EPOCH
        for name, status in processes.items():
            newest = max(newest, status.epoch)
            ready.add_metric([*self._labels, name], float(status.state == "ready"))
            epoch.add_metric([*self._labels, name], max(0, status.epoch - FIRST_EPOCH))
        self._families += [ready, epoch]
        text = "Times that a process was replaced, or the engine's together."
        self.add_counter("restarts", text, newest - FIRST_EPOCH, OWN_PREFIX)

    def add_vllm_names(self) -> None:
        """Add the metrics with the same meaning under vLLM's names."""
        by_name = {family.name: family for family in self._families}
        for alias in ALIASES:
            ours, renamed = by_name[alias.ours], dict(alias.renamed)
            family = Metric(VLLM_PREFIX + alias.name, ours.documentation, ours.type)
            for sample in ours.samples:
                labels = {renamed.get(label, label): value for label, value in sample.labels.items()}
                name = family.name + sample.name.removeprefix(ours.name)
                family.add_sample(name, {**labels, "engine": "0"}, sample.value)
            self._families.append(family)

    def add_by_position(self, name: str, text: str, values: Sequence[int]) -> None:
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, "position"))
        for position, value in enumerate(values):
            family.add_metric([*self._labels, str(position)], value)
        self._families.append(family)

    def add_gauge(self, name: str, text: str, value: float, prefix: str = PREFIX) -> None:
        family = GaugeMetricFamily(prefix + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        self._families.append(family)

    def add_histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[float], total: float
    ) -> None:
        """Add a histogram. `counts` has the count of each bucket by itself, one more than there
        are bounds.
        """
        family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
        edges = [*map(str, map(float, bounds)), "+Inf"]
        family.add_metric(self._labels, list(zip(edges, accumulate(counts), strict=True)), total)
        self._families.append(family)


def _add_runtime(families: _Families, status: ProcessStatus, info: Mapping[str, Any]) -> None:
    page_size = info["page_size"]
    num_used = status.num_pages - status.num_free_pages
    share = num_used / status.num_pages if status.num_pages else 0.0
    for name, text, value in (
        ("num_running_reqs", "Sequences that hold a row.", status.num_running),
        ("num_queue_reqs", "Sequences that wait for a row.", status.num_waiting),
        ("num_used_tokens", "Tokens of KV that running sequences use.", num_used * page_size),
        ("max_total_num_tokens", "Tokens of KV that there is room for.", status.num_pages * page_size),
        ("token_usage", "Share of the KV cache that running sequences use.", share),
        ("gen_throughput", "Output tokens per second.", status.tokens_per_s),
    ):
        families.add_gauge(name, text, value)
    evicted = info["num_evicted_pages"] * page_size
    families.add_counter("evicted_tokens", "Cached tokens that made room.", evicted)
    families.add_counter("num_retracted_requests", "Retractions.", info["num_retracted"])
    for name, text, field in (
        ("num_iterations", "Steps of the model.", "num_iterations"),
        ("context_tokens", "Tokens computed of prompts.", "num_ctx_tokens"),
        (
            "recomputed_tokens",
            "Those of them that are computed again, or are output, after a pause.",
            "num_recomputed_ctx_tokens",
        ),
        ("kv_new_blocks", "Pages given to requests, empty.", "num_new_pages"),
        ("kv_reused_blocks", "Pages found in the cache.", "num_reused_pages"),
        ("kv_missed_blocks", "Pages not found in the cache.", "num_missed_pages"),
        ("mask_wait_seconds", "Waits for masks of steps that were launched.", "mask_wait_s"),
        ("num_late_masks", "Masks that had not come then.", "num_late_masks"),
        ("spec_decode_num_drafts", "Times that a sequence had guesses verified.", "num_drafts"),
        ("spec_decode_num_draft_tokens", "Guesses that were verified.", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "Those of them that were right.", "num_accepted_draft_tokens"),
    ):
        families.add_counter(name, text, info[field])
    families.add_by_position(
        "spec_decode_num_accepted_tokens_per_pos",
        "Guesses that were right, by their place behind the last known token.",
        info["accepted_draft_tokens_by_position"],
    )
    drafts = info["num_drafts"]
    families.add_gauge(
        "spec_accept_length",
        "Output tokens for each time that guesses of a sequence were verified; 0 before the first.",
        1 + info["num_accepted_draft_tokens"] / drafts if drafts else 0.0,
    )
    families.add_histogram(
        "iteration_latency_seconds",
        "From the end of a step, or its launch if that is later, to the end of the next.",
        info["iter_latency_bounds_s"],
        info["iter_latency_counts"],
        info["iter_latency_sum_s"],
    )
    families.add_histogram(
        "queue_time_seconds",
        "From the scheduler's inbox to a row.",
        info["queue_time_bounds_s"],
        info["queue_time_counts"],
        info["queue_time_sum_s"],
    )
    if "num_adapter_loads" in info:
        _add_adapters(families, info)


def _add_adapters(families: _Families, info: Mapping[str, Any]) -> None:
    num_used, num_slots = info["num_adapters"], info["max_loras"]
    for name, text, value in (
        ("lora_pool_slots_used", "Adapters on the device.", num_used),
        ("lora_pool_slots_total", "Adapters that there is room for.", num_slots),
        ("lora_pool_utilization", "Share of the room that adapters take.", num_used / num_slots),
    ):
        families.add_gauge(name, text, value)
    for name, text, value in (
        ("lora_slots_leased", "Adapters that sequences with a row use.", info["num_adapters_in_use"]),
        ("lora_bytes", "Memory of the adapters on the device.", info["adapter_bytes"]),
    ):
        families.add_gauge(name, text, value, OWN_PREFIX)
    for name, text, field in (
        ("lora_hits", "Rows whose adapter was on the device.", "num_adapter_hits"),
        ("lora_misses", "Rows whose adapter had to be loaded.", "num_adapter_misses"),
        ("lora_loads", "Adapters loaded to the device.", "num_adapter_loads"),
        ("lora_load_failures", "Those of them that could not be.", "num_adapter_failures"),
        ("lora_evictions", "Adapters that made room for others.", "num_adapter_evictions"),
        ("lora_load_seconds", "Time of all loads.", "adapter_load_s"),
    ):
        families.add_counter(name, text, info[field], OWN_PREFIX)
    for adapter, count in info["adapter_requests"].items():
        text = "Rows given to requests, by their adapter."
        families.add_counter("lora_requests", text, count, OWN_PREFIX, (("lora_name", adapter),))
