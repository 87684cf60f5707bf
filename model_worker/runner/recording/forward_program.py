"""ForwardProgram: a step, from plan to tokens, as one call of C++. Knows plans and batches.

A decode step of a small model has about fifty kernels of a few microseconds. Calling each from Python would
double its time. It also costs a prompt some milliseconds, because kernels displace Python's data from the
caches. The recording runs the model's own modules, so there is only one description of a model. A model that
also uses torch operations is not recorded.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model_worker.attention.cpu_native import CpuNativeAttention, NativeStep
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.native.program import NotRecordable, Program
from model_worker.kernels.native.step_calls import StepCall
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.runner.future_map import FutureMap
from model_worker.runner.recording.base import StepParts
from model_worker.runner.recording.native_inputs import NativeInputs
from model_worker.runner.recording.thread_choice import ThreadChoice
from model_worker.runner.step_output import ForwardOutput
from model_worker.sampling.ops.base import SamplingOps
from runtime.sampling.features import DRAWABLE
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.plan import BatchPlan

logger = logging.getLogger(__name__)

# Limits of a recorded batch. Memory for so many activations and rows of logits is reserved, but taken only
# when a batch needs it. Arbitrary, except that larger batches are rare.
MAX_TOKENS = 8192
MAX_SEQS = 256
# Places at which tokens are sampled: 256 rows with three guesses each, or fewer rows with up to 64.
MAX_PLACES = 1024
PLACES_OF_A_ROW = 65
# Sizes of the batch that is recorded.
NUM_TOKENS, NUM_OUTPUTS, NUM_SEQS = 3, 2, 3

Forward = Callable[[ForwardBatch], Tensor]
"""Function from a prepared batch to its final hidden states [W, hidden_size]."""
Head = Callable[[Tensor], Tensor]
"""Function from hidden states to logits [W, vocab_size] float32."""


class ForwardProgram:
    def __init__(
        self,
        forward: Forward,
        head: Head,
        backend: CpuNativeAttention,
        table: ReqToTokenPool,
        future: FutureMap,
        sampling: SamplingOps,
        arrived: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Record a forward of up to MAX_TOKENS tokens of MAX_SEQS sequences. A head that is not a kernel,
        because its vocabulary fills no whole panels, is called after the program. arrived: memory of
        MAX_TOKENS tokens from which a pipeline stage reads the output of the stage before. Raises
        NotRecordable.
        """
        self._arrived = arrived
        max_seqs = min(max(table.max_rows, NUM_SEQS), MAX_SEQS)
        max_places = max(max_seqs, min(PLACES_OF_A_ROW * table.max_rows, MAX_PLACES))
        self._inputs = inputs = NativeInputs(
            table, future, max_tokens=MAX_TOKENS, max_seqs=max_seqs, max_places=max_places
        )
        batch = batch_of(inputs, table, backend, arrived)
        record = partial(
            Program,
            backend.kernels,
            inputs=[inputs],
            num_tokens=NUM_TOKENS,
            num_outputs=NUM_OUTPUTS,
            num_seqs=NUM_SEQS,
            max_tokens=MAX_TOKENS,
            max_outputs=max_places,
        )
        self._head: Head | None = None
        try:
            self._program = record(lambda: head(forward(batch)))
        except NotRecordable:
            self._program = record(lambda: forward(batch))
            self._head = head
        drawn = torch.empty(max_places, dtype=torch.int64)
        draw = sampling.draw_call(
            self._program.result(max_places), inputs.sample_rows, inputs.sample_positions, drawn
        )
        if draw is None:
            raise NotRecordable("a sampler of torch operations")
        self._tokens = (ctypes.c_int32 * max_places)()
        self._kept = (drawn, draw, future, sampling)
        self._call = StepCall(
            stage=ctypes.addressof(inputs.call),
            program=self._program.step_at,
            draw=ctypes.addressof(draw),
            features=sampling.features.ctypes.data,
            last_token=future.last_token.data_ptr(),
            tokens=ctypes.addressof(self._tokens),
            drawable=DRAWABLE,
        )
        self._call_at = ctypes.addressof(self._call)
        self._threads = ThreadChoice(torch.get_num_threads())
        self._run = backend.kernels.run_step

    def fits(self, plan: BatchPlan) -> bool:
        return self._inputs.fits(plan)

    def put(self, came: tuple[Tensor, Tensor] | None) -> None:
        """Set the hidden states of the stage before, from which the next run continues."""
        put(self._arrived, came)

    def run(self, plan: BatchPlan) -> ForwardOutput:
        """Compute a plan that fits, including its page table changes, but without its setups and page copies.
        If its rows need only a draw, their tokens are drawn, too. The logits are valid until the next run.
        """
        self._inputs.describe(plan)
        call = self._call
        call.is_drawn = self._head is None and not plan.defer_sampling
        limit = self._threads.begin_step(plan.rows, self._inputs.call.num_tokens)
        call.max_threads, call.num_limited = limit.threads, int(limit.share * self._program.num_calls)
        self._run(self._call_at)
        sample_rows = self._inputs.sampled()
        num_sampled = len(sample_rows.rows_host)
        logits = self._program.result(num_sampled)
        if self._head is not None:
            logits = self._head(logits)
        tokens = ctypes.string_at(self._tokens, num_sampled * TOKEN_BYTES) if call.is_drawn else None
        return ForwardOutput(logits, sample_rows, tokens=tokens)


