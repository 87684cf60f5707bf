"""Both executors behind one contract: the worker in this process, and in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from model_worker.executors import inproc, process
from runtime.base.errors import ExecutorError
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile, ProcessContext
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import pack_ids, unpack_floats
from runtime.wire.plan import SampleMasks
from runtime.wire.status_page import StatusPage
from scheduler_proc.main import ServingExecutor
from tests.harness.models.plans import FEEDBACK, GREEDY, PlanWriter, Wanted, greedy_reference, tokens_of
from tests.harness.ring.launched import SLACK, wait_until

ROOT = Path(__file__).resolve().parents[3]
PAGE_SIZE = 4
MAX_TOTAL_TOKENS = 800
PROMPT = [1, 5, 9, 33, 2, 71, 8, 8, 60]


class Waits:
    """An `on_wait` that remembers when it was called."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.called = threading.Event()

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        self.called.set()


def make_config(model: Path, **settings: object) -> RuntimeConfig:
    fields = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "cpu_threads": 1,
        "context_length": 64,
        "max_running_requests": 8,
        "page_size": PAGE_SIZE,
        "max_total_tokens": MAX_TOTAL_TOKENS,
        **settings,
    }
    return RuntimeConfig(**fields)  # type: ignore[arg-type]


@contextmanager
def scheduler_context(run_dir: Path, config: RuntimeConfig) -> Iterator[ProcessContext]:
    """Files that a launcher prepares, and the scheduler process's view of them."""
    endpoints = Endpoints(run_dir)
    run_dir.mkdir(mode=0o700, exist_ok=True)
    endpoints.config_file.write_bytes(msgspec.json.encode(LaunchFile(config)))
    page = StatusPage(endpoints.status_file, create=True)
    context = ProcessContext("scheduler", run_dir)
    try:
        yield context
    finally:
        context.close()
        context.status.close()
        page.close()


@contextmanager
def worker_process(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-m", "model_worker.main", str(run_dir)], cwd=ROOT)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def running(
    model: Path, run_dir: Path, waits: Waits, **settings: object
) -> Iterator[tuple[process.ProcessExecutor, subprocess.Popen[bytes]]]:
    with (
        scheduler_context(run_dir, make_config(model, **settings)) as context,
        worker_process(run_dir) as child,
    ):
        executor = process.create(context, waits)
        try:
            yield executor, child
        finally:
            executor.close()


def check_contract(executor: ServingExecutor, reference: LlamaForCausalLM) -> None:
    """Two steps in flight, the second fed back; then a deferred step; then one with raw logits behind it."""
    assert executor.feeds_back
    assert executor.max_in_flight == 2
    assert executor.limits.num_pages == MAX_TOTAL_TOKENS // PAGE_SIZE
    assert (executor.limits.page_size, executor.limits.max_rows, executor.limits.max_len) == (
        PAGE_SIZE,
        8,
        64,
    )
    plans = PlanWriter(PAGE_SIZE)
    plans.open_row(0, PROMPT, [9, 7, 5, 3], **GREEDY)
    handles = [
        executor.launch(plans.plan(chunks=[(0, PROMPT, True)])),
        executor.launch(plans.plan(decodes=[(0, FEEDBACK)])),
    ]
    tokens = [token for handle in handles for token in tokens_of(handle.result())]
    assert tokens == greedy_reference(reference, PROMPT, 2)
    assert all(handle.done() for handle in handles)
    deferred = executor.launch(plans.plan(decodes=[(0, tokens[-1])], defer_sampling=True))
    allowed = (1 << 11).to_bytes(4, "little")
    wait_until(deferred.waits_for_masks, 5.0, "the model is computed")
    assert not deferred.done()
    executor.sample(deferred, SampleMasks(step=3, masks=((0, allowed),)))
    assert tokens_of(deferred.result()) == [11]
    check_raw_logits(executor, plans, reference)


