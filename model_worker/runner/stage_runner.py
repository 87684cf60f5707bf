"""StageRunner: ModelRunner of one pipeline stage. It receives hidden states from the stage before and sends
its own to the next one. The last stage samples, and sends the tokens to the first one, which resolves input
ids of -1 with them.

    stage 0        tokens of earlier steps ─► FutureMap ─► layers ─► hidden states
    in between     hidden states ─► layers ─► hidden states
    last stage     hidden states ─► layers ─► head ─► Sampler ─► tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_worker.distributed.stage_link import StageLink
from model_worker.models.base import Model
from model_worker.models.decoder import StageOutput
from model_worker.models.transformer import CausalLM
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.recording.base import StageRecording
from model_worker.runner.recording.selection import record_stage
from model_worker.runner.step_output import ForwardOutput, StepOutput
from model_worker.runner.step_tables import StepTokens
from model_worker.sampling.columns import SampleRows
from runtime.wire.format import TOKEN_BYTES, RowMasks, unpack_ids
from runtime.wire.plan import BatchPlan, ProcessedRow


class StageRunner(ModelRunner):
    """Runner of one pipeline stage. Steps are numbered in their order, so that every stage uses the same
    number for the same plan.
    """

    def __init__(self, model: Model, *args: Any, link: StageLink, **options: Any) -> None:
        """link: to the other stages. Other arguments: as in ModelRunner; the model is a CausalLM."""
        super().__init__(model, *args, **options)
        assert isinstance(model, CausalLM), "settings with stages are refused for any other"
        self._link = link
        self._layout = link.layout
        self._stage_model = model
        self._program: StageRecording | None = None
        self._num_steps = 0
        self._arrived: tuple[Tensor, Tensor] | None = None
        # Only in the first stage: steps whose tokens have not arrived, and the last step that samples each
        # row.
        self._awaited: deque[tuple[int, SampleRows]] = deque()
        self._sampled_in = np.zeros(self.max_rows, np.int64)

    def apply(self, plan: BatchPlan) -> StepTokens:
        """Apply the plan as in ModelRunner, with the hidden states that have arrived for it."""
        tokens = super().apply(plan)
        tokens.batch.arrived = self._arrived
        return tokens

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> ForwardOutput | StepOutput:
        """Apply the plan and compute this stage's part of it."""
        self._num_steps += 1
        if self._layout.is_first:
            self._take_tokens(plan)
        else:
            self._take_hidden(plan)
        is_last = self._layout.is_last
        output = self._compute_last(plan) if is_last else self._compute_stage(plan)
        if not self._layout.is_first:
            self._arrived = None
            self._link.let_go()
        return output

    def _take_hidden(self, plan: BatchPlan) -> None:
        num_tokens = len(plan.input_ids) // TOKEN_BYTES
        data = self._link.take_hidden(self._num_steps, num_tokens).view(2, num_tokens, -1)
        self._arrived = data[0], data[1]

    def _take_tokens(self, plan: BatchPlan) -> None:
        """Receive tokens that have arrived, and wait for those that the plan's rows continue."""
        needed = 0
        if (unpack_ids(plan.input_ids) < 0).any():
            needed = self._sampled_in[unpack_ids(plan.rows)].max().item()
        while self._awaited and (self._awaited[0][0] <= needed or self._link.has_tokens):
            step, sample_rows = self._awaited.popleft()
            self._tables.future.store(sample_rows.rows, self._link.take_tokens(step))

    def _compute_stage(self, plan: BatchPlan) -> StepOutput:
        """Compute the layers of a stage that is not the last. The tokens of its result are meaningless."""
        made = self._run_recorded(plan)
        if made is None:
            batch, sample_rows = self.apply(plan)
            self._backend.prepare(batch)
            output = self._stage_model.compute_stage(batch, self.kv_pool, self._backend)
        else:
            assert not isinstance(made, ForwardOutput)
            output, sample_rows = made
        self._link.give_hidden(self._num_steps, output)
        if self._layout.is_first:
            # Copied, because a program writes the next plan to the same memory.
            kept = SampleRows(
                sample_rows.rows.clone(),
                sample_rows.positions,
                sample_rows.rows_host.copy(),
                sample_rows.positions_host,
            )
            self._awaited.append((self._num_steps, kept))
            self._sampled_in[kept.rows_host] = self._num_steps
        return StepOutput(bytes(len(sample_rows.rows_host) * TOKEN_BYTES))

    def _compute_last(self, plan: BatchPlan) -> ForwardOutput:
        made = self._run_recorded(plan)
        if made is None:
            return self._compute(plan)
        assert isinstance(made, ForwardOutput)
        return made

    def _run_recorded(self, plan: BatchPlan) -> ForwardOutput | tuple[StageOutput, SampleRows] | None:
        """Compute the plan in one recorded call; None if it must be computed operation by operation."""
        program = self._program
        if program is None or not program.fits(plan):
            return None
        if plan.setups or plan.page_copies:
            self._open_rows_and_copy_pages(plan)
        program.put(self._arrived)
        return program.run(plan)

    @torch.inference_mode()
    def sample(
        self,
        forward: ForwardOutput | StepOutput,
        masks: RowMasks,
        processed: Sequence[ProcessedRow] = (),
    ) -> StepOutput:
        """Sample as in ModelRunner. Only the last stage has logits to sample from."""
        output = super().sample(forward, masks, processed)
        if self._layout.is_last:
            tokens = output.tokens
            if isinstance(tokens, bytes):
                tokens = torch.from_numpy(unpack_ids(tokens).copy())
            self._link.give_tokens(self._num_steps, tokens.long())
        return output

    def _recorded_by(self) -> object | None:
        return self._program

    def _record(self, decode: BatchPlan, on_progress: Any) -> None:
        if self._records_steps and self._sampler.num_ranks == 1:
            self._program = record_stage(self._parts(decode), self._layout)
