"""LoadMetrics: the figures of one run, computed from its records. Failed requests are counted, but are part
of no other figure.

Names are those of SGLang's results, so that the output of both tools can be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bench_serving.load import LoadResult
from bench_serving.records import RequestRecord

DoubleArray: TypeAlias = npt.NDArray[np.float64]

PEAK_WINDOW_S = 1.0


class Summary(msgspec.Struct, frozen=True):
    """Distribution in milliseconds; all fields are None without values."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @staticmethod
    def of(values_s: Sequence[float]) -> Summary:
        if not values_s:
            return Summary()
        ms = np.asarray(values_s) * 1e3
        median, p90, p95, p99 = (float(value) for value in np.percentile(ms, (50, 90, 95, 99)))
        return Summary(float(ms.mean()), median, float(ms.std()), p90, p95, p99, float(ms.max()))


class LoadMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. Rates are per second, lengths in tokens."""

    duration: float
    completed: int
    failed: int
    errors: dict[str, int]
    """Errors and their numbers, the most frequent first."""
    total_input_tokens: int
    cached_input_tokens: int | None
    """Number of input tokens from the server's prefix cache; None if no answer has it."""
    total_output_tokens: int
    total_output_tokens_retokenized: int | None
    """Number of tokens of the answers' texts, counted by the tokenizer; None without one."""
    request_throughput: float
    input_throughput: float
    output_throughput: float
    max_output_tokens_per_s: float
    """Number of output tokens in the busiest second."""
    total_throughput: float
    max_concurrent_requests: int
    concurrency: float
    """Average number of requests in flight."""
    e2e_latency: Summary
    ttft: Summary
    tpot: Summary
    itl: Summary
    itl_source: str | None
    """Source of a chunk's number of tokens: `token counts` of the server, or `one token per chunk`."""
    tokens_per_chunk: float | None
    received_bytes: int | None
    """Bytes of the answers' bodies; None with the client library."""
    extra_bytes: int
    """Bytes of logprobs and logits. Over HTTP those of their JSON, which is part of the bodies; else those of
    the values as sent.
    """
    ended_early: int
    """Number of requests with fewer output tokens than requested."""
    goodput: float | None
    """Requests per second that met every limit of --goodput."""
    goodput_share: float | None
    """Share of such requests among all, including failed ones."""
    max_lateness_ms: float
    client_cpu_share: float


def compute_metrics(
    result: LoadResult, *, slo_ms: Mapping[str, float], num_retokenized: int | None
) -> LoadMetrics:
    """Return the figures. `slo_ms` has limits of ttft, tpot or e2el; empty: no goodput."""
    good = [record for record in result.records if record.error is None]
    duration_s = result.duration_s
    num_input = sum(record.input_len for record in good)
    num_output = sum(record.output_len for record in good)
    cached = [record.cached_len for record in good if record.cached_len is not None]
    received = [record.received_bytes for record in good if record.received_bytes is not None]
    num_chunks = sum(len(record.chunk_times_s) for record in good)
    num_meeting = sum(meets(record, slo_ms) for record in good) if slo_ms else None
    has_counts = all(record.has_token_counts for record in good)
    return LoadMetrics(
        duration=duration_s,
        completed=len(good),
        failed=len(result.records) - len(good),
        errors=dict(Counter(record.error for record in result.records if record.error).most_common()),
        total_input_tokens=num_input,
        cached_input_tokens=sum(cached) if cached else None,
        total_output_tokens=num_output,
        total_output_tokens_retokenized=num_retokenized,
        request_throughput=_rate(len(good), duration_s),
        input_throughput=_rate(num_input, duration_s),
        output_throughput=_rate(num_output, duration_s),
        max_output_tokens_per_s=_peak_output(good, duration_s),
        total_throughput=_rate(num_input + num_output, duration_s),
        max_concurrent_requests=_max_in_flight(good),
        concurrency=_rate(sum(record.latency_s for record in good), duration_s),
        e2e_latency=Summary.of([record.latency_s for record in good]),
        ttft=Summary.of(_known([record.ttft_s for record in good])),
        tpot=Summary.of(_known([record.tpot_s for record in good])),
        itl=Summary.of([itl for record in good for itl in record.itls_s()]),
        itl_source=None if not num_chunks else "token counts" if has_counts else "one token per chunk",
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        received_bytes=sum(received) if received else None,
        extra_bytes=sum(record.extra_bytes for record in good),
        ended_early=sum(record.output_len < record.asked_output_len for record in good),
        goodput=None if num_meeting is None else _rate(num_meeting, duration_s),
        goodput_share=None if num_meeting is None else num_meeting / max(1, len(result.records)),
        max_lateness_ms=result.max_lateness_s * 1e3,
        client_cpu_share=result.client_cpu_share,
    )


def meets(record: RequestRecord, slo_ms: Mapping[str, float]) -> bool:
    """Return True if a request met every limit. A figure that it does not have, such as a TPOT with one
    token, counts as met.
    """
    seen = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.latency_s}
    return all((seen[name] or 0.0) * 1e3 <= bound_ms for name, bound_ms in slo_ms.items())


class Series(NamedTuple):
    """Values over a run, one for each window of `width_s` from the start."""

    width_s: float
    output_throughput: DoubleArray
    """Output tokens per second."""
    in_flight: DoubleArray
    """Average number of requests in flight in the window."""


def throughput_series(result: LoadResult, width_s: float) -> Series:
    """Return tokens per second and requests in flight for each window of a run."""
    good = [record for record in result.records if record.error is None]
    num_windows = max(1, math.ceil(result.duration_s / width_s))
    tokens = np.zeros(num_windows)
    in_flight = np.zeros(num_windows)
    begins = result.began_s + np.arange(num_windows) * width_s
    for record in good:
        times, counts = _arrivals(record)
        windows = ((times - result.began_s) / width_s).astype(int)
        np.add.at(tokens, np.clip(windows, 0, num_windows - 1), counts)
        overlap_s = np.minimum(begins + width_s, record.end_s) - np.maximum(begins, record.start_s)
        in_flight += np.maximum(overlap_s, 0.0)
    return Series(width_s, tokens / width_s, in_flight / width_s)


def _arrivals(record: RequestRecord) -> tuple[DoubleArray, DoubleArray]:
    """Return (times, tokens) of the output; all of it at the end if it was not streamed. If chunks were
    counted as one token each, they share the number that the server reports.
    """
    if not record.chunk_times_s:
        return np.array([record.end_s]), np.array([float(record.output_len)])
    counts = np.asarray(record.chunk_tokens, float)
    if not record.has_token_counts:
        counts *= record.output_len / record.num_chunk_tokens
    return np.asarray(record.chunk_times_s), counts


def _peak_output(good: Sequence[RequestRecord], duration_s: float) -> float:
    """Return the largest number of tokens within any window; a run shorter than the window is one."""
    window_s = min(PEAK_WINDOW_S, duration_s)
    if not good or not window_s:
        return 0.0
    arrivals = [_arrivals(record) for record in good]
    times = np.concatenate([times for times, _ in arrivals])
    counts = np.concatenate([counts for _, counts in arrivals])
    order = np.argsort(times, kind="stable")
    times = times[order]
    until = np.concatenate([[0.0], np.cumsum(counts[order])])
    first = np.searchsorted(times, times - window_s, side="left")
    return float((until[1:] - until[first]).max()) / window_s


def _max_in_flight(records: Sequence[RequestRecord]) -> int:
    # At equal times an end comes first: a request that follows another does not run beside it.
    changes = sorted([(r.start_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    return int(np.cumsum([0, *(change for _, change in changes)]).max())


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s else 0.0
