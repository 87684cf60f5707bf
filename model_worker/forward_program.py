"""ForwardProgram: the model's forward for small batches as one recorded program. Knows plans and batches.

A decode step of a small model is some fifty kernels of a few microseconds: calling each from Python would
take as long again. The recording runs the model's own modules, so there is one description of a model; one
that also uses torch operations is not recorded and stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.cpu_native import CpuNativeAttention, NativeStep
from model_worker.forward_batch import ForwardBatch
from model_worker.future_map import FutureMap
from model_worker.kernels.native.program import NotRecordable, Program
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.native_inputs import NativeInputs
from model_worker.req_to_token_pool import ReqToTokenPool
from model_worker.sampling.columns import SampleRows
from runtime.plan import BatchPlan
from runtime.wire import TOKEN_BYTES

logger = logging.getLogger(__name__)

# Tokens of a batch, at most. Above, a kernel takes so long that calling it costs nothing; memory for
# activations grows with it.
MAX_TOKENS = 256

Forward = Callable[[ForwardBatch, MHATokenToKVPool, AttentionBackend], Tensor]


class ForwardProgram:
    def __init__(
        self,
        model: Forward,
        kv_pool: MHATokenToKVPool,
        backend: CpuNativeAttention,
        inputs: NativeInputs,
        table: ReqToTokenPool,
    ) -> None:
        """Record a forward of up to `inputs.capacity` tokens. Raises NotRecordable."""
        self._inputs = inputs
        capacity = inputs.capacity
        batch = ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_slots=inputs.out_slots,
            rows=inputs.rows,
            output_indices=inputs.output_indices,
            query_start=inputs.query_start.tolist(),
            kv_lens=inputs.kv_lens.tolist(),
            page_table=table.page_table,
            page_size=table.page_size,
            num_decodes=capacity,
        )
        backend.prepare(batch)
        step = batch.attn_metadata
        assert isinstance(step, NativeStep)
        step.read_from(inputs.kv_lens, inputs.query_start)
        self._program = Program(
            backend.kernels,
            lambda: model(batch, kv_pool, backend),
            [inputs],
            num_tokens=capacity,
            num_outputs=capacity - 1,
            num_seqs=capacity,
        )

    def fits(self, plan: BatchPlan) -> bool:
        return self._inputs.fits(plan)

    def run(self, plan: BatchPlan) -> tuple[Tensor, SampleRows]:
        """Final hidden states [W, hidden_size] of a plan that fits: of the tokens that are sampled after,
        then of its prompt positions; and whose next tokens are to be sampled. Stores the new tokens' KV.

        The tables are changed already as the plan says. The results are valid until the next run.
        """
        who, num_outputs = self._inputs.stage(plan)
        hidden = self._program.run(
            num_tokens=len(plan.input_ids) // TOKEN_BYTES,
            num_outputs=num_outputs,
            num_seqs=len(plan.rows) // TOKEN_BYTES,
        )
        return hidden, who


def record_forward(
    model: Forward,
    kv_pool: MHATokenToKVPool,
    backend: AttentionBackend,
    table: ReqToTokenPool,
    future: FutureMap,
    example: tuple[BatchPlan, ForwardBatch],
) -> ForwardProgram | None:
    """The program of a model whose forward is made of kernels alone; None for any other.

    example: a small plan and what it was laid out as, computed both ways: a program that does not give the
    same bits is not used. The plan's tables are written.
    """
    if not isinstance(backend, CpuNativeAttention):
        return None
    try:
        # One more than what it is for, because fewer outputs than tokens are recorded.
        inputs = NativeInputs(backend.kernels, table, future, min(table.max_rows, MAX_TOKENS) + 1)
        program = ForwardProgram(model, kv_pool, backend, inputs, table)
    except NotRecordable as error:
        logger.info("the forward is not recorded, because it uses %s", error)
        return None
    plan, batch = example
    backend.prepare(batch)
    expected = model(batch, kv_pool, backend)
    hidden, _ = program.run(plan)
    if not torch.equal(hidden.view(torch.uint8), expected.view(torch.uint8)):
        logger.warning("the forward is not recorded: the recording computes something else")
        return None
    return program
