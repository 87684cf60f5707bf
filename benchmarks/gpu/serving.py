"""The whole runtime over HTTP, with random weights and random token ids, all requests at once, and outputs of
exactly the asked length. The runtime is a launch without a tokenizer. The client measures from the first
request to the last byte.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench_serving.backends.base import GenerationOptions
from bench_serving.backends.openai import OpenAIBackend
from bench_serving.backends.over_http import served_model
from bench_serving.datasets.base import LoadConversation, Turn
from bench_serving.load import LoadResult, Traffic, as_text, run_load
from bench_serving.metrics import compute_metrics
from benchmarks.gpu.load import Load
from benchmarks.gpu.shapes import write_config
from benchmarks.server import launched
from carousel.http_client import HttpClient

TIMEOUT_S = 400.0
ATTENTION = {"cuda": "triton", "cpu": "torch_native"}
"""Attention backends that are used, by device."""
OPTIONS = GenerationOptions(
    stream=True, ignore_eos=True, add_special_tokens=True, extra={}, counts_tokens=True
)


def serve(
    name: str, load: Load, device: str, dtype: torch.dtype, *, overlap: bool, attention: str
) -> dict[str, Any]:
    """Start a launch, warm it up with as many requests, and measure. attention: name of a backend. Raises
    RuntimeError if a request fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, Path(folder))
        arguments = [
            *("--model", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--device", device),
            *("--dtype", str(dtype).removeprefix("torch."), "--log-level", "warning"),
            *("--max-running-requests", str(load.num_requests)),
            *("--context-length", str(load.input_len + load.output_len)),
            *("--attention-backend", attention),
        ]
        if not overlap:
            arguments.append("--disable-overlap-schedule")
        with (
            launched(*arguments) as server,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            measured = runner.run(_measure(server.url, name, load))
            return {"overlap": overlap, "attention": attention, **measured}


async def _measure(url: str, name: str, load: Load) -> dict[str, Any]:
    http = HttpClient(url, {}, timeout_s=TIMEOUT_S, clock=time.perf_counter)
    backend = OpenAIBackend(http, "completions", await served_model(http), OPTIONS, time.perf_counter)
    for seed in (0, 1):  # the first is the warm-up
        conversations = [
            LoadConversation((Turn(prompt, load.input_len, load.output_len),))
            for prompt in load.prompts(name, seed)
        ]
        traffic = Traffic(math.inf, None, seed)
        result: LoadResult = await run_load(
            backend, as_text, conversations, traffic, on_record=lambda _: None
        )
    metrics = compute_metrics(result, slo_ms={}, num_retokenized=None)
    if metrics.failed or metrics.ended_early:
        raise RuntimeError(
            f"{metrics.failed} requests failed, {metrics.ended_early} are short: {metrics.errors}"
        )
    return {
        "output_tokens_per_s": metrics.output_throughput,
        "duration_s": metrics.duration,
        "median_ttft_ms": metrics.ttft.median,
        "median_tpot_ms": metrics.tpot.median,
        "p99_itl_ms": metrics.itl.p99,
        "client_cpu_share": metrics.client_cpu_share,
    }
