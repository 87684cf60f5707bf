"""NativeInputs: a plan laid out by a C++ kernel, directly into the memory that a recorded forward reads. The
result equals that of ReqToTokenPool.write, InputBuffers, ReqToTokenPool.slots and FutureMap.resolve, in part
of one call instead of about forty operations of a few microseconds. Knows plans; knows no model.
"""

from __future__ import annotations

import numpy as np
import torch

from model_worker.kernels.native.step_calls import StageCall
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.runner.future_map import FutureMap
from model_worker.runner.sampled_places import has_drafts
from model_worker.sampling.columns import SampleRows
from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.plan import BatchPlan


class NativeInputs:
    """Inputs of up to max_tokens tokens of max_seqs sequences, sampled at up to max_places positions (0: one
    for each sequence). Tensors are int64, and overwritten by the next step.
    """

    def __init__(
        self, table: ReqToTokenPool, future: FutureMap, *, max_tokens: int, max_seqs: int, max_places: int = 0
    ) -> None:
        def integers(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64)

        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.input_ids = integers(max_tokens)
        self.positions = integers(max_tokens)
        self.out_slots = integers(max_tokens)
        self.rows = integers(max_seqs)
        self.kv_lens = torch.ones(max_seqs, dtype=torch.int64)
        self.query_start = torch.arange(max_seqs + 1)
        self.max_places = max_places or max_seqs
        self.output_indices = integers(self.max_places)
        self.sample_rows = integers(self.max_places)
        self.sample_positions = integers(self.max_places)
        self.guesses = integers(self.max_places)
        self._guesses = False
        self._sample_rows: dict[int, SampleRows] = {}  # by how many they are
        self._tables = (table.page_table, future.last_token)  # the call points into them
        self.call = StageCall(
            last_token=future.last_token.data_ptr(),
            page_table=table.page_table.data_ptr(),
            ids=self.input_ids.data_ptr(),
            positions=self.positions.data_ptr(),
            out_slots=self.out_slots.data_ptr(),
            seq_rows=self.rows.data_ptr(),
            kv_lens=self.kv_lens.data_ptr(),
            query_start=self.query_start.data_ptr(),
            sample_indices=self.output_indices.data_ptr(),
            sample_rows=self.sample_rows.data_ptr(),
            sample_positions=self.sample_positions.data_ptr(),
            guesses=self.guesses.data_ptr(),
            max_rows=table.max_rows,
            max_pages=table.max_pages,
            page_size=table.page_size,
        )

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if the kernel can lay out a plan: it is not too large, and nothing but sampling is
        wanted of it.
        """
        return (
            len(plan.input_ids) // TOKEN_BYTES <= self.max_tokens
            and len(plan.rows) // TOKEN_BYTES <= self.max_seqs
            and not plan.prompt_positions
            and (not has_drafts(plan) or self._has_places(plan))
        )

    def _has_places(self, plan: BatchPlan) -> bool:
        """Return True if there are enough positions for each row and each guess of the plan."""
        num_guesses: int = np.abs(unpack_ids(plan.drafts)).sum().item()
        return len(plan.rows) // TOKEN_BYTES + num_guesses <= self.max_places

    def describe(self, plan: BatchPlan) -> None:
        """Fill `call` with a plan that fits. The tokens of the step before must be known when it is run."""
        num_seqs = len(plan.rows) // TOKEN_BYTES
        num_rest = (num_seqs - plan.num_decodes) * TOKEN_BYTES
        assert len(plan.starts) == len(plan.rows), "starts does not match rows"
        assert len(plan.lens) == len(plan.samples) == num_rest, "lens does not match rows"
        call = self.call
        call.spans, call.pages = plan.table_spans, plan.table_pages
        call.num_spans = len(plan.table_spans) // (3 * TOKEN_BYTES)
        call.num_pages = len(plan.table_pages) // TOKEN_BYTES
        call.rows, call.starts, call.token_ids = plan.rows, plan.starts, plan.input_ids
        call.lens, call.samples = plan.lens, plan.samples
        self._guesses = has_drafts(plan)
        call.drafts = plan.drafts if self._guesses else None
        assert not self._guesses or len(plan.drafts) == num_rest, "drafts does not match rows"
        call.num_seqs, call.num_decodes = num_seqs, plan.num_decodes
        call.num_tokens = len(plan.input_ids) // TOKEN_BYTES

    def sampled(self) -> SampleRows:
        """Return the rows whose next tokens are to be sampled. Valid when the call has run."""
        num_sampled: int = self.call.num_sampled
        assert num_sampled >= 0, "a plan that contradicts itself, or with rows or positions that do not exist"
        if self._guesses:
            of = self.sample_rows[:num_sampled], self.sample_positions[:num_sampled]
            guesses = self.guesses[:num_sampled].numpy().copy()
            return SampleRows(*of, of[0].numpy(), of[1].numpy(), guesses)
        if (sample_rows := self._sample_rows.get(num_sampled)) is None:
            rows, positions = self.sample_rows[:num_sampled], self.sample_positions[:num_sampled]
            self._sample_rows[num_sampled] = sample_rows = SampleRows(
                rows, positions, rows.numpy(), positions.numpy()
            )
        return sample_rows