def put(arrived: tuple[Tensor, Tensor] | None, came: tuple[Tensor, Tensor] | None) -> None:
    """Copy hidden states that have arrived to where a program reads them."""
    if arrived is not None and came is not None:
        for memory, values in zip(arrived, came, strict=True):
            memory[: len(values)].copy_(values)


def batch_of(
    inputs: NativeInputs,
    table: ReqToTokenPool,
    backend: CpuNativeAttention,
    arrived: tuple[Tensor, Tensor] | None = None,
) -> ForwardBatch:
    """Return a batch of a few decodes whose tensors are the inputs' memory."""
    batch = ForwardBatch(
        input_ids=inputs.input_ids[:NUM_TOKENS],
        positions=inputs.positions[:NUM_TOKENS],
        out_slots=inputs.out_slots[:NUM_TOKENS],
        rows=inputs.rows[:NUM_SEQS],
        output_indices=inputs.output_indices[:NUM_OUTPUTS],
        query_start=inputs.query_start[: NUM_SEQS + 1].tolist(),
        kv_lens=inputs.kv_lens[:NUM_SEQS].tolist(),
        page_table=table.page_table,
        page_size=table.page_size,
        num_decodes=NUM_SEQS,
        arrived=None if arrived is None else (arrived[0][:NUM_TOKENS], arrived[1][:NUM_TOKENS]),
    )
    backend.prepare(batch)
    step = batch.attn_metadata
    assert isinstance(step, NativeStep)
    step.read_from(inputs.kv_lens, inputs.query_start)
    return batch


def record(parts: StepParts, on_progress: Callable[[], None]) -> ForwardProgram | None:
    """Return the program of a model whose forward consists of kernels only, on one rank; None for any other.
    An example is computed both ways, and a program whose bits differ is not used.
    """
    model, backend, sampler = parts.model, parts.ops.attention, parts.sampler
    if parts.num_ranks > 1 or sampler is None:
        return None  # a program cannot compute with other ranks
    assert isinstance(backend, CpuNativeAttention), "what C++ records reads batches as its attention does"
    batch = parts.lay_out(parts.example)

    def forward(batch: ForwardBatch) -> Tensor:
        return model(batch, parts.kv_pool, backend)

    head = model.compute_logits
    try:
        program = ForwardProgram(forward, head, backend, parts.table, parts.future, sampler.ops)
    except NotRecordable as error:
        logger.debug("the forward is not recorded, because it uses %s", error)
        return None
    backend.prepare(batch)
    expected = head(forward(batch))
    logits = program.run(parts.example).logits
    if not torch.equal(logits.view(torch.uint8), expected.view(torch.uint8)):
        logger.warning(
            "steps run operation by operation, which is slower: a recording of them computes something else"
        )
        return None
    return program
