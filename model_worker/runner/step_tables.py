"""StepTables: the device's tables by row, and the layout of a step's tokens by them. Pages, last tokens,
adapters and virtual tokens of rows are written from plans only, on the forward stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device.base import Device
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.prompt_tables import PromptTables
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.ops.adapters import RowAdapters
from model_worker.runner.future_map import FutureMap
from model_worker.runner.input_buffers import InputBuffers
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.guesses import rows_that_end
from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan


class StepTokens(NamedTuple):
    """Tokens of a plan on the device, and the rows that sample."""

    batch: ForwardBatch
    sample_rows: SampleRows


class StepTables:
    """Owner of the page table, of each row's last token, and of each row's adapter and prompt table."""

    def __init__(
        self,
        kv_pool: MHATokenToKVPool,
        device: Device,
        *,
        max_rows: int,
        max_len: int,
        row_adapters: RowAdapters | None = None,
        prompt_tables: PromptTables | None = None,
    ) -> None:
        """max_len: most tokens of a sequence, prompt and output. row_adapters, prompt_tables: of a model that
        takes adapters, else None.
        """
        self.kv_pool = kv_pool
        self.max_rows = max_rows
        self.max_len = max_len
        self.row_adapters = row_adapters
        self.pages = ReqToTokenPool(max_rows, max_len, kv_pool.page_size, device)
        self.future = FutureMap(max_rows, device.torch_device)
        self._prompt_tables = prompt_tables
        self._inputs = InputBuffers(self.pages, device)
        self._device = device

    def open_rows_and_copy_pages(self, plan: BatchPlan) -> None:
        """Apply changes that a recorded step does not apply itself: all but the page table."""
        if plan.setups:
            if self.row_adapters is not None:
                for setup in plan.setups:
                    self.row_adapters.set_row(setup.row, setup.adapter_slot)
            if self._prompt_tables is not None:
                self._prompt_tables.open_rows(plan.setups)
        if plan.page_copies:
            src, dst = np.array(plan.page_copies, np.int64).T
            self.kv_pool.copy_pages(self._device.tensor(src), self._device.tensor(dst))

    def has_virtual_tokens(self, plan: BatchPlan) -> bool:
        """Return True if ids of the plan refer to vectors of a prompt table."""
        return self._prompt_tables is not None and self._prompt_tables.are_in(plan)

    def lay_out(self, plan: BatchPlan) -> StepTokens:
        """Apply the plan's page table changes, and lay out its tokens."""
        if plan.table_spans:
            self.pages.write(unpack_ids(plan.table_spans).reshape(-1, 3), unpack_ids(plan.table_pages))
        adapters = self.row_adapters
        has_adapters = adapters is not None and adapters.have_any(unpack_ids(plan.rows).astype(np.int64))
        inputs = self._inputs.stage(plan, with_token_rows=has_adapters)
        if len(inputs.unresolved):
            self.future.resolve(inputs.input_ids, inputs.unresolved, inputs.unresolved_rows)
        batch = ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_slots=self.pages.slots(inputs.table_entries, inputs.positions),
            query_start=inputs.query_start,
            kv_lens=inputs.kv_lens,
            rows=inputs.rows,
            page_table=self.pages.page_table,
            page_size=self.pages.page_size,
            num_decodes=plan.num_decodes,
            output_indices=inputs.output_indices,
            adapter_rows=inputs.token_rows,
        )
        if self._prompt_tables is not None and self._prompt_tables.are_in(plan):
            batch.virtual = self._prompt_tables.take(plan, batch.input_ids)
        return StepTokens(batch, inputs.sample_rows)

    def remember(self, sample_rows: SampleRows, tokens: Tensor) -> None:
        """Store the last token of each row for plans that contain -1. Row `max_rows` is for padding."""
        rows = sample_rows.rows
        if sample_rows.guesses is not None:
            rows = rows_that_end(sample_rows.guesses, rows, tokens, self.max_rows, self._device)
        self.future.store(rows, tokens)

    @torch.inference_mode()
    def clear(self) -> None:
        """Clear all pages and last tokens, as after the warm-up."""
        self.pages.page_table.zero_()
        self.future.last_token.zero_()
