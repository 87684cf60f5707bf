"""The whole runtime over HTTP, and the transformers library's continuous batching of the same requests.

Random weights and random token ids, all requests at once, no end but the asked length. The runtime is a
launch without a tokenizer; its clock runs in the client, from the first request to the last byte. The library
runs offline in this process, in a manager that has done as much work before: no HTTP is in its time.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop

from bench_serving.backends.base import GenerationOptions
from bench_serving.backends.openai import OpenAIBackend, served_model
from bench_serving.datasets.base import Conversation, Turn
from bench_serving.http_client import HttpClient
from bench_serving.load import LoadResult, Traffic, as_text, run_load
from bench_serving.metrics import compute_metrics
from benchmarks.gpu.load import Load
from benchmarks.gpu.shapes import SHAPES, write_config
from benchmarks.server import launched

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

TIMEOUT_S = 400.0
OPTIONS = GenerationOptions(
    stream=True, ignore_eos=True, add_special_tokens=True, extra={}, counts_tokens=True
)


def serve(name: str, load: Load, device: str, dtype: torch.dtype, *, overlap: bool) -> dict[str, Any]:
    """Launch, warm up with as many requests, measure. Raises RuntimeError when a request fails."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, Path(folder))
        arguments = [
            *("--model", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--device", device),
            *("--dtype", str(dtype).removeprefix("torch."), "--log-level", "warning"),
            *("--max-running-requests", str(load.num_requests)),
            *("--context-length", str(load.input_len + load.output_len)),
        ]
        if not overlap:
            arguments.append("--disable-overlap-schedule")
        with (
            launched(*arguments) as server,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return {"overlap": overlap, **runner.run(_measure(server.url, name, load))}


async def _measure(url: str, name: str, load: Load) -> dict[str, Any]:
    http = HttpClient(url, {}, timeout_s=TIMEOUT_S, clock=time.perf_counter)
    backend = OpenAIBackend(http, "completions", await served_model(http), OPTIONS, time.perf_counter)
    for seed in (0, 1):  # the first is the warm-up
        conversations = [
            Conversation((Turn(prompt, load.input_len, load.output_len),))
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


def baseline(name: str, load: Load, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Greedy, in a manager that the library sizes for these requests. Raises RuntimeError when one fails."""
    # Here: it takes seconds, and the runtime can be measured without the library.
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=dtype).eval()
    settings = None
    if device.type == "cpu":  # it would size its cache by the machine's memory
        settings = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    generation = GenerationConfig(
        max_new_tokens=load.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    hints = WorkloadHints(load.input_len, load.output_len, load.num_requests)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings, workload_hints=hints
    ) as manager:
        for seed in (0, 1):  # the first is the warm-up
            began_s = time.perf_counter()
            manager.add_requests(inputs=load.prompts(name, seed), max_new_tokens=load.output_len)
            num_tokens = sum(_finished(manager) for _ in range(load.num_requests))
            duration_s = time.perf_counter() - began_s
    if num_tokens != load.num_requests * load.output_len:
        raise RuntimeError(f"the library made {num_tokens} tokens of {load}")
    return {
        "output_tokens_per_s": num_tokens / duration_s,
        "duration_s": duration_s,
        "attention": model.config._attn_implementation,
    }


def _finished(manager: ContinuousBatchingManager) -> int:
    """Wait for the next request to end; its number of tokens."""
    deadline_s = time.perf_counter() + TIMEOUT_S
    while time.perf_counter() < deadline_s and manager.is_running():
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            if output.error is not None:
                raise RuntimeError(f"the library failed: {output.error}")
            return len(output.generated_tokens)
    raise RuntimeError("the library's manager has stopped, or is much too late")
