"""NativeInputs: a small plan laid out by a kernel, straight into the memory that a recorded forward reads.

The same as InputBuffers, ReqToTokenPool.slots and FutureMap.resolve give, in one call instead of some thirty
operations of a few microseconds. Knows plans; knows no model.
"""

from __future__ import annotations

import ctypes

import torch

from model_worker.future_map import FutureMap
from model_worker.input_buffers import prompt_indices
from model_worker.kernels.native.library import NativeKernels, StageCall
from model_worker.prompt_positions import num_positions
from model_worker.req_to_token_pool import ReqToTokenPool
from model_worker.sampling.columns import SampleRows
from runtime.plan import BatchPlan
from runtime.wire import TOKEN_BYTES


class NativeInputs:
    """Of up to `capacity` tokens, and fewer outputs. Tensors are int64; the next `stage` overwrites them."""

    def __init__(
        self, kernels: NativeKernels, table: ReqToTokenPool, future: FutureMap, capacity: int
    ) -> None:
        def integers(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64)

        self.capacity = capacity
        self.input_ids = integers(capacity)
        self.positions = integers(capacity)
        self.out_slots = integers(capacity)
        self.rows = integers(capacity)
        self.kv_lens = torch.ones(capacity, dtype=torch.int64)
        self.query_start = torch.arange(capacity + 1)
        self.output_indices = integers(capacity - 1)
        self._sample_rows = integers(capacity)
        self._sample_positions = integers(capacity)
        self._output_indices_host = self.output_indices.numpy()
        self._sample_rows_host = self._sample_rows.numpy()
        self._sample_positions_host = self._sample_positions.numpy()
        self._tables = (table.page_table, future.last_token)  # the call points into them
        self._run = kernels.stage
        self._call = StageCall(
            last_token=future.last_token.data_ptr(),
            page_table=table.page_table.data_ptr(),
            ids=self.input_ids.data_ptr(),
            positions=self.positions.data_ptr(),
            out_slots=self.out_slots.data_ptr(),
            seq_rows=self.rows.data_ptr(),
            kv_lens=self.kv_lens.data_ptr(),
            query_start=self.query_start.data_ptr(),
            sample_indices=self.output_indices.data_ptr(),
            sample_rows=self._sample_rows.data_ptr(),
            sample_positions=self._sample_positions.data_ptr(),
            max_rows=table.max_rows,
            max_pages=table.max_pages,
            page_size=table.page_size,
        )

    def fits(self, plan: BatchPlan) -> bool:
        num_outputs = len(plan.rows) // TOKEN_BYTES + sum(map(num_positions, plan.prompt_positions))
        return len(plan.input_ids) // TOKEN_BYTES <= self.capacity and num_outputs < self.capacity

    def stage(self, plan: BatchPlan) -> tuple[SampleRows, int]:
        """Lay out a plan that fits: whose next tokens are to be sampled, and the number of outputs.

        Its tables are written, and the tokens of the step before are known.
        """
        num_seqs = len(plan.rows) // TOKEN_BYTES
        num_rest = (num_seqs - plan.num_decodes) * TOKEN_BYTES
        assert len(plan.starts) == len(plan.rows), "starts does not match rows"
        assert len(plan.lens) == len(plan.samples) == num_rest, "lens does not match rows"
        call = self._call
        call.rows, call.starts, call.token_ids = plan.rows, plan.starts, plan.input_ids
        call.lens, call.samples = plan.lens, plan.samples
        call.num_seqs, call.num_decodes = num_seqs, plan.num_decodes
        call.num_tokens = len(plan.input_ids) // TOKEN_BYTES
        self._run(ctypes.byref(call))
        num_sampled = call.num_sampled
        assert num_sampled >= 0, "a plan that contradicts itself, or with rows or positions that do not exist"
        who = SampleRows(
            self._sample_rows[:num_sampled],
            self._sample_positions[:num_sampled],
            self._sample_rows_host[:num_sampled],
            self._sample_positions_host[:num_sampled],
        )
        num_outputs = num_sampled
        if plan.prompt_positions:
            for wanted in prompt_indices(plan, self.query_start.tolist()):
                self._output_indices_host[num_outputs : num_outputs + len(wanted)] = wanted
                num_outputs += len(wanted)
        return who, num_outputs
