"""Time of a decode step of a model's shape, with random weights: the real worker, from plan to tokens.

A step is what a worker does for a plan: tables, forward, greedy sampling, the copy back. `overlap`: the next
step is launched before this one's tokens are read, as the scheduler does. The gap is what the device has
nothing to do between two steps. The floor is the memory that must be read, at the copy rate of the same run.
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
from benchmarks.gpu.timing import mark, ms_between, wait
from model_worker.attention.triton import TritonAttention
from model_worker.device import Device
from model_worker.loader import load_model
from model_worker.model_runner import ModelRunner
from model_worker.models.transformer import CausalLM
from model_worker.quant.selection import select_quant_method
from runtime.model_config import ModelConfig
from runtime.plan import BatchPlan


def load_shape(name: str, device: Device, dtype: torch.dtype) -> CausalLM:
    """The model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_config(name, path)
        config = ModelConfig.from_path(path)
        quant = select_quant_method("auto", config.quantization, device.name)
        return load_model(path, config, dtype, device.torch_device, "dummy", quant=quant)


def floor_bytes(model: CausalLM, batch: int, context: int, dtype: torch.dtype) -> float:
    """Bytes that a step must read: weights, of experts as many as a batch of so many tokens meets when each
    token takes them at random, and keys and values.
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


class DecodeSteps:
    """A runner whose rows all stand at the same length."""

    def __init__(
        self, model: CausalLM, device: Device, dtype: torch.dtype, batch: int, context: int, *, graphs: bool
    ) -> None:
        self._device = device
        pool = filled_pool(model.kv_layout, batch, context + 1, dtype, device.torch_device)
        self._runner = ModelRunner(
            model,
            pool,
            TritonAttention(),
            device,
            max_rows=batch,
            max_len=pages_for(context + 1) * PAGE_SIZE,
            vocab_size=model.config.vocab_size,
            graph_sizes=(batch,) if graphs else (),
        )
        device.forward_stream.launch(self._runner.warm_up).wait()
        self._plan = decode_plan(batch, context + 1)
        self._launch(opening_plan(batch, context + 1, pool.num_pages)).wait()

    def measure(self, num_steps: int, *, overlap: bool) -> dict[str, float]:
        """Medians over steps, in ms: `step` from start to start, `busy` of the device, `gap` between."""
        depth = 2 if overlap else 1
        waiting: list[Any] = []
        marks: list[tuple[Any, Any]] = []
        for _ in range(num_steps + 3):
            waiting.append(self._launch(self._plan))
            if len(waiting) >= depth:
                marks.append(waiting.pop(0).wait())
        marks += [ticket.wait() for ticket in waiting]
        wait(self._device.torch_device)
        marks = marks[3:]
        return {
            "step": statistics.median(ms_between(a[0], b[0]) for a, b in pairwise(marks)),
            "busy": statistics.median(ms_between(*each) for each in marks),
            "gap": statistics.median(ms_between(a[1], b[0]) for a, b in pairwise(marks)),
        }

    def trace(self, path: Path, num_steps: int) -> None:
        """Write a Chrome trace of some steps, which Perfetto shows."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.torch_device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.measure(num_steps, overlap=True)
        profile.export_chrome_trace(str(path))

    def _launch(self, plan: BatchPlan) -> Any:
        device, runner = self._device, self._runner

        def compute() -> tuple[Any, Any, Any]:
            first = mark(device.torch_device)
            output = runner.sample(runner.forward(plan), {})
            return first, mark(device.torch_device), output

        computed = device.forward_stream.launch(compute)

        def copy() -> tuple[Any, Any]:
            first, last, output = computed.value
            output.on_host(device)
            return first, last

        return device.copy_stream.launch(copy, after=computed)
