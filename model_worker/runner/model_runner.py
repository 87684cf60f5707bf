"""ModelRunner: turns a BatchPlan into device work. Knows rows and pages, no request.

All of it on the forward stream, in this order:

    plan ─► row parameters, page copies, page table ─► ForwardBatch ─► model ─► head ─► Sampler ─► FutureMap
                                                                             └► head, by blocks of prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch

from model_worker.device.base import Device
from model_worker.models.base import Model
from model_worker.ops.base import Ops
from model_worker.runner import warm_up
from model_worker.runner.prompt_positions import score_prompt_positions
from model_worker.runner.recording.base import Recording, StepParts
from model_worker.runner.recording.selection import record_steps
from model_worker.runner.step_output import ForwardOutput, StepOutput
from model_worker.runner.step_sampler import StepSampler
from model_worker.runner.step_tables import StepTables, StepTokens
from model_worker.runner.taps import Taps
from runtime.base.errors import ConfigError
from runtime.wire.format import RowMasks
from runtime.wire.plan import BatchPlan, ProcessedRow

NO_MASKS: RowMasks = MappingProxyType({})


class ModelRunner:
    """Executes plans on one rank. Its methods must run on the forward stream, in the order of the plans'
    launch.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: Device,
        *,
        tables: StepTables,
        sampler: StepSampler,
        vocab_size: int,
        attention_window: int = 0,
        graph_sizes: Sequence[int] = (),
        max_guesses: int = 0,
        max_tokens: int = 0,
        records_steps: bool = True,
        output_width: int = 0,
    ) -> None:
        """Make a runner.

        - attention_window: as in KVLayout. output_width: values in a row of an additional output; 0: none.
        - graph_sizes: batch sizes of decodes that `warm_up` records as CUDA graphs, where model and backend
          can. max_guesses: most guesses of a row in such a step.
        - max_tokens: tokens of the largest step that it computes; 0: those of a short prompt.
        - records_steps: True to record steps, on a CPU those that consist of kernels only.
        """
        self.vocab_size = vocab_size
        self.max_rows = tables.max_rows
        self.max_len = tables.max_len
        self.attention_window = attention_window
        self.kv_pool = tables.kv_pool
        self.model = model
        self._ops = ops
        self._backend = ops.attention
        self._device = device
        self._tables = tables
        self._sampler = sampler
        self._recording: Recording | None = None
        self._graph_sizes = graph_sizes
        self._max_guesses = max_guesses
        self._records_steps = records_steps
        self._max_tokens = max_tokens
        self.output_width = output_width
        self._taps = Taps(device) if output_width else None

    @torch.inference_mode()
    def apply(self, plan: BatchPlan) -> StepTokens:
        """Apply the plan's table changes in the order of its fields, and lay out its tokens."""
        self._open_rows_and_copy_pages(plan)
        return self._tables.lay_out(plan)

    @torch.inference_mode()
    def _open_rows_and_copy_pages(self, plan: BatchPlan) -> None:
        if plan.setups:
            self._sampler.open_rows(plan.setups)
        self._tables.open_rows_and_copy_pages(plan)

    def forward(self, plan: BatchPlan) -> ForwardOutput | StepOutput:
        """Apply the plan and compute its tokens. Returns a StepOutput if nothing is to be sampled."""
        taps = self._taps
        if taps is not None:
            taps.open_rows(plan.setups)
        if (
            self._recording is None
            or not self._recording.fits(plan)
            or (taps is not None and taps.of_rows(plan))
            or self._tables.has_virtual_tokens(plan)
        ):
            return self._compute(plan)
        if plan.setups or plan.page_copies:
            self._open_rows_and_copy_pages(plan)
        return self._recording.run(plan)

    @torch.inference_mode()
    def _compute(self, plan: BatchPlan) -> ForwardOutput:
        batch, sample_rows = self.apply(plan)
        tapped = None
        if self._taps is not None and self._sampler.is_first_rank:
            batch.taps, tapped = self._taps.of_step(plan, batch.output_indices)
        self._backend.prepare(batch)
        hidden = self.model(batch, self.kv_pool, self._backend)
        if not plan.prompt_positions:
            return ForwardOutput(self.model.compute_logits(hidden), sample_rows, tapped=tapped)
        num_sampled = len(sample_rows.rows_host)
        prompt = score_prompt_positions(
            plan.prompt_positions,
            hidden[num_sampled:],
            self.model.compute_logits,
            self._sampler.prompt_logprobs_of,
            self.vocab_size,
            self._device,
        )
        logits = self.model.compute_logits(hidden[:num_sampled])
        return ForwardOutput(logits, sample_rows, prompt, tapped=tapped)

    def sample(
        self,
        forward: ForwardOutput | StepOutput,
        masks: RowMasks,
        processed: Sequence[ProcessedRow] = (),
    ) -> StepOutput:
        """Sample the step's tokens, and store them for plans that contain -1. See StepSampler."""
        return self._sampler.sample(forward, masks, processed)

    @torch.inference_mode()
    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Compute a prompt and a decode through the real path, so that everything is loaded before the first
        request, and record what can be recorded.

        On a device that compiles kernels when they are launched, also compute steps of all sizes, so that
        their kernels are compiled and the allocator keeps the memory of the largest. on_progress is called
        now and then. Raises ConfigError.
        """
        prompt = warm_up.first_prompt(self.max_len, self.kv_pool.num_pages, self.kv_pool.page_size)
        decode = warm_up.decode_behind(prompt)
        try:
            for plan in (prompt, decode):
                self._compute_and_sample(plan)
            self._record(decode, on_progress)
            if self._device.compiles_when_launched:
                for plan in warm_up.ever_smaller_chunks(self._max_tokens, self.max_rows, self.max_len):
                    self._compute_and_sample(plan)
                    on_progress()
        except self._device.launch_errors as error:
            raise ConfigError(
                f"device: a kernel of this model does not fit this GPU ({error}): use --dtype bfloat16, "
                "another --attention-backend, or --device cpu"
            ) from error
        self._tables.clear()

    def log_kernels(self) -> None:
        """Log the kernels that compute steps; on rank 0, after `warm_up`."""
        sampler = self._sampler.own
        if sampler is None:
            return
        table = self._ops.table
        table.note("sampling", type(sampler.ops).__name__)
        recording = self._recorded_by()
        table.note("step", "Python" if recording is None else type(recording).__name__)
        table.log()

    def _recorded_by(self) -> object | None:
        return self._recording

    def _compute_and_sample(self, plan: BatchPlan, masks: RowMasks = NO_MASKS) -> None:
        self.sample(self.forward(plan), masks)

    def _record(self, decode: BatchPlan, on_progress: Callable[[], None]) -> None:
        """Record what can be recorded. decode: a plan that may be run again."""
        if self._device.compiles_when_launched:
            self._launch_unrecorded_kernels(decode)
            on_progress()
        if self._records_steps:
            self._recording = record_steps(self._parts(decode), on_progress)

    def _parts(self, example: BatchPlan) -> StepParts:
        return StepParts(
            model=self.model,
            ops=self._ops,
            device=self._device,
            kv_pool=self.kv_pool,
            table=self._tables.pages,
            future=self._tables.future,
            sampler=self._sampler.own,
            num_ranks=self._sampler.num_ranks,
            sizes=self._graph_sizes,
            max_guesses=self._max_guesses,
            max_len=self.max_len,
            vocab_size=self.vocab_size,
            example=example,
            lay_out=lambda plan: self.apply(plan).batch,
            row_adapters=self._tables.row_adapters,
        )

    def _launch_unrecorded_kernels(self, decode: BatchPlan) -> None:
        """Launch kernels that no recording launches, since the first launch compiles them. A decode of the
        longest context splits its keys, if any does.
        """
        for plan, masks in warm_up.edited_decodes(decode, self.vocab_size):
            self._compute_and_sample(plan, masks)
        self._compute_and_sample(warm_up.longest_decode(self.max_len, self.kv_pool.page_size))
