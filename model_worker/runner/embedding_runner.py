"""EmbeddingRunner: ModelRunner whose steps end in vectors instead of tokens. Its model needs no head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device.base import Device
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.sampled_places import has_drafts, sampled_places
from model_worker.runner.step_output import StepOutput
from runtime.checkpoint.pooling import Pooling
from runtime.wire.format import LongArray
from runtime.wire.plan import BatchPlan


class Pooler:
    """Pools final hidden states into one vector for each sequence. Knows rows; knows no request and no
    checkpoint. Its methods must run on the forward stream, in the order of steps.
    """

    def __init__(self, pooling: Pooling, *, max_rows: int, device: Device) -> None:
        self._pooling = pooling
        self._device = device
        self._max_rows = max_rows
        self._sums: Tensor | None = None  # [max_rows, hidden_size] float32, from the first step on

    @property
    def needs_every_token(self) -> bool:
        """Return True if a vector depends on every token of its sequence, and not only on the last."""
        return self._pooling.kind == "mean"

    def pool(self, hidden: Tensor, batch: ForwardBatch, complete: LongArray) -> Tensor:
        """Return the vectors [S, hidden_size] float32 of the S rows that are complete with this step.

        hidden: of every token of the batch, in order, if every token is needed; else of the last token of
        each complete row. complete [S]: their indices in batch.rows, on the host.
        """
        vectors = self._means(hidden, batch, complete) if self.needs_every_token else hidden.float()
        return F.normalize(vectors, dim=-1) if self._pooling.normalize else vectors

    def _means(self, hidden: Tensor, batch: ForwardBatch, complete: LongArray) -> Tensor:
        """Return mean vectors. A row's sum restarts with its first token and is extended token by token, so
        it does not depend on how the sequence is divided into chunks.
        """
        if self._sums is None:
            self._sums = hidden.new_zeros(self._max_rows, hidden.shape[1], dtype=torch.float32)
        lens, kv_lens = np.diff(batch.query_start), np.array(batch.kv_lens)
        first_chunks = self._device.tensor(np.flatnonzero(lens == kv_lens))
        self._sums.index_fill_(0, batch.rows[first_chunks], 0.0)
        sequence_of = self._device.tensor(np.repeat(np.arange(len(lens)), lens))
        self._sums.index_add_(0, batch.rows[sequence_of], hidden.float())
        at = self._device.tensor(complete)
        return self._sums[batch.rows[at]] / self._device.tensor(kv_lens[complete]).unsqueeze(1)


class EmbeddingRunner(ModelRunner):
    """Runner of an embedding model. When a plan samples a row, its sequence is complete: the result is its
    vector, and 0 as its token.
    """

    def __init__(self, *args: Any, pooling: Pooling, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pooler = Pooler(pooling, max_rows=self.max_rows, device=self._device)

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> StepOutput:
        """Apply the plan and compute its tokens."""
        assert not has_drafts(plan), "drafts of an embedding"
        batch, _ = self.apply(plan)
        if self._pooler.needs_every_token:
            batch = replace(batch, output_indices=None)
        self._backend.prepare(batch)
        hidden = self.model(batch, self.kv_pool, self._backend)
        complete, _, _ = sampled_places(plan)
        vectors = self._pooler.pool(hidden, batch, complete)
        tokens = torch.zeros(len(vectors), dtype=torch.int32, device=vectors.device)
        return StepOutput(tokens, embeddings=vectors)

    def _record(self, decode: BatchPlan, on_progress: Callable[[], None]) -> None:
        """Do nothing: recordings end in logits, and a prompt is computed only once."""
