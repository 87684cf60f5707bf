"""ModelWorker: executes plans in order on the device's streams. Knows tickets; knows no socket, no request.

                      forward stream              copy stream
launch(plan)          tables, forward, sampling   result to the host
launch(deferred)      tables, forward
sample(step, masks)   sampling                    result to the host
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.selection import make_attention_backend
from model_worker.device import Device, Ticket
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.loader import load_model
from model_worker.model_runner import ForwardOutput, ModelRunner, size_kv_pool
from model_worker.step_output import StepOutput
from runtime.config import RuntimeConfig
from runtime.errors import ExecutorError
from runtime.model_config import ModelConfig
from runtime.plan import BatchPlan, SampleMasks, StepResult, WorkerReady
from runtime.transport import Frame

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 1.0


class WorkerStep:
    """One launched step."""

    __slots__ = ("_copied", "_forward", "_plan", "frames")

    def __init__(self, plan: BatchPlan) -> None:
        self.frames: tuple[Frame, ...] = ()
        """Raw logits, one frame for each of the result's `tensors`; there once `result` has returned."""
        self._plan = plan
        self._forward: Ticket[ForwardOutput] | None = None
        self._copied: Ticket[StepOutput] | None = None

    @property
    def awaits_masks(self) -> bool:
        return self._copied is None

    def done(self) -> bool:
        return self._copied is not None and self._copied.done()

    def result(self) -> StepResult:
        """Wait for the step. Raises ExecutorError when it failed, or when its masks were never given."""
        if self._copied is None:
            raise ExecutorError(f"step {self._plan.step} waits for its masks")
        try:
            output = self._copied.wait()
        except Exception as error:
            raise ExecutorError(f"step {self._plan.step} failed: {type(error).__name__}: {error}") from error
        result, self.frames = output.to_result(self._plan)
        return result


class ModelWorker:
    def __init__(self, runner: ModelRunner, device: Device) -> None:
        self._runner = runner
        self._device = device
        self._deferred: WorkerStep | None = None
        self.limits = WorkerReady(
            num_pages=runner.kv_pool.num_pages,
            page_size=runner.kv_pool.page_size,
            max_rows=runner.max_rows,
            max_len=runner.max_len,
            vocab_size=runner.vocab_size,
            device=device.name,
        )

    def warm_up(self) -> None:
        self._device.forward_stream.launch(self._runner.warm_up).wait()

    def launch(self, plan: BatchPlan) -> WorkerStep:
        """Start a step; does not wait where the device works beside its caller. Failure shows in `result`."""
        assert self._deferred is None, "a step was launched before the masks of the one before it"
        step = WorkerStep(plan)
        runner = self._runner
        if plan.defer_sampling:
            step._forward = self._device.forward_stream.launch(lambda: runner.forward(plan))
            self._deferred = step
        else:
            self._copy_back(step, lambda: runner.sample(runner.forward(plan), {}))
        return step

    def sample(self, step: WorkerStep, masks: SampleMasks) -> None:
        """Sample the step that was launched last and deferred its sampling."""
        assert step is self._deferred, "masks for a step that does not wait for them"
        assert masks.step == step._plan.step, "masks of another step"
        self._deferred = None
        forward, step._forward = step._forward, None  # logits live no longer than they are needed
        assert forward is not None
        by_row: Mapping[int, bytes] = dict(masks.masks)
        runner = self._runner
        self._copy_back(step, lambda: runner.sample(forward.value, by_row))

    def _copy_back(self, step: WorkerStep, compute: Callable[[], StepOutput]) -> None:
        computed = self._device.forward_stream.launch(compute)
        step._copied = self._device.copy_stream.launch(
            lambda: computed.value.on_host(self._device), after=computed
        )

    def close(self) -> None:
        self._device.close()


class LoadProgress:
    """Says once a second how much of the weights is there, and lets the process show that it lives."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._next_line_at = time.monotonic() + LINE_INTERVAL_S

    def note(self, loaded: int, total: int) -> None:
        self._on_progress()
        now = time.monotonic()
        if now >= self._next_line_at:
            self._next_line_at = now + LINE_INTERVAL_S
            logger.info("loading weights: %d of %d tensors (%d %%)", loaded, total, 100 * loaded // total)


def load_worker(config: RuntimeConfig, device: Device, on_progress: Callable[[], None]) -> ModelWorker:
    """Load the model of resolved settings, give the KV cache the memory that is left, and warm up.

    on_progress is called after each tensor that was read. Raises ModelError or ConfigError.
    """
    # On the stream that will use it: memory of another stream would have to be waited for.
    runner = device.forward_stream.launch(lambda: _load_runner(config, device, on_progress)).wait()
    worker = ModelWorker(runner, device)
    on_progress()
    worker.warm_up()
    return worker


def _load_runner(config: RuntimeConfig, device: Device, on_progress: Callable[[], None]) -> ModelRunner:
    model_path = Path(config.model)
    model_config = ModelConfig.from_path(model_path, config.context_length)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = load_model(
        model_path,
        model_config,
        dtype,
        device.torch_device,
        load_format=config.load_format,
        progress=LoadProgress(on_progress).note,
    )
    backend = make_attention_backend(
        config.attention_backend, device=device.name, dtype=dtype, head_dim=model_config.head_dim
    )
    if isinstance(backend, CpuNativeAttention):
        model.use_native(backend.kernels)
        if dtype is torch.bfloat16 and not backend.kernels.packs_linear:
            logger.info("this CPU has no AVX512-BF16: linear layers stay with torch operations")
    num_pages = size_kv_pool(
        free_bytes=device.free_bytes(),
        fraction=config.mem_fraction_static,
        bytes_per_token=model_config.kv_bytes_per_token(dtype.itemsize),
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        device=device.name,
    )
    kv_pool = MHATokenToKVPool(
        num_pages,
        config.page_size,
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        dtype,
        device.torch_device,
    )
    logger.info(
        "KV cache: %d pages of %d tokens, %.2f GiB, %s on %s",
        num_pages,
        config.page_size,
        (num_pages + 1) * kv_pool.bytes_per_page() / (1 << 30),
        config.dtype,
        device.name,
    )
    return ModelRunner(
        model,
        kv_pool,
        backend,
        device,
        max_rows=config.max_running_requests,
        max_len=config.context_length,
        vocab_size=model_config.vocab_size,
    )
