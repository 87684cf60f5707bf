"""Throughput of pipeline stages: `python -m benchmarks.cpu.pipeline [--real]`.

The stages are processes that sleep, 20 ms divided by their number, a fifth more or less, and give each other
steps and tokens over the links that stages have; the scheduler is the real one. Compared is with one stage
that sleeps 20 ms: tokens per second of 8 rows for each stage, and the time of one prompt of 128k tokens in
chunks of 2k. --real: models instead, with a core for each stage, against one rank with both cores: the demo
model, and one of its kind with random weights, 110 million numbers.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.bench_step import TOKEN, Bench, Case
from carousel import LLM, SamplingParams
from model_worker.distributed.layout import Layout
from model_worker.distributed.stage_link import SlotSizes, StageLink
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult
from scheduler_proc.batching.micro_batches import MicroBatches
from scheduler_proc.batching.prefill_adder import StepLimits

STEP_S = 0.02
SPREAD = 0.2
ROWS_OF_A_STAGE = 8
NUM_STEPS = 300
CHUNK, NUM_CHUNKS = 2048, 64
START_S = 60.0
WIDTH = 64
NUM_TOKENS = 64
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 14,
}
READY = 0
PR_SET_TIMERSLACK = 29


def link_of(folder: Path, layout: Layout) -> StageLink:
    sizes = SlotSizes(CHUNK * WIDTH * 4, 4096 * 8, torch.float32, WIDTH)
    return StageLink(folder, layout, sizes, join_timeout_s=START_S, on_wait=lambda: None)


def stage(folder: Path, layout: Layout, plans: Connection, results: Connection) -> None:
    """Sleep for each step, between receiving from the stage before and sending to the next one."""
    torch.set_num_threads(1)
    # Otherwise each sleep takes 50 us more, a larger share of the shorter steps of more stages.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    link = link_of(folder, layout) if layout.num_stages > 1 else None
    results.send(READY)
    draw = random.Random(layout.stage)
    hidden, tokens = torch.zeros(CHUNK, WIDTH), torch.zeros(CHUNK, dtype=torch.int64)
    waits_for: dict[int, int] = {}
    taken = 0
    step = 0
    while (item := plans.recv()) is not None:
        step += 1
        rows, num_tokens, needs_tokens, sampled = item
        if link is not None and layout.is_first and needs_tokens:
            while taken < max(waits_for[row] for row in rows):
                taken += 1
                link.take_tokens(taken)
        elif link is not None and not layout.is_first:
            link.take_hidden(step, num_tokens)
        time.sleep(STEP_S / layout.num_stages * (1 + draw.uniform(-SPREAD, SPREAD)))
        waits_for.update(dict.fromkeys(sampled, step))
        if link is not None:
            if not layout.is_first:
                link.let_go()
            if layout.is_last:
                link.give_tokens(step, tokens[: len(sampled)])
            else:
                link.give_hidden(step, [hidden[:num_tokens]])
            while layout.is_first and link.has_tokens:
                taken += 1
                link.take_tokens(taken)
        if layout.is_last:
            results.send(step)


class Handle:
    frames = ()

    def __init__(self, executor: SleepingStages, plan: BatchPlan) -> None:
        self._executor = executor
        samples = unpack_ids(plan.samples)
        tokens = np.full(plan.num_decodes + int(samples.sum()), TOKEN, np.int32)
        self._result = StepResult(plan.step, tokens.tobytes(), samples.tobytes())

    def result(self) -> StepResult:
        assert self._executor.results.recv() == self._result.step
        return self._result

    def done(self) -> bool:
        return False


class SleepingStages:
    feeds_back = True

    def __init__(self, num_stages: int, folder: Path) -> None:
        self.max_in_flight = num_stages + 1
        fork = multiprocessing.get_context("fork")
        # Pipes, since a queue would pass on each message in a separate thread.
        plans = [fork.Pipe(duplex=False) for _ in range(num_stages)]
        results = [fork.Pipe(duplex=False) for _ in range(num_stages)]
        self._plans = [sending for _, sending in plans]
        self.results = results[-1][0]
        """Pipe on which the last stage reports the number of each step that it has computed."""
        self._processes = [
            fork.Process(target=stage, args=(folder, Layout(i, 0, num_stages), plans[i][0], results[i][1]))
            for i in range(num_stages)
        ]
        for process in self._processes:
            process.start()
        assert all(receiving.recv() == READY for receiving, _ in results)

    def launch(self, plan: BatchPlan) -> Handle:
        rows, ids = unpack_ids(plan.rows), unpack_ids(plan.input_ids)
        samples = np.concatenate([np.ones(plan.num_decodes, bool), unpack_ids(plan.samples) > 0])
        needs_tokens = bool((ids < 0).any())
        item = rows.tolist(), len(ids), needs_tokens, rows[samples].tolist()
        for plans in self._plans:
            plans.send(item)
        return Handle(self, plan)

    def sample(self, handle: object, masks: SampleMasks) -> None:
        raise AssertionError("no row has a mask")

    def close(self) -> None:
        for plans in self._plans:
            plans.send(None)
        for process in self._processes:
            process.join()


def bench_of(case: Case, executor: SleepingStages, num_stages: int) -> Bench:
    bench = Bench(case, executor)
    builder = bench.scheduler.builder
    builder._limits = StepLimits(CHUNK, case.num_rows)
    if num_stages > 1:
        builder.micro_batches = MicroBatches(bench.rows, num_stages)
        bench.scheduler._is_pipeline = True
    return bench


def tokens_per_second(num_stages: int, num_rows: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        executor = SleepingStages(num_stages, Path(folder))
        case = Case(num_rows, 16, churn=False, num_prompt=16, num_output=NUM_STEPS * 2)
        bench = bench_of(case, executor, num_stages)
        bench.step(bench.first_frames())
        while bench.scheduler.num_committed < 30:
            bench.step([])
        num_before, began = bench.rows.num_tokens.sum(), time.perf_counter()
        while bench.scheduler.num_committed < 30 + NUM_STEPS:
            bench.step([])
        rate = (bench.rows.num_tokens.sum() - num_before) / (time.perf_counter() - began)
        while bench.scheduler.in_flight:
            bench.scheduler._commit_oldest()
        executor.close()
        return float(rate)


def prompt_seconds(num_stages: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        executor = SleepingStages(num_stages, Path(folder))
        case = Case(1, 16, churn=False, num_prompt=CHUNK * NUM_CHUNKS, num_output=2)
        bench = bench_of(case, executor, num_stages)
        began = time.perf_counter()
        bench.step([bench.frame(1)])
        while bench.lifecycle.requests:
            bench.step([])
        seconds = time.perf_counter() - began
        executor.close()
        return seconds


def larger_model(folder: Path) -> Path:
    """Make a checkpoint without weights, for --load-format dummy."""
    path = folder / "model"
    shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | LARGER))
    return path


def model_rate(num_streams: int, model: str | Path = "", **settings: Any) -> float:
    """Return the tokens per second."""
    sampling = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=n) for n in range(num_streams)]
    prompts = [f"def f{n}(x):\n    return" for n in range(num_streams)]
    with LLM(model, max_total_tokens=16384, **settings) as llm:
        llm.generate(prompts, sampling, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return num_streams * NUM_TOKENS / (time.perf_counter() - began)


def compare_models(
    name: str, num_streams: int, model: str | Path, report: dict[str, float], **settings: Any
) -> None:
    one = model_rate(num_streams, model, **settings)
    two = model_rate(num_streams, model, pp_size=2, **settings)
    report[f"{name} model, {num_streams} streams: 2 stages / 1 rank"] = round(two / one, 3)
    print(f"{name} model, {num_streams} streams: {one:.0f} and {two:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    report: dict[str, float] = {}
    if args.real:
        with tempfile.TemporaryDirectory() as folder:
            compare_models("larger", 16, larger_model(Path(folder)), report, load_format="dummy")
        compare_models("demo", 64, "", report)
    else:
        rate, seconds = tokens_per_second(1, ROWS_OF_A_STAGE), prompt_seconds(1)
        for num_stages in (2, 4):
            report[f"decodes, {num_stages} stages"] = round(
                tokens_per_second(num_stages, ROWS_OF_A_STAGE * num_stages) / rate, 3
            )
            report[f"prompt, {num_stages} stages"] = round(seconds / prompt_seconds(num_stages), 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
