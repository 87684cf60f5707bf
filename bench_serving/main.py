"""Composition: arguments → server → prompts → warm-up → load → figures.

Exit code 0 when every request completed, 1 when one failed, 64 for wrong arguments, 130 when interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm  # type: ignore[import-untyped]

from bench_serving.arguments import BenchConfig, parse_args
from bench_serving.datasets.base import Conversation
from bench_serving.datasets.random_prompts import warm_up_like
from bench_serving.datasets.table import make_conversations
from bench_serving.load import LoadResult, Traffic, run_load
from bench_serving.metrics import Metrics, compute_metrics
from bench_serving.plot import check_plotting, plot_run, plot_sweep
from bench_serving.records import RequestFailure
from bench_serving.report import append_line, details, json_record, remarks, result_table, saturation_table
from bench_serving.target import Target, open_target
from runtime.errors import CarouselError, ConfigError, StartError
from text.tokenizer import Tokenizer

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MAX_OPEN_FILES = 65535
# Second element of a seed, so that the warm-up draws from a stream of its own.
WARM_UP_STREAM = 2


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = parse_args(argv)
        _check_outputs(config)
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(bench(config))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (CarouselError, RequestFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


async def bench(config: BenchConfig) -> int:
    """Warm up, run each rate, print and write the results. Returns the exit code.

    Raises: RequestFailure when the server does not answer or the warm-up fails; else as `open_target` and
    `make_conversations`.
    """
    target = await open_target(config)
    print(target.description)
    try:
        runs: list[tuple[float, LoadResult, Metrics]] = []
        for index, rate in enumerate(config.rates):
            # Fresh prompts for each rate: what one run leaves in the prefix cache must not serve the next.
            seed = config.seed + index
            conversations = make_conversations(config, target.source, seed)
            if index == 0:
                await _warm_up(config, target, conversations)
            result = await _run(config, target, conversations, rate, seed)
            num_retokenized = _num_retokenized(result, target.tokenizer)
            metrics = compute_metrics(result, slo_ms=config.slo_ms, num_retokenized=num_retokenized)
            runs.append((rate, result, metrics))
            print(result_table(config, rate, metrics))
            print("\n".join(remarks(config, metrics)), flush=True)
    finally:
        await target.backend.aclose()
    _write(config, runs)
    return EXIT_FAILED if any(metrics.failed for _, _, metrics in runs) else 0


async def _warm_up(config: BenchConfig, target: Target, conversations: Sequence[Conversation]) -> None:
    rng = np.random.default_rng([config.seed, WARM_UP_STREAM])
    warm_up = warm_up_like(conversations, target.source, rng, config.warmup_requests)
    traffic = Traffic(request_rate=np.inf, max_concurrency=config.max_concurrency or None, seed=0)
    result = await run_load(target.backend, target.render, warm_up, traffic, on_record=lambda _: None)
    for record in result.records:
        if record.error is not None:
            raise RequestFailure(f"the warm-up failed: {record.error}")


async def _run(
    config: BenchConfig, target: Target, conversations: Sequence[Conversation], rate: float, seed: int
) -> LoadResult:
    num_requests = sum(len(conversation.turns) for conversation in conversations)
    # The prompts are millions of objects that no collection during the run needs to look at.
    gc.collect()
    gc.freeze()
    try:
        with tqdm(total=num_requests, disable=config.disable_tqdm, desc=f"{rate:g} req/s") as bar:
            return await run_load(
                target.backend,
                target.render,
                conversations,
                Traffic(rate, config.max_concurrency or None, seed),
                on_record=lambda _: bar.update(),
            )
    finally:
        gc.unfreeze()


def _num_retokenized(result: LoadResult, tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    texts = [record.text for record in result.records if record.error is None]
    return sum(map(len, tokenizer.encode_batch(texts, add_special_tokens=False)))


def _write(config: BenchConfig, runs: Sequence[tuple[float, LoadResult, Metrics]]) -> None:
    if config.sweep:
        print(saturation_table([(rate, metrics) for rate, _, metrics in runs]))
    if config.plot and config.sweep:
        plot_sweep(Path(config.plot), config.backend, [(rate, metrics) for rate, _, metrics in runs])
    elif config.plot:
        rate, result, _ = runs[0]
        plot_run(Path(config.plot), f"{config.backend}, {rate:g} requests/s", result)
    for rate, result, metrics in runs:
        record = json_record(config, rate, metrics)
        if config.output_file:
            more = details(result.records) if config.output_details else {}
            append_line(Path(config.output_file), record | more)
        print(msgspec.json.encode(record).decode())


def _check_outputs(config: BenchConfig) -> None:
    """Before the run, not after it. Raises ConfigError."""
    if config.plot:
        check_plotting()
    for flag, name in (("--output-file", config.output_file), ("--plot", config.plot)):
        try:
            if name:
                Path(name).open("ab").close()
        except OSError as error:
            raise ConfigError(f"{flag}: {name}: {error.strerror}") from None


def _raise_file_limit() -> None:
    """A connection for each request in flight is more than the usual soft limit of 1024 allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
