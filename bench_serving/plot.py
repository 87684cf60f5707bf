"""Plots of a run and of a sweep, as PNG. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_serving.load import LoadResult
from bench_serving.metrics import LoadMetrics, throughput_series
from runtime.base.errors import ConfigError

NUM_WINDOWS = 60
NUM_BINS = 50


def check_plotting() -> None:
    """Check that plots can be drawn. Raises ConfigError that says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'carousel[bench]', or matplotlib") from None


def plot_run(path: Path, title: str, result: LoadResult) -> None:
    """Plot the distributions of TTFT, ITL and end-to-end latency, and throughput and requests in flight over
    time.
    """
    good = [record for record in result.records if record.error is None]
    figure, axes = _figure(2, 2, title)
    distributions = (
        ("Time to first token", [1e3 * record.ttft_s for record in good if record.ttft_s is not None]),
        ("Inter-token latency", [1e3 * itl for record in good for itl in record.itls_s()]),
        ("End-to-end latency", [1e3 * record.latency_s for record in good]),
    )
    for axis, (name, values) in zip(axes.flat, distributions, strict=False):
        axis.hist(values, bins=NUM_BINS)
        axis.set(title=name, xlabel="ms", ylabel="count")
    _draw_series(axes.flat[3], result)
    figure.savefig(path)


def plot_sweep(path: Path, title: str, rows: Sequence[tuple[float, LoadMetrics]]) -> None:
    """Plot latency against delivered throughput, with a point for each rate."""
    figure, axes = _figure(1, 2, title)
    delivered = [metrics.output_throughput for _, metrics in rows]
    for axis, name in zip(axes.flat, ("ttft", "tpot"), strict=True):
        for part in ("median", "p99"):
            values = [getattr(getattr(metrics, name), part) for _, metrics in rows]
            axis.plot(
                delivered, [float("nan") if each is None else each for each in values], "o-", label=part
            )
        for x, (rate, metrics) in zip(delivered, rows, strict=True):
            y = getattr(metrics, name).p99
            if y is not None:
                axis.annotate(f"{rate:g}/s", (x, y))
        axis.set(title=name.upper(), xlabel="output tok/s", ylabel="ms")
        axis.legend()
    figure.savefig(path)


def _draw_series(axis: Any, result: LoadResult) -> None:
    series = throughput_series(result, max(result.duration_s, 1e-9) / NUM_WINDOWS)
    times = [(index + 0.5) * series.width_s for index in range(len(series.output_throughput))]
    axis.plot(times, series.output_throughput, label="output tok/s")
    axis.set(title="Over time", xlabel="s", ylabel="output tok/s")
    in_flight = axis.twinx()
    in_flight.plot(times, series.in_flight, color="tab:orange", label="in flight")
    in_flight.set_ylabel("requests in flight")
    axis.legend(handles=[*axis.lines, *in_flight.lines])


def _figure(num_rows: int, num_columns: int, title: str) -> tuple[Any, Any]:
    # Not pyplot: it would look for a display and keep every figure alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * num_columns, 4 * num_rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(num_rows, num_columns)
