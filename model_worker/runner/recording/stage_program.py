"""StageProgram: the layers of a pipeline stage as one call. The last stage uses a ForwardProgram; those
before it end in hidden states and draw nothing.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.distributed.layout import Layout
from model_worker.kernels.native.program import NotRecordable, Program
from model_worker.kernels.native.step_calls import StepCall
from model_worker.models.decoder import StageOutput
from model_worker.models.transformer import CausalLM
from model_worker.runner.recording.base import StepParts
from model_worker.runner.recording.forward_program import (
    MAX_SEQS,
    MAX_TOKENS,
    NUM_OUTPUTS,
    NUM_SEQS,
    NUM_TOKENS,
    ForwardProgram,
    batch_of,
    put,
)
from model_worker.runner.recording.native_inputs import NativeInputs
from model_worker.sampling.columns import SampleRows
from runtime.wire.plan import BatchPlan

logger = logging.getLogger(__name__)

ArrivedStates: TypeAlias = tuple[Tensor, Tensor]


class StageProgram:
    """Recorded layers of a stage that is not the last."""

    def __init__(
        self, compute: Callable[[ForwardBatch], StageOutput], parts: StepParts, arrived: ArrivedStates | None
    ) -> None:
        """arrived: as in ForwardProgram. Raises NotRecordable."""
        backend, table, future = parts.ops.attention, parts.table, parts.future
        assert isinstance(backend, CpuNativeAttention), "what C++ records reads batches as its attention does"
        max_seqs = min(max(table.max_rows, NUM_SEQS), MAX_SEQS)
        self._inputs = inputs = NativeInputs(table, future, max_tokens=MAX_TOKENS, max_seqs=max_seqs)
        self._arrived = arrived
        batch = batch_of(inputs, table, backend, arrived)
        self._program = Program(
            backend.kernels,
            lambda: compute(batch),
            inputs=[inputs, arrived],
            num_tokens=NUM_TOKENS,
            num_outputs=NUM_OUTPUTS,
            num_seqs=NUM_SEQS,
            max_tokens=MAX_TOKENS,
            max_outputs=max_seqs,
        )
        self._kept = future
        self._call = StepCall(
            stage=ctypes.addressof(inputs.call),
            program=self._program.step_at,
            last_token=future.last_token.data_ptr(),
        )
        self._run = backend.kernels.run_step

    def fits(self, plan: BatchPlan) -> bool:
        return self._inputs.fits(plan)

    def put(self, came: ArrivedStates | None) -> None:
        """Set the hidden states of the stage before, from which the next run continues."""
        put(self._arrived, came)

    def run(self, plan: BatchPlan) -> tuple[StageOutput, SampleRows]:
        """Compute a plan that fits, including its page table changes, but without its setups and page copies.
        The result is valid until the next run.
        """
        self._inputs.describe(plan)
        self._call.is_drawn = 0
        self._run(ctypes.addressof(self._call))
        sample_rows = self._inputs.sampled()
        num_tokens = self._inputs.call.num_tokens
        made = self._program.results(num_tokens)
        if self._arrived is not None:  # the residual stays in the buffer where it arrived
            return StageOutput(self._arrived[0][:num_tokens], made[-1]), sample_rows
        return StageOutput(*made), sample_rows


def record(parts: StepParts, layout: Layout) -> StageProgram | ForwardProgram | None:
    """Record the layers of a stage if they consist of kernels only; None otherwise. An example is computed
    both ways, and a program whose bits differ is not used.
    """
    model, backend = parts.model, parts.ops.attention
    assert isinstance(model, CausalLM), "stages of any other are refused"
    assert isinstance(backend, CpuNativeAttention), "what C++ records reads batches as its attention does"
    arrived: ArrivedStates | None = None
    came: ArrivedStates | None = None
    batch = parts.lay_out(parts.example)
    if not layout.is_first:
        memory = torch.empty(2, MAX_TOKENS, model.config.hidden_size, dtype=model.dtype)
        arrived = memory[0], memory[1]
        some = torch.randn(2, len(batch.input_ids), model.config.hidden_size).to(model.dtype)
        came = some[0], some[1]

    def compute(batch: ForwardBatch) -> Any:
        """Return the final hidden states, or the output for the next stage."""
        return model(batch, parts.kv_pool, backend)

    program: StageProgram | ForwardProgram
    try:
        if layout.is_last:
            assert parts.sampler is not None
            of_sampler = parts.sampler.ops
            program = ForwardProgram(
                compute, model.compute_logits, backend, parts.table, parts.future, of_sampler, arrived
            )
        else:
            program = StageProgram(compute, parts, arrived)
    except NotRecordable as error:
        logger.debug("the layers of this stage are not recorded, because of %s", error)
        return None
    backend.prepare(batch)
    if came is not None:
        batch.arrived = came[0].clone(), came[1].clone()
    made = compute(batch)
    program.put(came)
    if isinstance(program, ForwardProgram):
        pairs = [(program.run(parts.example).logits, model.compute_logits(made))]
    else:
        output, _ = program.run(parts.example)
        pairs = list(zip(output, made, strict=True))
    if not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs):
        logger.warning(
            "steps run operation by operation, which is slower: a recording of them computes something else"
        )
        return None
    return program
