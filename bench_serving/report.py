"""Report of a run: a table with SGLang's labels, the saturation curve, a JSON object per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench_serving.arguments import BenchConfig
from bench_serving.metrics import LoadMetrics, Summary
from bench_serving.records import RequestRecord
from bench_serving.server_metrics import Comparison, ServerFigures

WIDTH = 50
MAX_ERRORS_SHOWN = 5
MAX_ERROR_CHARS = 300
BUSY_CLIENT = 0.8

SECTIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency", ("mean", "median", "p90", "p99")),
    ("Time to First Token", "TTFT", "ttft", ("mean", "median", "p99")),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot", ("mean", "median", "p99")),
    ("Inter-Token Latency", "ITL", "itl", ("mean", "median", "p95", "p99", "max")),
)
"""Rows of the table: heading, label, field of LoadMetrics, part of the distribution."""

CURVE_COLUMNS = (
    "rate",
    "req/s",
    "output tok/s",
    "concurrency",
    "TTFT mean",
    "TTFT P99",
    "TPOT mean",
    "ITL P99",
    "failed",
    "goodput",
)


def result_table(config: BenchConfig, request_rate: float, metrics: LoadMetrics) -> str:
    rows = [
        ("Backend:", config.backend),
        ("Traffic request rate:", str(request_rate)),
        ("Max request concurrency:", str(config.max_concurrency or "not set")),
        ("Successful requests:", str(metrics.completed)),
        ("Failed requests:", str(metrics.failed)),
        ("Benchmark duration (s):", _number(metrics.duration)),
        ("Total input tokens:", str(metrics.total_input_tokens)),
    ]
    if metrics.cached_input_tokens is not None:
        rows.append(("Cached input tokens:", str(metrics.cached_input_tokens)))
    rows.append(("Total generated tokens:", str(metrics.total_output_tokens)))
    if metrics.total_output_tokens_retokenized is not None:
        retokenized = str(metrics.total_output_tokens_retokenized)
        rows.append(("Total generated tokens (retokenized):", retokenized))
    rows += [
        ("Request throughput (req/s):", _number(metrics.request_throughput)),
        ("Input token throughput (tok/s):", _number(metrics.input_throughput)),
        ("Output token throughput (tok/s):", _number(metrics.output_throughput)),
        ("Peak output token throughput (tok/s):", _number(metrics.max_output_tokens_per_s)),
        ("Peak concurrent requests:", str(metrics.max_concurrent_requests)),
        ("Total token throughput (tok/s):", _number(metrics.total_throughput)),
        ("Concurrency:", _number(metrics.concurrency)),
    ]
    if metrics.received_bytes is not None:
        rows.append(("Received bytes per output token:", _per_token(metrics.received_bytes, metrics)))
    if config.asks_for_extra:
        rows.append(("Logprobs and logits (bytes):", str(metrics.extra_bytes)))
        rows.append(("Logprobs and logits per output token:", _per_token(metrics.extra_bytes, metrics)))
    if metrics.goodput is not None:
        rows.append(("Goodput (req/s):", _number(metrics.goodput)))
        rows.append(("Share of requests within bounds:", _number(metrics.goodput_share)))
    lines = ["", " Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [f"{label:<40} {value:<10}" for label, value in rows]
    for heading, label, field, parts in SECTIONS:
        summary: Summary = getattr(metrics, field)
        lines.append(heading.center(WIDTH, "-"))
        for part in parts:
            name = f"{part.capitalize()} {label} (ms):"
            lines.append(f"{name:<40} {_number(getattr(summary, part)):<10}")
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return a table of the client's figures beside those of the server's /metrics."""
    lines = [f"{'beside the /metrics of the server':<34} {'client':>12} {'server':>12} {'difference':>12}"]
    for each in comparisons:
        shown = ".0f" if each.is_exact else ".2f"
        cells = (f"{each.client:{shown}}", f"{each.server:{shown}}", f"{each.difference:+.2%}")
        mark = "" if each.agrees else "  differs"
        lines.append(f"{each.name:<34} " + " ".join(f"{cell:>12}" for cell in cells) + mark)
    return "\n".join(lines)


def remarks(config: BenchConfig, metrics: LoadMetrics) -> list[str]:
    """Return remarks that a reader has to know before quoting the table."""
    found = []
    for error, count in list(metrics.errors.items())[:MAX_ERRORS_SHOWN]:
        found.append(f"failed {count}x: {error[:MAX_ERROR_CHARS]}")
    if len(metrics.errors) > MAX_ERRORS_SHOWN:
        found.append(f"... and {len(metrics.errors) - MAX_ERRORS_SHOWN} other errors")
    if metrics.itl_source is not None:
        found.append(
            f"ITL: {metrics.itl_source}, {metrics.tokens_per_chunk:.2f} tokens in a chunk on average"
        )
    if metrics.ended_early and not config.disable_ignore_eos:
        found.append(f"{metrics.ended_early} requests got fewer tokens than were asked for")
    if metrics.client_cpu_share > BUSY_CLIENT:
        found.append(
            f"the client was busy {metrics.client_cpu_share:.0%} of the time: it limits what is measured"
        )
    return found


def saturation_table(rows: Sequence[tuple[float, LoadMetrics]]) -> str:
    """Return a table with one line for each rate of a sweep; latencies in ms."""
    lines = ["", " Saturation Curve ".center(len(CURVE_COLUMNS) * 13, "=")]
    lines.append(" ".join(f"{name:>12}" for name in CURVE_COLUMNS))
    for rate, metrics in rows:
        cells = [
            str(rate),
            _number(metrics.request_throughput),
            _number(metrics.output_throughput),
            _number(metrics.concurrency),
            _number(metrics.ttft.mean),
            _number(metrics.ttft.p99),
            _number(metrics.tpot.mean),
            _number(metrics.itl.p99),
            str(metrics.failed),
            _number(metrics.goodput),
        ]
        lines.append(" ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def json_record(
    config: BenchConfig, request_rate: float, metrics: LoadMetrics, server: ServerFigures | None
) -> dict[str, Any]:
    """Return all figures under SGLang's names, the server's /metrics for the run, and all arguments."""
    figures = msgspec.to_builtins(metrics)
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(getattr(metrics, name), Summary):
            flat |= {f"{part}_{name}_ms": number for part, number in value.items()}
        else:
            flat[name] = value
    arguments = msgspec.to_builtins(config)
    # Results are shared, and a header may have a key.
    arguments["header"] = [header.partition("=")[0] for header in config.header]
    arguments["request_rate"] = _json_rate(config.request_rate)
    return {
        "backend": config.backend,
        "dataset_name": config.dataset_name,
        "request_rate": _json_rate(request_rate),
        "max_concurrency": config.max_concurrency or None,
        **flat,
        "server_metrics": None if server is None else msgspec.to_builtins(server),
        "args": arguments,
    }


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return columns with one entry for each request."""
    return {
        "input_lens": [record.input_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s() for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def append_line(path: Path, record: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def _json_rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


def _per_token(num_bytes: int, metrics: LoadMetrics) -> str:
    return _number(num_bytes / metrics.total_output_tokens if metrics.total_output_tokens else None)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
