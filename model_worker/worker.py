"""ModelWorker: executes plans in order on the device's streams. Knows tickets; knows no socket, no request.

                      forward stream              copy stream
launch(plan)          tables, forward, sampling   result to the host
launch(deferred)      tables, forward
sample(step, masks)   sampling                    result to the host
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from model_worker.adapters.slots import AdapterAnswer, AdapterSlots
from model_worker.device.base import Device, Ticket
from model_worker.device.out_of_memory import first_line, is_out_of_memory
from model_worker.models.base import Model
from model_worker.runner.model_runner import NO_MASKS, ModelRunner
from model_worker.runner.step_output import ForwardOutput, StepOutput
from model_worker.sampling.step_masks import MaskMap, MaskReader
from runtime.base.errors import ExecutorError
from runtime.wire.format import RowMasks
from runtime.wire.plan import (
    BatchPlan,
    LoadAdapter,
    ProcessedRow,
    SampleMasks,
    SpanName,
    StepResult,
    StepSpan,
    WorkerReady,
)
from runtime.wire.transport import Frame

T = TypeVar("T")


class WorkerStep:
    """One launched step."""

    __slots__ = ("_copied", "_forward", "_plan", "_spans", "frames")

    def __init__(self, plan: BatchPlan) -> None:
        self.frames: tuple[Frame, ...] = ()
        """Raw logits, one frame for each of the result's `tensors`. Set once `result` has returned."""
        self._plan = plan
        self._forward: Ticket[ForwardOutput | StepOutput] | None = None
        self._copied: Ticket[StepOutput] | None = None
        self._spans: list[StepSpan] = []

    def timed(self, name: SpanName, compute: Callable[[], T]) -> Callable[[], T]:
        """Return the work itself or, if the plan is profiled, the work with its begin and end recorded. On a
        GPU these are the times for which the host launched it.
        """
        if not self._plan.profiled:
            return compute

        def timed() -> T:
            begin_ns = time.monotonic_ns()
            value = compute()
            self._spans.append(StepSpan(name, begin_ns, time.monotonic_ns()))
            return value

        return timed

    @property
    def awaits_masks(self) -> bool:
        return self._copied is None

    def done(self) -> bool:
        return self._copied is not None and self._copied.done()

    def waits_for_masks(self) -> bool:
        """Return True if the model is computed, and the masks have not been given."""
        return self._forward is not None and self._forward.done()

    def result(self) -> StepResult:
        """Return the step's result, waiting for it. Raises ExecutorError if it failed, or its masks were
        never given.
        """
        if self._copied is None:
            raise ExecutorError(f"step {self._plan.step} waits for its masks")
        try:
            output = self._copied.wait()
        except Exception as error:
            step = f"step {self._plan.step}"
            if is_out_of_memory(error):
                raise ExecutorError(
                    f"{step} is out of memory: lower --mem-fraction-static, so that the KV cache leaves "
                    f"more, or --chunked-prefill-size, so that a step needs less ({first_line(error)})"
                ) from error
            raise ExecutorError(f"{step} failed: {type(error).__name__}: {error}") from error
        result, self.frames = output.to_result(self._plan)
        return msgspec.structs.replace(result, spans=tuple(self._spans)) if self._spans else result


class ModelWorker:
    def __init__(self, runner: ModelRunner, device: Device, adapters: AdapterSlots | None = None) -> None:
        self._runner = runner
        self.adapters = adapters
        """Slots of adapters; None for a model without adapters."""
        self._device = device
        self._mask_reader = MaskReader()
        self._deferred: WorkerStep | None = None
        self._failed: WorkerStep | None = None
        self.limits = WorkerReady(
            num_pages=runner.kv_pool.num_pages,
            page_size=runner.kv_pool.page_size,
            max_rows=runner.max_rows,
            max_len=runner.max_len,
            vocab_size=runner.vocab_size,
            device=device.name,
            attention_window=runner.attention_window,
            output_width=runner.output_width,
            num_adapted_modules=0 if adapters is None else adapters.num_modules,
            adapter_rows=0 if adapters is None else adapters.max_rows,
            adapter_row_bytes=0 if adapters is None else adapters.row_bytes,
        )

    @property
    def model(self) -> Model:
        """This rank's part of the model."""
        return self._runner.model

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Compute a prompt and a decode through the real path, so that everything is loaded before the first
        request, and record what can be recorded; see ModelRunner.
        """
        self._device.forward_stream.launch(lambda: self._runner.warm_up(on_progress)).wait()

    def log_kernels(self) -> None:
        """Log the kernels that compute steps; on rank 0, after `warm_up`."""
        self._runner.log_kernels()

    def launch(self, plan: BatchPlan) -> WorkerStep:
        """Launch a step; does not wait if the device works asynchronously. A failure is raised by `result`.
        Raises ExecutorError if an earlier step is known to have failed: other ranks' devices may still wait
        for this one in that step, and would take another step's collective operations for its own.
        """
        assert self._deferred is None, "a step was launched before the masks of the one before it"
        if self._failed is not None:
            self._failed.result()
        step = WorkerStep(plan)
        runner = self._runner
        forward = step.timed("forward", lambda: runner.forward(plan))
        if plan.defer_sampling:
            step._forward = self._device.forward_stream.launch(forward)
            self._deferred = step
        else:
            self._sample(step, forward)
        return step

    def sample(self, step: WorkerStep, masks: SampleMasks) -> None:
        """Sample the step that was launched last and deferred its sampling."""
        assert step is self._deferred, "masks for a step that does not wait for them"
        assert masks.step == step._plan.step, "masks of another step"
        self._deferred = None
        forward, step._forward = step._forward, None  # logits live no longer than they are needed
        assert forward is not None
        self._sample(step, lambda: forward.value, MaskMap(masks, self._mask_reader), masks.processed)

    def _sample(
        self,
        step: WorkerStep,
        forward: Callable[[], ForwardOutput | StepOutput],
        masks: RowMasks = NO_MASKS,
        processed: Sequence[ProcessedRow] = (),
    ) -> None:
        runner = self._runner

        def compute() -> StepOutput:
            output = forward()
            return step.timed("sample", lambda: runner.sample(output, masks, processed))()

        computed = self._device.forward_stream.launch(compute)
        copy = step.timed("copy", lambda: computed.value.on_host(self._device))
        step._copied = self._device.copy_stream.launch(copy, after=computed)
        if step._copied.has_failed:
            self._failed = step

    def load_adapter(self, asked: LoadAdapter) -> None:
        """Load an adapter into a slot; see LoadAdapter."""
        assert self.adapters is not None, "an adapter for a model that takes none"
        self.adapters.load(asked)

    def drop_adapter(self, slot: int) -> None:
        """Free the memory of a slot; see DropAdapter."""
        assert self.adapters is not None, "an adapter of a model that takes none"
        self.adapters.drop(slot)

    def on_adapter_news(self, callback: Callable[[], None]) -> None:
        """Set the function to be called, in another thread, when there is an answer."""
        if self.adapters is not None:
            self.adapters.on_news = callback

    def adapter_answers(self) -> list[AdapterAnswer]:
        """Return and clear the results of loads since the last call; see AdapterSlots."""
        return [] if self.adapters is None else self.adapters.answers()

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        self._device.close()
