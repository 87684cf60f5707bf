"""Main program: arguments → server → prompts → warm-up → load → figures.

Exit code 0 if every request completed, 1 if one failed, 64 for wrong arguments, 130 if interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from bench_serving.arguments import BenchConfig, parse_args
from bench_serving.datasets.base import LoadConversation
from bench_serving.datasets.random_prompts import warm_up_like
from bench_serving.datasets.table import make_conversations
from bench_serving.load import LoadResult, Traffic, run_load
from bench_serving.metrics import LoadMetrics, compute_metrics
from bench_serving.plot import check_plotting, plot_run, plot_sweep
from bench_serving.report import (
    append_line,
    comparison_table,
    details,
    json_record,
    remarks,
    result_table,
    saturation_table,
)
from bench_serving.server_metrics import ServerFigures, compare, scrape
from bench_serving.target import BenchTarget, open_target
from carousel.http_client import RequestFailure, raise_file_limit
from runtime.base.errors import CarouselError, ConfigError, StartError
from runtime.base.progress import Progress
from runtime.text.tokenizer import Tokenizer

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# Second element of a seed, so that the warm-up draws from a stream of its own.
WARM_UP_STREAM = 2


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = parse_args(argv)
        _check_outputs(config)
        raise_file_limit()
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


@dataclass(frozen=True, slots=True)
class RatedRun:
    rate: float
    result: LoadResult
    metrics: LoadMetrics
    server: ServerFigures | None
    """Figures of the run from the server's /metrics, if it has them."""


async def bench(config: BenchConfig) -> int:
    """Warm up, run each rate, print and write the results. Returns the exit code.

    Raises: RequestFailure if the server does not answer or the warm-up fails; otherwise what `open_target`
    and `make_conversations` raise.
    """
    target = await open_target(config)
    print(target.description)
    runs: list[RatedRun] = []
    agrees = True
    try:
        for index, rate in enumerate(config.rates):
            # Fresh prompts for each rate: what one run leaves in the prefix cache must not serve the next.
            seed = config.seed + index
            conversations = make_conversations(config, target.source, seed)
            if index == 0:
                await _warm_up(config, target, conversations)
            run = await _run(config, target, conversations, rate, seed)
            runs.append(run)
            print(result_table(config, rate, run.metrics))
            print("\n".join(remarks(config, run.metrics)))
            if run.server is not None:
                comparisons = compare(run.metrics, run.server)
                agrees = agrees and all(each.agrees for each in comparisons)
                print(comparison_table(comparisons), flush=True)
    finally:
        await target.backend.aclose()
    _write(config, runs)
    is_good = agrees or not config.check_metrics
    return 0 if is_good and not any(run.metrics.failed for run in runs) else EXIT_FAILED


async def _warm_up(
    config: BenchConfig, target: BenchTarget, conversations: Sequence[LoadConversation]
) -> None:
    rng = np.random.default_rng([config.seed, WARM_UP_STREAM])
    warm_up = warm_up_like(conversations, target.source, rng, config.warmup_requests)
    traffic = Traffic(request_rate=np.inf, max_concurrency=config.max_concurrency or None, seed=0)
    result = await run_load(target.backend, target.render, warm_up, traffic, on_record=lambda _: None)
    for record in result.records:
        if record.error is not None:
            raise RequestFailure(f"the warm-up failed: {record.error}")


async def _run(
    config: BenchConfig,
    target: BenchTarget,
    conversations: Sequence[LoadConversation],
    rate: float,
    seed: int,
) -> RatedRun:
    if config.flush_cache:
        await target.backend.flush_cache()
    before = await _scrape(config, target)
    result = await _load(
        config, target, conversations, Traffic(rate, config.max_concurrency or None, seed, config.burstiness)
    )
    after = await _scrape(config, target)
    server = after.since(before) if before is not None and after is not None else None
    num_retokenized = _num_retokenized(result, target.tokenizer)
    metrics = compute_metrics(result, slo_ms=config.slo_ms, num_retokenized=num_retokenized)
    return RatedRun(rate, result, metrics, server)


async def _load(
    config: BenchConfig, target: BenchTarget, conversations: Sequence[LoadConversation], traffic: Traffic
) -> LoadResult:
    num_requests = sum(len(conversation.turns) for conversation in conversations)
    # The prompts are millions of objects that no collection during the run needs to look at.
    gc.collect()
    gc.freeze()
    try:
        progress, num_done = Progress(f"{traffic.request_rate:g} req/s", "requests"), 0

        def note(_: object) -> None:
            nonlocal num_done
            num_done += 1
            if not config.disable_tqdm:
                progress.note(num_done, num_requests)

        return await run_load(target.backend, target.render, conversations, traffic, on_record=note)
    finally:
        gc.unfreeze()


async def _scrape(config: BenchConfig, target: BenchTarget) -> ServerFigures | None:
    """Return the server's figures; None if it has no known kind of /metrics, unless they were requested."""
    if target.metrics_http is None:
        return None
    try:
        return await scrape(target.metrics_http)
    except RequestFailure as failure:
        if config.check_metrics:
            raise RequestFailure(f"--check-metrics: {failure}") from None
        return None


def _num_retokenized(result: LoadResult, tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    texts = [record.text for record in result.records if record.error is None]
    return sum(map(len, tokenizer.encode_batch(texts, add_special_tokens=False)))


def _write(config: BenchConfig, runs: Sequence[RatedRun]) -> None:
    curve = [(run.rate, run.metrics) for run in runs]
    if config.sweep:
        print(saturation_table(curve))
    if config.plot and config.sweep:
        plot_sweep(Path(config.plot), config.backend, curve)
    elif config.plot:
        plot_run(Path(config.plot), f"{config.backend}, {runs[0].rate:g} requests/s", runs[0].result)
    for run in runs:
        record = json_record(config, run.rate, run.metrics, run.server)
        if config.output_file:
            more = details(run.result.records) if config.output_details else {}
            append_line(Path(config.output_file), record | more)
        print(msgspec.json.encode(record).decode())


def _check_outputs(config: BenchConfig) -> None:
    """Check the output files before the run. Raises ConfigError."""
    if config.plot:
        check_plotting()
    for flag, name in (("--output-file", config.output_file), ("--plot", config.plot)):
        try:
            if name:
                Path(name).open("ab").close()
        except OSError as error:
            raise ConfigError(f"{flag}: {name}: {error.strerror}") from None
