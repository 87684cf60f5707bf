"""Time of a decode step of a model's shape, with random weights: the real worker, from plan to tokens.

A step is what a worker does for a plan: tables, forward, greedy sampling, the copy back. `overlap`: the next
step is launched before this one's tokens are read, as the scheduler does. The floor is the memory that must
be read, at the copy rate of the same run.

The gap, in which the device has nothing to do, is a step's time less that of its work: of steps that are
queued behind other work, so that none of them waits for the host. Marks before and after a step's launches
would not do: while the host lays a step out the device stands still between them.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_rows import PAGE_SIZE, decode_plan, filled_pool, opening_plan, pages_for
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.timing import Backlog, mark, ms_between, wait
from model_worker.device.base import Device
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.triton_ops import TritonOps
from model_worker.quant.selection import select_quant_method
from model_worker.runner.build_runner import build_runner
from runtime.checkpoint.model_config import ModelConfig
from runtime.wire.plan import BatchPlan


def load_shape(name: str, device: Device, dtype: torch.dtype) -> CausalLM:
    """Return the model of that shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_config(name, path)
        config = ModelConfig.from_path(path)
        quant = select_quant_method("auto", config.quantization, device.name)
        return load_model(path, config, dtype, device.torch_device, "dummy", quant=quant, ops=TritonOps())


def floor_bytes(model: CausalLM, batch: int, context: int, dtype: torch.dtype) -> float:
    """Return the bytes that a step must read: weights (of experts, as many as a batch uses on average when
    tokens choose them at random), keys and values.
    """
    config = model.config
    total = 0.0
    for name, weight in model.named_parameters():
        share = 1.0
        if name.endswith("embed_tokens.weight") and model.lm_head.weight is not weight:
            share = batch / weight.shape[0]
        elif config.experts is not None and ".experts." in name:
            share = 1.0 - (1.0 - config.experts.num_per_token / config.experts.num_experts) ** batch
        total += share * weight.nbytes
    return total + batch * context * model.kv_layout.bytes_per_token(dtype)


NUM_QUEUED = 3
"""Number of steps that are queued together, each of about 300 launches if it is not recorded."""
NUM_ROUNDS = 3


class DecodeSteps:
    """A runner whose rows all have the same length."""

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        dtype: torch.dtype,
        batch: int,
        context: int,
        *,
        graphs: bool,
        backlog_bytes: int,
    ) -> None:
        """backlog_bytes: bytes that are copied while steps are queued."""
        self._device = device
        self._busy_ms: float | None = None
        pool = filled_pool(model.kv_layout, batch, context + 1, dtype, device.torch_device)
        self._runner = build_runner(
            model,
            pool,
            TritonOps(),
            device,
            max_rows=batch,
            max_len=pages_for(context + 1) * PAGE_SIZE,
            vocab_size=model.config.vocab_size,
            graph_sizes=(batch,) if graphs else (),
        )
        device.forward_stream.launch(self._runner.warm_up).wait()
        self._backlog = Backlog(device.torch_device, backlog_bytes)
        self._plan = decode_plan(batch, context + 1)
        self._launch(opening_plan(batch, context + 1, pool.num_pages)).wait()

    def measure(self, num_steps: int, *, overlap: bool) -> dict[str, float]:
        """Return medians in ms: `step` from start to start, `busy` time of the device, `gap`
        between steps.
        """
        step_ms = self._step_ms(num_steps, 2 if overlap else 1)
        if self._busy_ms is None:  # the device's time does not depend on overlap
            count, rounds = min(NUM_QUEUED, num_steps), min(NUM_ROUNDS, 1 + num_steps // 10)
            self._busy_ms = statistics.median(self._queued_ms(step_ms, count) for _ in range(rounds))
        return {"step": step_ms, "busy": self._busy_ms, "gap": step_ms - self._busy_ms}

    def _step_ms(self, num_steps: int, depth: int) -> float:
        """Return ms from start to start. depth: most steps in flight."""
        waiting: list[Any] = []
        starts: list[Any] = []
        for _ in range(num_steps + 3):
            waiting.append(self._launch(self._plan))
            if len(waiting) >= depth:
                starts.append(waiting.pop(0).wait())
        starts += [ticket.wait() for ticket in waiting]
        return statistics.median(ms_between(*pair) for pair in pairwise(starts[2:]))

    def _queued_ms(self, step_ms: float, count: int) -> float:
        """Return the device's ms for a step, of `count` that are in its queue before it begins the first.
        step_ms: upper bound of a step's time on device and host.
        """
        at, stream = self._device.torch_device, self._device.forward_stream

        def start() -> Any:
            self._backlog.queue(2 * count * step_ms)
            return mark(at)

        first = stream.launch(start).value
        steps = [stream.launch(self._compute) for _ in range(count)]
        last = stream.launch(lambda: mark(at)).value
        for step in steps:
            step.wait()  # raises the error of the step
        wait(at)
        return ms_between(first, last) / count

    def trace(self, path: Path, num_steps: int) -> None:
        """Write a Chrome trace of some steps, for Perfetto."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.torch_device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            self._step_ms(num_steps, depth=2)
        profile.export_chrome_trace(str(path))

    def _compute(self) -> Any:
        return self._runner.sample(self._runner.forward(self._plan), {})

    def _launch(self, plan: BatchPlan) -> Any:
        """Start a step. Its ticket is done when its tokens are on the host."""
        device, runner = self._device, self._runner

        def compute() -> tuple[Any, Any]:
            return mark(device.torch_device), runner.sample(runner.forward(plan), {})

        computed = device.forward_stream.launch(compute)

        def copy() -> Any:
            start, output = computed.value
            output.on_host(device)
            return start

        return device.copy_stream.launch(copy, after=computed)