def check_raw_logits(executor: ServingExecutor, plans: PlanWriter, reference: LlamaForCausalLM) -> None:
    """Steps with frames behind their results, and one without in between, all in flight together."""
    plans.open_row(1, PROMPT, [11, 12, 13, 14], returns_logits=True, **GREEDY)
    wanted = {1: Wanted(PROMPT, 0, 2, returns_logits=True)}
    handles = [
        executor.launch(plans.plan(chunks=[(1, PROMPT, True)], wanted=wanted)),
        executor.launch(plans.plan(decodes=[(0, FEEDBACK)])),
        executor.launch(plans.plan(decodes=[(1, FEEDBACK)])),
    ]
    results = [handle.result() for handle in handles]
    assert [[tensor.name for tensor in result.tensors] for result in results] == [
        ["context_logits", "generation_logits"],
        [],
        ["generation_logits"],
    ]
    first = tokens_of(results[0])
    with torch.inference_mode():
        logits = reference(torch.tensor([[*PROMPT, *first]])).logits[0].numpy()
    frames = [np.frombuffer(frame, np.float32) for handle in handles for frame in handle.frames]
    for got, expected in zip(frames, [logits[:-1].ravel(), logits[-2], logits[-1]], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    scored = unpack_floats(results[0].prompts[0].logprobs)
    logprobs = torch.from_numpy(logits).log_softmax(-1).numpy()
    np.testing.assert_allclose(scored[:-1], logprobs[range(8), PROMPT[1:]], atol=1e-4)


def test_inproc_executor_keeps_the_contract(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, reference = tiny_checkpoint
    waits = Waits()
    with scheduler_context(tmp_path / "run", make_config(path)) as context:
        executor = inproc.create(context, waits)
        check_contract(executor, reference)
        executor.close()
    assert waits.times, "loading must keep the heartbeat going"


def test_process_executor_keeps_the_contract_and_the_worker_ends_when_asked(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, reference = tiny_checkpoint
    with running(path, tmp_path / "run", Waits()) as (executor, child):
        check_contract(executor, reference)
        executor.close()
        assert child.wait(10.0 * SLACK) == 0


def test_waiting_keeps_the_heartbeat_going_and_a_killed_worker_is_an_error(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    waits = Waits()
    with running(tiny_checkpoint[0], tmp_path / "run", waits, disable_overlap_schedule=True) as (
        executor,
        child,
    ):
        assert executor.max_in_flight == 1
        os.kill(child.pid, signal.SIGSTOP)
        plans = PlanWriter(PAGE_SIZE)
        plans.open_row(0, PROMPT, [9, 7, 5, 3], **GREEDY)
        step = executor.launch(plans.plan(chunks=[(0, PROMPT, True)]))
        assert not step.done()
        errors: list[ExecutorError] = []

        def wait_for_result() -> None:
            try:
                step.result()
            except ExecutorError as error:
                errors.append(error)

        waits.times.clear()
        waiting = threading.Thread(target=wait_for_result)
        waiting.start()
        for _ in range(3):
            waits.called.clear()
            assert waits.called.wait(5.0 * SLACK)
        gaps = [later - earlier for earlier, later in zip(waits.times, waits.times[1:], strict=False)]
        assert min(gaps) < 0.15 * SLACK, gaps
        child.kill()
        waiting.join(5.0 * SLACK)
        assert not waiting.is_alive()
        assert "died" in str(errors[0])
        assert step.done()


def test_a_failing_plan_reaches_the_scheduler_with_its_reason_and_ends_the_worker(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    with running(tiny_checkpoint[0], tmp_path / "run", Waits()) as (executor, child):
        plans = PlanWriter(PAGE_SIZE)
        plans.open_row(0, PROMPT, [9, 7, 5, 3], **GREEDY)
        bad = msgspec.structs.replace(plans.plan(chunks=[(0, PROMPT, True)]), table_pages=pack_ids([]))
        # The second is a recorded step's, where the kernels can be compiled.
        reason = "table_pages does not match table_spans|a plan that contradicts itself"
        with pytest.raises(ExecutorError, match=reason):
            executor.launch(bad).result()
        assert child.wait(10.0 * SLACK) == 70


def test_waiting_for_a_worker_ends_when_the_process_is_asked_to_stop(
    tiny_checkpoint: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    with scheduler_context(tmp_path / "run", make_config(tiny_checkpoint[0])) as context:
        waits = Waits()

        def stop_at_the_second_wait() -> None:
            waits()
            if len(waits.times) == 2:
                context.stop.set()

        with pytest.raises(ExecutorError, match="before the model worker was ready"):
            process.create(context, stop_at_the_second_wait)
        assert len(waits.times) == 2
